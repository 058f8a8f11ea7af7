"""Granite 4 H: Mamba-2 with a few layers of attention; a shared feed-forward, with or without experts.

Embedding, residual, attention and logits carry multipliers (see ``Architecture``). Attention usually has
no position embedding at all. Experts are stored as ``input_linear`` / ``output_linear`` / ``router.layer``
in hub releases and may be saved as ``experts.gate_up_proj`` / ``experts.down_proj`` / ``router``; the
shared feed-forward keeps gate and up fused already. Source: transformers ``granitemoehybrid``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Attention, Dense, Experts, FeedForward, Mamba2
from weft.models import block_readers as parts
from weft.models import state_space
from weft.models.blocks.experts import ExpertsBlock
from weft.models.blocks.linear import Linear, Norm, SwiGlu
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer, Mixer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers)


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape = architecture.mixers[index]
    feed = architecture.feed_forwards[index]
    assert feed is not None
    mixer: Mixer
    if isinstance(shape, Attention):
        mixer = parts.attention(architecture, source, shape, f"{name}.self_attn")
    else:
        assert isinstance(shape, Mamba2)
        mixer = state_space.mamba2(source, shape, f"{name}.mamba", hidden, eps)
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps), mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.post_attention_layernorm.weight", hidden), eps),
        feed_forward=_feed_forward(source, feed, name, hidden))


def _feed_forward(source: TensorSource, shape: FeedForward, name: str, hidden: int) -> SwiGlu | ExpertsBlock:
    width = shape.width if isinstance(shape, Dense) else shape.shared_width
    shared = SwiGlu(source.linear([(f"{name}.shared_mlp.input_linear.weight", 2 * width)], hidden),
                    source.linear([(f"{name}.shared_mlp.output_linear.weight", hidden)], width))
    if isinstance(shape, Dense):
        return shared
    sparse = f"{name}.block_sparse_moe"
    router, gate_up, down = (f"{sparse}.router.layer.weight", f"{sparse}.input_linear.weight",
                             f"{sparse}.output_linear.weight")
    if source.has(f"{sparse}.experts.gate_up_proj"):
        router, gate_up, down = (f"{sparse}.router.weight", f"{sparse}.experts.gate_up_proj",
                                 f"{sparse}.experts.down_proj")
    return _experts(source, shape, hidden, router, gate_up, down, shared)


def _experts(source: TensorSource, shape: Experts, hidden: int, router: str, gate_up: str, down: str,
             shared: SwiGlu) -> ExpertsBlock:
    own = len(source.own_experts(shape.count))
    return ExpertsBlock(shape, Linear(source.tensor(router, shape.count, hidden)),
                        source.all_experts(gate_up, own, 2 * shape.width, hidden),
                        source.all_experts(down, own, hidden, shape.width), shared=shared)
