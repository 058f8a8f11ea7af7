"""Granite 4 H: Mamba-2 with a few layers of attention; a shared feed-forward, with or without experts.

Embedding, residual, attention and logits carry multipliers (see ``Architecture``). Attention usually has
no position embedding at all. Experts are stored as ``input_linear`` / ``output_linear`` / ``router.layer``
in hub releases and may be saved as ``experts.gate_up_proj`` / ``experts.down_proj`` / ``router``; the
shared feed-forward keeps gate and up fused already. Source: transformers ``granitemoehybrid``.
"""

from __future__ import annotations

import torch

from weft.architecture import Architecture, Attention, Dense, Experts, FeedForward, Mamba2
from weft.models import parts
from weft.models.blocks.experts import ExpertsBlock
from weft.models.blocks.linear import Linear, Norm, SwiGlu
from weft.models.blocks.mamba2 import Mamba2Block
from weft.models.decoder import CausalModel, DecoderLayer, Mixer
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    layers = [_layer(architecture, source, index) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers)


def _layer(architecture: Architecture, source: TensorSource, index: int) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape = architecture.mixers[index]
    mixer: Mixer
    if isinstance(shape, Attention):
        mixer = parts.attention(architecture, source, shape, f"{name}.self_attn")
    else:
        assert isinstance(shape, Mamba2)
        mixer = _mamba(source, shape, f"{name}.mamba", hidden, eps)
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps), mixer=mixer,
        feed_norm=Norm(source.tensor(f"{name}.post_attention_layernorm.weight", hidden), eps),
        feed_forward=_feed_forward(source, architecture.feed_forwards[index], name, hidden))


def _mamba(source: TensorSource, shape: Mamba2, name: str, hidden: int, eps: float) -> Mamba2Block:
    inner, channels = shape.inner_width, shape.inner_width + 2 * shape.group_width
    rows = inner + channels + shape.heads

    def bias(part: str, size: int, present: bool) -> torch.Tensor | None:
        return source.tensor(f"{name}.{part}.bias", size) if present else None

    def per_head(part: str) -> torch.Tensor:
        return source.tensor(f"{name}.{part}", shape.heads, dtype=torch.float32)

    return Mamba2Block(
        shape,
        Linear(source.tensor(f"{name}.in_proj.weight", rows, hidden),
               bias("in_proj", rows, shape.projection_bias)),
        conv=source.tensor(f"{name}.conv1d.weight", channels, 1, shape.conv_kernel).squeeze(1),
        conv_bias=bias("conv1d", channels, shape.conv_bias),
        a=-per_head("A_log").exp(), d=per_head("D"), dt_bias=per_head("dt_bias"),
        norm=source.tensor(f"{name}.norm.weight", inner), norm_eps=eps,
        out=Linear(source.tensor(f"{name}.out_proj.weight", hidden, inner),
                   bias("out_proj", hidden, shape.projection_bias)))


def _feed_forward(source: TensorSource, shape: FeedForward, name: str, hidden: int) -> SwiGlu | ExpertsBlock:
    width = shape.width if isinstance(shape, Dense) else shape.shared_width
    shared = SwiGlu(Linear(source.tensor(f"{name}.shared_mlp.input_linear.weight", 2 * width, hidden)),
                    Linear(source.tensor(f"{name}.shared_mlp.output_linear.weight", hidden, width)))
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
    return ExpertsBlock(shape, Linear(source.tensor(router, shape.count, hidden)),
                        source.tensor(gate_up, shape.count, 2 * shape.width, hidden),
                        source.tensor(down, shape.count, hidden, shape.width), shared=shared)
