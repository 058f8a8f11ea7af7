"""Several parallel residual streams: how a block reads them, and how its output is added.

    x_TN = S streams of D numbers           enter: x_TN -> seen_TD, carried        leave: x_TN, y_TD -> x_TN

    gated   n = norm of each stream;  seen = mean over streams of sigmoid(up(silu(down(n) / S))) n
            x_s += 2 sigmoid(inject(n) / S)_s y
    mixed   w = fn(x / rms(x));  seen = sum of (sigmoid(w) + eps)_s x_s
            x_s = 2 sigmoid(w')_s y + sum over r of M_rs x_r,  rows and columns of M sum to 1
    apart   seen as in mixed;  x_s += (magnitude sigmoid(w') + eps)_s y

Sources: Hyper-Connections (Zhu et al., 2024); manifold-constrained ones (Xie et al., 2026); transformers
``Qwen4ExpTextGatedResidual``, ``Glm5NextTextHyperConnection``, ``HYV4HyperConnection``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import torch
import torch.nn.functional as F

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import FeedForward
from weft.families.mixers.ngrams import WithNgrams
from weft.families.residuals import Streams
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.ngrams import read_ngrams
from weft.models.blocks.plain import plain_layer
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
from weft.tensor.ops.elementwise import each
from weft.tensor.ops.norm import rms_norm


class StreamMix(Protocol):
    """Mixing of streams before and after one block."""

    def enter(self, x_TN: torch.Tensor, /) -> tuple[torch.Tensor, Carried]: ...

    def leave(self, x_TN: torch.Tensor, carried: Carried, y_TD: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(slots=True)
class GatedStreams:
    """Gated mixing. ``norm``: over D, with weights for all streams; ``down`` [rank, S D], ``up`` [S D, rank];
    ``inject`` [S, S D], None after the last layer.
    """

    shape: Streams
    norm: Norm
    down: Linear
    up: Linear
    inject: Linear | None

    def enter(self, x_TN: torch.Tensor) -> tuple[torch.Tensor, Carried]:
        count, width = self.shape.count, x_TN.shape[1] // self.shape.count
        normed_TN = rms_norm(x_TN, self.norm.weight, self.norm.eps, plus_one=self.norm.plus_one, group_size=width)
        gates_TN = each(torch.sigmoid, self.up(each(F.silu, self.down(normed_TN) / count)))
        seen_TD = torch.unflatten(gates_TN * normed_TN, 1, (count, width)).mean(1)
        if self.inject is None:
            return seen_TD, ()
        return seen_TD, (2 * each(torch.sigmoid, self.inject(normed_TN) / count),)

    def leave(self, x_TN: torch.Tensor, carried: Carried, y_TD: torch.Tensor) -> torch.Tensor:
        [shares_TS] = carried
        return x_TN + (shares_TS[..., None] * y_TD[:, None]).flatten(1)


@dataclass(slots=True)
class MixedStreams:
    """Mixing by a matrix, float32: ``fn`` [S + S + S S, S D], ``base`` [S + S + S S], ``scale`` [3]: of the input, of
    the output, of the matrix. ``norm_eps``: of the norm before them, which has no weight.
    """

    shape: Streams
    fn: torch.Tensor
    base: torch.Tensor
    scale: torch.Tensor
    norm_eps: float

    def enter(self, x_TN: torch.Tensor) -> tuple[torch.Tensor, Carried]:
        count, eps = self.shape.count, self.shape.eps
        parts = zip(
            torch.split(self._weights(x_TN), [count, count, count**2], dim=-1),
            self.scale,
            torch.split(self.base, [count, count, count**2]),
            strict=True,
        )
        see_TS, give_TS, mix_TM = (weights * scale + base for weights, scale, base in parts)
        mix_TSS = torch.softmax(mix_TM.view(-1, count, count), dim=-1) + eps
        mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
        for _ in range(self.shape.rounds - 1):
            mix_TSS = mix_TSS / (mix_TSS.sum(-1, keepdim=True) + eps)
            mix_TSS = mix_TSS / (mix_TSS.sum(-2, keepdim=True) + eps)
        return self._seen(x_TN, see_TS), ((2 * each(torch.sigmoid, give_TS)).to(x_TN.dtype), mix_TSS.to(x_TN.dtype))

    def collapsed(self, x_TN: torch.Tensor) -> torch.Tensor:
        """Return the weighed sum of the streams, after the last layer: its tensors have only the first weights."""
        return self._seen(x_TN, self._weights(x_TN) * self.scale + self.base)

    def _weights(self, x_TN: torch.Tensor) -> torch.Tensor:
        wide_TN = x_TN.float()
        return F.linear(wide_TN * torch.rsqrt(wide_TN.square().mean(-1, keepdim=True) + self.norm_eps), self.fn)

    def _seen(self, x_TN: torch.Tensor, see_TS: torch.Tensor) -> torch.Tensor:
        streams_TSD = torch.unflatten(x_TN, 1, (self.shape.count, -1))
        return ((each(torch.sigmoid, see_TS) + self.shape.eps)[..., None] * streams_TSD).sum(1).to(x_TN.dtype)

    def leave(self, x_TN: torch.Tensor, carried: Carried, y_TD: torch.Tensor) -> torch.Tensor:
        give_TS, mix_TSS = carried
        mixed_TSD = mix_TSS.transpose(1, 2) @ torch.unflatten(x_TN, 1, (self.shape.count, -1))
        return (give_TS[..., None] * y_TD[:, None] + mixed_TSD).flatten(1)


@dataclass(slots=True)
class StreamsApart(MixedStreams):
    """Mixing without a matrix: ``fn`` [S + S, S D], ``base`` [S + S], ``scale`` [2]."""

    def enter(self, x_TN: torch.Tensor) -> tuple[torch.Tensor, Carried]:
        weights_TS = torch.unflatten(self._weights(x_TN), 1, (-1, self.shape.count))
        see_TS, give_TS = (weights_TS * self.scale[:, None] + self.base.view(-1, self.shape.count)).unbind(1)
        return self._seen(x_TN, see_TS), (self.shape.magnitude * each(torch.sigmoid, give_TS) + self.shape.eps,)

    def leave(self, x_TN: torch.Tensor, carried: Carried, y_TD: torch.Tensor) -> torch.Tensor:
        [give_TS] = carried
        return (x_TN.float() + (give_TS[..., None] * y_TD[:, None].float()).flatten(1)).to(x_TN.dtype)


@dataclass(slots=True)
class StreamsBlock(ResidualBlock):
    """A residual block inside ``mix``."""

    mix: StreamMix = field(kw_only=True)

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        seen_TD, carried = self.mix.enter(stream.summed())
        return normed(self.norm, seen_TD), carried

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        stream.x_TD = self.mix.leave(stream.x_TD, carried, y_TD)


@dataclass(slots=True)
class Collapse:
    """Step that makes one stream of several, after the last layer."""

    make: Callable[[torch.Tensor], torch.Tensor]

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        step.streams_TN = stream.summed()
        stream.x_TD = self.make(step.streams_TN)


def read_streams(read: BlockReader, shape: Streams, name: str, *, last: bool = False) -> StreamMix:
    """Return the mixing around the block whose streams are under ``name``; ``last``: after all layers."""
    if shape.kind != "gated":  # layers.3.hc_attn_fn, or layers.3.attn_hc.fn
        layer, _, block = name.rpartition(".")
        joint = f"hc_{block}_" if read.source.has(f"{layer}.hc_{block}_fn") else f"{block}_hc."
        return read_mixed(read, shape, layer, joint)
    table = read.table(shape.mix_table(read.hidden, last=last), name)
    return GatedStreams(
        shape,
        table.norm("norm", read.eps, plus_one=read.plus_one),
        table.linear("down"),
        table.linear("up"),
        None if last else table.linear("inject"),
    )


def read_mixed(read: BlockReader, shape: Streams, name: str, joint: str, *, last: bool = False) -> MixedStreams:
    """Return the mixing whose tensors begin with ``joint`` under ``name``."""
    table = read.table(shape.mix_table(read.hidden, last=last, joint=joint), name)
    kind = StreamsApart if shape.kind == "apart" else MixedStreams
    return kind(shape, table.tensor("fn"), table.tensor("base"), table.tensor("scale"), read.eps)


def layer_reader(read: BlockReader) -> ReadLayer:
    """Return the reader of layers. N-grams of a layer are added before it. A head for multi-token prediction may have
    one stream.
    """
    shape, names = read.architecture.residual, read.architecture.names

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        before: list[StreamBlock] = []
        if isinstance(mixer, WithNgrams):
            before, mixer = [read_ngrams(read, mixer.ngrams, f"{name}.ple")], mixer.mixer
        plain = plain_layer(read, name, mixer, feed)
        if not isinstance(shape, Streams):
            return plain
        mixed = [
            StreamsBlock(
                block.norm,
                block.block,
                block.out_norm,
                block.mixes,
                mix=read_streams(read, shape, f"{name}.{names.mixes[0 if block.mixes else 1]}"),
            )
            for block in plain.residuals
        ]
        return DecoderLayer([*before, *mixed])

    return layer


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    shape = read.architecture.residual
    assert isinstance(shape, Streams)
    expand = OnStream(lambda x_TD: x_TD.repeat(1, shape.count))
    if shape.weighed:
        return [expand], [Collapse(read_mixed(read, shape, "hc_head", "hc_", last=True).collapsed)]
    if shape.kind == "mixed":
        return [expand], [Collapse(lambda x_TN: torch.unflatten(x_TN, 1, (shape.count, -1)).mean(1))]
    mix = read_streams(read, shape, "hyper_connection_mixer", last=True)
    return [expand], [Collapse(lambda x_TN: mix.enter(x_TN)[0])]
