"""The index of an attention layer that sees chosen blocks: the row that each token keeps, and the queries that score
these rows.

    means     x_TD --project--> [ queries | key ]         queries: norm, rotary
                                             +--> pages; a block's key: mean, norm, rotary of its first
                                             position
    learned   x_TD --project--> [ key | weight | query weights ];  the query's bottleneck --> queries
                                  norm  +--> pages; a block's key: sum of keys by softmax(weight + place)
    tokens    x_TD --project--> [ key | query weights ];  the query's bottleneck --> queries: rotary
                                  norm, rotary --> pages
    maxima    x_TD --project--> [ queries | key ]         both: norm, rotary; the key --> pages

Every rank has the complete index, so all ranks choose alike. Sources: transformers ``Qwen4ExpTextQSAIndexer``,
``Glm5NextTextIndexer``, ``DeepseekV32Indexer``, ``GlmMoeDsaIndexer``, ``MiniMaxM3VLIndexer``.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import partial

import torch
import torch.nn.functional as F

from weft.families.mixers.attention import Index, Rope
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, Norm, by_head, neighbours_apart
from weft.models.rotary import RotaryTable
from weft.models.weights import Order
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.chosen_blocks import Seen, choose_blocks, choose_by_maxima, sees_all, write_index
from weft.tensor.ops.elementwise import rotary


@dataclass(slots=True)
class MeanIndex:
    """Index by means of keys. ``project``: rows queries [queries * key_dim], key [key_dim]. ``rotary``: of the
    attention.
    """

    shape: Index
    project: Linear
    q_norm: Norm
    k_norm: Norm
    rotary: RotaryTable

    def __call__(
        self,
        x_TD: torch.Tensor,
        bottleneck_TR: torch.Tensor | None,
        inputs: StepInputs,
        cache: LayerCache,
        cos_sin: CosSin | None,
    ) -> Seen | None:
        """Return the chosen tokens, None if every token sees all that is before it."""
        shape = self.shape
        q_TC = self.write(x_TD, inputs, cache, cos_sin)
        if sees_all(inputs.runs, shape):
            return None
        assert cos_sin is not None, "an index without rotary tables"
        q_THD = self.q_norm(by_head(q_TC, shape.queries))
        q_THD, _ = rotary(q_THD, q_THD[:, :1], *cos_sin)
        weights_TH = q_THD.new_full(q_THD.shape[:2], shape.key_dim**-0.5)
        return choose_blocks(q_THD, weights_TH, cache, inputs.runs, shape)

    def write(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> torch.Tensor:
        """Write the rows that the tokens keep. Return the queries of the tokens."""
        shape = self.shape
        q_TC, row_TW = torch.split(self.project(x_TD), [shape.queries * shape.key_dim, shape.key_dim], dim=-1)
        write_index(row_TW, self._block_keys, cache, inputs.positions_T, inputs.runs, shape)
        return q_TC

    def _block_keys(self, rows_NKW: torch.Tensor, numbers_N: torch.Tensor) -> torch.Tensor:
        keys_N1D = self.k_norm(rows_NKW.mean(1).to(self.k_norm.weight.dtype))[:, None]
        cos_sin = self.rotary.computed(numbers_N * self.shape.block)
        return rotary(keys_N1D, keys_N1D, *cos_sin)[0][:, 0]


@dataclass(slots=True)
class TokenIndex:
    """Index whose blocks are tokens. ``project``: rows key [key_dim], query weights [queries]; ``query``: [queries *
    key_dim, rank]. ``norm``, ``norm_bias``: a layer norm of keys. Keys and queries turn as the attention does.
    """

    shape: Index
    project: Linear
    query: Linear
    norm: torch.Tensor
    norm_bias: torch.Tensor

    def __call__(
        self,
        x_TD: torch.Tensor,
        bottleneck_TR: torch.Tensor | None,
        inputs: StepInputs,
        cache: LayerCache,
        cos_sin: CosSin | None,
    ) -> Seen | None:
        """Return the chosen tokens, None if every token sees all that is before it. ``bottleneck_TR``: of the queries,
        normed.
        """
        shape, dim = self.shape, self.shape.key_dim
        assert bottleneck_TR is not None, "an index that reads a bottleneck"
        weights_TH = self.write(x_TD, inputs, cache, cos_sin)
        if sees_all(inputs.runs, shape):
            return None
        q_THD = self._turned(by_head(self.query(bottleneck_TR), shape.queries), cos_sin)
        weights_TH = weights_TH.float() * (dim * shape.queries) ** -0.5
        return choose_blocks(q_THD, weights_TH, cache, inputs.runs, shape)

    def write(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> torch.Tensor:
        """Write the rows that the tokens keep. Return the weights of their queries."""
        shape, dim = self.shape, self.shape.key_dim
        key_TD, weights_TH = torch.split(self.project(x_TD), [dim, shape.queries], dim=-1)
        key_TD = self._turned(self._normed(key_TD)[:, None], cos_sin)[:, 0]
        write_index(key_TD, _no_keys, cache, inputs.positions_T, inputs.runs, shape)
        return weights_TH

    def _normed(self, key_TD: torch.Tensor) -> torch.Tensor:
        return F.layer_norm(key_TD, (self.shape.key_dim,), self.norm, self.norm_bias, self.shape.norm_eps)

    def _turned(self, x_THD: torch.Tensor, cos_sin: CosSin | None) -> torch.Tensor:
        assert cos_sin is not None, "an index without rotary tables"
        return rotary(x_THD, x_THD[:, :1], *cos_sin)[0]


def _no_keys(rows_NKW: torch.Tensor, numbers_N: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the row of a token is its key")


@dataclass(slots=True)
class LearnedIndex(TokenIndex):
    """Index of blocks with learned weights. ``project``: rows key [key_dim], weight [key_dim], query weights [queries];
    ``places_KD``: added to weights, by the place in a block. Nothing turns.
    """

    places_KD: torch.Tensor

    def write(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> torch.Tensor:
        """Write the rows that the tokens keep. Return the weights of their queries."""
        shape, dim = self.shape, self.shape.key_dim
        key_TD, weight_TD, weights_TH = torch.split(self.project(x_TD), [dim, dim, shape.queries], dim=-1)
        row_TW = torch.cat((self._normed(key_TD), weight_TD), dim=-1)
        write_index(row_TW, self._block_keys, cache, inputs.positions_T, inputs.runs, shape)
        return weights_TH

    def _turned(self, x_THD: torch.Tensor, cos_sin: CosSin | None) -> torch.Tensor:
        return x_THD

    def _block_keys(self, rows_NKW: torch.Tensor, numbers_N: torch.Tensor) -> torch.Tensor:
        keys_NKD, weights_NKD = rows_NKW.chunk(2, dim=-1)
        shares_NKD = torch.softmax(weights_NKD + self.places_KD.float(), dim=1).to(self.norm.dtype)
        return (shares_NKD * keys_NKD.to(self.norm.dtype)).sum(1)


@dataclass(slots=True)
class MaximaIndex:
    """Index by the best token of a block. ``project``: rows queries [queries * key_dim], key [key_dim]. ``own``: the
    queries whose KV heads this rank has.
    """

    shape: Index
    project: Linear
    q_norm: Norm
    k_norm: Norm
    own: slice

    def __call__(
        self,
        x_TD: torch.Tensor,
        bottleneck_TR: torch.Tensor | None,
        inputs: StepInputs,
        cache: LayerCache,
        cos_sin: CosSin | None,
    ) -> Seen | None:
        """Return the chosen tokens of each KV head, None if every token sees all that is before it."""
        q_TC = self.write(x_TD, inputs, cache, cos_sin)
        if sees_all(inputs.runs, self.shape):
            return None
        assert cos_sin is not None, "an index without rotary tables"
        q_THD = self.q_norm(by_head(q_TC, self.shape.queries)[:, self.own].contiguous())
        q_THD, _ = rotary(q_THD, q_THD[:, :1], *cos_sin)
        return choose_by_maxima(q_THD, cache, inputs.runs, self.shape)

    def write(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None) -> torch.Tensor:
        """Write the keys of the tokens. Return the queries of the tokens."""
        shape = self.shape
        assert cos_sin is not None, "an index without rotary tables"
        q_TC, key_TD = torch.split(self.project(x_TD), [shape.queries * shape.key_dim, shape.key_dim], dim=-1)
        key_T1D = self.k_norm(key_TD.contiguous())[:, None]
        key_TD = rotary(key_T1D, key_T1D, *cos_sin)[0][:, 0]
        write_index(key_TD, _no_keys, cache, inputs.positions_T, inputs.runs, shape)
        return q_TC


def turned_first(rows: torch.Tensor, *, shape: Index, turned: int) -> torch.Tensor:
    """Return ``rows`` [heads x key_dim, ...], the ``turned`` numbers that positions turn first, their halves one after
    the other.
    """
    if shape.turned_last:
        rows = rows.view(-1, shape.key_dim, *rows.shape[1:]).roll(turned, 1).flatten(0, 1)
    return neighbours_apart(rows, head_dim=shape.key_dim, turned=turned) if shape.interleaved else rows


IndexBlock = MeanIndex | TokenIndex | MaximaIndex


def read_index(
    read: BlockReader, shape: Index, name: str, rope: Rope | None, rank: int = 0, own: slice = slice(None)
) -> IndexBlock:
    """Return the index of the attention ``name``. ``rank``: width of the queries' bottleneck; ``own``: numbers of the
    KV heads of this rank.
    """
    apart = read.source.has(f"{name}.indexer.index_q_proj.weight")  # of GGUF files
    table = read.table(shape.table(read.hidden, rank, apart=apart), f"{name}.indexer")
    if shape.kind == "learned":
        return LearnedIndex(
            shape,
            table.linear("project"),
            table.linear("query"),
            table.tensor("norm"),
            table.tensor("norm.bias"),
            table.tensor("places"),
        )
    assert rope is not None
    if shape.kind == "tokens":
        order: Order = partial(turned_first, shape=shape, turned=rope.rotary_dim)
        return TokenIndex(
            shape,
            table.linear("project", orders={"wk.weight": order}),
            table.linear("query", orders={"wq_b.weight": order}),
            order(table.tensor("norm")),
            order(table.tensor("norm.bias")),
        )
    q_norm, k_norm = (table.norm(role, read.eps, plus_one=read.plus_one) for role in ("q_norm", "k_norm"))
    if shape.kind == "maxima":
        return MaximaIndex(shape, table.linear("project"), q_norm, k_norm, own)
    return MeanIndex(shape, table.linear("project"), q_norm, k_norm, RotaryTable(rope, read.source.device))
