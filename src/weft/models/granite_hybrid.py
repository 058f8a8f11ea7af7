"""Granite 4 H: Mamba-2 with a few layers of attention; a shared feed-forward, with or without experts.

Embedding, residual, attention and logits carry multipliers (see ``Architecture``). Attention usually has
no position embedding at all. Experts are stored as ``input_linear`` / ``output_linear`` / ``router.layer``
in hub releases and may be saved as ``experts.gate_up_proj`` / ``experts.down_proj`` / ``router``; the
shared feed-forward has gate and up fused, but for GGUF files. Source: transformers ``granitemoehybrid``.
"""

from __future__ import annotations

from weft.families.architecture import (
    Architecture,
    Attention,
    Dense,
    Experts,
    FeedForward,
    Mamba2,
    Mixer,
)
from weft.families.tensors import GATED
from weft.models.block_readers import BlockReader
from weft.models.blocks.dense import SwiGlu
from weft.models.blocks.experts import ExpertsBlock
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource

_SHARED = ("input_linear", "output_linear")


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"),
            read.mixer(mixer, {Attention: f"{name}.self_attn", Mamba2: f"{name}.mamba"}),
            read.norm(f"{name}.post_attention_layernorm"), _feed_forward(read, feed, name))

    return read.model(layer)


def _feed_forward(read: BlockReader, shape: FeedForward | None, name: str) -> SwiGlu | ExpertsBlock:
    shared = f"{name}.shared_mlp"
    names = _SHARED if read.source.has(f"{shared}.input_linear.weight") else GATED
    if isinstance(shape, Dense):
        return read.swiglu(shape, shared, names)
    assert isinstance(shape, Experts)
    sparse = f"{name}.block_sparse_moe"
    if read.source.has(f"{sparse}.experts.gate_up_proj"):
        block = read.experts(shape, sparse, router="router.weight")
    else:
        block = read.experts(shape, sparse, router="router.layer.weight",
                             stacks=("input_linear.weight", "output_linear.weight"))
    block.shared = read.swiglu(shape.shared, shared, names)
    return block
