"""Verify runs: decodes that compute more than one token, because the next tokens may be known already.

    decode    [t]               one token, one state read and written
    verify    [t d1 d2 d3]      t was chosen, d1 to d3 are drafts; one token is chosen after each of the four
                     tokens chosen: d1 d2 x          d1 and d2 are right, x is new: three tokens in one step

A verify run is best effort, like a tap (law L9). It is planned last, and it is shortened

    at the end of the answer          ``RowTable.limit``
    at a position that saves a state  the running slot must hold exactly this state between two steps
    before an id that may end it      so only the last new token of a step can end an answer
    where pages are short             every other lease still has a free page to grow into
    where the step is full            the token budget, and VERIFY_TOKENS_MAX (law L11)

Pages that it took stay with its lease: the sequence grows into them anyway.
"""

from __future__ import annotations

from weft.schedule.plan_builder import PlanBuilder
from weft.schedule.reuse import Reuse
from weft.schedule.rows import RowTable
from weft.schedule.sequence import Sequence
from weft.speculation.drafter import Drafter, DraftRow
from weft.units import PAGE_TOKENS, VERIFY_TOKENS_MAX, RowId, SeqId


class VerifyPlanner:
    """The planner of verify runs. ``step_tokens``: most tokens that a step may have."""

    def __init__(self, drafter: Drafter, rows: RowTable, reuse: Reuse, step_tokens: int) -> None:
        self._drafter = drafter
        self._rows = rows
        self._reuse = reuse
        self._step_tokens = step_tokens

    def plan(self, step: PlanBuilder) -> None:
        """Turn decodes of ``step`` into verify runs. All else in it is final."""
        if self._drafter.awake:
            self._plan_runs(step)
        elif not step.prefill_rows:
            return
        sequences = int(step.decode_rows.size) + sum(step.prefill_samples)
        step.mtp_drafts = self._drafter.head_drafts(sequences, prompts=bool(step.prefill_rows))

    def _plan_runs(self, step: PlanBuilder) -> None:
        if step.short or not step.decode_rows.size:
            return
        rows = step.decode_rows.tolist()
        room = min(self._step_tokens - step.token_count, VERIFY_TOKENS_MAX - 1)
        limits = {row: min(limit, room) for row, limit in zip(rows, self._limits(step), strict=True)}
        draft_rows = [DraftRow(self._rows.seq_ids.item(row), limits[row]) for row in rows if limits[row] > 0]
        if not draft_rows:
            return
        drafts = self._drafter.draft(draft_rows)
        if not drafts:
            return
        runs: dict[int, tuple[int, ...]] = {}
        tokens_left, rows_left = room, VERIFY_TOKENS_MAX
        for row in rows:
            draft = self._without_ends(row, drafts.get(self._rows.seq_ids.item(row), ())[: limits[row]])
            count = self._with_pages(step, row, min(len(draft), tokens_left, rows_left - 1))
            if count > 0:
                runs[row] = (self._seq(row).generated[-1], *draft[:count])
                tokens_left -= count
                rows_left -= 1 + count
        step.set_verify_runs(runs)

    def _limits(self, step: PlanBuilder) -> list[int]:
        """Return the largest number of drafts of each decode."""
        rows, decodes = self._rows, step.decode_rows
        computed = rows.computed[decodes]
        limits = rows.limit[decodes] - computed - 1
        until = self._reuse.until_copies(decodes)
        if until is not None:
            limits = limits.clip(max=until - 1)
        limited: list[int] = limits.tolist()
        return limited

    def _without_ends(self, row: int, draft: tuple[int, ...]) -> tuple[int, ...]:
        ends = self._seq(row).stop_ids
        for index, token in enumerate(draft):
            if token in ends:
                return draft[:index]
        return draft

    def _seq(self, row: int) -> Sequence:
        seq = self._rows.seqs[row]
        assert seq is not None, f"row {row} decodes and is empty"
        return seq

    def _with_pages(self, step: PlanBuilder, row: int, count: int) -> int:
        """Return how many of ``count`` drafts fit into the pages of the lease and into new ones."""
        if count <= 0:
            return 0
        rows, transaction = self._rows, step.transaction
        seq = SeqId(rows.seq_ids.item(row))
        first = rows.computed.item(row)
        gained = len(transaction.new_pages(seq))
        page_count = rows.pages_held.item(row) + gained
        if not rows.pages_held.item(row):
            return count  # a model without pages
        if first + 1 + count > page_count * PAGE_TOKENS:
            if transaction.extend(seq, first + 1 + count, headroom_pages=len(step.decode_batch.rows)):
                step.write_table(RowId(row), page_count, transaction.new_pages(seq)[gained:])
            else:
                count = page_count * PAGE_TOKENS - first - 1
        return count
