"""Inputs of one forward pass, except weights: integers and views, without types of memory or schedule.

Shape letters used in the tensor plane:

    T  tokens of the step, flat, in run order       R  runs (sequences in this step)
    H  heads   G  query heads per KV head           D  head dim   K, V  key / value dim of a state
    C  channels                                     S  slots      N  Mamba state dim   P  pages

Runs are ordered: decodes (length 1), verify runs, prefills. ``page_table_RP`` has PAD (-1) beyond a row's pages. Rows
of only PAD may pad the decode part of a batch. Kernels skip them (law L4), and their outputs are unspecified but
finite.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from itertools import pairwise
from typing import Any, TypeVar

import torch

from weft.tensor.adapter_rows import StepAdapters
from weft.tensor.replay_log import ReplayLog
from weft.units import PAD, PAGE_TOKENS

T = TypeVar("T")


@dataclass(frozen=True, slots=True)
class TapPoint:
    """Position of a tap: inside prefill run ``run``, the state after ``offset`` tokens of that run (1..length) is
    written to ``slot``.
    """

    run: int
    offset: int
    slot: int


@dataclass(frozen=True, slots=True)
class Runs:
    """Runs of one step. Host lists drive loops; the tensors drive batched kernels.

    ``offsets[r]`` is the run's first index in T; ``starts[r]`` the position of its first token; ``lengths[r]`` its
    tokens; ``slots[r]`` its state slot or PAD; ``fresh[r]``: state starts from zero. A PAD row has slot PAD, start PAD
    and length 1. The ``verify_count`` runs after the decodes are verify runs: they read states, write none, and log
    the inputs of recurrent ops in ``log``.
    """

    offsets: list[int]
    starts: list[int]
    lengths: list[int]
    slots: list[int]
    fresh: list[bool]
    decode_count: int
    starts_R: torch.Tensor  # int64
    slots_R: torch.Tensor  # int64, PAD allowed
    context_R: torch.Tensor  # int64: tokens visible after this step: start + length; 0 for PAD rows
    page_table_RP: torch.Tensor  # int32, PAD beyond the row's pages
    taps: tuple[TapPoint, ...] = ()
    verify_count: int = 0
    log: ReplayLog | None = None
    padded: bool = False
    """Whether PAD rows may be among the decodes. Always on GPUs, so that each kernel has one form."""
    unseen: Mapping[int, int] = field(default_factory=dict)
    """Number of last tokens of a run whose keys attention leaves out, in a model that is not causal (expansions)."""
    memo: dict[str, Any] = field(default_factory=dict, repr=False, compare=False)
    """Values that ops derived from the fields above once per step, for their calls in further layers (write indices,
    chunk layouts, addresses of the log). Create a new ``Runs`` with a new memo for other runs; never change one.
    """

    def __post_init__(self) -> None:
        # Kernels read the number of run r at index r, so the tensors must be dense: no columns of a wider table.
        assert self.starts_R.is_contiguous(), "starts_R is strided"
        assert self.slots_R.is_contiguous(), "slots_R is strided"
        assert self.context_R.is_contiguous(), "context_R is strided"
        table = self.page_table_RP
        assert table.shape[1] <= 1 or table.stride(1) == 1, "page_table_RP is strided along its pages"

    @property
    def run_count(self) -> int:
        return len(self.offsets)

    def once(self, key: str, derive: Callable[[], T]) -> T:
        """Return the result of ``derive``, which is called once per step for ``key`` (``memo``)."""
        if key not in self.memo:
            self.memo[key] = derive()
        derived: T = self.memo[key]
        return derived

    def in_chunks(self, tokens: int) -> Runs:
        """Return these runs for attention in which a token sees only its own chunk of ``tokens`` tokens of the text, a
        multiple of a page: runs are cut where chunks end, and the pages of each begin with those of its chunk.
        """
        if all(start + length <= tokens for start, length in zip(self.starts, self.lengths, strict=True)):
            return self
        return self.once(f"chunks.{tokens}", lambda: self._cut(tokens))

    def _cut(self, tokens: int) -> Runs:
        pieces = [piece for run in range(self.run_count) for piece in self._pieces(run, tokens)]
        runs, offsets, starts, lengths = (list(column) for column in zip(*pieces, strict=True))
        device, table_RP = self.page_table_RP.device, self.page_table_RP
        of_R, starts_R, lengths_R = (torch.tensor(x, device=device) for x in (runs, starts, lengths))
        first_R1 = (starts_R // tokens).clamp_min(0)[:, None] * (tokens // PAGE_TOKENS)
        columns_RP = first_R1 + torch.arange(table_RP.shape[1], device=device)
        pages_RP = table_RP[of_R[:, None], columns_RP.clamp_max(table_RP.shape[1] - 1)]
        inside_R = torch.where(starts_R < 0, starts_R, starts_R % tokens)
        return replace(
            self,
            offsets=offsets,
            starts=inside_R.tolist(),
            lengths=lengths,
            slots=[self.slots[run] for run in runs],
            fresh=[self.fresh[run] for run in runs],
            starts_R=inside_R,
            slots_R=self.slots_R[of_R],
            context_R=torch.where(inside_R < 0, 0, inside_R + lengths_R),
            page_table_RP=pages_RP.masked_fill(columns_RP >= table_RP.shape[1], PAD),
            taps=(),
            verify_count=0,
            log=None,
            memo={},
        )

    def _pieces(self, run: int, tokens: int) -> Iterator[tuple[int, int, int, int]]:
        """Yield run, offset, first position and length of each piece of a run that is inside one chunk."""
        offset, start, end = self.offsets[run], self.starts[run], self.starts[run] + self.lengths[run]
        cuts = [start, *range((max(start, 0) // tokens + 1) * tokens, end, tokens), end]
        for begin, stop in pairwise(cuts):
            yield run, offset + begin - start, begin, stop - begin

    def keeps(self, run: int) -> bool:
        """Return whether the state after ``run`` goes to its slot."""
        return not 0 <= run - self.decode_count < self.verify_count


@dataclass(frozen=True, slots=True)
class OutputRows:
    """Rows of the hidden state that the head needs: the last token of some runs. ``runs`` [X], ascending; ``rows_X``
    (int64, on the device): the index in T of the last token of each.
    """

    runs: list[int]
    rows_X: torch.Tensor


@dataclass(frozen=True, slots=True)
class EmbeddedRows:
    """Rows of pictures instead of the embeddings of some tokens. ``row_T`` int64: the row in ``rows_ND`` of each token,
    PAD for a token with an embedding.
    """

    row_T: torch.Tensor
    rows_ND: torch.Tensor

    def put(self, x_TD: torch.Tensor) -> torch.Tensor:
        """Return ``x_TD`` with the rows."""
        rows_TD = self.rows_ND.index_select(0, self.row_T.clamp(min=0))
        return torch.where((self.row_T == PAD)[:, None], x_TD, rows_TD)


@dataclass(frozen=True, slots=True)
class StepInputs:
    """Inputs of a step. ``output_rows``: rows whose output is needed, None for all. A model's last mixer reads all rows
    and writes the KV and states of all, but returns output only for these rows. ``adapters``: adapters of the rows,
    None if all are of the base model. ``turns``: positions by which rotary layers turn, int64 [T] or [3, T] (time, row
    and column); None: ``positions_T``. KV is always written by ``positions_T``.
    """

    tokens_T: torch.Tensor  # int64; 0 for PAD rows
    positions_T: torch.Tensor  # int64; PAD for PAD rows
    runs: Runs
    output_rows: OutputRows | None = None
    adapters: StepAdapters | None = None
    embedded: EmbeddedRows | None = None
    turns: torch.Tensor | None = None

    @property
    def turned(self) -> torch.Tensor:
        """Positions of rotary tables."""
        return self.positions_T if self.turns is None else self.turns

    def of_output_rows(self) -> StepInputs:
        """Return the output rows as decodes of one token each, for layers that only read pages."""
        output_rows, runs = self.output_rows, self.runs
        assert output_rows is not None, "the output of all rows is needed"
        ends = [runs.starts[run] + runs.lengths[run] - 1 for run in output_rows.runs]
        device, count = self.tokens_T.device, len(ends)
        which_X = torch.tensor(output_rows.runs, dtype=torch.int64, device=device)
        of_rows = Runs(
            offsets=list(range(count)),
            starts=ends,
            lengths=[1] * count,
            slots=[runs.slots[run] for run in output_rows.runs],
            fresh=[False] * count,
            decode_count=count,
            starts_R=torch.tensor(ends, dtype=torch.int64, device=device),
            slots_R=runs.slots_R[which_X],
            context_R=runs.context_R[which_X],
            page_table_RP=runs.page_table_RP[which_X],
            padded=runs.padded,
        )
        return StepInputs(
            self.tokens_T[output_rows.rows_X],
            self.positions_T[output_rows.rows_X],
            of_rows,
            adapters=self.adapters,
            turns=None if self.turns is None else self.turns[..., output_rows.rows_X],
        )

    def asked_of(self, x_TC: torch.Tensor) -> torch.Tensor:
        """Return the rows of ``x_TC`` [T, C] whose output is needed, [X, C]; all rows if ``output_rows`` is None."""
        return x_TC if self.output_rows is None else x_TC.index_select(0, self.output_rows.rows_X)


@dataclass(slots=True, weakref_slot=True, eq=False)
class LayerCache:
    """Views into the arena for one layer. ``k``/``v`` are the packed pages (see tensor.layout), None for a layer
    without attention (only ``v`` is None: latent attention); ``state``: part name -> [S, *part shape].

    ``token_scales`` bfloat16 [P, K and V, kv_heads, 16]: the scales of int8 pages. ``head_scales`` [K and V,
    kv_heads]: powers of two in the model's dtype, for fp8; they are outside the arena, and None means ones. See
    ``kv_numbers``. ``layer``: the layer's number, an input of the hash that rounds a state in few bits. ``index``:
    rows of the index, for attention that sees chosen blocks.
    """

    k: torch.Tensor | None = None
    v: torch.Tensor | None = None
    state: dict[str, torch.Tensor] = field(default_factory=dict)
    token_scales: torch.Tensor | None = None
    head_scales: torch.Tensor | None = None
    layer: int = 0
    index: LayerCache | None = None
