"""The engine: requests in, one step at a time, events out.

    submit(request) --> n sequences wait
    step()              plan -> commit -> execute -> settle       one TokenEvent per sequence that moved
    cancel(id, index)   at any moment, from inside a step too

    submission.py   checks a request and makes its sequences
    streams.py      live sequences and their events
    loop.py         the four verbs, one after the other
    overlap.py      the same verbs, with the next step planned while one is computed
    settlement.py   tokens to events

Each index of each accepted request gets exactly one event with a ``finish_reason``, and that event is its
last. This holds for a cancel before, between and during steps, for ``close``, and for a failed executor. An
executor that raises ends the engine, not the process: all live sequences end with "error", ``failure`` is
set, and later requests are refused.

The engine knows no text, no clock and no randomness: the clock is passed in and seeds are split
(``request.split_seed``). One thread owns it. ``submit`` and ``cancel`` may be called while ``step`` is in
``execute``, by the executor, on that thread.

Laws: L11 (at most ``queue_max`` sequences wait; the error names the flag), L1 (``audit``, which the owner of
the engine calls when it has fallen idle).
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Protocol

import msgspec

from weft.config import Sizes
from weft.costs.fit import StepMeter
from weft.costs.step import StepCost
from weft.engine.adapters import AdapterPool
from weft.engine.draft_feed import DraftFeed
from weft.engine.executor import Executor, ProcessWatch
from weft.engine.grammars import GrammarCompiler
from weft.engine.loop import Ages, CacheFlush, PlainLoop, StepParts
from weft.engine.overlap import OverlapLoop
from weft.engine.pictures import PictureEncoder, PictureQueue
from weft.engine.settlement import Settlement
from weft.engine.stats import AWAKE, EngineCounters, EngineStats, WeightsState
from weft.engine.streams import Stream, StreamTable
from weft.engine.submission import Submission
from weft.errors import EngineUnavailableError, QueueFullError, RequestError
from weft.memory.memory import Memory
from weft.memory.usage import CacheShape
from weft.request import Request, TokenEvent
from weft.schedule.budget import StepLimit
from weft.schedule.plan import StepPlan, work_of
from weft.schedule.scheduler import Scheduler
from weft.schedule.snapshots import AUTO, SnapshotPolicy
from weft.schedule.store_tier import StoreTier
from weft.speculation.drafter import Drafter, SpeculationStats
from weft.speculation.speculator import Speculator

STORE_PAUSE_S = 1e-3
"""Seconds between two reads of the store's events while every request waits for the store."""
ENCODING_S = 0.1
"""Seconds for pictures between two steps, where no decode waits."""
STORE_CLOSE_S = 20.0
"""Seconds that an engine may write snapshots when it ends."""


class ReadWeights(Protocol):
    """A source of weights: ``weft.assemble.weights.WeightsSource``. ``place``: the directory from which the executor
    reads the weights again."""

    @property
    def place(self) -> str: ...

    def check(self, directory: str) -> None:
        """Raise CheckpointError where the weights in ``directory`` have other shapes or are incomplete."""

    def digest(self) -> str:
        """Return the digest of the weights that were read last. Raise CheckpointError, OSError."""


class EngineCore:
    """The engine core; see the module. ``clock`` returns seconds and never goes back; ``eos_ids`` are the model's own.
    ``memory`` decides whether prefixes are cached, ``snapshots`` where states are cached. ``grammars`` compiles the
    grammars of requests, ``adapters`` holds the adapters in memory. ``overlap``: plan the next step while one is
    computed. ``store``: prefixes beyond memory; ``pause`` lets time pass while every request waits for it. ``drafter``
    guesses next tokens, which steps then verify (``weft.schedule.verify_runs``); None: no speculation. ``max_step_s``:
    seconds of a step with decodes (``weft.schedule.budget``), None: no limit; ``pair_tokens``: guessed cost of a
    (query, key) pair in prefill tokens. ``encoder``: of the pictures in prompts, whose rows have ``pictures_bytes``;
    None: the model reads text only. ``step_costs``: seconds of a step by which the engine decides; None: measured."""

    def __init__(
        self,
        *,
        vocab_size: int,
        sizes: Sizes,
        memory: Memory,
        executor: Executor,
        clock: Callable[[], float],
        seed: int,
        eos_ids: tuple[int, ...],
        snapshots: SnapshotPolicy = AUTO,
        grammars: GrammarCompiler | None = None,
        overlap: bool = False,
        store: StoreTier | None = None,
        pause: Callable[[float], None] = lambda seconds: None,
        drafter: Drafter | None = None,
        max_step_s: float | None = None,
        pair_tokens: float = 0.0,
        adapters: AdapterPool | None = None,
        encoder: PictureEncoder | None = None,
        pictures_bytes: int = 0,
        step_costs: StepCost | None = None,
    ) -> None:
        self.vocab_size = vocab_size
        self.sizes = sizes
        self.memory = memory
        self.eos_ids = eos_ids
        self.grammars = grammars or GrammarCompiler(None, eos_ids, vocab_size)
        self.adapters = adapters or AdapterPool(None)
        self.adapters.running = lambda: {stream.seq.adapter for stream in self.streams.by_seq.values()}
        self.drafter = drafter
        self.scheduler = Scheduler(memory, sizes, snapshots, store, drafter)
        self.store = store
        self._pause = pause
        self.counters = EngineCounters()
        if step_costs is not None:
            self.counters.priced_s = lambda plan, seconds: step_costs.step_s(work_of(plan))
        self.on_step = self.counters.on_step
        """Listeners that get each computed step and its seconds."""
        self.meter = StepMeter(pair_tokens)
        self._max_step_s = max_step_s
        self.on_step.append(self._measure)
        feed = None if drafter is None else DraftFeed(drafter)
        self.pictures = PictureQueue(encoder, pictures_bytes, clock)
        self.streams = StreamTable(self.scheduler, self.counters, self.pictures, feed)
        self.settlement = Settlement(self.scheduler, self.streams, self.counters, feed)
        if feed is not None:
            self.on_step.append(feed.stepped)
        self.on_close: list[Callable[[], None]] = []
        self.processes: ProcessWatch | None = None
        """Other processes that the executor needs; an idle engine watches them."""
        self.failure: BaseException | None = None
        """The exception that ended the engine: from ``execute``, or an assert."""
        self.sleep_state = AWAKE
        self.paused = False
        """Whether no step is computed; requests are accepted and wait."""
        self.weights = WeightsState()
        """Only ``weft.engine.sleeper`` changes these three."""
        self.source: ReadWeights | None = None
        """Where weights are read again from; None for a model built in memory."""
        self._submission = Submission(
            vocab_size=vocab_size,
            sizes=sizes,
            eos_ids=eos_ids,
            seed=seed,
            picture_tokens=() if encoder is None else encoder.picture_tokens,
        )
        self._flush = CacheFlush(memory, self.scheduler)
        self._ages = Ages()
        self._closed = False
        self.parts = StepParts(self.scheduler, executor, self.settlement, self._flush, self.counters, self._ages, clock)
        self._loop = OverlapLoop(self.parts) if overlap else PlainLoop(self.parts)

    def _measure(self, plan: StepPlan, seconds: float) -> None:
        self.scheduler.charge(plan, seconds)
        if plan.verify_count or not plan.run_count:
            return  # steps that verify drafts are other work
        self.meter.stepped(plan.step, work_of(plan), seconds)
        if self._max_step_s is not None:
            self.scheduler.step_limit = StepLimit(self._max_step_s, self.meter.cost_now())

    @property
    def executor(self) -> Executor:
        return self.parts.executor

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Accept ``request``: its ``n`` sequences wait from now on.

        Raises RequestError: a field is out of range, the prompt is empty, a token is not in the vocabulary,
        the id is in use. Raises ContextLengthError (both numbers in the message), QueueFullError (names
        limits.max_queued_requests) or EngineUnavailableError (failed, closed, asleep). Nothing is accepted
        then.
        """
        self._check_open()
        prompt = self._submission.check(request)
        self.pictures.check(request)
        if request.request_id in self.streams.by_request:
            raise RequestError(
                f"request_id {request.request_id!r} is in use by a request that has not ended", param="request_id"
            )
        try:
            waiting = self.scheduler.waiting
            self._submission.check_queue(len(waiting), waiting.count(request.key), request)
        except QueueFullError:
            self.counters.requests_refused += 1
            raise
        if request.adapter is not None:
            self.adapters.load(request.adapter)
        spec = request.sampling.grammar
        grammar = None if spec is None else self.grammars.compile(spec)
        now_s = self.parts.clock()
        number = self.counters.requests
        self.counters.requests += 1
        self.counters.prompt_tokens += prompt.size * request.sampling.n
        for index, seq, rule in self._submission.sequences(request, prompt, grammar, number):
            self.streams.add(Stream(request.request_id, index, seq, rule, now_s))
            self.scheduler.submit(seq)
            self.pictures.submitted(seq)

    def _check_open(self) -> None:
        if self.failure is not None:
            raise EngineUnavailableError(f"the engine has failed: {self.failure!r}")
        if self._closed:
            raise EngineUnavailableError("the engine has stopped")
        self.sleep_state.check_awake()

    def cancel(self, request_id: str, index: int | None = None) -> bool:
        """End one sequence of a request, or all of them, now; the last event comes with the next ``step``.
        False when there is no live sequence by that name: no error, as an end and a cancel may cross."""
        streams = self.streams.of_request(request_id, index)
        self.streams.cancel(streams)
        return bool(streams)

    def retract_all(self) -> None:
        """Preempt every sequence that runs, so that no sequence and no load holds memory. The events come with the next
        ``step``. The sequences wait in their places of the queue and are computed again from their tokens."""
        events: list[TokenEvent] = []
        self.scheduler.retracts, paused, self.paused = True, self.paused, False
        while self.failure is None and (self.scheduler.holds_memory or self._loop.in_flight is not None):
            events += self.step()
        self.scheduler.retracts, self.paused = False, paused
        self.hand_back(events)

    def cancel_all(self, why: str) -> None:
        """Cancel every request; ``why`` is in the last event of each."""
        self.streams.cancel(list(self.streams.by_seq.values()), why)

    def hand_back(self, events: list[TokenEvent]) -> None:
        """Take back events that ``step`` returned; the next ``step`` returns them again."""
        self.streams.outbox = events + self.streams.outbox

    # ------------------------------------------------------------------ the prefix cache

    def cache_shape(self) -> CacheShape:
        """Return the sizes and uses of the prefix cache. Call it between steps; it visits every
        node (``weft.memory.prefix.readings``)."""
        now_s = self.parts.clock()
        return self.memory.cache_shape(lambda version: self._ages.seconds_since(version, now_s))

    def flush_cache(self, *, store: bool = False) -> None:
        """Drop every prefix that no running sequence reads, with ``store`` those on disk too. Answers in progress
        are not affected. Prefixes of closing sequences go with the step that closes them; with a step in flight,
        the flush waits for its settling (``weft.engine.loop.CacheFlush``)."""
        if self.failure is None and not self._closed:
            self._flush.clears_store |= store
            self._flush.run(in_flight=self._loop.in_flight is not None)

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do: sequences, memory to free, or events to return."""
        return bool(self.streams.outbox) or (self.failure is None and self._has_steps)

    @property
    def _has_steps(self) -> bool:
        if self.paused or self.sleep_state.level:
            return False
        return self.scheduler.has_work or self._loop.in_flight is not None

    @property
    def live_count(self) -> int:
        """Sequences that run or wait."""
        return len(self.streams.by_seq)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model since the start. Cheaper than ``stats`` after each step."""
        return self.counters.computed_tokens

    def step(self) -> list[TokenEvent]:
        """Run one step of the loop. Returns the events of cancels since the last step, then those of this step in run
        order. Never raises for the fault of a request or the executor: see ``failure``. An interrupt (Ctrl-C) inside
        the step ends the engine too, and is raised on."""
        self.poll_store()
        if self.failure is None and self._has_steps:
            try:
                encodes = self.pictures.has_work
                if encodes:
                    for seq, why in self.pictures.advance(self._encoding_seconds).items():
                        self.streams.end(self.streams.by_seq[seq], [], "error", error=why, own_fault=True)
                if not (self._has_steps and self._loop.step()) and not encodes:
                    self._pause(STORE_PAUSE_S)
            except BaseException as error:
                # Also when interrupted: half a step cannot be repeated, because states have moved on.
                self.failure = error
                self._loop.abandon()
                self.streams.fail_all(f"the engine failed: {error!r}")
                if not isinstance(error, Exception):
                    raise
        return self._versioned(self.streams.drain())

    def _versioned(self, events: list[TokenEvent]) -> list[TokenEvent]:
        version = self.weights.version
        if not version:
            return events
        replaced = msgspec.structs.replace
        return [event if event.weight_version else replaced(event, weight_version=version) for event in events]

    @property
    def _encoding_seconds(self) -> float:
        """Seconds for pictures between two steps: decodes that run wait for them."""
        return (self._max_step_s or ENCODING_S) / 2 if len(self.scheduler.running) else ENCODING_S

    def poll_store(self) -> None:
        """Take the events of the store, if there is one, and choose the next snapshots to write. ``step`` does so by
        itself; an idle engine whose ``store.is_waiting`` calls this now and then."""
        if self.store is not None and not self._closed:
            self.parts.note_transfers()
            self.store.poll()

    def close(self, *, write_s: float = STORE_CLOSE_S) -> list[TokenEvent]:
        """Cancel everything and free the device. Snapshots that are worth it go to the store first, for at
        most ``write_s`` seconds. Returns the events not yet returned by ``step``. Idempotent."""
        if not self._closed:
            self.streams.cancel(list(self.streams.by_seq.values()))
            if self.store is not None:
                self.write_all(write_s)
                self.store.close()
            self._closed = True
            self._loop.abandon()
            self.executor.close()
            self.grammars.close()
            for end in self.on_close:
                end()
        return self.streams.drain()

    def write_all(self, limit_s: float) -> None:
        """Write every snapshot that is worth it, for at most ``limit_s`` seconds. No request is live."""
        if self.store is None or self.sleep_state.level:
            return
        self.store.writes.draining = True
        end_s = self.parts.clock() + limit_s
        events = self.step()
        while self.failure is None and self.parts.clock() < end_s and (self._has_steps or self.store.writes.is_waiting):
            if not self._has_steps:
                self._pause(STORE_PAUSE_S)
            events += self.step()
        self.hand_back(events)
        self.store.writes.draining = False

    # ------------------------------------------------------------------ numbers

    def audit(self) -> None:
        """Recount memory, rows and queues from their owners (law L1). Raise AssertionError if they differ."""
        self.memory.audit()
        self.scheduler.audit(self._loop.in_flight or ())
        self.streams.audit()
        self.pictures.audit()

    def _store_stats(self) -> dict[str, Any]:
        """Return statistics of the store and of the link; empty without a store. ``store`` is None for a tier without a
        directory, which only serves handoffs."""
        if self.store is None:
            return {}
        stats = self.store.stats()
        return {"store": stats if stats.store.path else None, "link": self.store.link_stats()}

    def stats(self) -> EngineStats:
        return EngineStats(
            **self.counters.counts(),
            running=len(self.scheduler.running),
            waiting=len(self.scheduler.waiting),
            rows_max=self.sizes.rows_max,
            queue_max=self.sizes.queue_max,
            memory=self.memory.usage(),
            preemptions=self.scheduler.preemption_count,
            recomputed_tokens=self.scheduler.recomputed_tokens,
            sleep=self.sleep_state,
            weights=self.weights,
            paused=self.paused,
            **self._store_stats(),
            speculation=self.drafter.stats() if isinstance(self.drafter, Speculator) else SpeculationStats(),
            pictures=self.pictures.stats(),
            costs=self.meter.cost(),
            ranks=self.counters.ranks(),
            steps_by_form=self.counters.steps_by_form(),
            adapters=self.adapters.stats(),
        )
