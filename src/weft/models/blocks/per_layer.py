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
from weft.tensor.ops.elementwise import activate

OWN = "per layer"
"""Name of each token's numbers for the layers, among the rows of the stream."""


@dataclass(slots=True)
class PerLayerInputs:
    """Numbers of tokens for each layer. ``table``: [vocab, layers * P]; ``project``: [layers * P, D]; ``norm``: over
    P.
    """

    table: Lookup
    project: Linear
    norm: Norm
    width: int

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        """Give each token its numbers, [T, layers, P]."""
        tokens_T, embedded_TD = step.inputs.tokens_T, stream.summed()
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
class BehindLayer:
    """Addition after one layer. ``gate``: [P, D]; ``out``: [D, P]; both None in a model without a second embedding."""

    layer: int
    scalar: torch.Tensor
    gate: Linear | None = None
    out: Linear | None = None
    norm: Norm | None = None

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        x_TD = stream.summed()
        if self.gate is not None and self.out is not None and self.norm is not None:
            inner_TP = activate(self.gate(x_TD), "gelu_tanh") * stream.rows[OWN][:, self.layer]
            x_TD = x_TD + self.norm(self.out(inner_TP))
        stream.x_TD = x_TD * self.scalar


def layer_reader(read: BlockReader) -> ReadLayer:
    shape = read.architecture.residual
    assert isinstance(shape, PerLayer)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        plain, table = plain_layer(read, name, mixer, feed), read.table(shape.behind_table(read.hidden), name)
        behind = BehindLayer(int(name.rpartition(".")[2]), table.tensor("scalar"))
        if shape.width:
            behind.gate, behind.out = table.linear("gate"), table.linear("out")
            behind.norm = table.norm("norm", read.eps)
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
    second: Lookup = Embedding(rows) if share is None else share.lookup(rows, vocab)
    return [PerLayerInputs(second, table.linear("project"), table.norm("norm", read.eps), shape.width)], []
