"""Drafts of the model's own head, behind the tokens of a step.

    trunk      h0 h1 h2 | h5 | ...           hidden states of the step's tokens
    chosen        x1 x2 x3 | x6 | ...        tokens that follow them: chosen, right drafts, or of the prompt
    head       (h2, x3) -> d4                first draft of the run; keys and values at every position
               (d4's hidden state, d4) -> d5     at the next position, as long as its page is there

The head keeps keys and values in the pages of the sequence, in the field of its own layer:

    a new page                      pending (``HeadPages``): the head may be off, and then nothing is written
    the head runs, pages leave      all pending pages get zeros first (law L10: never another sequence's keys)
    a plan with ``mtp_drafts``      the head reads all tokens of the step; runs that chose a token draft
    a plan without                  nothing: the positions stay zero, and later drafts see less

Drafts take no page: where the next position needs a new one, the run drafts less. Drafts are guesses. No
token depends on this file.
"""

from __future__ import annotations

import time
from collections.abc import Sequence
from dataclasses import dataclass

import numpy as np
import numpy.typing as npt
import torch

from weft.models.mtp import MtpHead, only_decodes
from weft.runner.pictures import PictureRows
from weft.schedule.plan import HeadDraft, StepPlan, StepResult
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import PAD, PAGE_TOKENS


class HeadPages:
    """Pages that hold no keys of the head yet. ``pages_per_frame``: of the arena."""

    def __init__(self, pages_per_frame: int) -> None:
        self._pages_per_frame = pages_per_frame
        self._pending: set[int] = set()

    def admit(self, plan: StepPlan) -> list[int]:
        """The pages to zero before the arena work of ``plan``. Called for every plan, in order."""
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


@dataclass(frozen=True, slots=True)
class _Ends:
    """The runs that chose a token. ``runs``: their numbers; ``rows_X``: index in T of the last right token
    of each; ``starts``: its position."""

    runs: list[int]
    rows_X: torch.Tensor
    starts: list[int]


class HeadRunner:
    """``table``: int32 [rows + 1, pages], of the rows. ``cache``: the views of the head's layer.
    ``pages_per_frame``: of the arena. ``known``: by row, the prompt of its sequence and the answer before a
    preemption. ``pictures``: those of the rows."""

    def __init__(self, head: MtpHead, table: torch.Tensor, cache: LayerCache, pages_per_frame: int,
                 pictures: PictureRows | None = None) -> None:
        self._head = head
        self._pictures = pictures
        self._table = table
        self._caches = [cache]
        self._zeroed = [view for view in (cache.k, cache.v, cache.token_scales) if view is not None]
        self._unzeroed = HeadPages(pages_per_frame)
        self.known: dict[int, Int32s] = {}

    def admit(self, plan: StepPlan) -> None:
        """Rows and pages of ``plan``, before its arena work."""
        due = self._unzeroed.admit(plan)
        if due:
            self.zero(due)
        for row in plan.rows_cleared:
            self.known.pop(row, None)
        for admission in plan.admissions:
            self.known[admission.row] = admission.tokens

    def zero(self, pages: Sequence[int]) -> None:
        """``pages`` hold neutral keys of this layer, of no sequence."""
        index = torch.tensor(pages, dtype=torch.int64, device=self._table.device)
        for view in self._zeroed:
            (view.view(torch.uint8) if view.itemsize == 1 else view).index_fill_(0, index, 0)

    def run(self, plan: StepPlan, inputs: StepInputs, hidden_TD: torch.Tensor, result: StepResult,
            ) -> tuple[dict[int, HeadDraft], float]:
        """Drafts by run of ``plan``, and the seconds that they took. ``result``: what the step chose."""
        began_s = time.perf_counter()
        assert plan.mtp_drafts is not None
        ends = self._ends(plan, inputs, result)
        following_T = self._following(plan, inputs, result)
        joined_TD = self._head.joined(hidden_TD, following_T)
        if plan.prefills or not plan.mtp_drafts:
            self._head.write(joined_TD, inputs, self._caches[0])
            joined_XD = joined_TD.index_select(0, ends.rows_X)
            inputs_X = only_decodes(ends.starts, self._pages(plan, ends, 0),
                                    self._turns(plan, ends.runs, ends.starts))
            hidden_XD = (self._head.draft(joined_XD, inputs_X, self._caches)
                         if plan.mtp_drafts and ends.runs else joined_XD)
        else:
            hidden_XD = self._head.draft(joined_TD, inputs, self._caches)
            if plan.decode_count != len(hidden_XD):
                hidden_XD = hidden_XD.index_select(0, ends.rows_X)
        drafts = self._drafts(plan, ends, hidden_XD) if plan.mtp_drafts and ends.runs else {}
        return drafts, time.perf_counter() - began_s

    def _drafts(self, plan: StepPlan, ends: _Ends, hidden_XD: torch.Tensor) -> dict[int, HeadDraft]:
        assert plan.mtp_drafts is not None
        tokens: dict[int, list[int]] = {run: [] for run in ends.runs}
        chances: dict[int, list[float]] = {run: [] for run in ends.runs}
        runs, starts = ends.runs, ends.starts
        pages_XP = self._pages(plan, ends, plan.mtp_drafts - 1)
        for number in range(plan.mtp_drafts):
            best_X, chances_X = self._head.best(hidden_XD)
            for run, token, chance in zip(runs, best_X.tolist(), chances_X, strict=True):
                tokens[run].append(token)
                chances[run].append(chance if chance == chance else 0.0)   # NaN: not a number
            if number + 1 == plan.mtp_drafts:
                break
            starts = [start + 1 for start in starts]
            going_on = [at for at, start in enumerate(starts)
                        if start // PAGE_TOKENS < pages_XP.shape[1]
                        and int(pages_XP[at, start // PAGE_TOKENS]) != PAD]
            if not going_on:
                break
            if len(going_on) < len(runs):
                index = torch.tensor(going_on, dtype=torch.int64, device=hidden_XD.device)
                best_X, hidden_XD, pages_XP = (
                    x.index_select(0, index) for x in (best_X, hidden_XD, pages_XP))
                runs, starts = [runs[at] for at in going_on], [starts[at] for at in going_on]
            joined_XD = self._head.joined(hidden_XD, best_X)
            hidden_XD = self._head.draft(
                joined_XD, only_decodes(starts, pages_XP, self._turns(plan, runs, starts)), self._caches)
        return {run: HeadDraft(tuple(tokens[run]), tuple(chances[run])) for run in tokens}

    def _turns(self, plan: StepPlan, runs: list[int], starts: list[int]) -> torch.Tensor | None:
        """By which positions tokens at ``starts`` of ``runs`` turn, None for ``starts`` themselves."""
        return None if self._pictures is None else self._pictures.turns_at(plan.rows[runs].tolist(), starts)

    def _pages(self, plan: StepPlan, ends: _Ends, further: int) -> torch.Tensor:
        """The page tables of the runs of ``ends``, up to the page ``further`` positions behind the last."""
        width = (max(ends.starts, default=0) + further) // PAGE_TOKENS + 1
        rows = torch.from_numpy(plan.rows[ends.runs].astype(np.int64)).to(self._table.device)
        return self._table[:, :width].index_select(0, rows)

    def _ends(self, plan: StepPlan, inputs: StepInputs, result: StepResult) -> _Ends:
        pads = inputs.runs.decode_count - plan.decode_count
        runs, rows, starts = [], [], []
        for run in np.flatnonzero(plan.samples).tolist():
            at = run + (pads if run >= plan.decode_count else 0)
            right = len(result.verified[run]) if run in result.verified else int(plan.lengths[run])
            runs.append(run)
            rows.append(inputs.runs.offsets[at] + right - 1)
            starts.append(int(plan.starts[run]) + right - 1)
        return _Ends(runs, torch.tensor(rows, dtype=torch.int64, device=inputs.tokens_T.device), starts)

    def _following(self, plan: StepPlan, inputs: StepInputs, result: StepResult) -> torch.Tensor:
        """int64 [T]: the token after each of the step; any token behind the wrong drafts of a verify run."""
        pads = inputs.runs.decode_count - plan.decode_count
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
        return torch.from_numpy(following).to(inputs.tokens_T.device)
