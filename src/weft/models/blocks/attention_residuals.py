"""Attention residuals: blocks read an attention over sums of earlier layers instead of the stream.

    layers    0 1 2 | 3 4 5 | 6 ..           every 3: the stream before layers 0, 3, 6 .. is a complete sum
    sums      [T, N, D]                      the embedding, then the sum of each complete group
    seen_TQD  = softmax(query . norm(sums and stream)) of the sums and the stream, for each query
    stream    + output of the block;  the first block of a group starts a new stream with its output

Sources: "Attention Residuals" (Kimi Team, 2026); transformers ``Inkling2BlockAttentionResidual``; mlx-lm's ``kimi_k3``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.residuals import AttentionResiduals
from weft.models.block_reader import BlockReader
from weft.models.layer import Carried, DecoderLayer, LayerStep, ResidualBlock, ResidualStream, normed
from weft.tensor.ops.elementwise import softmax_

SUMS = "sums"
"""Name of the complete sums among the rows of the stream."""


@dataclass(slots=True)
class SumAttention:
    """Attention over sums, for each query. ``query_QD`` float32, in which factors of scores and keys are included.
    ``values_normed``: as ``AttentionResiduals`` has it.
    """

    query_QD: torch.Tensor
    eps: float
    values_normed: bool

    def __call__(self, sources_TND: torch.Tensor) -> torch.Tensor:
        """Return [T, Q, D] in the dtype of the sources; computed in float32."""
        wide_TND = sources_TND.float()
        inverse_TN = torch.rsqrt(wide_TND.square().mean(-1) + self.eps)
        seen = []
        for query_D in self.query_QD:
            weights_TN = softmax_((wide_TND * query_D).sum(-1) * inverse_TN, 1.0)
            if self.values_normed:
                weights_TN = weights_TN * inverse_TN
            seen.append((wide_TND * weights_TN[..., None]).sum(1))
        return torch.stack(seen, 1).to(sources_TND.dtype)


def sources_of(stream: ResidualStream) -> torch.Tensor:
    """Return [T, N, D]: the complete sums, and the stream after them."""
    x_TD = stream.summed()
    sums_TND = stream.rows.get(SUMS)
    return x_TD[:, None] if sums_TND is None else torch.cat((sums_TND, x_TD[:, None]), 1)


@dataclass(slots=True)
class AttendingBlock(ResidualBlock):
    """A residual block that reads sums. ``attend``: None for a block that reads only the stream. ``opens``: it is the
    first of its group.
    """

    attend: SumAttention | None = field(kw_only=True)
    opens: bool = field(kw_only=True)

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        sources_TND = sources_of(stream)
        seen_TQD = sources_TND if self.attend is None else self.attend(sources_TND)
        if self.opens:
            stream.rows[SUMS] = sources_TND
        return self.normed(seen_TQD, stream), ()

    def normed(self, seen_TQD: torch.Tensor, stream: ResidualStream) -> torch.Tensor:
        """Return the input of ``block``, made of what each query sees."""
        return normed(self.norm, seen_TQD[:, 0])

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        stream.x_TD = y_TD if self.opens else stream.x_TD + y_TD


@dataclass(slots=True)
class LastAttention:
    """Step after all layers: the stream is what one more query sees."""

    attend: SumAttention

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        stream.x_TD = self.attend(sources_of(stream))[:, 0]


def joined_to_sums(read: BlockReader, name: str, layer: DecoderLayer) -> DecoderLayer:
    """Return ``layer``, "layers.3" by its ``name``, whose blocks read sums if the model has attention residuals."""
    shape, names = read.architecture.residual, read.architecture.names.mixes
    if not isinstance(shape, AttentionResiduals):
        return layer
    number = int(name.rpartition(".")[2])
    return DecoderLayer(
        [
            AttendingBlock(
                block.norm,
                block.block,
                mixes=block.mixes,
                attend=read_queries(read, f"{name}.{mix}") if number or mix != names[0] or shape.first else None,
                opens=mix == names[0] and number % shape.every == 0,
            )
            for block, mix in zip(layer.residuals, names, strict=True)
        ]
    )


def read_queries(read: BlockReader, name: str, inputs: int = 1) -> SumAttention:
    """Return the attention of a block with ``inputs`` inputs, whose queries are under ``name``."""
    shape = read.architecture.residual
    assert isinstance(shape, AttentionResiduals)
    joined = shape.weighed and not read.source.has(f"{name}_norm.weight")
    table = read.table(shape.query_table(read.hidden, name, inputs, joined=joined), "")
    query_QD, weight_D = table.tensor("query").float().reshape(inputs, -1), table.get("norm")
    if not (query_QD.is_meta or joined):
        query_QD = query_QD * (read.hidden**-0.5 if weight_D is None else weight_D.float())
    return SumAttention(query_QD, shape.eps, values_normed=not shape.weighed)
