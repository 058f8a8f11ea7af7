"""Inkling: attention with a bias by distance between short convolutions, experts that share their weights.

    x_TD --project--> [ q | k | v | r ]        k, v <- conv         q, k <- norms         no rotary
    scores = scale (q . k) + r . bank[distance]                     (``ops.relative_bias``)
    y      = conv(out(o))                       a feed-forward's output passes one too
    weights of experts: sigmoids of the chosen and of the shared ones, as shares of their sum

All convolutions add their input: that is 1 on the newest tap. A factor on a feed-forward's output becomes a factor on
the taps after it, so windows hold outputs before that factor.

Source: transformers ``InklingAttention``, ``InklingShortConvolution``, ``InklingTopkRouter``, ``InklingMoE``.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace

import torch

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import Experts, FeedForward
from weft.families.more.inkling import RelativeAttention, feed_scale
from weft.models.block_reader import BlockReader
from weft.models.blocks.feed_forward import ExpertsBlock, gate_first, read_swiglu, routed_block
from weft.models.blocks.linear import Linear, Norm, Projection, by_head
from weft.models.layer import DecoderLayer, FeedForwardBlock, OnStream, ReadLayer, ResidualBlock, StreamBlock
from weft.models.weights import Order
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import AttentionCore, CosSin, attend
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.elementwise import each
from weft.tensor.ops.moe import ChoiceRule, ExpertWeights, choose_experts
from weft.units import PAD


@dataclass(slots=True)
class OutputConv:
    """Convolution of an output. ``taps``: float32 [C, K], 1 added; ``part``: of the layer's state."""

    taps: torch.Tensor
    part: str

    def __call__(self, y_TC: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        return causal_conv(y_TC, self.taps, None, None, cache.state[self.part], inputs.runs)


def with_input(taps_CK: torch.Tensor, terms: int = 1) -> torch.Tensor:
    """Return the taps of a convolution to whose result its input is added, divided by the root of ``terms``."""
    return torch.cat((taps_CK[:, :-1], taps_CK[:, -1:] + 1.0), -1) / math.sqrt(terms)


def grown(q_THD: torch.Tensor, inputs: StepInputs, floor: int, growth: float) -> torch.Tensor:
    """Return queries times 1 + ``growth`` log((position + 1) / ``floor``), from position ``floor`` on; a ``floor`` of
    0: unchanged.
    """
    if not floor:
        return q_THD
    length_T = (inputs.positions_T + 1).float() / floor
    growth_T = 1.0 + growth * torch.log(length_T.clamp_min(1.0))
    return (q_THD.float() * growth_T[:, None, None]).to(q_THD.dtype)


def relative_core(shape: RelativeAttention, bank: torch.Tensor) -> AttentionCore:
    """Return the attention with a bias by distance. ``bank``: float32 [states, extent]."""
    return AttentionCore(shape.attention, None, None, 0.0, False, bank=bank)


@dataclass(slots=True)
class RelativeAttentionBlock:
    """Attention with a bias by distance. ``project``: rows q, k, v, r."""

    shape: RelativeAttention
    project: Linear
    kv_conv: OutputConv
    q_norm: Norm
    k_norm: Norm
    core: AttentionCore
    out: Projection
    out_conv: OutputConv

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        of, states = self.shape.attention, self.shape.states
        kv_width = 2 * of.kv_heads * of.head_dim
        q_TC, kv_TC, r_TC = torch.split(self.project(x_TD), [of.heads * of.head_dim, kv_width, of.heads * states], -1)
        k_TC, v_TC = self.kv_conv(kv_TC, inputs, cache).chunk(2, dim=-1)
        q_THD = torch.cat((self.q_norm(by_head(q_TC, of.heads)), by_head(r_TC, of.heads)), -1)
        q_THD = grown(q_THD, inputs, self.shape.floor, self.shape.growth)
        o_THD = attend(
            q_THD, self.k_norm(by_head(k_TC, of.kv_heads)), by_head(v_TC, of.kv_heads), self.core, inputs, cache, None
        )
        y_TD = self.out_conv(self.out(o_THD.flatten(1)), inputs, cache)
        return inputs.asked_of(y_TD)


@dataclass(slots=True)
class SharingExperts:
    """Experts that share their weights. ``router``: rows of the routed experts, then of the shared ones. ``parts``:
    output of both, from ids and weights (``of_parts``), summed over ranks.
    """

    experts: ExpertsBlock
    shared: ExpertsBlock
    router: Linear
    choice_bias: torch.Tensor
    parts: Callable[..., torch.Tensor]

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None) -> torch.Tensor:
        shape = self.experts.shape
        scores_TE, shared_TS = torch.split(self.router(x_TD.float()), [shape.count, shape.shared_count], -1)
        rule = ChoiceRule(shape.per_token, normalized=False, scoring="sigmoid")
        chosen_TX, ids_TX = choose_experts(
            scores_TE.contiguous(), rule, self.choice_bias, positions_T, dtype=torch.float32
        )
        weights_TW = torch.cat((chosen_TX, each(torch.sigmoid, shared_TS)), -1)
        weights_TW = (weights_TW * (shape.scale / weights_TW.sum(-1, keepdim=True))).to(x_TD.dtype)
        return self.parts(x_TD, ids_TX, *torch.split(weights_TW, [shape.per_token, shape.shared_count], -1))


def of_parts(experts: ExpertsBlock, shared: ExpertsBlock) -> Callable[..., torch.Tensor]:
    """Return the function (rows, ids and weights of the chosen experts, weights of the shared ones) -> their sum."""

    def both(
        x_TD: torch.Tensor, ids_TX: torch.Tensor, weights_TX: torch.Tensor, shared_TS: torch.Tensor
    ) -> torch.Tensor:
        every_TS = torch.arange(shared_TS.shape[1], device=x_TD.device).expand(len(x_TD), -1)
        every_TS = every_TS.masked_fill(ids_TX[:, :1] == PAD, PAD)  # PAD rows read no expert (L4)
        return experts.of_choices(x_TD, ids_TX, weights_TX) + shared.of_choices(x_TD, every_TS, shared_TS.contiguous())

    return both


@dataclass(slots=True)
class ConvolvedFeed:
    """A feed-forward whose output passes a convolution: a mixer."""

    feed: FeedForwardBlock
    conv: OutputConv

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        y_TD = self.feed(x_TD, inputs.positions_T if inputs.runs.padded else None)
        return inputs.asked_of(self.conv(y_TD, inputs, cache))


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    return [OnStream(read.norm("embed_tokens.embed_norm"))], []


def layer_reader(read: BlockReader) -> ReadLayer:
    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(mixer, RelativeAttention)
        assert feed is not None
        sparse = isinstance(feed, Experts)
        around = read.table(mixer.around_table(read.hidden), name)
        scale = read.table(feed_scale(f"mlp.{'gate.' if sparse else ''}global_scale"), name)
        out_conv, feed_conv = (
            OutputConv(with_input(around.tensor(part).squeeze(1)), f"conv.{part}") for part in ("mixer", "feed")
        )
        feed_conv.taps = feed_conv.taps * scale.tensor("scale")
        block: FeedForwardBlock
        if isinstance(feed, Experts):
            block = _sharing_experts(read, feed, f"{name}.mlp")
        elif read.source.has(f"{name}.mlp.w13_dn.weight"):
            block = read.source.summed(read_swiglu(read, feed, f"{name}.mlp", ("w13_dn", "down_proj"), paired=True))
        else:
            block = read.source.summed(read_swiglu(read, feed, f"{name}.mlp"))
        attention = read.block(mixer, f"{name}.self_attn", out_conv=out_conv)
        return DecoderLayer(
            [
                ResidualBlock(read.norm(f"{name}.input_layernorm"), attention),
                ResidualBlock(read.norm(f"{name}.post_attention_layernorm"), ConvolvedFeed(block, feed_conv)),
            ]
        )

    return layer


def read_relative_attention(
    read: BlockReader, shape: RelativeAttention, name: str, *, out_conv: OutputConv
) -> RelativeAttentionBlock:
    table = read.table(shape.table(read.hidden), name)
    q_norm, k_norm = (Norm(table.tensor(f"{part}_norm"), read.eps) for part in "qk")
    taps = torch.cat([table.tensor(f"{part}_conv").squeeze(1) for part in "kv"])
    return RelativeAttentionBlock(
        shape,
        table.linear("qkv"),
        OutputConv(with_input(taps), "conv.kv"),
        q_norm,
        k_norm,
        relative_core(shape, table.tensor("rel_logits_proj.proj")),
        read.source.summed(table.linear("out")),
        out_conv,
    )


def read_routed(read: BlockReader, shape: Experts, name: str) -> ExpertsBlock:
    """Return the routed experts, whose rows of gate and up take turns in releases."""
    paired = read.source.has(f"{name}.experts.w13_weight")
    table = read.table(
        shape.table(read.hidden, paired=paired, stacks=("experts.w13_weight", "experts.w2_weight") if paired else None),
        name,
    )
    router = table.plain("router", torch.float32)
    experts = routed_block(read, shape, table, router, order=gate_first if paired else None)
    experts.choice_bias = table.tensor("choice_bias")
    return experts


def _sharing_experts(read: BlockReader, shape: Experts, name: str) -> SharingExperts:
    experts = read_routed(read, shape, name)
    assert experts.choice_bias is not None
    # ``weft quantize`` takes the routed experts apart and leaves these.
    shared_paired = read.source.has(f"{name}.shared_experts.shared_w13_weight")
    both = read.table(shape.shared_table(read.hidden, paired=shared_paired), name)
    shared_shape = replace(shape, count=shape.shared_count, width=shape.shared_width, own_count=0)

    def stack(role: str, order: Order | None) -> ExpertWeights:
        parts = [both.declared(tensor) for tensor in both.table[role]]
        count, rows, columns = parts[0][1]
        return read.source.all_experts([full for full, _ in parts], count, rows, columns, order=order)

    shared = ExpertsBlock(
        shared_shape, experts.router, stack("into", gate_first if shared_paired else None), stack("down", None)
    )
    return SharingExperts(
        experts, shared, experts.router, experts.choice_bias, read.source.summed(of_parts(experts, shared))
    )
