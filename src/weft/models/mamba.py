"""Mamba, Falcon-Mamba and Mamba-2: a mixer in every layer, and nothing else. No attention, so no KV at all.

Names are those of the original code: ``embeddings``, ``layers.N.norm``, ``layers.N.mixer``, ``norm_f``, all
under ``backbone.``. The residual stream is float32 where the configuration says so, which it does.
Sources: transformers ``mamba``, ``falcon_mamba``, ``mamba2``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Mamba1, Mamba2
from weft.models import block_readers as parts
from weft.models import state_space
from weft.models.blocks.linear import Norm
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer, Mixer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers, final_norm="norm_f.weight",
                       embedding="embeddings.weight")


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape = architecture.mixers[index]
    mixer: Mixer
    if isinstance(shape, Mamba1):
        mixer = state_space.mamba1(source, shape, f"{name}.mixer", hidden)
    else:
        assert isinstance(shape, Mamba2)
        mixer = state_space.mamba2(source, shape, f"{name}.mixer", hidden, eps)
    return DecoderLayer(mixer_norm=Norm(source.tensor(f"{name}.norm.weight", hidden), eps), mixer=mixer,
                        feed_norm=None, feed_forward=None)
