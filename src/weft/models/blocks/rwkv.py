"""RWKV-7: time mixing and channel mixing. Both norm the input and also read the token before.

    time mixing      x = norm(x);  x_p = x + mix_p (x of the token before - x), p = r w k v a g
                     r, k, v = products of x_r, x_k, x_v
                     g_t  = -e^-0.5 sigmoid(w(x_w))         log decay of each line, at least -0.61
                     a    = sigmoid(a(x_a))                 rate of each line
                     v    = v + sigmoid(v(x_v)) (v of the first layer - v)
                     kk   = k k_k, of length 1 by head;     k = k (1 + (a - 1) k_a)
                     o    = WKV7(r, g_t, k, v, kk, kk a)    (recurrent state)
                     y    = (norm by head(o) + (r . k r_k) v) gate(x_g)

    channel mixing   y = down(relu(up(x_k)) ^ 2)

    w, a, v, gate    products of low rank, with tanh, nothing, nothing and a sigmoid in the middle

Values of the first layer are rows of the stream that later layers read.

Source: Peng et al., "RWKV-7 Goose" (2025), section 4 and appendix F.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import FeedForward
from weft.families.mixers.mixing import ChannelMix, TimeMix
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, Norm, Projection, by_head
from weft.models.layer import DecoderLayer, LayerStep, OnStream, ReadLayer, ResidualBlock, ResidualStream, StreamBlock
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.elementwise import activate, each
from weft.tensor.ops.wkv7 import wkv7

VALUES = "values"
"""Name of the first layer's values among the rows of the stream."""
_LEAST_LOG_DECAY = -0.6065306597126334
"""-exp(-0.5)."""


@dataclass(slots=True)
class Shifted:
    """``norm`` of the stream, for this token and the token before: zeros before the first."""

    norm: Norm
    _shift: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        zeros_D = torch.zeros_like(self.norm.weight)
        self._shift = torch.stack((zeros_D + 1, zeros_D), 1)

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the norm of ``x_TD``, and the norm of the token before minus it."""
        x_TD = self.norm(x_TD)
        return x_TD, causal_conv(x_TD, self._shift, None, None, cache.state["conv.1"], inputs.runs) - x_TD


LowRank = tuple[Linear, Linear]


@dataclass(slots=True)
class TimeMixBlock:
    """Time mixing. ``mixes`` [6, 1, D]: of r, w, k, v, a, g. ``k_k``, ``k_a`` [C]; ``r_k`` [heads, D]. ``value``: None
    in the first layer. ``out_norm``: weight [C], bias [C] and epsilon of the norm by head.
    """

    shape: TimeMix
    shifted: Shifted
    mixes: torch.Tensor
    r: Linear
    k: Linear
    v: Linear
    decay: LowRank
    rate: LowRank
    gate: LowRank
    value: LowRank | None
    k_k: torch.Tensor
    k_a: torch.Tensor
    r_k: torch.Tensor
    out_norm: tuple[torch.Tensor, torch.Tensor, float]
    out: Projection

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        inputs, cache = step.whole, step.cache
        x_TD, distance_TD = self.shifted(stream.summed(), inputs, cache)
        for_r, for_w, for_k, for_v, for_a, for_g = torch.addcmul(x_TD, distance_TD, self.mixes)
        heads, (into, up) = self.shape.heads, self.decay
        r_TC, k_TC, v_TC = self.r(for_r), self.k(for_k), self.v(for_v)
        g_TC = each(torch.sigmoid, up(each(torch.tanh, into(for_w))).float()) * _LEAST_LOG_DECAY
        a_TC = each(torch.sigmoid, self.rate[1](self.rate[0](for_a)).float())
        gate_TC = self.gate[1](each(torch.sigmoid, self.gate[0](for_g)))
        if self.value is None:
            stream.rows[VALUES] = v_TC
        else:
            share_TC = each(torch.sigmoid, self.value[1](self.value[0](for_v)))
            v_TC = torch.lerp(v_TC, stream.rows[VALUES], share_TC)
        # float32 up to the one rounding of the recurrence's inputs.
        kk_THK = F.normalize(by_head(k_TC.float() * self.k_k, heads), dim=-1)
        k_TC = (k_TC.float() * (1 + (a_TC - 1) * self.k_a)).to(k_TC.dtype)
        r, g, k, v, a = (by_head(part, heads) for part in (r_TC, g_TC, k_TC, v_TC, a_TC))
        o_THV = wkv7(
            r,
            g,
            k,
            v,
            kk_THK.to(r.dtype),
            (kk_THK * a).to(r.dtype),
            cache.state["recurrent"],
            inputs.runs,
            layer=cache.layer,
        )
        own_THV = (r * k * self.r_k).sum(-1, keepdim=True) * v
        normed_TC = F.group_norm(o_THV.flatten(1), heads, *self.out_norm)
        y_TC = (normed_TC + own_THV.flatten(1)) * gate_TC
        # Never the last layer that keeps a state: channel mixing follows, so all rows are asked for.
        stream.y_TD = self.out(y_TC)


@dataclass(slots=True)
class ChannelMixBlock:
    """Channel mixing. ``mix`` [D]."""

    shifted: Shifted
    mix: torch.Tensor
    into: Linear
    down: Projection

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        x_TD, distance_TD = self.shifted(x_TD, inputs, cache)
        mixed_TD = inputs.asked_of(torch.addcmul(x_TD, distance_TD, self.mix))
        return self.down(activate(self.into(mixed_TD), "relu2"))


def layer_reader(read: BlockReader) -> ReadLayer:
    """Return the reader of layers: of layer n of the release, 2n is time mixing and 2n + 1 channel mixing."""

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        stored = f"layers.{int(name.rpartition('.')[2]) // 2}"
        if isinstance(mixer, TimeMix):
            return DecoderLayer([read.block(mixer, f"{stored}.attn", norm=f"{stored}.attn_norm")])
        assert isinstance(mixer, ChannelMix)
        return DecoderLayer([ResidualBlock(None, read.block(mixer, f"{stored}.ffn", norm=f"{stored}.ffn_norm"))])

    return layer


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    first, last = read.norm("layers.0.pre_norm"), read.norm("norm")
    return [OnStream(first)], [OnStream(last)]


def read_time_mix(read: BlockReader, shape: TimeMix, name: str, *, norm: str) -> TimeMixBlock:
    joined = read.source.has(f"{name}.x_x")  # the name in the library's first version
    table = read.table(shape.table(read.hidden, joined=joined), name)
    mixes = table.tensor("x_x")[:, None] if joined else torch.cat([table.tensor(f"x_{part}") for part in "rwkvag"])

    if not shape.value_rank:  # in some files the first layer has unused tensors for its values too
        for end in ("0.weight", "2.weight", "2.bias"):
            read.source.leave(f"{name}.v_lora.lora.{end}")

    def low_rank(part: str) -> tuple[Linear, Linear]:
        return table.linear(f"{part}.0", finer=True), table.linear(f"{part}.1", finer=True)

    out_norm = table.tensor("norm"), table.tensor("norm.bias"), read.eps * shape.head_dim
    r, k, v = (table.linear(part) for part in "rkv")
    return TimeMixBlock(
        shape,
        Shifted(read.norm(norm)),
        mixes,
        r,
        k,
        v,
        decay=low_rank("w"),
        rate=low_rank("a"),
        gate=low_rank("g"),
        value=low_rank("v") if shape.value_rank else None,
        k_k=table.tensor("k_k"),
        k_a=table.tensor("k_a"),
        r_k=table.tensor("r_k"),
        out_norm=out_norm,
        out=read.source.summed(table.linear("out")),
    )


def read_channel_mix(read: BlockReader, shape: ChannelMix, name: str, *, norm: str) -> ChannelMixBlock:
    table = read.table(shape.table(read.hidden), name)
    return ChannelMixBlock(
        Shifted(read.norm(norm)), table.tensor("x_k"), table.linear("into"), read.source.summed(table.linear("down"))
    )
