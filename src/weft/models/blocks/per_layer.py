"""Gemma 4's additions after each layer: numbers of each token for that layer, and a factor on the stream.

    tokens --second embedding--> [T, layers, P] ----------------+
    x_TD of the first one --project--> [T, layers, P] --norm--> + --> / sqrt(2), read by layer

    after a layer     x += norm(out(gelu(gate(x)) * own numbers));   x *= scalar

The second embedding is as wide as all layers together, and a step reads one row of it for each token. Source:
transformers ``Gemma4TextModel`` and ``Gemma4TextDecoderLayer``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import FeedForward
from weft.families.residuals import PerLayer
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.plain import plain_layer
from weft.models.embedding import Embedding, Lookup
from weft.models.layer import DecoderLayer, LayerStep, ReadLayer, ResidualStream, StreamBlock
from weft.models.table_reader import TableReader
from weft.tensor.ops.elementwise import activate

OWN = "per layer"
"""Name of each token's numbers for the layers, among the rows of the stream."""


@dataclass(slots=True)
class PerLayerInputs:
    """Numbers of tokens for each layer. ``table``: [vocab, layers * P]; ``project``: [layers * P, D]; ``norm``: over
    P. ``known``: as in ``PerLayer``.
    """

    table: Lookup
    project: Linear
    norm: Norm
    width: int
    known: int = 0

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        """Give each token its numbers, [T, layers, P]."""
        tokens_T, embedded_TD = step.inputs.tokens_T, stream.summed()
        if self.known:
            tokens_T = tokens_T.masked_fill(tokens_T >= self.known, 0)
        tokens, hidden = embedded_TD.shape
        own_TLP = (self.table.rows_at(tokens_T) * self._scale(self.width**0.5, embedded_TD)).view(
            tokens, -1, self.width
        )
        seen_TLP = (self.project(embedded_TD) * hidden**-0.5).view(own_TLP.shape)
        stream.rows[OWN] = (self.norm(seen_TLP) + own_TLP) * 2.0**-0.5

    def _scale(self, factor: float, like: torch.Tensor) -> float:
        """Return the factor rounded to the model's dtype, like that of the first embedding."""
        return torch.tensor(factor, dtype=like.dtype).item()


@dataclass(slots=True)
class OwnNumbers:
    """Addition to the stream of each token's numbers for one layer. ``gate``: [P, D]; ``out``: [D, P]."""

    layer: int
    gate: Linear
    out: Linear
    norm: Norm

    def __call__(self, x_TD: torch.Tensor, stream: ResidualStream) -> torch.Tensor:
        inner_TP = activate(self.gate(x_TD), "gelu_tanh") * stream.rows[OWN][:, self.layer]
        return self.norm(self.out(inner_TP))


@dataclass(slots=True)
class BehindLayer:
    """Addition after one layer, and the factor; ``own`` is None in a model without a second embedding."""

    scalar: torch.Tensor
    own: OwnNumbers | None = None

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        x_TD = stream.summed()
        if self.own is not None:
            x_TD = x_TD + self.own(x_TD, stream)
        stream.x_TD = x_TD * self.scalar


def read_own(read: BlockReader, table: TableReader) -> OwnNumbers:
    """Return the addition of the layer that ``table`` belongs to."""
    layer = int(table.name.rpartition(".")[2])
    return OwnNumbers(layer, table.linear("gate"), table.linear("out"), table.norm("norm", read.eps))


def layer_reader(read: BlockReader) -> ReadLayer:
    shape = read.architecture.residual
    assert isinstance(shape, PerLayer)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        plain, table = plain_layer(read, name, mixer, feed), read.table(shape.after_layer_table(read.hidden), name)
        behind = BehindLayer(table.tensor("scalar"))
        if shape.width:
            behind.own = read_own(read, table)
        return DecoderLayer([*plain.blocks, behind])

    return layer


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    architecture, source = read.architecture, read.source
    shape, vocab = architecture.residual, architecture.vocab_size
    assert isinstance(shape, PerLayer)
    if not shape.width:
        return [], []
    table = read.table(shape.embedding_table(vocab, architecture.layer_count, read.hidden), "")
    rows, share = table.tensor("table"), source.share
    second: Lookup = Embedding(rows) if share is None else share.lookup(rows, shape.known or vocab)
    norm = table.norm("norm", read.eps)
    return [PerLayerInputs(second, table.linear("project"), norm, shape.width, shape.known)], []
