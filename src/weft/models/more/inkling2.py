"""Inkling 2: attention with clipped lengths and sinks of each token, between attention residuals; layers in loops.

    x_TID, I inputs: queries, keys, values
    q g r s <- x_0      k <- conv(x_1)      v <- conv(x_2)        q, r <- clip(scale), k <- clip, v <- norm
    scores = scale (q . k) + r . bank[distance], with s in each sum       y = out_conv(out(o sigmoid(g)))

All convolutions add their input and divide by the root of the number of their taps, which is 1 on the newest tap and a
factor on all. Of a full layer each token adds to the taps: y = sum over lags of (static + own)_lag x_(t - lag).

Later runs of a loop read messages: attention over the sums of the run before, through a gate before each input.

    gated = (1 - tanh(forget)) x + tanh(message) m        both from [ norm(x) | norm(m) ]

Source: transformers ``Inkling2FullAttention``, ``Inkling2LoopFullLoopDecoderLayer``, ``Inkling2LoopTextModel``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch
import torch.nn.functional as F

from weft.families.mixers import Mixer
from weft.families.mixers.combined import Again
from weft.families.mixers.feed_forward import Experts, FeedForward
from weft.families.more.inkling2 import ClippedAttention, Inkling2Residuals
from weft.models.block_reader import BlockReader
from weft.models.blocks.attention_residuals import (
    SUMS,
    AttendingBlock,
    LastAttention,
    SumAttention,
    read_queries,
    sources_of,
)
from weft.models.blocks.linear import Linear, Norm, Projection, by_head
from weft.models.blocks.shifts import Shifts
from weft.models.layer import DecoderLayer, LayerStep, OnStream, ReadLayer, ResidualStream, StreamBlock, normed
from weft.models.more.inkling import ConvolvedFeed, OutputConv, grown, read_routed, relative_core, with_input
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import AttentionCore, CosSin, attend
from weft.tensor.ops.elementwise import each
from weft.tensor.ops.norm import rms_norm


def clipped(x_THD: torch.Tensor, longest: float, scale_HD: torch.Tensor | None = None) -> torch.Tensor:
    """Return the heads of ``x_THD`` times ``scale_HD``, those longer than ``longest`` at that length."""
    wide_THD = x_THD.float() if scale_HD is None else x_THD.float() * scale_HD
    lengths_TH1 = wide_THD.square().sum(-1, keepdim=True).sqrt()
    return (wide_THD * (longest / (lengths_TH1 + 1e-6)).clamp_max(1.0)).to(x_THD.dtype)


@dataclass(slots=True)
class DynamicConv:
    """Convolution of keys and values to whose taps each token adds numbers for each head. ``taps_KC``: of this token
    first, with 1 added there.
    """

    taps_KC: torch.Tensor
    shifts: Shifts

    def __call__(
        self, x_TC: torch.Tensor, own_THK: torch.Tensor, inputs: StepInputs, cache: LayerCache
    ) -> torch.Tensor:
        heads, kernel = own_THK.shape[1:]
        y_THD = torch.zeros(len(x_TC), heads, x_TC.shape[1] // heads, device=x_TC.device)
        for lag, seen_TC in enumerate(self.shifts(x_TC, inputs, cache)):
            taps_THD = by_head(self.taps_KC[lag : lag + 1], heads) + own_THK[..., lag, None].float()
            y_THD = torch.addcmul(y_THD, taps_THD, by_head(seen_TC, heads))
        return (y_THD.flatten(1) * float((2 * kernel + 1) ** -0.5)).to(x_TC.dtype)


@dataclass(slots=True)
class ClippedAttentionBlock:
    """Attention over clipped heads. ``query``: rows q, gate, r, sinks; ``key`` and ``value``: rows of keys or values,
    then of their own taps. ``scales``: of q and r, float32 by head.
    """

    shape: ClippedAttention
    query: Linear
    key: Linear
    value: Linear
    kv_conv: OutputConv | DynamicConv
    scales: tuple[torch.Tensor, torch.Tensor]
    value_norm: Norm
    core: AttentionCore
    out: Projection
    out_conv: OutputConv

    def __call__(
        self, x_TID: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        of, (longest, longest_states) = self.shape.attention, self.shape.clips
        width = of.heads * of.head_dim
        x_TD, key_TD, value_TD = x_TID.expand(-1, 3, -1).unbind(1)
        widths = [width, width, of.heads * self.shape.states, of.heads]
        q_TC, gate_TC, r_TC, sinks_TH = torch.split(self.query(x_TD), widths, -1)
        k_THD, v_THD = self._keys_and_values(key_TD, value_TD, inputs, cache)
        q_THD = clipped(by_head(q_TC, of.heads), longest, self.scales[0])
        r_THR = clipped(by_head(r_TC, of.heads), longest_states, self.scales[1])
        q_THD = grown(torch.cat((q_THD, r_THR), -1), inputs, self.shape.floor, self.shape.growth)
        k_THD, v_THD, sinks_TH = clipped(k_THD, longest), self.value_norm(v_THD), sinks_TH.float().contiguous()
        o_THD = attend(q_THD, k_THD, v_THD, self.core, inputs, cache, None, sinks_TH)
        o_TC = (o_THD.flatten(1).float() * each(torch.sigmoid, gate_TC.float())).to(o_THD.dtype)
        return inputs.asked_of(self.out_conv(self.out(o_TC), inputs, cache))

    def _keys_and_values(
        self, key_TD: torch.Tensor, value_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache
    ) -> tuple[torch.Tensor, torch.Tensor]:
        of, kernel = self.shape.attention, self.shape.conv_kernel
        own = of.kv_heads * kernel if self.shape.dynamic else 0
        widths = [of.kv_heads * of.head_dim, own]
        (k_TC, of_k), (v_TC, of_v) = (
            torch.split(project(x_TD), widths, -1) for project, x_TD in ((self.key, key_TD), (self.value, value_TD))
        )
        kv_TC = torch.cat((k_TC, v_TC), -1)
        if isinstance(self.kv_conv, DynamicConv):
            own_THK = torch.unflatten(torch.cat((of_k, of_v), -1), 1, (2 * of.kv_heads, kernel))
            kv_TC = self.kv_conv(kv_TC, own_THK, inputs, cache)
        else:
            kv_TC = self.kv_conv(kv_TC, inputs, cache)
        k_THD, v_THD = by_head(kv_TC, 2 * of.kv_heads).chunk(2, 1)
        return k_THD, v_THD


@dataclass(slots=True)
class MessageGate:
    """Gate between an input and its message. ``both``: float32 [2 D, rank], rows of the forget gate first."""

    down: Linear
    both: torch.Tensor
    eps: float

    def __call__(self, x_TD: torch.Tensor, message_TD: torch.Tensor) -> torch.Tensor:
        ones_D = x_TD.new_ones(x_TD.shape[1])
        seen = torch.cat([rms_norm(rows, ones_D, self.eps) for rows in (x_TD, message_TD)], -1)
        gates = each(torch.tanh, F.linear(self.down(seen).float(), self.both))
        forget_TD, give_TD = gates.chunk(2, -1)
        return ((1 - forget_TD) * x_TD.float() + give_TD * message_TD.float()).to(x_TD.dtype)


@dataclass(slots=True)
class Messages:
    """Messages of the run before, one for each input of a block: what ``attend`` sees of the sums of that run."""

    attend: SumAttention
    gates: list[MessageGate]

    def __call__(self, seen_TQD: torch.Tensor, stream: ResidualStream) -> torch.Tensor:
        """Return [T, I, D], the inputs with their messages."""
        messages_TID = self.attend(stream.rows[PREVIOUS])
        inputs_TID = seen_TQD.expand(messages_TID.shape)
        parts = zip(self.gates, inputs_TID.unbind(1), messages_TID.unbind(1), strict=True)
        return torch.stack([gate(x_TD, message_TD) for gate, x_TD, message_TD in parts], 1)


PREVIOUS = "previous"
"""Name of the sums of a loop's run before among the rows of the stream, its last stream with them."""


@dataclass(slots=True)
class InputsBlock(AttendingBlock):
    """A residual block of several inputs. ``norms``: one for all inputs, or one for each."""

    norms: list[Norm] = field(kw_only=True)
    messages: Messages | None = field(kw_only=True)

    def normed(self, seen_TQD: torch.Tensor, stream: ResidualStream) -> torch.Tensor:
        if self.messages is not None:
            seen_TQD = self.messages(seen_TQD, stream)
        count = max(len(self.norms), seen_TQD.shape[1])
        norms, rows = self.norms * (count // len(self.norms)), seen_TQD.expand(-1, count, -1).unbind(1)
        return torch.stack([normed(norm, x_TD) for norm, x_TD in zip(norms, rows, strict=True)], 1)


@dataclass(slots=True)
class FirstInput:
    """A mixer that reads the only one of its inputs."""

    block: ConvolvedFeed

    def __call__(
        self, x_TID: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        return self.block(x_TID[:, 0], inputs, cache, cos_sin)


@dataclass(slots=True)
class RunAgain:
    """Step before a loop runs again: the stream is that before the loop. ``before``: number of its complete sums."""

    before: int

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        sums_TND = stream.rows[SUMS]
        stream.rows[PREVIOUS] = sources_of(stream)[:, self.before + 1 :]
        stream.x_TD, stream.rows[SUMS] = sums_TND[:, self.before], sums_TND[:, : self.before]


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    return [OnStream(read.norm("embed_tokens.embed_norm"))], [LastAttention(read_queries(read, "final_input"))]


def layer_reader(read: BlockReader) -> ReadLayer:
    return _Layers(read)


class _Layers:
    """Reader of layers. A layer of a loop is read once."""

    def __init__(self, read: BlockReader) -> None:
        shape = read.architecture.residual
        assert isinstance(shape, Inkling2Residuals)
        self.read, self.shape = read, shape
        self.known: dict[int, _Layer] = {}
        self.queries = self._message_queries() if shape.looped else None

    def __call__(self, name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        number = int(name.rpartition(".")[2])
        if isinstance(mixer, Again):
            again = self.known[number].run(again=True)
            if number == self.shape.looped.start:
                again.blocks.insert(0, RunAgain(number // self.shape.every))
            return again
        assert isinstance(mixer, ClippedAttention)
        assert isinstance(feed, Experts)
        self.known[number] = layer = _Layer(self, number, name, mixer, feed)
        return layer.run(again=False)

    def _message_queries(self) -> torch.Tensor:
        """Return [layers, 4, D]."""
        read, apart = self.read, not self.read.source.has("message_input.query")
        table = read.table(self.shape.messages_table(read.hidden, apart=apart), "")
        if not apart:
            return table.tensor("queries")
        ours, of_kv = (torch.unflatten(table.tensor(role), 0, (-1, 2)) for role in table.table)
        return torch.cat((ours[:, :1], of_kv, ours[:, 1:]), 1)

    def messages(self, number: int, own: slice) -> SumAttention:
        """Return the attention of the messages ``own`` of four, of layer ``number``."""
        assert self.queries is not None
        query_ID = self.queries[number - self.shape.looped.start, own]
        query_ID = query_ID if query_ID.is_meta else query_ID * self.read.hidden**-0.5
        return SumAttention(query_ID, self.shape.eps, values_normed=True)


class _Layer:
    """The parts of one layer, of which each run has its own residual blocks."""

    def __init__(self, of: _Layers, number: int, name: str, mixer: ClippedAttention, feed: Experts) -> None:
        read, names = of.read, of.read.architecture.names
        around = read.table(mixer.around_table(read.hidden), name)
        out_conv, feed_conv = (
            OutputConv(with_input(around.tensor(part).squeeze(1), mixer.conv_kernel + 1), f"conv.{part}")
            for part in ("mixer", "feed")
        )
        self.opens = number % of.shape.every == 0
        self.attention = read.block(mixer, f"{name}.self_attn", out_conv=out_conv)
        experts = read.source.summed(read_routed(read, feed, f"{name}.mlp"))
        self.feed = FirstInput(ConvolvedFeed(experts, feed_conv))
        prefixes = [f"{part}_" for part in "qkv"] if mixer.inputs > 1 else [""]
        self.norms = [read.norm(f"{name}.{prefix}input_layernorm") for prefix in prefixes]
        self.feed_norm = read.norm(f"{name}.post_attention_layernorm")
        first, second = (f"{name}.{mix}" for mix in names.mixes)
        self.attend = read_queries(read, first, mixer.inputs) if number else None
        self.attend_feed = read_queries(read, second)
        self.messages: list[Messages] = []
        if mixer.messaged:
            gates = [_read_gate(read, mixer, f"{name}.{part}_message_gate.") for part in ("q", "k", "v", "mlp")]
            self.messages = [Messages(of.messages(number, own), gates[own]) for own in (slice(0, 3), slice(3, 4))]

    def run(self, *, again: bool) -> DecoderLayer:
        """Return one run of the layer; ``again``: it has messages."""
        of_attention, of_feed = self.messages if again else (None, None)
        blocks = (
            (self.attention, self.norms, self.attend, self.opens, of_attention),
            (self.feed, [self.feed_norm], self.attend_feed, False, of_feed),
        )
        return DecoderLayer(
            [
                InputsBlock(None, block, attend=attend, opens=opens, norms=norms, messages=messages)
                for block, norms, attend, opens, messages in blocks
            ]
        )


def _read_gate(read: BlockReader, shape: ClippedAttention, name: str) -> MessageGate:
    table = read.table(shape.gate_table(read.hidden, name), "")
    return MessageGate(
        table.linear("down"), torch.cat([table.tensor(part) for part in ("forget", "message")]), read.eps
    )


def read_clipped_attention(
    read: BlockReader, shape: ClippedAttention, name: str, *, out_conv: OutputConv
) -> ClippedAttentionBlock:
    table, of = read.table(shape.table(read.hidden), name), shape.attention
    k_taps, v_taps = (table.tensor(f"{part}_conv") for part in "kv")
    conv: OutputConv | DynamicConv
    if shape.dynamic:
        taps_KC = torch.cat((k_taps, v_taps), -1)
        if not taps_KC.is_meta:
            taps_KC[0] += 1.0
        conv = DynamicConv(taps_KC, Shifts.of(taps_KC.shape[1], shape.conv_kernel - 1, taps_KC))
    else:
        taps = torch.cat((k_taps, v_taps)).squeeze(1)
        conv = OutputConv(with_input(taps, shape.conv_kernel + 1), "conv.kv")
    return ClippedAttentionBlock(
        shape,
        table.linear("query"),
        table.linear("k"),
        table.linear("v"),
        conv,
        (table.tensor("q_scale").float(), table.tensor("r_scale").float()),
        Norm(torch.ones(of.head_dim, dtype=read.source.dtype, device=read.source.device), read.eps),
        relative_core(shape, table.tensor("relative_position_bias.proj")),
        read.source.summed(table.linear("out")),
        out_conv,
    )
