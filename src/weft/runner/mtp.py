"""Drafts of the model's own head, after the tokens of a step.

    trunk      h0 h1 h2 | h5 | ...           hidden states of the step's tokens
    chosen        x1 x2 x3 | x6 | ...        tokens that follow them: chosen, right drafts, or of the prompt
    head       (h2, x3) -> d4                first draft of the run; keys and values at every position
               (d4's hidden state, d4) -> d5     at the next position, as long as its page is there

The head keeps keys and values in the pages of the sequence, in the field of its own layer:

    a new page                      pending (``HeadPages``): the head may be off, and then nothing is written
    the head runs, pages leave      all pending pages get zeros first (law L10: never another sequence's keys)
    a plan with ``mtp_drafts``      the head reads all tokens of the step; runs that chose a token draft
    a plan without                  nothing: the positions stay zero, and later drafts see less

The drafts are launched and not waited for: the host settles the tokens meanwhile, and then waits for the drafts.

Drafts take no page: if the next position needs a new one, the run drafts less. Drafts are guesses. No token depends on
this file.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.models.mtp import MtpHead, only_decodes
from weft.runner.graph_shapes import GraphShape
from weft.runner.head_graphs import HeadGraphs
from weft.runner.pictures import PictureRows
from weft.runner.readback import PendingReadback, Readback
from weft.runner.staging import Staged, Staging
from weft.schedule.plan import HeadDraft, HeadDrafts, StepPlan, StepResult
from weft.tensor import gpu
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import HEAD_DRAFTS_MAX, PAD, PAGE_TOKENS


class HeadPages:
    """Pages that have no keys of the head yet. ``pages_per_frame``: of the arena."""

    def __init__(self, pages_per_frame: int) -> None:
        self._pages_per_frame = pages_per_frame
        self._pending: set[int] = set()

    def admit(self, plan: StepPlan) -> list[int]:
        """Return the pages to zero before the arena work of ``plan``. Called for every plan, in order."""
        reservation, work = plan.reservation, plan.arena_work
        if not self._pending and not reservation.pages:
            return []
        # The bytes of a claimed frame are states now, or pages that will be handed out again.
        for claim in reservation.frames:
            first = claim.frame * self._pages_per_frame
            self._pending.difference_update(range(first, first + self._pages_per_frame))
        if plan.mtp_drafts is not None or work.kv_compressions or work.page_stores:
            due = self._pending.union(reservation.pages)
            self._pending = set()
            return sorted(due)
        if not work.writes_pages:
            self._pending.update(reservation.pages)
            return []
        # Contents that arrive in a page fill it; a copy of a pending page is pending as well.
        copied = {copy.dst for copy in work.page_copies if copy.src in self._pending}
        self._pending.update(reservation.pages)
        self._pending -= work.pages_written()
        self._pending |= copied
        return []


Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]


@dataclass(frozen=True, slots=True)
class _Ends:
    """Runs that chose a token: ``runs``, numbers of runs; ``rows`` and ``starts``, index in T and position of the last
    right token of each.
    """

    runs: list[int]
    rows: list[int]
    starts: list[int]


@dataclass(frozen=True, slots=True)
class _Place:
    """Positions at which the head computes one token of each of ``runs``: ``starts``. ``going``: indices of the rows
    of the previous place that go on; None for all. ``table``: of runs, for the Triton kernels.
    """

    runs: list[int]
    starts: list[int]
    going: Staged | None
    starts_R: Staged
    turns: Staged | None
    table: Staged | None

    def inputs(self, pages_XP: torch.Tensor) -> StepInputs:
        inputs = only_decodes(
            self.starts, self.starts_R.device, pages_XP, None if self.turns is None else self.turns.device
        )
        if self.table is not None:  # decodes have no chunks
            device_runs.remember(inputs.runs, self.table.device, 0)
        return inputs


class PendingDrafts:
    """Drafts that are launched. ``pending``: their numbers, of which ``read`` makes drafts by run. ``launched_s``:
    seconds of the launch."""

    def __init__(
        self,
        pending: PendingReadback,
        read: Callable[[npt.NDArray[np.float64]], dict[int, HeadDraft]],
        launched_s: float,
    ) -> None:
        self._pending, self._read, self._launched_s = pending, read, launched_s

    def result(self) -> HeadDrafts:
        """Wait for the drafts and return them."""
        began_s = time.perf_counter()
        [numbers] = self._pending.open()
        return HeadDrafts(self._read(numbers), self._launched_s + time.perf_counter() - began_s)


class HeadRunner:
    """Runner of the model's own head. ``table``: int32 [rows + 1, pages], of the rows. ``cache``: the views of the
    head's layer. ``pages_per_frame``: of the arena. ``known``: by row, the prompt of its sequence and the answer
    before a preemption. ``pictures``: those of the rows. ``staging_bytes``: of a usual step. ``graphs``: those that
    compute drafts, once they are recorded.
    """

    def __init__(
        self,
        head: MtpHead,
        table: torch.Tensor,
        cache: LayerCache,
        pages_per_frame: int,
        pictures: PictureRows | None,
        staging_bytes: int,
        graphs: HeadGraphs | None,
    ) -> None:
        self.graphs = graphs
        self._head = head
        self._pictures = pictures
        self._table = table
        self._has_page = np.zeros(tuple(table.shape), np.bool_)
        """Like ``table``, on the host: reading ``table`` would wait for the device."""
        self._staging = Staging(table.device, staging_bytes)
        self._readback = Readback(table.device, 2 * HEAD_DRAFTS_MAX * table.shape[0])
        self._caches = [cache]
        self._zeroed = [
            view
            for of in (cache, cache.index)
            if of is not None
            for view in (of.k, of.v, of.token_scales)
            if view is not None
        ]
        self._unzeroed = HeadPages(pages_per_frame)
        self.known: dict[int, Int32s] = {}

    def admit(self, plan: StepPlan) -> None:
        """Take rows and pages of ``plan``, before its arena work."""
        due = self._unzeroed.admit(plan)
        if due:
            self.zero(due)
        for row in plan.rows_cleared:
            self.known.pop(row, None)
            self._has_page[row] = False
        for admission in plan.admissions:
            self.known[admission.row] = admission.tokens
        for rows, columns, pages in (plan.table_writes, plan.table_patches):
            self._has_page[rows, columns] = pages != PAD

    def zero(self, pages: Sequence[int]) -> None:
        """Write neutral keys of this layer, of no sequence, to ``pages``."""
        self._staging.begin()
        index = self._staging.add(np.array(pages, np.int64))
        self._staging.send()
        for view in self._zeroed:
            (view.view(torch.uint8) if view.itemsize == 1 else view).index_fill_(0, index.device, 0)

    def run(self, plan: StepPlan, inputs: StepInputs, hidden_TD: torch.Tensor, result: StepResult) -> PendingDrafts:
        """Launch the drafts of the runs of ``plan``, and do not wait for them. ``result``: the tokens that the step
        chose. All numbers go to the device in one copy, and all drafts return to the host in one.
        """
        began_s = time.perf_counter()
        assert plan.mtp_drafts is not None
        ends = self._ends(plan, inputs, result)
        shape = None
        if self.graphs is not None and plan.mtp_drafts and ends.runs:
            shape = self.graphs.shape_of(len(ends.runs))
        if shape is not None:
            numbers, read = self._replayed(plan, inputs, hidden_TD, result, ends, shape)
            return PendingDrafts(self._readback.send([numbers]), read, time.perf_counter() - began_s)
        self._staging.begin()
        following = self._staging.add(self._following(plan, inputs, result))
        ends_X = self._staging.add(np.array(ends.rows, np.int64))
        rows_X = self._staging.add(plan.rows[ends.runs].astype(np.int64))
        places = self._places(plan, ends)
        self._send(inputs, tables=True)
        pages = (max(ends.starts, default=0) + len(places) - 1) // PAGE_TOKENS + 1
        pages_XP = self._table[:, :pages].index_select(0, rows_X.device)
        joined_TD = self._head.joined(hidden_TD, following.device)
        if plan.prefills or not plan.mtp_drafts:
            self._head.write(joined_TD, inputs, self._caches[0])
            joined_XD = joined_TD.index_select(0, ends_X.device)
            hidden_XD = (
                self._head.draft(joined_XD, places[0].inputs(pages_XP), self._caches)
                if plan.mtp_drafts and ends.runs
                else joined_XD
            )
        else:
            hidden_XD = self._head.draft(joined_TD, inputs, self._caches)
            if plan.decode_count != len(hidden_XD):
                hidden_XD = hidden_XD.index_select(0, ends_X.device)
        pending = Readback.arrived_now([np.empty(0)])
        if plan.mtp_drafts and ends.runs:
            pending = self._readback.send([torch.cat(self._columns(places, pages_XP, hidden_XD))])
        return PendingDrafts(pending, lambda numbers: _by_run(places, numbers), time.perf_counter() - began_s)

    def _replayed(
        self,
        plan: StepPlan,
        inputs: StepInputs,
        hidden_TD: torch.Tensor,
        result: StepResult,
        ends: _Ends,
        shape: GraphShape,
    ) -> tuple[torch.Tensor, Callable[[npt.NDArray[np.float64]], dict[int, HeadDraft]]]:
        """Launch the drafts of graphs of ``shape``, and return their numbers and the reader of these. A graph writes
        only the keys of its own rows, so in a step with other runs than decodes the keys of all tokens are written
        first.
        """
        assert self.graphs is not None
        rows = plan.rows[ends.runs].tolist()
        starts = [ends.starts]
        for _ in range(1, plan.mtp_drafts or 0):
            further = [
                start + 1 if start != PAD and self._reaches(row, start + 1) else PAD
                for row, start in zip(rows, starts[-1], strict=True)
            ]
            if all(start == PAD for start in further):
                break
            starts.append(further)
        decodes_alone = plan.decode_count == plan.run_count == len(ends.runs)
        self._staging.begin()
        following = self._staging.add(self._following(plan, inputs, result))
        ends_X = self._staging.add(np.array(ends.rows, np.int64))
        blocks = [self._staging.add(self.graphs.block(shape, places, rows)) for places in starts]
        self._send(inputs, tables=not decodes_alone)
        if not decodes_alone:
            self._head.write(self._head.joined(hidden_TD, following.device), inputs, self._caches[0])
        numbers_CW2 = self.graphs.drafts(
            shape,
            hidden_TD.index_select(0, ends_X.device),
            following.device.index_select(0, ends_X.device),
            [block.device for block in blocks],
        )

        def read(numbers: npt.NDArray[np.float64]) -> dict[int, HeadDraft]:
            going = np.array(starts) != PAD
            return {run: _draft_of(numbers[going[:, index], index].tolist()) for index, run in enumerate(ends.runs)}

        return numbers_CW2, read

    def _send(self, inputs: StepInputs, *, tables: bool) -> None:
        """Send the staged arrays, and the tables of the runs of ``inputs`` if kernels read them and they are not on
        the device yet.
        """
        table, chunk_count = None, 0
        if tables and gpu.fits(self._table) and not device_runs.is_known(inputs.runs):  # a graph has its own
            flat, chunk_count = device_runs.pack(inputs.runs)
            table = self._staging.add(flat)
        self._staging.send()
        if table is not None:
            device_runs.remember(inputs.runs, table.device, chunk_count)

    def _columns(self, places: list[_Place], pages_XP: torch.Tensor, hidden_XD: torch.Tensor) -> list[torch.Tensor]:
        """Return tokens and chances of each place, float64, which holds every token. ``hidden_XD``: of the first."""
        best_X, chances_X = self._head.best(hidden_XD)
        columns = [best_X.double(), chances_X.double()]
        for place in places[1:]:
            if place.going is not None:
                best_X, hidden_XD, pages_XP = (
                    x.index_select(0, place.going.device) for x in (best_X, hidden_XD, pages_XP)
                )
            hidden_XD = self._head.draft(self._head.joined(hidden_XD, best_X), place.inputs(pages_XP), self._caches)
            best_X, chances_X = self._head.best(hidden_XD)
            columns += [best_X.double(), chances_X.double()]
        return columns

    def _places(self, plan: StepPlan, ends: _Ends) -> list[_Place]:
        """Return the places of the drafts of ``plan``, as far as runs have pages. Call it while ``staging`` has
        begun.
        """
        runs, starts = ends.runs, ends.starts
        places = [self._place(plan, runs, starts, None)]
        for _ in range(1, plan.mtp_drafts or 0):
            starts = [start + 1 for start in starts]
            going = [entry for entry, run in enumerate(runs) if self._reaches(int(plan.rows[run]), starts[entry])]
            if not going:
                break
            index = None if len(going) == len(runs) else self._staging.add(np.array(going, np.int64))
            runs, starts = [runs[entry] for entry in going], [starts[entry] for entry in going]
            places.append(self._place(plan, runs, starts, index))
        return places

    def _reaches(self, row: int, position: int) -> bool:
        """Return whether ``row`` has a page for ``position``."""
        page = position // PAGE_TOKENS
        return page < self._has_page.shape[1] and bool(self._has_page[row, page])

    def _place(self, plan: StepPlan, runs: list[int], starts: list[int], going: Staged | None) -> _Place:
        add, count = self._staging.add, len(runs)
        turns = None if self._pictures is None else self._pictures.turns_at(plan.rows[runs].tolist(), starts)
        table = None
        if gpu.fits(self._table):
            table = add(device_runs.pack_lists(list(range(count)), starts, [1] * count, [False] * count, count, ())[0])
        return _Place(
            runs, starts, going, add(np.array(starts, np.int64)), None if turns is None else add(turns), table
        )

    def _ends(self, plan: StepPlan, inputs: StepInputs, result: StepResult) -> _Ends:
        pads = _pads_of(plan, inputs)
        runs, rows, starts = [], [], []
        for run in np.flatnonzero(plan.samples).tolist():
            padded_run = run + (pads if run >= plan.decode_count else 0)
            right = len(result.verified[run]) if run in result.verified else int(plan.lengths[run])
            runs.append(run)
            rows.append(inputs.runs.offsets[padded_run] + right - 1)
            starts.append(int(plan.starts[run]) + right - 1)
        return _Ends(runs, rows, starts)

    def _following(self, plan: StepPlan, inputs: StepInputs, result: StepResult) -> Int64s:
        """Return int64 [T]: the token after each of the step; any token after the wrong drafts of a verify run."""
        pads = _pads_of(plan, inputs)
        following = np.zeros(inputs.tokens_T.shape[0], np.int64)
        decodes = plan.decode_count
        following[:decodes] = result.tokens[:decodes]
        for run in plan.verify_runs:
            first, chosen = inputs.runs.offsets[run + pads], result.verified[run]
            following[first : first + len(chosen)] = chosen
        begin = int(plan.lengths[: plan.prefills.start].sum())
        for run in plan.prefills:
            first, length = inputs.runs.offsets[run + pads], int(plan.lengths[run])
            following[first : first + length - 1] = plan.tokens[begin + 1 : begin + length]
            known, end = self.known.get(int(plan.rows[run])), int(plan.starts[run]) + length
            if plan.samples[run]:
                following[first + length - 1] = max(0, int(result.tokens[run]))
            elif known is not None and end < known.size:
                following[first + length - 1] = known[end]
            begin += length
        return following


def _by_run(places: list[_Place], numbers: npt.NDArray[np.float64]) -> dict[int, HeadDraft]:
    """Return the drafts of ``places``. ``numbers``: of each place the tokens of its runs, then their chances."""
    drafts: dict[int, list[tuple[float, float]]] = {}
    begin = 0
    for place in places if numbers.size else ():
        tokens_R, chances_R = numbers[begin : begin + 2 * len(place.runs)].reshape(2, -1)
        for run, token, chance in zip(place.runs, tokens_R.tolist(), chances_R.tolist(), strict=True):
            drafts.setdefault(run, []).append((token, chance))
        begin += 2 * len(place.runs)
    return {run: _draft_of(own) for run, own in drafts.items()}


def _draft_of(numbers: Iterable[Sequence[float]]) -> HeadDraft:
    """Return a draft of (token, chance) pairs; a chance that is NaN counts as 0."""
    tokens, chances = zip(*numbers, strict=True)
    return HeadDraft(tuple(map(int, tokens)), tuple(chance if chance == chance else 0.0 for chance in chances))


def _pads_of(plan: StepPlan, inputs: StepInputs) -> int:
    """Return the PAD runs of ``inputs`` between the decodes and the other runs of ``plan``."""
    return inputs.runs.decode_count + inputs.runs.verify_count - plan.prefills.start
