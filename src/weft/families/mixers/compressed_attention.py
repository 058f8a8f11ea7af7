"""Attention over the last tokens and over entries of groups of tokens (DeepSeek V4). Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Rope
from weft.families.tensors import Table, Tensor, Units, exact, norm_weight, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class EntryIndex:
    """Index that lets a token see ``chosen`` entries. Each entry has a key of ``key_dim`` numbers, made as the entry
    is; ``queries`` score it, and the scores above 0 are added with learned weights. Every rank has all of it."""

    queries: int
    key_dim: int
    chosen: int


@dataclass(frozen=True, slots=True)
class CompressedAttention(Mixer):
    """Attention over the last ``window`` tokens and over entries of ``group`` tokens each; 0: there are no entries. The
    keys of one head are its values, and outputs are turned back. ``overlaps``: the tokens of the group before take part
    in an entry. ``index``: chooses entries; None: all are seen. ``query_rank``: width of the bottleneck of queries.
    ``out_groups``: groups of heads, each with an output of ``out_rank`` numbers, from which the output is made."""

    reader = "weft.models.blocks.compressed_attention:read_compressed_attention"
    part = "attention"

    heads: int
    head_dim: int
    rope: Rope
    window: int
    query_rank: int
    out_groups: int
    out_rank: int
    norm_eps: float
    group: int = 0
    overlaps: bool = False
    index: EntryIndex | None = None

    @property
    def parts(self) -> int:
        """Number of entries that a token takes part in."""
        return 1 + self.overlaps

    @property
    def index_width(self) -> int:
        """Numbers that a token keeps for the index: its part of a key."""
        return 0 if self.index is None else spec.entry_part(self.index.key_dim, self.group)

    def layer_spec(self) -> LayerSpec:
        index = 0 if self.index is None else self.index.key_dim
        return spec.compressed_attention(self.head_dim, self.window, self.group, self.parts, index)

    def table(self, hidden: int) -> Table:
        dim, inside = self.head_dim, "compressor."
        table = product("into", hidden, ("q_a_proj", self.query_rank), ("kv_proj", dim), *self._entry_rows())
        table |= norm_weight("query_norm", self.query_rank, "q_a_norm") | norm_weight("norm", dim, "kv_norm")
        table |= product("query", self.query_rank, ("q_b_proj", Units(self.heads, dim)))
        table |= exact("sinks", dims=(Units(self.heads),))
        table["out_groups"] = (
            Tensor("o_a_proj.weight", (Units(self.out_groups, self.out_rank), self.heads // self.out_groups * dim)),
        )
        table |= product("out", Units(self.out_groups, self.out_rank), ("o_b_proj", hidden))
        if self.group:
            table |= self._entry_table("entries", inside, dim)
        if self.index is not None:
            inside, queries = f"{inside}indexer.", self.index.queries * self.index.key_dim
            table |= self._entry_table("index", inside, self.index.key_dim)
            table |= product("index_query", self.query_rank, (f"{inside}q_b_proj", queries))
        return table

    def _entry_rows(self) -> list[tuple[str, int]]:
        """Return the projections of the stream that entries and the index are made of: (name, rows)."""
        dims = {"compressor.": self.head_dim} if self.group else {}
        if self.index is not None:
            dims["compressor.indexer."] = self.index.key_dim
        rows = [(f"{inside}{of}_proj", self.parts * dim) for inside, dim in dims.items() for of in ("kv", "gate")]
        if self.index is not None:
            rows.append(("compressor.indexer.scorer.weights_proj", self.index.queries))
        return rows

    def _entry_table(self, role: str, inside: str, dim: int) -> Table:
        places = Tensor(f"{inside}position_bias", (self.group, self.parts * dim), "float32")
        return {f"{role}.places": (places,), **norm_weight(f"{role}.norm", dim, f"{inside}kv_norm")}
