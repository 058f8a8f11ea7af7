"""ZAYA1: attention with convolved queries and keys, a router that hands its state to the next layer, scaled residuals.

    x_TD --project--> [ q | k | v1 | v2 ]        shifts by a token: convolutions of two, (1, 0), with windows
    q, k = conv(q, k) + (q + k) / 2, k of a query's head and the mean of a key's queries
    both of length sqrt(D), a key times the factor of its head; rotary and attention follow
    v    = [ v1 | v2 of the token before ]

Only the inputs of the first convolution are kept. The second one's inputs from earlier tokens are computed again, by
one product per channel.

The state of a router is rows of the stream, which each block of experts reads and replaces.

Source: transformers ``ZayaCCAProjection``, ``ZayaQKNorm``, ``ZayaRouter``, ``ZayaResidualScaling``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import Experts, FeedForward
from weft.families.more.zaya import ConvolvedAttention, ScaledResidual
from weft.families.rank_place import ShardSpan
from weft.families.tensors import Units
from weft.models.block_reader import BlockReader
from weft.models.blocks.feed_forward import routed_block
from weft.models.blocks.linear import HeadLinear, Linear, Norm, by_head
from weft.models.layer import (
    Carried,
    DecoderLayer,
    LayerStep,
    OnStream,
    ReadLayer,
    ResidualBlock,
    ResidualStream,
    StreamBlock,
    normed,
)
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import AttentionCore, CosSin, attention_layer
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.elementwise import each, softmax_
from weft.units import PAD


@dataclass(slots=True)
class ConvolvedAttentionBlock:
    """Attention with convolved queries and keys. ``project``: rows q, k, v1, v2; ``first`` [C, kernel] and its bias
    [C]; ``second``: by head, [taps x D, D] with the oldest tap first, and its bias [C]; ``factors`` [kv_heads];
    ``values``: this rank's of all values.
    """

    shape: ConvolvedAttention
    project: Linear
    first: torch.Tensor
    first_bias: torch.Tensor
    second: HeadLinear
    second_bias: torch.Tensor
    factors: torch.Tensor
    values: ShardSpan
    out: Linear
    core: AttentionCore = field(init=False, repr=False)
    shift: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        zeros_C = self.first_bias.new_zeros(len(self.first_bias) + self.shape.delayed)
        self.shift = torch.stack((zeros_C + 1, zeros_C), 1)
        self.core = AttentionCore(self.shape.attention, None, None, 0.0, False)

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        of, delayed = self.shape.attention, self.shape.delayed
        heads, group = of.heads + of.kv_heads, of.heads // of.kv_heads
        qk_TC, now_TC, later_TC = torch.split(self.project(x_TD), [heads * of.head_dim, delayed, delayed], -1)
        before_TC = self._before(torch.cat((qk_TC, later_TC), -1), 1, inputs, cache)
        seen = [qk_TC, before_TC[:, :-delayed]]
        for number in range(2, self.shape.reach + 1):
            seen.append(self._before(seen[-1].contiguous(), number, inputs, cache))
        rows_THJ = torch.cat(
            [by_head(self._first(seen[later:]), heads) for later in reversed(range(self.shape.second_kernel))], -1
        )
        convolved = self.second(rows_THJ)
        convolved = convolved + by_head(self.second_bias[None], heads)
        q_THD, k_THD = torch.split(by_head(qk_TC, heads), [of.heads, of.kv_heads], 1)
        means = (q_THD + k_THD.repeat_interleave(group, 1)) * 0.5
        means_of_keys = torch.unflatten(means, 1, (of.kv_heads, group)).mean(2)
        qk_THD = convolved + torch.cat((means, means_of_keys), 1)
        lengths = qk_THD.float().norm(dim=-1, keepdim=True).clamp_min(torch.finfo(qk_THD.dtype).eps)
        factors_H = torch.cat((self.factors.new_ones(of.heads), self.factors))
        qk_THD = qk_THD * (of.head_dim**0.5 / lengths).to(qk_THD.dtype) * factors_H[:, None]
        v_TC = torch.cat((now_TC, before_TC[:, -delayed:]), -1)
        own_TC = v_TC[:, self.values.begin : self.values.begin + self.values.count]
        o_TC = attention_layer(torch.cat((qk_THD.flatten(1), own_TC), -1), self.core, inputs, cache, cos_sin)
        return self.out(inputs.asked_of(o_TC))

    def _first(self, seen: list[torch.Tensor]) -> torch.Tensor:
        """Return the first convolution of the inputs of a token and of those before it, the latest first."""
        y_TC = self.first_bias
        for weight_C, x_TC in zip(self.first.T.flip(0), seen, strict=False):
            y_TC = y_TC + weight_C * x_TC
        return y_TC

    def _before(self, x_TC: torch.Tensor, number: int, inputs: StepInputs, cache: LayerCache) -> torch.Tensor:
        """Return the rows of the tokens before, zeros before the first."""
        return causal_conv(x_TC, self.shift[: x_TC.shape[1]], None, None, cache.state[f"conv.{number}"], inputs.runs)


Scaled = tuple[torch.Tensor, torch.Tensor]
"""A bias and a factor of each channel."""


@dataclass(slots=True)
class ScaledBlock(ResidualBlock):
    """Block with (x + bias) scale on the stream, and on its output."""

    residual: Scaled = field(kw_only=True)
    output: Scaled = field(kw_only=True)

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        return normed(self.norm, stream.summed().to(stream.dtype)), ()

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        (bias, scale), (y_bias, y_scale) = self.residual, self.output
        stream.x_TD = (stream.x_TD + bias) * scale + (y_TD + y_bias) * y_scale


@dataclass(slots=True)
class ContinuedBlock(ScaledBlock):
    """Block of experts that read the state of the previous router and pass a new state on."""

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        seen_TD, carried = self.enter(stream, step)
        y_TD, stream.rows[ROUTER] = self.block(seen_TD, stream.rows.get(ROUTER), step.positions_T)
        self.leave(stream, carried, y_TD)


ROUTER = "router"
"""Name of the state of the router among the rows of the stream."""


@dataclass(slots=True)
class ContinuedExperts:
    """Experts over x and the state of the router before -> y and its own state. ``routed``: (rows, expert, weight) of
    one expert each. ``continued``: [R], None in the first layer; ``choices``: of R, the last one is none; ``biases``:
    float32, added to choose and not to weigh.
    """

    routed: Callable[..., torch.Tensor]
    router: Linear
    continued: torch.Tensor | None
    router_norm: Norm
    inner: tuple[Linear, Linear]
    choices: Linear
    biases: torch.Tensor
    experts: object
    """Block whose experts ``routed`` computes."""

    def __call__(
        self, x_TD: torch.Tensor, before_TR: torch.Tensor | None, positions_T: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        state_TR = self.router(x_TD)
        if self.continued is not None and before_TR is not None:
            state_TR = state_TR + before_TR * self.continued
        inner_TR = self.router_norm(state_TR)
        for product in self.inner:
            inner_TR = each(F.gelu, product(inner_TR))
        shares_TE = softmax_(self.choices(inner_TR).float(), 1.0)
        ids_T1 = (shares_TE + self.biases).argmax(-1, keepdim=True)
        weights_T1 = shares_TE.gather(-1, ids_T1).to(x_TD.dtype)
        skipped_T1 = ids_T1 == len(self.biases) - 1
        if positions_T is not None:
            skipped_T1 = skipped_T1 | (positions_T == PAD)[:, None]
        y_TD = self.routed(x_TD, ids_T1.masked_fill(skipped_T1, PAD), weights_T1.masked_fill(skipped_T1, 0.0))
        return y_TD, state_TR


def read_convolved_attention(read: BlockReader, shape: ConvolvedAttention, name: str) -> ConvolvedAttentionBlock:
    of, table = shape.attention, read.table(shape.table(read.hidden), name)
    second = torch.unflatten(table.tensor("second"), 0, (-1, of.head_dim))
    values = Units(of.kv_heads, of.head_dim, of.kv_copies).span(read.source.place)
    return ConvolvedAttentionBlock(
        shape,
        table.linear("project"),
        table.tensor("first").squeeze(1),
        table.tensor("first.bias"),
        HeadLinear.of(second.permute(0, 3, 2, 1).flatten(1, 2).contiguous()),
        table.tensor("second.bias"),
        table.tensor("factors"),
        values,
        table.linear("out"),
    )


def read_continued_experts(read: BlockReader, shape: Experts, name: str) -> ContinuedExperts:
    table = read.table(shape.table(read.hidden), name)
    router = table.plain("router")
    experts = routed_block(read, shape, table, router)
    return ContinuedExperts(
        read.source.summed(experts.of_choices),
        router,
        table.get("continued"),
        table.norm("router_norm", read.eps),
        (table.plain("fc1"), table.plain("fc2")),
        table.plain("choice"),
        table.tensor("choice_bias"),
        experts,
    )


def layer_reader(read: BlockReader) -> ReadLayer:
    shape = read.architecture.residual
    assert isinstance(shape, ScaledResidual)

    def scaled(name: str) -> tuple[Scaled, Scaled]:
        table = read.table(shape.table(read.hidden), name)
        residual, output = (
            (table.tensor(f"{part}_bias"), table.tensor(f"{part}_scale")) for part in ("residual", "hidden_states")
        )
        return residual, output

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(mixer, ConvolvedAttention)
        assert isinstance(feed, Experts)
        norm = read.norm(f"{name}.input_layernorm")
        attention = read.source.summed(read.block(mixer, f"{name}.self_attn"))
        residual, output = scaled(f"{name}.post_attention_residual_scale")
        first = ScaledBlock(norm, attention, residual=residual, output=output)
        norm = read.norm(f"{name}.post_attention_layernorm")
        experts = read_continued_experts(read, feed, f"{name}.mlp")
        residual, output = scaled(f"{name}.post_mlp_residual_scale")
        return DecoderLayer([first, ContinuedBlock(norm, experts, mixes=False, residual=residual, output=output)])

    return layer


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    bias, scale = (read.source.tensor(f"input_hidden_states_{part}", read.hidden) for part in ("bias", "scale"))
    return [OnStream(lambda x_TD: (x_TD + bias) * scale)], []
