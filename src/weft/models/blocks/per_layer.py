"""What Gemma 4 adds behind each layer: numbers of its own for each token, and a factor on the stream.

    tokens --second embedding--> [T, layers, P] ----------------+
    x_TD of the first one --project--> [T, layers, P] --norm--> + --> / sqrt(2), read by layer

    behind a layer    x += norm(out(gelu(gate(x)) * own numbers));   x *= scalar

The second embedding is as wide as all layers together, and a step reads one row of it for each token. Source:
transformers ``Gemma4TextModel`` and ``Gemma4TextDecoderLayer``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.families.stream_tensors import behind_layer, per_layer
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, Norm
from weft.models.embedding import Embedding, Lookup
from weft.tensor.ops.elementwise import activate


@dataclass(slots=True)
class PerLayerInputs:
    """``table``: [vocab, layers * P]; ``project``: [layers * P, D]; ``norm``: over P."""

    table: Lookup
    project: Linear
    norm: Norm
    width: int

    def __call__(self, tokens_T: torch.Tensor, embedded_TD: torch.Tensor) -> torch.Tensor:
        """-> [T, layers, P]."""
        tokens, hidden = embedded_TD.shape
        own_TLP = (self.table.rows_at(tokens_T) * self._scale(self.width**0.5, embedded_TD)).view(
            tokens, -1, self.width
        )
        seen_TLP = (self.project(embedded_TD) * hidden**-0.5).view(own_TLP.shape)
        both_TLP: torch.Tensor = (self.norm(seen_TLP) + own_TLP) * 2.0**-0.5
        return both_TLP

    def _scale(self, factor: float, like: torch.Tensor) -> float:
        """Rounded to the model's dtype, as that of the first embedding."""
        return torch.tensor(factor, dtype=like.dtype).item()


@dataclass(slots=True)
class BehindLayer:
    """``gate``: [P, D]; ``out``: [D, P]; both None in a model without a second embedding."""

    scalar: torch.Tensor
    gate: Linear | None = None
    out: Linear | None = None
    norm: Norm | None = None

    def __call__(self, x_TD: torch.Tensor, own_TP: torch.Tensor | None) -> torch.Tensor:
        if self.gate is not None and self.out is not None and self.norm is not None:
            assert own_TP is not None, "a model without a second embedding"
            inner_TP = activate(self.gate(x_TD), "gelu_tanh") * own_TP
            x_TD = x_TD + self.norm(self.out(inner_TP))
        return x_TD * self.scalar


def read_per_layer(read: BlockReader, width: int) -> PerLayerInputs:
    """Gemma 4's second embedding."""
    source, layers = read.source, read.architecture.layer_count
    of_model = per_layer(width, layers, read.architecture.vocab_size, read.hidden)
    table = read.table(of_model, "")
    rows, share = table.tensor("table"), source.share
    second: Lookup = Embedding(rows) if share is None else share.lookup(rows, read.architecture.vocab_size)
    return PerLayerInputs(second, table.linear("project"), table.norm("norm", read.eps), width)


def read_behind(read: BlockReader, name: str) -> BehindLayer:
    """What follows the layer ``name`` of Gemma 4."""
    width = read.architecture.per_layer_width
    table = read.table(behind_layer(width, read.hidden), name)
    scalar = table.tensor("scalar")
    if not width:
        return BehindLayer(scalar)
    return BehindLayer(scalar, table.linear("gate"), table.linear("out"), table.norm("norm", read.eps))
