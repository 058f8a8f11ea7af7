"""Families whose files have several spellings, or more than a table of names says: OLMo norms the output of attention;
Granite, Kimi, Ling and MiniMax choose between spellings of a feed-forward.

Hub releases and saves of transformers may spell a name differently: both are read. Sources: transformers ``olmo3``,
``olmo_hybrid``, ``kimi_linear``, ``bailing_hybrid``, ``granitemoehybrid``, ``minimax``, ``gemma4``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from weft.families.mixers import Mixer
from weft.families.mixers.delta import GatedDelta, KimiDelta
from weft.families.mixers.feed_forward import GATED, Dense, Experts, FeedForward
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.mixers.lightning import Lightning
from weft.families.names import W_NAMES
from weft.families.residuals import AttentionResiduals, NormedStream
from weft.models.block_reader import BlockReader
from weft.models.blocks.attention_residuals import LastAttention, joined_to_sums, read_queries
from weft.models.blocks.feed_forward import (
    ExpertsBlock,
    SwiGlu,
    read_dense,
    read_experts,
    read_experts_apart,
    read_swiglu,
    summed_experts,
)
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.plain import plain_feed, plain_layer
from weft.models.layer import (
    Carried,
    DecoderLayer,
    FeedForwardBlock,
    LayerStep,
    ReadLayer,
    ResidualBlock,
    ResidualStream,
    StreamBlock,
)
from weft.tensor.ops.moe import add_gated


def granite_feed(read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    """Read Granite's feed-forward. Experts are stored as ``input_linear`` / ``output_linear`` / ``router.layer`` in
    hub releases and may be saved as ``experts.gate_up_proj`` / ``experts.down_proj`` / ``router``. The shared
    feed-forward has gate and up fused, except in GGUF files.
    """
    shared, sparse = f"{layer}.shared_mlp", f"{layer}.block_sparse_moe"
    fused = read.source.has(f"{shared}.input_linear.weight")
    parts = ("input_linear", "output_linear") if fused else GATED
    if isinstance(shape, Dense):
        return read.source.summed(read_swiglu(read, shape, shared, parts))
    if read.source.has(f"{sparse}.experts.gate_up_proj"):
        block = read_experts(read, shape, sparse, router="router.weight")
    else:
        block = read_experts(
            read, shape, sparse, router="router.layer.weight", stacks=("input_linear.weight", "output_linear.weight")
        )
    if shape.shared_width:
        block.shared = read_swiglu(read, shape.shared, shared, parts)
    return read.source.summed(block)


def gemma_feed(read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    names = read.architecture.names
    if isinstance(shape, Dense):
        return read.source.summed(read_dense(read, shape, f"{layer}.mlp"))
    return read_experts_apart(
        read,
        shape,
        layer,
        ((names.feed_norm, f"{names.feed_norm}_2"), (f"{names.out_norms[1]}_1", f"{names.out_norms[1]}_2")),
    )


def axk1_feed(read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    """Read a feed-forward of A.X K1. Releases have no bias on the choice of experts, and a norm that dense layers do
    not use.
    """
    norm = f"{layer}.post_mlp_layernorm"
    if isinstance(shape, Dense):
        read.source.leave_all(f"{norm}.")
        return plain_feed(read, shape, layer)
    if not read.source.has(f"{layer}.mlp.gate.e_score_correction_bias"):
        shape = replace(shape, choice_bias=False)
    return NormedFeed(plain_feed(read, shape, layer), read.norm(norm))


@dataclass(slots=True)
class NormedFeed:
    """Feed-forward whose output is normed."""

    block: FeedForwardBlock
    norm: Norm

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        return self.norm(self.block(x_TD, positions_T))


@dataclass(slots=True)
class BankedFeed:
    """Routed experts that several layers use, and the layer's own shared expert."""

    experts: ExpertsBlock
    shared: SwiGlu
    gate: Linear

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        return add_gated(self.experts(x_TD, positions_T), self.shared(x_TD), self.gate(x_TD))


def banked_feed(read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    """Read a feed-forward of Intern-S2-Mobius: a bank is read in the first layer that uses it."""
    if isinstance(shape, Dense) or shape.bank is None:
        return plain_feed(read, shape, layer)
    if shape.bank not in read.banks:
        read.banks[shape.bank] = read_experts(read, shape.routed, f"meta_mlp.{shape.bank}")
    own = read.table(shape.own_table(read.hidden), f"{layer}.mlp")
    shared = read_swiglu(read, shape.shared, f"{layer}.mlp.shared_expert")
    return read.source.summed(BankedFeed(read.banks[shape.bank], shared, own.plain("shared_gate")))


def minimax_feed(read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    assert isinstance(shape, Experts)
    on_hub = read.source.has(f"{layer}.block_sparse_moe.gate.weight")
    own_names = read.source.has(f"{layer}.block_sparse_moe.experts.0.w1.weight")
    name = f"{layer}.{'block_sparse_moe' if on_hub else 'mlp'}"
    return read.source.summed(read_experts(read, shape, name, names=W_NAMES if own_names else GATED))


def kimi_feed(read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    saved, source = f"{layer}.block_sparse_moe", read.source
    dense = read_swiglu if read.architecture.names.swiglu else read_dense
    if isinstance(shape, Dense):  # transformers' save takes dense layers for sparse ones
        name = saved if source.has(f"{saved}.gate_proj.weight") else f"{layer}.mlp"
        return source.summed(dense(read, shape, name))
    inside = saved if source.has(f"{saved}.gate.weight") else f"{layer}.mlp"
    own_names = source.has(f"{inside}.experts.0.w1.weight")
    bias = "expert_bias" if source.has(f"{inside}.gate.expert_bias") else "e_score_correction_bias"
    block = read_experts(
        read, shape, inside, names=W_NAMES if own_names else GATED, choice_bias=f"gate.{bias}", exact_router=True
    )
    block.shared = dense(read, shape.shared, f"{inside}.shared_experts")
    return summed_experts(read, block)


def kimi_layers(read: BlockReader) -> ReadLayer:
    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        on_hub = any(read.source.has(f"{name}.attention.{part}.weight") for part in ("q_proj", "dense"))
        inside = "attention" if on_hub else "self_attn"
        kinds: tuple[type[Mixer], ...] = (KimiDelta, LatentAttention, Lightning)
        return joined_to_sums(
            read,
            name,
            plain_layer(read, name, mixer, feed, replace(read.architecture.names, mixers=dict.fromkeys(kinds, inside))),
        )

    return layer


def summing_layers(read: BlockReader) -> ReadLayer:
    """Return the reader of layers by their names, between attention residuals."""
    return lambda name, mixer, feed: joined_to_sums(read, name, plain_layer(read, name, mixer, feed))


def sums_ends(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    """Return the blocks around the layers of a model with attention residuals: its last attention, if it has one."""
    residual = read.architecture.residual
    if not isinstance(residual, AttentionResiduals):
        return [], []
    return [], [LastAttention(read_queries(read, read.architecture.names.last_mix))]


def minimax_layers(read: BlockReader) -> ReadLayer:
    residual = read.architecture.residual
    assert isinstance(residual, NormedStream)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        first, second = plain_layer(read, name, mixer, feed).residuals
        factors = residual.factors[int(name.rpartition(".")[2])]
        return DecoderLayer(
            [
                NormedBlock(first.norm, first.block, factors=factors[:2]),
                NormedBlock(second.norm, second.block, mixes=False, factors=factors[2:]),
            ]
        )

    return layer


@dataclass(slots=True)
class NormedBlock(ResidualBlock):
    """Block after which the stream is the norm's output. ``factors``: on the stream, and on the output of the block."""

    factors: tuple[float, float] = field(kw_only=True)

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        seen_TD = stream.normed(self.norm)
        stream.x_TD = seen_TD * self.factors[0]
        return seen_TD, ()

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        stream.y_TD = y_TD * self.factors[1]


DELTA_NORM_EPS = 1e-5
"""Epsilon of the gated norm in a delta layer of OLMo hybrid, independent of the epsilon of other norms in
config.json.
"""


def olmo_layers(read: BlockReader) -> ReadLayer:
    """Return the reader of OLMo's layers. A delta layer of the hybrid is an ordinary pre-norm layer. Transformers'
    save renames norms of attention layers on the way.
    """

    def norm(name: str, saved: str, on_the_hub: str = "") -> Norm:
        on_hub = read.source.has(f"{name}.{on_the_hub}.weight")
        return read.norm(f"{name}.{on_the_hub if on_hub else saved}")

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(feed, Dense)
        summed = read.source.summed
        feed_forward = summed(read_swiglu(read, feed, f"{name}.mlp"))
        after = norm(name, "post_attention_layernorm", "feedforward_layer_norm")
        if isinstance(mixer, GatedDelta):
            delta = read.block(
                mixer, f"{name}.linear_attn", names="each", norm="o_norm", out="o_proj", eps=DELTA_NORM_EPS
            )
            before = norm(name, "input_layernorm", "attention_layer_norm")
            return DecoderLayer([ResidualBlock(before, summed(delta)), ResidualBlock(after, feed_forward, mixes=False)])
        assert mixer is not None
        attended = ResidualBlock(None, summed(read.block(mixer, f"{name}.self_attn")), after)
        last = norm(name, "post_feedforward_layernorm")
        return DecoderLayer([attended, ResidualBlock(None, feed_forward, last, mixes=False)])

    return layer
