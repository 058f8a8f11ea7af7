"""An executor without a model: it checks each plan for errors that kernels would suffer from, and makes up the tokens.

It has its own device: a page table, KV cells, state slots. Their contents follow only from the plans (``rows_cleared``,
``admissions``, ``table_writes``, ``zero_frames``, copies, taps). Instead of a kernel's numbers it writes *digests*: the
cell of position p holds a hash of tokens [0, p], the slot of a sequence at p a hash of tokens [0, p). So every read can
be compared with the expected digest:

    page table row 3   [ 7 | 2 | . ]                slot 5
                         |   |                        |
    cells        page 7 [h1 h2 .. h16]             state h17 at position 17
                 page 2 [h17 .. ]

    read of [0, 17) through the row == hashes of the row's own tokens, or ``PlanViolation`` says which is not

It catches, each with a negative control in tests/unit/engine: a wrong page-table write; a row that was not
cleared; a slot that holds another sequence's state or an older one of its own; a skipped or repeated
position; a page written under a second reader (L7); memory that changed kind without zeroing (L6); a chunk
that ends off the grid; a wrong token fed to a decode; a budget overrun. A copy carries its digests along, so
it also catches a hit on another prefix's state or page; a state at another position than the run starts at; a
compressed state or page restored from other pages or in another order; a page replaced by one with other
tokens; a copy of bytes that were never written; a tap off the grid, outside its run or into a slot in use.

The token chosen is a pure function of the tokens before it and of the sequence's seed (none when greedy):
``reference_tokens`` computes a whole answer without any engine, and batching, chunking and preemption must
change nothing. ``next_token`` replaces the function where a test wants a particular answer.

Rejected: a mock that returns canned tokens by step (it would pass whatever the plan says).
"""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections import deque
from collections.abc import Callable
from dataclasses import dataclass, field

import numpy as np
import numpy.typing as npt

from tests.support.digests import EMPTY, MASK, PlanViolation, digest, digest_of, require
from tests.support.scripted_arena import ScriptedArena
from tests.support.scripted_pooling import pooled_parts
from weft.engine.stats import PARTS, Part
from weft.engine.submission import stop_rule
from weft.memory.frames.plan import ArenaPlan
from weft.pictures import prompt_keys
from weft.request import FinishReason, SamplingParams, TokenLogprobs
from weft.schedule.plan import Admission, Int32s, StepPlan, StepResult
from weft.units import CHUNK_TOKENS, PAD, PAGE_TOKENS, RowId, ceil_div

NextToken = Callable[[int, int], int]
"""(digest of all tokens so far, seed or 0 when greedy) -> next token."""


def hashed_token(vocab_size: int) -> NextToken:
    """Return the default: a function that picks a token by the hash, uniform over the vocabulary."""

    def choose(state: int, seed: int) -> int:
        mixed = digest(state ^ (seed & MASK), 0x5EED)
        return (mixed >> 17) % vocab_size

    return choose


def reference_tokens(
    prompt: list[int],
    sampling: SamplingParams,
    *,
    seed: int,
    eos_ids: tuple[int, ...],
    max_model_len: int,
    next_token: NextToken,
) -> tuple[list[int], FinishReason]:
    """Return the complete answer of one sequence, computed without an engine. ``seed`` is the sequence's."""
    rule = stop_rule(sampling, eos_ids, max_model_len - len(prompt))
    state = digest_of(prompt)
    answer: list[int] = []
    if sampling.max_tokens == 0:
        return answer, "length"
    while True:
        token = next_token(state, 0 if sampling.greedy else seed)
        state = digest(state, token)
        answer.append(token)
        reason = rule.reason(token, len(answer))
        if reason is not None:
            return answer, reason


@dataclass(slots=True)
class _Row:
    """A row of the device. ``digests[p]``: of tokens [0, p]; known tokens only."""

    admission: Admission
    tokens: list[int]
    digests: list[int] = field(default_factory=list)
    computed: int | None = None

    def learn(self, token: int, key: int | None = None) -> None:
        """Append ``token``. ``key``: the number that represents a row of a picture, whose KV depends on the picture."""
        self.tokens.append(token)
        self.digests.append(digest(self.digests[-1] if self.digests else EMPTY, token if key is None else key))

    def state_at(self, position: int) -> int:
        return self.digests[position - 1] if position else EMPTY


class LateExecutor(ABC):
    """An executor that computes in ``finish``: ``begin`` and ``finish`` by way of ``execute``."""

    def __init__(self) -> None:
        self._begun: deque[StepPlan] = deque()

    @abstractmethod
    def execute(self, plan: StepPlan) -> StepResult: ...

    def begin(self, plan: StepPlan) -> None:
        self._begun.append(plan)

    def finish(self) -> StepResult:
        return self.execute(self._begun.popleft())

    def transfers_done(self, step: int) -> bool:
        return True


class ScriptedExecutor(LateExecutor):
    """The scripted executor. ``arena`` gives the geometry; the others are the engine's own limits.
    ``step_tokens_bound`` is the most tokens that a step may have (``weft.schedule.budget.step_tokens_bound``).
    """

    def __init__(
        self,
        arena: ArenaPlan,
        *,
        vocab_size: int,
        rows_max: int,
        max_model_len: int,
        step_tokens_bound: int,
        grid_tokens: int = CHUNK_TOKENS,
        next_token: NextToken | None = None,
    ) -> None:
        super().__init__()
        self.closed = False
        self._missing: set[Part] = set()
        self.next_token = next_token or hashed_token(vocab_size)
        self._step_tokens_bound = step_tokens_bound
        self._context = max_model_len
        self._grid_tokens = grid_tokens
        self._rows: list[_Row | None] = [None] * rows_max
        self._pages = arena.pages_per_frame > 0
        self._slots = arena.slots_per_frame > 0
        self._table = np.full((rows_max, ceil_div(max_model_len, PAGE_TOKENS)), PAD, dtype=np.int32)
        self.arena = ScriptedArena(arena)

    def sleep(self, level: int) -> tuple[Part, ...]:
        """Forget all cells and states, so a read after waking of data from before the sleep is an error."""
        require(not any(self._rows), "a row is taken while the engine goes to sleep")
        self._missing = set(PARTS)
        self.arena.forget()
        return PARTS

    def wake(self, part: Part) -> None:
        self._missing.discard(part)

    def close(self) -> None:
        self.closed = True

    def execute(self, plan: StepPlan) -> StepResult:
        """Execute ``plan``. Raise PlanViolation."""
        require(not self.closed, "a closed executor was used")
        require(not self._missing, "a sleeping executor was used")
        self._check_shape(plan)
        self._apply_rows(plan)
        for kind, ids in plan.arena_work.ordered():
            self.arena.perform(kind, ids, plan)
        self._patch_rows(plan)
        tokens = np.full(plan.run_count, PAD, dtype=np.int32)
        logprobs: dict[int, TokenLogprobs] = {}
        verified: dict[int, tuple[int, ...]] = {}
        verified_logprobs: dict[int, list[TokenLogprobs]] = {}
        prompt_logprobs: dict[int, list[TokenLogprobs]] = {}
        pooled: dict[int, npt.NDArray[np.float64]] = {}
        require(all(0 <= tap.run < plan.run_count for tap in plan.taps), "a tap of a run that is not there")
        offset = 0
        for run in range(plan.run_count):
            length = int(plan.lengths[run])
            row = self._run(plan, run, plan.tokens[offset : offset + length])
            offset += length
            if run in plan.prompt_logprob_runs:
                prompt_logprobs[run] = self._prompt_logprobs(row, int(plan.starts[run]), length)
            if run in plan.pooled_runs:
                assert row.admission.pooling is not None
                pooled[run] = pooled_parts(row.digests, int(plan.starts[run]), length, row.admission.pooling)
            if run in plan.verify_runs:
                verified[run] = self._verify(plan, run, row, verified_logprobs)
                tokens[run] = verified[run][-1]
            elif plan.samples[run]:
                tokens[run] = self._sample(row)
                if row.admission.sampling.logprobs is not None:
                    logprobs[run] = scripted_logprobs(
                        int(tokens[run]), row.digests[-1], row.admission.sampling.logprobs
                    )
        for kind, ids in plan.arena_work.after_runs():
            self.arena.perform(kind, ids, plan)
        return StepResult(
            tokens=tokens,
            logprobs=logprobs,
            prompt_logprobs=prompt_logprobs,
            verified=verified,
            verified_logprobs=verified_logprobs,
            pooled=pooled,
        )

    # ------------------------------------------------------------------ the form of a plan

    def _check_shape(self, plan: StepPlan) -> None:
        runs = plan.run_count
        for name in ("rows", "starts", "lengths", "slots", "fresh", "samples"):
            require(getattr(plan, name).shape == (runs,), f"{name} is not one per run")
        require(plan.tokens.shape == (int(plan.lengths.sum()),), "tokens are not as many as lengths say")
        require(
            plan.token_count <= self._step_tokens_bound,
            f"{plan.token_count} tokens in a step of at most {self._step_tokens_bound}",
        )
        require(len(set(plan.rows.tolist())) == runs, "a row has two runs in one step")
        require(len(set(plan.seqs)) == runs, "a sequence has two runs in one step")
        decodes, prefills = slice(0, plan.decode_count), slice(plan.decode_count, runs)
        verified = slice(plan.verify_runs.start, plan.verify_runs.stop)
        require((plan.lengths[verified] > 1).all(), "a verify run without drafts")
        require((plan.starts[verified] > 0).all(), "a verify run starts at 0")
        require((plan.lengths[decodes] == 1).all(), "a decode is longer than one token")
        require((plan.starts[decodes] > 0).all(), "a decode starts at 0")
        require((plan.lengths[prefills] > 0).all(), "an empty run")

    def _apply_rows(self, plan: StepPlan) -> None:
        for cleared in plan.rows_cleared:
            require(self._rows[cleared] is not None, f"row {cleared} was cleared and holds nothing")
            held = self._table[cleared][self._table[cleared] != PAD]
            self.arena.readers[held] -= 1
            self._table[cleared] = PAD
            self._rows[cleared] = None
        for admission in plan.admissions:
            held_by = self._rows[admission.row]
            require(
                held_by is None,
                f"L5: row {admission.row} is given to sequence {admission.seq} and was not cleared of the one before",
            )
            row = _Row(admission, [])
            keys = prompt_keys(admission.tokens, admission.pictures).tolist()
            for token, key in zip(admission.tokens.tolist(), keys, strict=True):
                row.learn(token, key)
            self._rows[admission.row] = row
        for row_id, index, page in plan.table_writes.T.tolist():
            require(self._rows[row_id] is not None, f"L5: a page is written into the empty row {row_id}")
            require(self._table[row_id, index] == PAD, f"entry {index} of row {row_id} is written twice")
            require(
                index == 0 or self._table[row_id, index - 1] != PAD,
                f"L4: entry {index} of row {row_id} is written before entry {index - 1}",
            )
            require(0 <= page < self.arena.plan.page_count, f"page {page} is outside the arena")
            self._table[row_id, index] = page
            self.arena.readers[page] += 1

    def _patch_rows(self, plan: StepPlan) -> None:
        """Apply the table patches, after the copies: a moved page has the contents of its source, and from now on the
        sources of moved pages and slots are empty."""
        for row_id, index, page in plan.table_patches.T.tolist():
            before = int(self._table[row_id, index])
            require(before != PAD, f"entry {index} of row {row_id} is replaced and was not written")
            require(0 <= page < self.arena.plan.page_count, f"page {page} is outside the arena")
            require(
                np.array_equal(self.arena.cells[page], self.arena.cells[before]),
                f"L7: entry {index} of row {row_id} is replaced by a page that holds other tokens",
            )
            self._table[row_id, index] = page
            self.arena.readers[before] -= 1
            self.arena.readers[page] += 1
        self.arena.vacate(plan.reservation.moves)

    def _write_taps(self, plan: StepPlan, run: int, row: _Row, start: int, end: int, where: str) -> None:
        for tap in plan.taps:
            if tap.run != run:
                continue
            here = f"{where}, tap at {tap.position}"
            require(self._slots, f"L4: {here}: this model has no state")
            require(run in plan.prefills, f"{here}: a decode run keeps no state on its way")
            require(start < tap.position <= end, f"{here} is outside the run")
            require(tap.position % self._grid_tokens == 0, f"{here} is off the grid of {self._grid_tokens}")
            require(0 <= tap.slot < self.arena.plan.slot_count, f"{here}: slot {tap.slot} is outside the arena")
            users = [other.slot for other in plan.taps].count(tap.slot) + int((plan.slots == tap.slot).sum())
            require(users == 1, f"L1: {here}: slot {tap.slot} is used twice in this step")
            self.arena.claim_slot(tap.slot)
            self.arena.states[tap.slot] = row.state_at(tap.position)

    # ------------------------------------------------------------------ one run

    def _run(self, plan: StepPlan, run: int, tokens: Int32s) -> _Row:
        row_id, start = RowId(int(plan.rows[run])), int(plan.starts[run])
        end = start + int(plan.lengths[run])
        row = self._rows[row_id]
        drafts = end - start - 1 if run in plan.verify_runs else 0
        where = f"step {plan.step} run {run} (row {row_id}, positions {start} to {end})"
        if row is None:
            raise PlanViolation(f"L5: {where} is on an empty row")
        require(
            row.admission.seq == plan.seqs[run],
            f"L5: {where} is for sequence {plan.seqs[run]}; the row holds {row.admission.seq}",
        )
        if row.computed is not None:
            require(
                start == row.computed,
                f"{where}: {row.computed} positions are computed, so positions would be skipped or repeated",
            )
        known = end - drafts
        require(known <= len(row.tokens), f"{where}: only {len(row.tokens)} tokens are known")
        chosen_last = run < plan.decode_count and tokens[0] == PAD
        require(
            chosen_last or tokens[: known - start].tolist() == row.tokens[start:known],
            f"{where}: the tokens are not the sequence's",
        )
        last = known == len(row.tokens)
        require(last or end % CHUNK_TOKENS == 0, f"{where} ends off the grid of {CHUNK_TOKENS}")
        require(run in plan.prefills or last, f"{where}: a decode that is behind")
        if drafts:
            self._check_drafts(row, tokens[1:].tolist(), where)
        wanted = last and row.admission.sampling.max_tokens != 0
        require(bool(plan.samples[run]) == wanted, f"{where}: samples is {bool(plan.samples[run])}")
        self._run_state(plan, run, row, start, known, where)
        self._write_taps(plan, run, row, start, end, where)
        if self._pages:
            self._run_pages(row_id, row, start, end, where, tokens[end - start - drafts :].tolist())
        row.computed = known
        return row

    def _check_drafts(self, row: _Row, drafts: list[int], where: str) -> None:
        """Check that no draft is past the answer's end, by its tokens or by its length."""
        ends = set(row.admission.stop_ids)
        require(not ends.intersection(drafts), f"{where}: a draft is an end of the answer")
        most = row.admission.sampling.max_tokens
        left = self._context if most is None else min(self._context, row.admission.prompt_tokens + most)
        require(len(row.tokens) + len(drafts) < left, f"{where}: drafts go past the answer's last token")

    def _verify(self, plan: StepPlan, run: int, row: _Row, logprobs: dict[int, list[TokenLogprobs]]) -> tuple[int, ...]:
        """Return the tokens after the chosen token and after each right draft, and advance the state."""
        offset = int(plan.lengths[:run].sum())
        drafts = plan.tokens[offset + 1 : offset + int(plan.lengths[run])].tolist()
        chosen: list[int] = []
        top = row.admission.sampling.logprobs
        while True:
            chosen.append(self._sample(row))
            if top is not None:
                logprobs.setdefault(run, []).append(scripted_logprobs(chosen[-1], row.digests[-1], top))
            if len(chosen) > len(drafts) or chosen[-1] != drafts[len(chosen) - 1]:
                break
        row.computed = int(plan.starts[run]) + len(chosen)
        if self._slots:
            self.arena.states[int(plan.slots[run])] = row.state_at(row.computed)
        return tuple(chosen)

    def _run_state(self, plan: StepPlan, run: int, row: _Row, start: int, end: int, where: str) -> None:
        slot, fresh = int(plan.slots[run]), bool(plan.fresh[run])
        require(fresh == (start == 0), f"{where}: fresh is {fresh}")
        if not self._slots:
            require(slot == PAD, f"L4: {where} has slot {slot}; this model has no state")
            return
        require(0 <= slot < self.arena.plan.slot_count, f"{where}: slot {slot} is outside the arena")
        require(np.count_nonzero(plan.slots == slot) == 1, f"L1: {where} shares slot {slot} in this step")
        if not fresh:
            require(
                int(self.arena.states[slot]) == row.state_at(start),
                f"L5: {where}: slot {slot} does not hold the state after {start} tokens",
            )
        self.arena.claim_slot(slot)
        self.arena.states[slot] = row.state_at(end)

    def _run_pages(self, row_id: RowId, row: _Row, start: int, end: int, where: str, drafts: list[int]) -> None:
        pages = self._table[row_id, : ceil_div(end, PAGE_TOKENS)]
        require((pages != PAD).all(), f"L4: {where}: the page table ends before the run does")
        written = pages[start // PAGE_TOKENS :]
        require((self.arena.readers[written] == 1).all(), f"L7: {where} writes a page that has two readers")
        for page in written.tolist():
            self.arena.claim_page(page)
        digests = row.digests[:end]
        for token in drafts:
            digests.append(digest(digests[-1], token))
        expected = np.asarray(digests, dtype=np.uint64)
        positions = np.arange(start, end)
        self.arena.cells[pages[positions // PAGE_TOKENS], positions % PAGE_TOKENS] = expected[start:]
        read = self.arena.cells[pages].reshape(-1)[:end]
        if not np.array_equal(read, expected):
            at = int(np.flatnonzero(read != expected)[0])
            raise PlanViolation(
                f"{where}: page {int(pages[at // PAGE_TOKENS])} does not hold position {at} of this sequence"
            )

    def _sample(self, row: _Row) -> int:
        seed = 0 if row.admission.sampling.greedy else row.admission.seed
        token = self.next_token(row.digests[-1], seed)
        row.learn(token)
        return token

    def _prompt_logprobs(self, row: _Row, start: int, length: int) -> list[TokenLogprobs]:
        top = row.admission.sampling.prompt_logprobs
        assert top is not None
        end = min(start + length, row.admission.prompt_tokens - 1)
        return [scripted_logprobs(row.tokens[at + 1], row.digests[at], top) for at in range(start, end)]


def scripted_logprobs(token: int, before: int, top: int) -> TokenLogprobs:
    """Return invented logprobs of ``token`` after the tokens with digest ``before``: a pure function of both."""
    first = -(digest(before, token) % 4096) / 1024
    return TokenLogprobs(token=token, logprob=first, rank=0, top=[(token + at, first - at) for at in range(top)])
