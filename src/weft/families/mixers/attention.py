"""Softmax attention: the tokens that a head sees, the numbers kept of each token, rotary positions.

    Attention         keys and values of some heads        pages, or a ring for a short window
    Rope              positions                            nothing
    Index             chooses blocks for attention         rows of its own
    KeyIndex          chooses blocks for each KV head      means of their keys, as rows of its own

Pure data, no torch.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Literal

from weft import spec
from weft.families.mixers import Mixer
from weft.families.tensors import Dim, Table, Tensor, Units, exact, layer_norm, norm_weight, product
from weft.spec import LayerSpec
from weft.units import ceil_div

RopeKind = Literal["default", "linear", "llama3", "yarn", "proportional", "longrope"]


RING_TOKENS_MAX = 1024
"""Largest window, tokens, that is a ring in the state slot; wider ones stay in pages and are masked. Why: decision
0008."""


@dataclass(frozen=True, slots=True)
class Rope:
    """Rotary position embedding over the first ``rotary_dim`` dims of a head.

    ``factor`` and the fields after it belong to the scaled kinds and are ignored by "default".
    ``original_positions`` is the context length before scaling. ``attention_factor`` multiplies cos and sin.
    ``turning_dim``: of "proportional", which spaces its frequencies over all of ``rotary_dim`` and then lets
    only the fastest ``turning_dim / 2`` of them turn. ``divisors``: of "longrope", one for each frequency.
    """

    theta: float
    rotary_dim: int
    kind: RopeKind = "default"
    factor: float = 1.0
    original_positions: int = 0
    low_freq_factor: float = 1.0
    high_freq_factor: float = 4.0
    beta_fast: float = 32.0
    beta_slow: float = 1.0
    truncate: bool = True
    attention_factor: float = 1.0
    turning_dim: int = 0
    divisors: tuple[float, ...] = ()


@dataclass(frozen=True, slots=True)
class Growth:
    """Factor on queries: 1 + ``factor`` log(1 + floor((position + ``first``) / ``tokens``)), so that
    attention over more tokens stays as sharp (Llama 4, Ministral 3)."""

    factor: float
    tokens: int
    first: int = 0


@dataclass(frozen=True, slots=True)
class Index:
    """Index that lets attention see ``chosen`` blocks of ``block`` tokens and the unfinished block after them. Each
    block has one key of ``key_dim`` numbers, made of a row that each token keeps; ``queries`` of the same width score
    the key, and the scores above 0 are added. Every rank has the complete index.

    With "maxima" each query chooses for one KV head: the score of a block is that of its best token, and the
    unfinished block is one of those chosen, with the ``near`` - 1 blocks before it.

    ``kind``:
        means     the key is the mean of its rows, and turns by the first position of its block; so is the sum (Qwen4)
        learned   the weights of rows in the key, and of queries in the sum, are learned; queries come from the
                  bottleneck (GLM 5 next)
        tokens    each token is a block, and its key turns; weights in the sum are learned, and queries come from the
                  bottleneck (DeepSeek V3.2). ``interleaved``: positions turn pairs of neighbours (GLM 5);
                  ``turned_last``: they turn the last numbers of a key, not the first (Hy4). ``norm_eps``: of the keys
        maxima    each token has a key, which turns (MiniMax M3)
    """

    queries: int
    key_dim: int
    block: int
    chosen: int
    kind: Literal["means", "learned", "tokens", "maxima"] = "means"
    interleaved: bool = False
    near: int = 1
    turned_last: bool = False
    norm_eps: float = 1e-6

    @property
    def keeps_keys(self) -> bool:
        """Whether the row of a token is a key, which no block makes of several."""
        return self.kind in ("tokens", "maxima")

    def blocks_of(self, tokens: int) -> int:
        """Return the number of blocks of a text of ``tokens`` tokens among which its last one chooses."""
        return ceil_div(tokens, self.block) if self.kind == "maxima" else tokens // self.block

    @property
    def row_width(self) -> int:
        """Numbers that a token keeps: a key, and its weight if that is learned."""
        return self.key_dim * (2 if self.kind == "learned" else 1)

    def table(self, hidden: int, rank: int = 0, *, apart: bool = False) -> Table:
        """Return the tensors under ``indexer``; every rank has all of them. ``rank``: width of the query's bottleneck.
        ``apart``: queries and key are two tensors."""
        dim = self.key_dim
        if self.kind == "maxima":
            return (
                product("project", hidden, ("q_proj", self.queries * dim), ("k_proj", dim))
                | norm_weight("q_norm", dim)
                | norm_weight("k_norm", dim)
            )
        if self.kind == "means":
            both = (
                (("index_q_proj", self.queries * dim), ("index_k_proj", dim))
                if apart
                else (("index_qk_proj", (self.queries + 1) * dim),)
            )
            return (
                product("project", hidden, *both)
                | norm_weight("q_norm", dim, "q_layernorm")
                | norm_weight("k_norm", dim, "k_layernorm")
            )
        table = product("project", hidden, ("wk", dim)) | product("query", rank, ("wq_b", self.queries * dim))
        table |= layer_norm("norm", dim, "k_norm")
        if self.kind == "learned":
            table["project"] += (Tensor("index_kpool_compress_gate", (dim, hidden)),)
            table["places"] = (Tensor("index_kpool_compress_ape", (self.block, dim), "plain"),)
        table["project"] += (Tensor("weights_proj.weight", (self.queries, hidden)),)
        return table


@dataclass(frozen=True, slots=True)
class KeyIndex:
    """Index that lets each KV head see ``chosen`` blocks of ``block`` tokens, once a text has ``dense`` tokens
    (InfLLM-v2). Queries of the attention itself score means of its keys over two times ``stride`` tokens. The first
    ``first`` blocks, a token's own and the ``near`` ones before it are always among the chosen."""

    stride: int
    block: int
    chosen: int
    first: int
    near: int
    dense: int


@dataclass(frozen=True, slots=True)
class Attention(Mixer):
    """Softmax attention with grouped KV heads. The defaults of the fields are those of Llama.

    Tokens that a token sees:
        window           itself and the ``window - 1`` tokens before; None: all tokens before
        chunk            the tokens before in the same chunk; chunks of ``chunk`` tokens, a multiple of a page, are
                         counted from the beginning of the text (Llama 4)
        causal           False: later tokens of the prompt too, at most ``window`` places away if that is set
        index            only blocks that the index chooses (Qwen4, MiniCPM-SALA)
        kv_of            the layer whose pages this layer reads; it then has no keys and values (Gemma 4)
        shared           later layers read the keys of this layer, so they are in pages whatever the window (Gemma 4)

    Queries, keys and values:
        qk_norm          an RMS norm of queries and keys before the rotary embedding
        norm_whole       that norm is over all heads at once, not per head (OLMo)
        norm_by_head     that norm has a weight of each head (PLaMo 2)
        norm_plain       that norm has no weight (Llama 4)
        norm_centred     that norm subtracts the mean, with a weight ("weight"), or with weight and bias ("bias")
        norm_after       that norm comes after the rotary embedding (Hunyuan)
        values_normed    an RMS norm of values, without a weight
        values_are_keys  the keys before the norm are also the values
        clip             all are limited to [-clip, clip]; 0: no limit (OLMo)
        growth           factor on queries, which grows with the position
        bias             the projections have biases
        value_dim        numbers of a value, if fewer than those of a key; memory keeps values as wide as keys
        value_factor     factor on values (MiMo V2 Flash)
        grouped          a tensor of all three has the rows of each KV head after the queries that share it
        parts            a tensor of all three has so many parts, in each of which the queries, the values and the keys
                         of its heads follow each other (CodeGen)
        kv_copies        number of ranks that hold the same KV heads, if there are fewer KV heads than ranks

    Scores and output:
        scale            factor on scores
        alibi            scores have a bias by distance, of ``alibi_slopes`` with this exponent (BLOOM); 0: none
        cap              scores are cap x tanh(score / cap); 0: they are not changed (Gemma 2)
        sinks            each head has a learned score that adds to the sum of the softmax, without a value (gpt-oss)
        gated            the output is multiplied by the sigmoid of a gate, further rows of the query projection
        head_gated       the output is multiplied by the sigmoid of one number per head, from another projection
        softplus_gate    gates are a softplus, not a sigmoid (Laguna)
        out_normed       before the gates, an RMS norm of the output of each head, with the weight of ``norm_plain``
                         (Muse Spark)
        out_bias         the output projection has a bias; None: as ``bias``
    """

    reader = "weft.models.blocks.attention:read_attention"
    part = "attention"
    copied = ("kv_heads", "kv_copies")

    heads: int
    kv_heads: int
    head_dim: int
    scale: float
    rope: Rope | None
    qk_norm: bool = False
    gated: bool = False
    bias: bool = False
    window: int | None = None
    head_gated: bool = False
    norm_whole: bool = False
    sinks: bool = False
    kv_copies: int = 1
    values_normed: bool = False
    values_are_keys: bool = False
    kv_of: int | None = None
    shared: bool = False
    out_bias: bool | None = None
    index: Index | KeyIndex | None = None
    causal: bool = True
    clip: float = 0.0
    cap: float = 0.0
    norm_after: bool = False
    growth: Growth | None = None
    norm_plain: bool = False
    softplus_gate: bool = False
    chunk: int | None = None
    value_dim: int = 0
    value_factor: float = 1.0
    grouped: bool = False
    alibi: float = 0.0
    norm_by_head: bool = False
    parts: int = 0
    norm_centred: Literal["", "weight", "bias"] = ""
    out_normed: bool = False

    @property
    def index_width(self) -> int:
        """Numbers that a token keeps for the index; 0 without one. The numbers of a mean are divided among its
        tokens."""
        if isinstance(self.index, KeyIndex):
            return ceil_div(self.kv_heads * self.head_dim, self.index.stride)
        return 0 if self.index is None else self.index.row_width

    @property
    def ring(self) -> bool:
        """Whether keys and values live in a ring of ``window`` tokens in the state slot, not in pages."""
        # A ring is overwritten as it is read: a second reader would find the step's first tokens gone.
        short = self.window is not None and self.window <= RING_TOKENS_MAX
        return short and not self.shared and self.kv_of is None and self.causal

    @property
    def own_kv_heads(self) -> int:
        """Number of KV heads that this layer computes itself."""
        return self.kv_heads if self.kv_of is None else 0

    @property
    def usual(self) -> bool:
        """Whether this is the form that the fused kernels compute: causal, with own keys and values, unchanged after
        the projection."""
        plain = self.kv_of is None and not self.values_normed and not self.values_are_keys
        normed = self.norm_after or self.norm_by_head or self.norm_centred or self.out_normed
        changed = self.clip or self.cap or self.alibi or normed or self.growth is not None
        return plain and self.causal and not (changed or self.softplus_gate or self.chunk)

    @property
    def joined_rows(self) -> Units | None:
        """Rows of one tensor of queries, keys and values in another order than all of one, then all of the next."""
        if self.parts:
            return Units(self.parts, 3 * self.heads // self.parts * self.head_dim)
        if self.grouped and self.kv_copies == 1:  # of one group, which ranks share, the order is the same
            return Units(self.kv_heads, (self.heads // self.kv_heads + 2) * self.head_dim)
        return None

    def layer_spec(self) -> LayerSpec:
        if self.kv_of is not None:
            return spec.reading(self.kv_of)
        if self.window is not None and self.ring:
            return spec.window_attention(self.kv_heads, self.head_dim, self.window)
        return spec.attention(self.kv_heads, self.head_dim)

    def table(
        self,
        hidden: int,
        *,
        inputs: int | None = None,
        out: str = "o_proj",
        norms: tuple[str, str] = ("q_norm", "k_norm"),
        gates: str = "g_proj",
        gate: str | None = None,
        joined: str = "",
    ) -> Table:
        """Return the tensors of the projections and their norms. ``inputs``: width of the input, if that is not the
        stream. ``gate``: name of a gate that is stored by itself; None: its rows are in the query projection.
        ``joined``: name of one tensor with the rows of queries, keys and values. Head gates have no bias."""
        queries = Units(self.heads, self.head_dim)
        keys = Units(self.kv_heads, self.head_dim, self.kv_copies)
        values = replace(keys, width=self.value_dim or self.head_dim)
        apart = ((gate, queries),) if self.gated and gate else ()
        query_rows = Units(self.heads, self.head_dim * 2) if self.gated and not gate else queries
        read = inputs or hidden
        own = (("k_proj", keys), ("v_proj", values))[: 0 if self.kv_of is not None else 2 - self.values_are_keys]
        parts: tuple[tuple[str, Dim], ...] = (("q_proj", query_rows), *apart, *own)
        if joined:
            parts = ((joined, self.joined_rows or (queries, keys, keys)),)
        table = product("qkv", read, *parts, bias=self.bias)
        if self.head_gated:
            table["qkv"] += (Tensor(f"{gates}.weight", (Units(self.heads), read)),)
        if self.norm_by_head:
            weights = (("q_norm", Units(self.heads)), ("k_norm", replace(keys, width=1)))
            table |= {
                role: (Tensor(name, (heads, self.head_dim), "plain"),)
                for (role, heads), name in zip(weights, norms, strict=True)
            }
        elif self.norm_centred == "bias":
            table |= layer_norm("q_norm", self.head_dim, norms[0]) | layer_norm("k_norm", self.head_dim, norms[1])
        elif self.qk_norm and not self.norm_plain:
            table |= norm_weight("q_norm", queries if self.norm_whole else self.head_dim, norms[0])
            if self.kv_of is None:
                table |= norm_weight("k_norm", keys if self.norm_whole else self.head_dim, norms[1])
        if self.sinks:
            table |= exact("sinks", dims=(Units(self.heads),))
        out_bias = self.bias if self.out_bias is None else self.out_bias
        outputs = Units(self.heads, self.value_dim or self.head_dim)
        return table | product("out", outputs, (out, hidden), bias=out_bias)

    def tables(self, hidden: int) -> list[Table]:
        return [self.table(hidden), *index_tables(self.index, hidden)]


def alibi_slopes(heads: int, exponent: float) -> list[float]:
    """Return the slopes of ``heads`` heads: 2^(-exponent i / n), i from 1 to n, for n of them, a power of two; then
    those between, from the first."""
    count = 1 << (heads.bit_length() - 1)
    own = [2.0 ** (-exponent * (i + 1) / count) for i in range(count)]
    return own + [2.0 ** (-exponent * (2 * i + 1) / (2 * count)) for i in range(heads - count)]


def index_tables(index: Index | KeyIndex | None, hidden: int, rank: int = 0) -> list[Table]:
    """Return the table of an index that has tensors. ``rank``: as ``Index.table`` takes it."""
    return [index.table(hidden, rank)] if isinstance(index, Index) else []
