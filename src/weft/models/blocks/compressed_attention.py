"""DeepSeek V4: attention over the last tokens and over entries, experts chosen by a token's number.

    x_TD --into--> [ bottleneck of queries | row | value, gate of entries | value, gate of index keys | weights ]
    row             norm, rotary --> ring of the last tokens
    value, gate     sums over a group of tokens, norm, rotary of the group's first position --> entry
    queries         norm of each head, rotary;   o = softmax(q . [rows, entries], sinks) [rows, entries]
    o               turned back by the query's position --by groups of heads--> --out--> y_TD

Rotary positions turn the last dims of a head, by pairs of neighbours.

Source: transformers ``DeepseekV4Attention``, ``DeepseekV4Indexer``, ``DeepseekV4HashRouter``, ``DeepseekV4HyperHead``.
"""

from __future__ import annotations

from dataclasses import dataclass, field

import torch

from weft.families.mixers import Mixer
from weft.families.mixers.compressed_attention import CompressedAttention, EntryIndex
from weft.families.mixers.feed_forward import Experts, FeedForward
from weft.models.block_reader import BlockReader
from weft.models.blocks import streams
from weft.models.blocks.linear import HeadLinear, Linear, Norm, by_head
from weft.models.blocks.streams import StreamsBlock
from weft.models.layer import DecoderLayer, LayerStep, ReadLayer, ResidualStream, StreamBlock
from weft.models.rotary import RotaryTable
from weft.models.table_reader import TableReader
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.entries import (
    Entries,
    attend_rows_and_entries,
    choose_entries,
    gated_sums,
    last_entries,
    last_rows,
    whole_entries,
)
from weft.tensor.ops.norm import rms_norm
from weft.units import PAD


def turned(x_THD: torch.Tensor, cos_sin: CosSin, *, back: bool = False) -> torch.Tensor:
    """Return ``x_THD`` [T, heads, D] with the last dims of each head turned by pairs of neighbours, in its dtype.
    ``cos_sin`` [T, rotary dims]: both halves carry the same angles. ``back``: by the negative angles.
    """
    cos_T1P, sin_T1P = (x_TR[:, None, : x_TR.shape[1] // 2] for x_TR in cos_sin)
    sin_T1P = -sin_T1P if back else sin_T1P
    out = x_THD.clone()
    from_last = x_THD.shape[-1] - 2 * cos_T1P.shape[-1]
    first, second = torch.unflatten(x_THD[..., from_last:].float(), -1, (-1, 2)).unbind(-1)
    pairs = torch.stack((first * cos_T1P - second * sin_T1P, second * cos_T1P + first * sin_T1P), -1)
    out[..., from_last:] = pairs.flatten(-2)
    return out


@dataclass(slots=True)
class Compressor:
    """Maker of entries. ``places`` float32 [group, parts C]: added to the gates of a group's tokens. ``name``: end of
    the names of its states.
    """

    group: int
    parts: int
    places: torch.Tensor
    norm: Norm
    rotary: RotaryTable
    name: str

    def __call__(
        self, parts: tuple[torch.Tensor, torch.Tensor], inputs: StepInputs, cache: LayerCache, pages: LayerCache
    ) -> Entries:
        """Return the entries with those of the step, whose rows are written into ``pages``. ``parts``: values and gates
        [T, parts C].
        """
        value_TC, gate_TC = parts
        positions_T, runs = inputs.positions_T, inputs.runs
        gate_TC = gate_TC.float() + self.places[positions_T % self.group]
        # Stored first are the rows for the next group's entry.
        value_TKC, gate_TKC = (by_head(x_TC, self.parts).flip(1) for x_TC in (value_TC.float(), gate_TC))
        waiting_SJC, last_S1C = cache.state[f"waiting{self.name}"], cache.state[f"entry{self.name}"]
        sum_TC = gated_sums(value_TKC, gate_TKC, waiting_SJC, runs, self.group, layer=cache.layer)
        normed_TC = self.norm(sum_TC.to(self.norm.weight.dtype))
        first_T = positions_T // self.group * self.group
        entry_TC = turned(normed_TC[:, None], self.rotary.computed(first_T))[:, 0]
        entries = Entries(last_entries(entry_TC, last_S1C, runs, self.group), pages, self.group)
        entries.write(positions_T, runs)
        return entries


@dataclass(slots=True)
class EntryIndexBlock:
    """Index of entries. ``query`` [queries key_dim, rank]."""

    shape: EntryIndex
    query: Linear
    compressor: Compressor


@dataclass(slots=True)
class CompressedAttentionBlock:
    """Attention over rows of tokens and entries. ``into``: rows as above. ``out_groups``: of the heads of a group
    [heads D / groups, rank] each. ``sinks`` float32 [heads].
    """

    shape: CompressedAttention
    into: Linear
    query_norm: Norm
    query: Linear
    norm: Norm
    sinks: torch.Tensor
    out_groups: HeadLinear
    out: Linear
    compressor: Compressor | None
    index: EntryIndexBlock | None
    _ones_D: torch.Tensor = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._ones_D = torch.ones_like(self.norm.weight)

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        assert cos_sin is not None, "a rotary layer in a model without rotary tables"
        shape, runs = self.shape, inputs.runs
        bottleneck_TR, row_TD, of_entries, of_index, weights_TH = self._projected(x_TD)
        asked_TR = self.query_norm(bottleneck_TR)
        q_THD = rms_norm(by_head(self.query(asked_TR), shape.heads), self._ones_D, shape.norm_eps)
        q_THD = turned(q_THD, cos_sin)
        row_TD = turned(self.norm(row_TD)[:, None], cos_sin)[:, 0]
        scale = 1.0 if cache.head_scales is None else cache.head_scales[0, 0]
        known = last_rows(row_TD / scale, cache.state["window"], runs)
        entries = None if self.compressor is None else self.compressor(of_entries, inputs, cache, cache)
        keys, scoring_THD = None, q_THD
        if self.index is not None:
            assert cache.index is not None, "an index without pages"
            keys = self.index.compressor(of_index, inputs, cache, cache.index)
            scoring_THD = turned(by_head(self.index.query(asked_TR), self.index.shape.queries), cos_sin)
        o_THD = torch.zeros_like(q_THD)
        for run, (begin, start, length) in enumerate(zip(runs.offsets, runs.starts, runs.lengths, strict=True)):
            if start == PAD:
                continue
            rows = slice(begin, begin + length)
            known_SD = known[run].float() * scale
            positions_L = torch.arange(start, start + length, device=x_TD.device)
            count = 0 if entries is None else entries.count(runs, run)
            seen_LE = whole_entries(positions_L, count, max(shape.group, 1))
            if keys is not None and shape.index is not None and count > shape.index.chosen:
                keys_ED = keys.read(runs, run, torch.arange(count, device=x_TD.device))
                seen_LE = choose_entries(scoring_THD[rows], weights_TH[rows], keys_ED, seen_LE, shape.index.chosen)
            [read_E] = seen_LE.any(0).nonzero(as_tuple=True)
            entries_ED = known_SD[:0] if entries is None else entries.read(runs, run, read_E)
            o_THD[rows] = attend_rows_and_entries(
                q_THD[rows],
                known_SD,
                shape.window,
                entries_ED,
                seen_LE[:, read_E],
                shape.head_dim**-0.5,
                self.sinks,
                start,
            ).to(o_THD.dtype)
        o_THD = inputs.asked_of(turned(o_THD, cos_sin, back=True))
        return self.out(self.out_groups(by_head(o_THD.flatten(1), shape.out_groups)).flatten(1))

    def _projected(
        self, x_TD: torch.Tensor
    ) -> tuple[
        torch.Tensor, torch.Tensor, tuple[torch.Tensor, torch.Tensor], tuple[torch.Tensor, torch.Tensor], torch.Tensor
    ]:
        """Return the bottleneck of queries, the row, value and gate of entries, those of the index, and its weights."""
        shape, index = self.shape, self.shape.index
        of_entry = shape.parts * shape.head_dim if shape.group else 0
        of_key, queries = (0, 0) if index is None else (shape.parts * index.key_dim, index.queries)
        bottleneck_TR, row_TD, value_TC, gate_TC, key_TC, key_gate_TC, weights_TH = torch.split(
            self.into(x_TD), [shape.query_rank, shape.head_dim, of_entry, of_entry, of_key, of_key, queries], dim=-1
        )
        return bottleneck_TR, row_TD, (value_TC, gate_TC), (key_TC, key_gate_TC), weights_TH


def read_compressed_attention(read: BlockReader, shape: CompressedAttention, name: str) -> CompressedAttentionBlock:
    table, index = read.table(shape.table(read.hidden), name), None
    rotary = RotaryTable(shape.rope, read.source.device)

    def compressor(role: str, end: str) -> Compressor:
        norm = table.norm(f"{role}.norm", shape.norm_eps)
        return Compressor(shape.group, shape.parts, table.tensor(f"{role}.places"), norm, rotary, end)

    if shape.index is not None:
        index = EntryIndexBlock(shape.index, table.linear("index_query"), compressor("index", ".index"))
    return CompressedAttentionBlock(
        shape,
        table.linear("into"),
        table.norm("query_norm", shape.norm_eps),
        table.linear("query"),
        table.norm("norm", shape.norm_eps),
        table.tensor("sinks"),
        _out_groups(shape, table),
        table.linear("out"),
        compressor("entries", "") if shape.group else None,
        index,
    )


def _out_groups(shape: CompressedAttention, table: TableReader) -> HeadLinear:
    stored = table.tensor("out_groups").view(shape.out_groups, shape.out_rank, -1)
    return HeadLinear.of(stored.transpose(1, 2).contiguous())


@dataclass(slots=True)
class HashedBlock(StreamsBlock):
    """Experts that a table chooses by the token's number."""

    def __call__(self, stream: ResidualStream, step: LayerStep) -> None:
        seen_TD, carried = self.enter(stream, step)
        self.leave(stream, carried, self.block(seen_TD, step.positions_T, stream.rows[TOKENS]))


TOKENS = "tokens"
"""Name of the tokens' numbers among the rows of the stream."""


def note_tokens(stream: ResidualStream, step: LayerStep) -> None:
    """Hand the numbers of the tokens on to the blocks that choose experts by them."""
    stream.rows[TOKENS] = step.whole.tokens_T


def layer_reader(read: BlockReader) -> ReadLayer:
    usual = streams.layer_reader(read)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        plain = usual(name, mixer, feed)
        if isinstance(feed, Experts) and feed.hashed:
            last = plain.blocks[-1]
            assert isinstance(last, StreamsBlock)
            plain.blocks[-1] = HashedBlock(last.norm, last.block, last.out_norm, last.mixes, mix=last.mix)
        return plain

    return layer


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    before, after = streams.ends_reader(read)
    return [note_tokens, *before], after
