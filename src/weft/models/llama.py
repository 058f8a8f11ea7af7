"""Attention in every layer, SwiGLU or experts: Llama, Mistral, Qwen3 and Qwen3-MoE.

The plain case, without recurrent state (windows that are kept as rings are a state too). Qwen3 has norms on
queries and keys, its sparse models experts without a shared one. Sources: transformers ``llama``,
``mistral``, ``qwen3``, ``qwen3_moe``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Attention, Dense, Experts
from weft.models import block_readers as parts
from weft.models.blocks.experts import ExpertsBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers)


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    mixer, feed = architecture.mixers[index], architecture.feed_forwards[index]
    assert isinstance(mixer, Attention)
    assert isinstance(feed, (Dense, Experts))
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps),
        mixer=parts.attention(architecture, source, mixer, f"{name}.self_attn"),
        feed_norm=Norm(source.tensor(f"{name}.post_attention_layernorm.weight", hidden), eps),
        feed_forward=(parts.swiglu(source, f"{name}.mlp", hidden, feed.width) if isinstance(feed, Dense)
                      else _experts(source, f"{name}.mlp", hidden, feed)))


def _experts(source: TensorSource, name: str, hidden: int, shape: Experts) -> ExpertsBlock:
    gate_up, down = parts.gated_experts(source, f"{name}.experts", hidden, shape)
    router = source.tensor(f"{name}.gate.weight", shape.count, hidden)
    return ExpertsBlock(shape, Linear(router), gate_up, down)
