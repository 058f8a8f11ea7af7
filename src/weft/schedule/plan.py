"""The plan of one step: a frozen value that says everything the step will do.

    plan (decides, changes nothing) -> commit (only writer of memory) -> execute (only user of the device)
                                                                       -> settle (tokens arrive)

It can be printed, compared, replayed and simulated. The executor sees nothing else of the pure half: no
sequence object, no memory object. ``rows_cleared``, ``admissions``, ``table_writes`` and ``table_patches``
keep the per-row state on the device (page table, sampling parameters, token counts) up to date. Then
``arena_work`` makes memory ready. All of it is applied in this order before the step computes.

    runs are ordered: every decode (length 1, start > 0), then every verify run, then every prefill.

        tokens_T   [ d0 d1 | w0 w0 w0 | w1 w1 | p0 p0 p0 p0 | p1 p1 ... ]     flat, in run order
        run r covers tokens [offset_r, offset_r + length_r) at positions [start_r, start_r + length_r)

Laws: L4 (PAD); L5 (rows cleared when a sequence leaves, before the row is used again); L6 (frames are zeroed before
first use); L7 (shared pages and states are copied before they are written: the copies).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Protocol

import numpy as np
import numpy.typing as npt

from weft.costs.step import Work, pairs_of
from weft.memory.arena_work import NO_WORK, ArenaWork
from weft.memory.reservation import Reservation
from weft.request import PlacedPicture, Pooling, SamplingParams, TokenLogprobs
from weft.schedule.tier_values import NO_STORE_STEP, StoreStep
from weft.speculation.drafter import DraftGrammar
from weft.units import RowId, SeqId, SlotId

Int32s = npt.NDArray[np.int32]
Bools = npt.NDArray[np.bool_]

_NO_WRITES: Int32s = np.empty((3, 0), dtype=np.int32)


def no_writes() -> Int32s:
    return _NO_WRITES


class CompiledGrammar(DraftGrammar, Protocol):
    """A compiled grammar (``weft.engine.grammars``): a value that the planner carries."""

    @property
    def token_count(self) -> int:
        """Tokens that a mask of its matcher covers, from 0 on."""

    @property
    def step_s(self) -> float:
        """Seconds of a step that grammars may take, over all rows."""


@dataclass(frozen=True, slots=True)
class Admission:
    """A sequence gets a row: the values that the executor must know while the sequence holds it.

    ``tokens`` is the prompt and, after a preemption, the tokens generated before it. ``prompt_tokens`` counts
    the prompt's, so that penalties count exactly the *generated* ones. ``seed`` is the sequence's own 64-bit
    seed (already split for n > 1)."""

    row: RowId
    seq: SeqId
    tokens: Int32s
    prompt_tokens: int
    sampling: SamplingParams
    seed: int
    stop_ids: tuple[int, ...]
    """Ids that end the sequence; the sampler masks them until ``min_tokens`` are generated."""
    grammar: CompiledGrammar | None = None
    """The grammar of its answer, if it has one."""
    pictures: tuple[PlacedPicture, ...] = ()
    """Pictures whose rows the executor has."""
    adapter: str = ""
    """The digest of the adapter that computes it, empty for the base model."""
    pooling: Pooling | None = None
    """Pooling of its prompt, instead of an answer."""


@dataclass(frozen=True, slots=True)
class Tap:
    """A write of the recurrent state after ``position`` tokens into ``slot``, during run ``run``."""

    run: int
    position: int
    slot: SlotId


@dataclass(frozen=True, slots=True)
class StepPlan:
    """The plan of one step. ``rows``, ``starts``, ``lengths``, ``slots``: int32 [runs]; ``fresh``, ``samples``: bool
    [runs]; ``tokens``: int32 [sum of lengths]; PAD for a decode: the token that its row chose last, which the planner
    did not wait for.

    ``slots`` is PAD for models without recurrent state. ``fresh``: the state starts from zero, whatever the slot's
    bytes are. ``samples``: the run ends at the sequence's last known token, so its last logits choose the next one.
    ``prompt_logprob_runs``: runs whose sequence asked for logprobs of its prompt. ``table_writes``: int32 [3, k] of
    (row, page index in the row, page id). ``table_patches``, in the same form, replaces entries by pages that hold the
    same tokens. ``arena_work``: that of the reservation, copies of running slots before this step overwrites them, and
    stores. ``store``: decisions of this plan about the store.

    The ``verify_count`` runs after the decodes are verify runs: a chosen token, and drafts of the next ones. A token is
    chosen after each of them, and those after a wrong draft are dropped (``schedule.verify_runs``).

    ``mtp_drafts``: how many next tokens the model's own head drafts for each run that chooses one; 0: it
    reads the tokens of the step and drafts none; None: it does not run.
    """

    step: int
    seqs: tuple[SeqId, ...]
    rows: Int32s
    starts: Int32s
    lengths: Int32s
    slots: Int32s
    fresh: Bools
    samples: Bools
    tokens: Int32s
    decode_count: int
    verify_count: int
    rows_cleared: tuple[RowId, ...]
    admissions: tuple[Admission, ...]
    table_writes: Int32s
    taps: tuple[Tap, ...]
    prompt_logprob_runs: tuple[int, ...]
    reservation: Reservation
    preempted: tuple[SeqId, ...]
    finished: tuple[SeqId, ...] = ()
    """Sequences that ended (or were cancelled) since the last plan; their rows are in rows_cleared."""
    reclaiming: bool = False
    """Whether a sequence did not fit, and memory makes room for the next plan by evictions or moves."""
    table_patches: Int32s = field(default_factory=no_writes)
    arena_work: ArenaWork = NO_WORK
    store: StoreStep = NO_STORE_STEP
    mtp_drafts: int | None = None
    pooled_runs: tuple[int, ...] = ()
    """Prefills with hidden rows that ``Admission.pooling`` asks for."""

    @property
    def run_count(self) -> int:
        return len(self.seqs)

    @property
    def token_count(self) -> int:
        return int(self.tokens.size)

    @property
    def verify_runs(self) -> range:
        """A chosen token and drafts of the next ones."""
        return range(self.decode_count, self.decode_count + self.verify_count)

    @property
    def decides_next(self) -> bool:
        """Whether the next plan depends on the tokens of this step: its positions follow from the right drafts, or its
        drafts from those of the model's own head."""
        return bool(self.verify_count or self.mtp_drafts)

    @property
    def prefills(self) -> range:
        return range(self.decode_count + self.verify_count, self.run_count)


def work_of(plan: StepPlan) -> Work:
    """Return the amounts that decide the time of ``plan``; tokens of verify runs count as prefill tokens."""
    decodes = plan.decode_count
    starts, lengths = plan.starts, plan.lengths
    context = int(starts[:decodes].sum()) + decodes
    if decodes == plan.run_count:
        return Work(0, 0, decodes, context)
    runs = zip(starts[decodes:].tolist(), lengths[decodes:].tolist(), strict=True)
    return Work(
        int(lengths[decodes:].sum()), sum(pairs_of(start, start + length) for start, length in runs), decodes, context
    )


@dataclass(frozen=True, slots=True)
class HeadDraft:
    """Guesses of the model's own head. ``tokens``: the next tokens that it expects. ``chances``: by the head, that each
    is right if those before it are."""

    tokens: tuple[int, ...]
    chances: tuple[float, ...]


@dataclass(frozen=True, slots=True)
class HeadDrafts:
    """Drafts of the model's own head in one step, by run. ``seconds``: those of the host for launching them and waiting
    for them; work that the device did meanwhile is not in them."""

    by_run: dict[int, HeadDraft] = field(default_factory=dict)
    seconds: float = 0.0


NO_DRAFTS = HeadDrafts()


@dataclass(frozen=True, slots=True)
class StepResult:
    """The result of a step. ``tokens``: int32 [runs], the last token that each run chose, PAD for a run that did not
    sample. The dicts are by run index.

    ``logprobs``: of runs whose request wants logprobs. ``prompt_logprobs``: one entry per token of the run, each the
    logprob of the *next* prompt token (the last entry of the prompt's last run is absent). ``failures``: why a sequence
    cannot go on, for reasons of its own such as a grammar beyond a limit. ``verified``: all tokens that a verify run
    chose, its right drafts and the token after them; ``verified_logprobs``: their logprobs, if the request wants them.
    ``head`` waits for the drafts of the model's own head, which the device may still compute, and returns them."""

    tokens: Int32s
    logprobs: dict[int, TokenLogprobs]
    prompt_logprobs: dict[int, list[TokenLogprobs]]
    device_s: float = 0.0
    failures: dict[int, str] = field(default_factory=dict)
    verified: dict[int, tuple[int, ...]] = field(default_factory=dict)
    verified_logprobs: dict[int, list[TokenLogprobs]] = field(default_factory=dict)
    head: Callable[[], HeadDrafts] = lambda: NO_DRAFTS
    pooled: dict[int, npt.NDArray[np.float64]] = field(default_factory=dict)
    """Results of ``pooled_runs``, [parts, width]: the last row, or for a mean the sums of rows between two multiples of
    CHUNK_TOKENS."""
