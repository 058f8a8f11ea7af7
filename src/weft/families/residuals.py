"""Forms of the residual stream, as data: the tensors outside mixers and feed-forwards.

    Residual          x + scale * block(norm(x))                    most families
    Streams           several streams, mixed around each block      Qwen4, GLM 5
    AttentionResiduals  blocks read an attention over sums of layers  Inkling 2, Kimi K3
    PerLayer          a second embedding, and a factor              Gemma 4, 3n
    NormedStream      the stream is the output of a norm            MiniMax
    GatedNorms        some norms have gates                         A.X K2
    PlainNorms        norms without weights                         nanochat
    NormedEmbedding   the embedding is normed, without a weight     Muse Glimmer
    GatedSums         sums with learned shares of stream and block  Muse Spark
    LayerNorms        the embedding is normed too                   RWKV-7, BLOOM

A family with another kind has a record of its own. Ranks divide only the second embedding. Pure.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from typing import ClassVar, Literal

from weft.families.mixers import BlockShape, Mixer
from weft.families.tensors import (
    Dim,
    NormGate,
    Numbered,
    Table,
    Tensor,
    exact,
    layer_norm,
    norm_gate,
    norm_weight,
    product,
)


@dataclass(frozen=True, slots=True)
class ModelShape:
    """Sizes that the tables outside the blocks depend on. ``records``: mixers and feed-forwards of all layers."""

    hidden: int
    vocab: int
    layers: int
    records: tuple[BlockShape, ...]


@dataclass(frozen=True, slots=True)
class Positions:
    """Table of ``rows`` that are added to the embedding: to position p the row ``first`` + p. ``sinusoids``: they are
    computed and not stored (XGLM)."""

    rows: int
    first: int = 0
    sinusoids: bool = False

    def table(self, hidden: int) -> Table:
        """Return the tensor of the rows, of which every rank has all."""
        return {} if self.sinusoids else {"rows": (Tensor("weight", (self.rows, hidden), "plain"),)}


@dataclass(frozen=True, slots=True, kw_only=True)
class Residual:
    """Form of the residual stream. ``scale``: factor on the output of a block (Granite, MiniCPM). ``in_norms`` and
    ``out_norms``: norms before and after each block (OLMo 2 has those after; LFM3 and Gemma have both). ``float32``:
    the stream is kept in float32 whatever the weights are in (Mamba). ``gate``: of every norm of the stream (GigaChat
    3.5). ``centred``: norms subtract the mean, with a weight ("weight"), with weight and bias ("bias"), or with
    neither ("plain"). ``parallel``: mixer and feed-forward of a layer read the same stream, under one norm or under a
    norm each ("one", "two"). ``positions``: are added to the embedding. ``out_eps``: epsilon of norms after blocks; 0:
    that of all norms."""

    adapts_embedding: ClassVar[bool] = True
    """Whether adapters may change the embedding, because its rows go into the stream unchanged."""
    scale: float = 1.0
    in_norms: bool = True
    out_norms: bool = False
    float32: bool = False
    gate: NormGate | None = None
    centred: Literal["", "plain", "weight", "bias"] = ""
    parallel: Literal["", "one", "two"] = ""
    positions: Positions | None = None
    out_eps: float = 0.0

    def norm_table(self, hidden: int, name: str = "norm") -> Table:
        """Return the table of one norm of the stream, whose tensors are under ``name``."""
        if self.centred == "plain":
            return {}
        if self.centred == "bias":
            return layer_norm("norm", hidden, name)
        return norm_weight("norm", hidden, name) | norm_gate("norm", self.gate, hidden, name)

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        """Yield all tables outside the blocks, except embedding and head, each with the name under which plans count
        it."""
        each = self.in_norms + self.out_norms
        norms = 1 + sum(each + record.further_norms for record in model.records)
        norms -= model.layers * (self.parallel == "one")
        yield from _norms(self.norm_table(model.hidden), norms)
        if self.positions is not None:
            yield "positions", self.positions.table(model.hidden)

    def head_tables(self, hidden: int) -> Iterator[Table]:
        """Yield the tables of the norms of a head for multi-token prediction, over both inputs, around the layer and
        over the output. The join of the inputs is the same for all kinds."""
        yield from [self.norm_table(hidden)] * (3 + 2 * (self.in_norms + self.out_norms))


@dataclass(frozen=True, slots=True, kw_only=True)
class GatedNorms(Residual):
    """Residual whose ``gate`` is of the norms before mixers, and of those before the feed-forwards of some layers:
    ``feeds`` has true for them (A.X K2)."""

    feeds: tuple[bool, ...]

    def norm_table(self, hidden: int, name: str = "norm") -> Table:
        *_, layer, norm = ("", *name.split("."))
        gated = layer.isdigit() and (norm == "input_layernorm" or self.feeds[int(layer)])
        return norm_weight("norm", hidden, name) | norm_gate("norm", self.gate if gated else None, hidden, name)

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        for layer in range(model.layers):
            for norm in ("input_layernorm", "post_attention_layernorm"):
                yield "norms", self.norm_table(model.hidden, f"{layer}.{norm}")
        yield "norms", self.norm_table(model.hidden)


PLAIN = Residual()
"""Residual of most families."""


def _norms(table: Table, count: int) -> Iterable[tuple[str, Table]]:
    return [("norms", table)] * count


@dataclass(frozen=True, slots=True)
class Streams(Residual):
    """Parallel residual streams, ``count`` in number (hyper-connections). Each block sees a mix of the streams, and
    each stream gets a share of the block's output.

    ``rank``: of "gated" (Qwen4), the width between streams and gates: every number of every stream has a gate. "mixed"
    (GLM 5) has a weight for each stream, and mixes the streams by a matrix. Its rows and columns sum to 1 after
    ``rounds`` rounds of Sinkhorn's iteration. "apart" (Hy4) is "mixed" without the matrix: streams keep their values.
    ``magnitude``: largest share of a stream in a block's output. ``weighed``: without gates, streams are weighed after
    the last layer too (DeepSeek V4); otherwise their mean is taken."""

    kind: Literal["gated", "mixed", "apart"]
    count: int
    rank: int = 0
    rounds: int = 0
    eps: float = 0.0
    weighed: bool = False
    magnitude: float = 2.0

    def mix_table(self, hidden: int, *, last: bool = False, joint: str = "") -> Table:
        """Return the tensors that mix streams around one block; ``last``: after all layers. ``joint``: text that joins
        the names of mixed streams to that of their block."""
        width = self.count * hidden
        if self.kind == "gated":
            table = (
                norm_weight("norm", width, "hc_norm")
                | product("down", width, ("input_mix_weight_down", self.rank))
                | product("up", self.rank, ("input_mix_weight_up", width))
            )
            return table if last else table | product("inject", width, ("block_inject_weight", self.count))
        parts = 1 if last else 2 + (self.kind == "mixed")
        weights = self.count * (self.count + 2 if parts > 2 else parts)
        each: dict[str, tuple[Dim, ...]] = {"fn": (weights, width), "base": (weights,), "scale": (parts,)}
        return {role: (Tensor(f"{joint}{role}", dims, "float32"),) for role, dims in each.items()}

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        if self.kind != "gated":
            yield from Residual.tables(self, model)
        for _ in range(2 * model.layers):
            yield "streams", self.mix_table(model.hidden)
        if self.kind == "gated" or self.weighed:
            yield "streams", self.mix_table(model.hidden, last=True)

    def head_tables(self, hidden: int) -> Iterator[Table]:
        yield from [self.norm_table(hidden)] * (1 + self.count)
        yield from [self.mix_table(hidden)] * 2
        yield self.mix_table(hidden, last=True)


@dataclass(frozen=True, slots=True)
class AttentionResiduals(Residual):
    """Residual whose blocks read an attention over the sums of earlier groups of ``every`` layers, the embedding the
    first of them, and over the sum of the present group. A block has a learned query for each of its inputs.

    ``weighed``: the norm of the keys has a weight, and values are the sums themselves (Kimi K3, AliceAI); otherwise
    values are normed as keys are, and scores are divided by the root of their width (Inkling 2). ``eps``: of that norm.
    ``first``: the first block has a query too, although it reads only the embedding."""

    every: int
    eps: float
    weighed: bool = False
    first: bool = False

    def query_table(self, hidden: int, name: str, inputs: int = 1, *, joined: bool = False) -> Table:
        """Return the queries of a block, and the weight of its keys' norm; ``name``: the beginning of their names.
        ``joined``: a query has been multiplied by the weight (GGUF)."""
        if joined:
            return {"query": (Tensor(f"{name}_proj.weight", (hidden,), "plain"),)}
        if self.weighed:
            query: Table = {"query": (Tensor(f"{name}_proj.weight", (inputs, hidden), "plain"),)}
            return query | norm_weight("norm", hidden, f"{name}_norm")
        return {"query": (Tensor(f"{name}.query", (hidden,) if inputs == 1 else (inputs, hidden), "float32"),)}

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        yield from Residual.tables(self, model)
        for record in model.records[0 if self.first else 1 :]:
            yield "norms", self.query_table(model.hidden, "", record.inputs)
        yield "norms", self.query_table(model.hidden, "")


@dataclass(frozen=True, slots=True)
class PerLayer(Residual):
    """Residual with a factor on the stream after each layer; with a ``width``, also with ``width`` numbers of a second
    embedding, which each token has for each layer. ``known``: tokens of the second embedding, the first ones, if it has
    fewer than the first; the others have the numbers of token 0."""

    width: int = 0
    known: int = 0

    def embedding_table(self, vocab: int, layers: int, hidden: int) -> Table:
        """Return the second embedding, and the projection of the first that is added to it."""
        columns, rows = layers * self.width, Numbered("tokens", self.known or vocab)
        return {
            "table": (Tensor("embed_tokens_per_layer.weight", (rows, columns), "plain"),),
            **product("project", hidden, ("per_layer_model_projection", columns)),
            **norm_weight("norm", self.width, "per_layer_projection_norm"),
        }

    def behind_table(self, hidden: int) -> Table:
        """Return the tensors that add a layer's numbers of the second embedding to the stream, and the factor on the
        stream."""
        scalar: Table = {"scalar": (Tensor("layer_scalar", (1,), "plain"),)}
        return scalar | self.own_table(hidden) if self.width else scalar

    def own_table(self, hidden: int) -> Table:
        """Return the tensors that make an addition to the stream of a layer's numbers of the second embedding."""
        return (
            product("gate", hidden, ("per_layer_input_gate", self.width))
            | product("out", self.width, ("per_layer_projection", hidden))
            | norm_weight("norm", hidden, "post_per_layer_input_norm")
        )

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        yield from Residual.tables(self, model)
        for _ in range(model.layers):
            yield "behind layers", self.behind_table(model.hidden)
        if self.width:
            yield "second embedding", self.embedding_table(model.vocab, model.layers, model.hidden)


@dataclass(frozen=True, slots=True)
class NormedStream(Residual):
    """Residual whose stream is the output of the norm before a block. ``factors``: four for each layer, on the stream
    and the mixer's output, then on the stream and the feed-forward's."""

    factors: tuple[tuple[float, float, float, float], ...]


@dataclass(frozen=True, slots=True)
class PlainNorms(Residual):
    """Residual whose norms have no weight; the embedding passes one too."""

    adapts_embedding: ClassVar[bool] = False

    def norm_table(self, hidden: int, name: str = "norm") -> Table:
        return {}


@dataclass(frozen=True, slots=True)
class NormedEmbedding(Residual):
    """Residual whose embedding passes a norm without a weight, while other norms have one."""

    adapts_embedding: ClassVar[bool] = False


@dataclass(frozen=True, slots=True)
class GatedSums(NormedEmbedding):
    """Residual in which each channel of a block's output counts by b, the sigmoid of a learned number over
    ``temperature``, and the stream by the root of 1 - b^2, at least 1e-3 under the root. The norm after a mixer has no
    weight. That after a feed-forward scales its input."""

    temperature: float

    def norm_table(self, hidden: int, name: str = "norm") -> Table:
        return {} if name.endswith("post_attention_layernorm") else norm_weight("norm", hidden, name)

    def gate_table(self, hidden: int) -> Table:
        """Return the numbers of one block."""
        return exact("gate", dims=(hidden,))

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        for record in model.records:
            yield "norms", self.norm_table(model.hidden)
            yield "norms", {} if isinstance(record, Mixer) else self.norm_table(model.hidden)
            yield "norms", self.gate_table(model.hidden)
        yield "norms", self.norm_table(model.hidden)


@dataclass(frozen=True, slots=True)
class LayerNorms(Residual):
    """Residual whose embedding has a norm too (BLOOM), and blocks may hold their own (RWKV-7)."""

    centred: Literal["", "plain", "weight", "bias"] = "bias"

    def tables(self, model: ModelShape) -> Iterator[tuple[str, Table]]:
        yield from Residual.tables(self, model)
        yield "norms", self.norm_table(model.hidden)
