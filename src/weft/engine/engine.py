"""The engine: requests in, one step at a time, events out.

    submit(request) --> n sequences waiting
    step()              plan -> commit -> execute -> settle       one TokenEvent per sequence that moved
    cancel(id, index)   at any moment, from inside a step too

                     scheduler.plan()        decides, changes nothing
                     scheduler.commit(plan)  rows, queues, memory
    one step:        executor.execute(plan)  the only one to touch the device
                     settle                  tokens home; ended sequences leave; events

What a caller can rely on: each index of each accepted request gets exactly one event with a
``finish_reason``, and it is its last: also when it is cancelled (before it ran, between steps, during a
step: what that step computed for it is dropped), when the engine is closed, and when the executor fails.
An executor that raises ends the engine, not the process: all live sequences end with "error",
``failure`` is set, and nothing more is accepted.

The engine owns the link between a sequence (which knows tokens) and its request (which knows a client),
and the token-level end of an answer. It knows no text, no clock and no randomness: the clock is passed
in, seeds are split (``seeds.py``). It is not thread safe: one thread owns it. ``submit`` and ``cancel``
may be called while ``step`` is in ``execute`` (by the executor, on that thread).

Laws: L11 (at most ``queue_max`` sequences wait on submit; the error names the flag), L1 (``audit``, which
whoever steps the engine calls when it has fallen idle).
"""

from __future__ import annotations

from collections import Counter
from collections.abc import Callable

import numpy as np

from weft.config import Sizes
from weft.engine.ages import Ages
from weft.engine.executor import Executor
from weft.engine.grammars import GrammarCompiler
from weft.engine.overlap import Overlap
from weft.engine.seeds import split
from weft.engine.sleep import AWAKE
from weft.engine.stats import EngineStats
from weft.engine.stopping import stop_ids, stop_rule
from weft.engine.streams import Stream, told
from weft.errors import EngineUnavailableError, QueueFullError, RequestError
from weft.memory.memory import Memory
from weft.memory.prefix.shape import CacheShape
from weft.request import FinishReason, Request, TokenEvent, TokenLogprobs
from weft.schedule.checkpoints import AUTO, CheckpointPolicy
from weft.schedule.plan import Int32s, StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import Sequence
from weft.units import PAD, SeqId


class EngineCore:
    """See the module. ``clock`` returns seconds and never goes back; ``eos_ids`` are the model's own.
    Whether prefixes are cached is up to ``memory``; ``checkpoints`` says where states are kept then.
    ``grammars`` compiles the grammars of requests that bring one. ``overlap``: the next step is planned while
    one is computed (``weft.engine.overlap``)."""

    def __init__(self, *, vocab_size: int, sizes: Sizes, memory: Memory, executor: Executor,
                 clock: Callable[[], float], seed: int, eos_ids: tuple[int, ...],
                 checkpoints: CheckpointPolicy = AUTO, grammars: GrammarCompiler | None = None,
                 overlap: bool = False) -> None:
        self.vocab_size = vocab_size
        self.sizes = sizes
        self.memory = memory
        self.executor = executor
        self.eos_ids = eos_ids
        self.grammars = grammars or GrammarCompiler(None, eos_ids, vocab_size)
        self.scheduler = Scheduler(memory, sizes, checkpoints)
        self.failure: BaseException | None = None
        """What ended the engine: the exception that ``execute`` (or an assert) raised."""
        self.sleep_state = AWAKE
        """Changed by ``weft.engine.sleep`` alone."""
        self.on_step: list[Callable[[StepPlan, float], None]] = []
        """Told each step that was computed and its seconds: whoever records, whoever learns what it costs."""
        self._clock = clock
        self._seed = seed
        self._closed = False
        self._flush_due = False
        self._streams: dict[SeqId, Stream] = {}
        self._requests: dict[str, dict[int, SeqId]] = {}
        self._outbox: list[TokenEvent] = []
        self._next_seq = 0
        self._ages = Ages()
        self._counts = Counter[str]()
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
        self._last_step = (0, 0, 0.0)
        self._overlap = Overlap(self.scheduler, executor, clock, start=self._start, land=self._land,
                                hold=lambda: self._flush_due) if overlap else None

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Accept ``request``: its ``n`` sequences wait from now on.

        Raises RequestError (a field is out of range, the prompt is empty, a token is not in the
        vocabulary, the id is in use), ContextLengthError (both numbers in the message), QueueFullError
        (names --max-queued-requests) or EngineUnavailableError (failed, closed, asleep); nothing is accepted.
        """
        if self.failure is not None or self._closed:
            raise EngineUnavailableError("the engine has stopped" if self.failure is None
                                         else f"the engine has failed: {self.failure!r}")
        self.sleep_state.check_awake()
        sampling = request.sampling
        sampling.check(self.vocab_size)
        if request.request_id in self._requests:
            raise RequestError(f"request_id {request.request_id!r} is in use by a request that has not ended",
                               param="request_id")
        request.check_length(self.sizes.max_model_len)
        request.check_marks()
        prompt = self._prompt_array(request.prompt_tokens)
        waiting = len(self.scheduler.waiting)
        if waiting + sampling.n > self.sizes.queue_max:
            self._counts["requests_refused"] += 1
            raise QueueFullError(
                f"{waiting} sequences are waiting and this request brings {sampling.n}; the limit is "
                f"{self.sizes.queue_max} (--max-queued-requests). Try again later, or raise the limit",
                param="--max-queued-requests", code="queue_full")
        grammar = None if sampling.grammar is None else self.grammars.compile(sampling.grammar)
        now = self._clock()
        number = self._counts["requests"]
        self._counts["requests"] += 1
        self._counts["prompt_tokens"] += prompt.size * sampling.n
        seed = split(self._seed, number) if sampling.seed is None else sampling.seed
        rule = stop_rule(sampling, self.eos_ids, self.sizes.max_model_len - int(prompt.size))
        ends = stop_ids(sampling, self.eos_ids)
        self._requests[request.request_id] = {}
        for index in range(sampling.n):
            seq = Sequence(SeqId(self._next_seq), prompt=prompt, sampling=sampling, seed=split(seed, index),
                           stop_ids=ends, rank=(request.priority, number, index), salt=request.cache_salt,
                           boundaries=tuple(request.boundaries), marks=tuple(request.marks),
                           grammar=grammar, made_max=rule.made_max)
            self._next_seq += 1
            self._streams[seq.id] = Stream(request.request_id, index, seq, rule, now)
            self._requests[request.request_id][index] = seq.id
            self.scheduler.submit(seq)

    def _prompt_array(self, tokens: list[int]) -> Int32s:
        try:
            wide = np.asarray(tokens, dtype=np.int64)
        except (OverflowError, TypeError, ValueError):
            raise RequestError("the prompt has a value that is no token id", param="prompt") from None
        bad = np.flatnonzero((wide < 0) | (wide >= self.vocab_size))
        if bad.size:
            raise RequestError(f"prompt token {int(bad[0])} is {int(wide[bad[0]])}; this model has tokens "
                               f"0 to {self.vocab_size - 1}", param="prompt")
        return wide.astype(np.int32)

    def cancel(self, request_id: str, index: int | None = None) -> bool:
        """End one sequence of a request, or all of it, now; the last event comes with the next ``step``.
        False when there is nothing by that name that has not ended: no error, as the two may cross."""
        live = self._requests.get(request_id)
        if live is None or (index is not None and index not in live):
            return False
        for seq in list(live.values()) if index is None else [live[index]]:
            self._outbox.append(self._end(self._streams[seq], [], "cancelled"))
        return True

    def cancel_all(self, why: str) -> None:
        """``cancel`` for everybody; ``why`` is in their last event."""
        for stream in list(self._streams.values()):
            self._outbox.append(self._end(stream, [], "cancelled", error=why))

    def hand_back(self, events: list[TokenEvent]) -> None:
        """Events that ``step`` gave, to be given again by the next one."""
        self._outbox = events + self._outbox

    def cache_shape(self) -> CacheShape:
        """What the prefix cache holds, in sizes and uses. Between steps only, and not free: it looks at every
        node (``weft.memory.prefix.shape``)."""
        now = self._clock()
        return self.memory.cache_shape(lambda version: self._ages.seconds_since(version, now))

    def flush_cache(self) -> None:
        """Drop every prefix that no running sequence reads. Answers in progress go on unharmed. What has
        ended and is not closed yet goes with the next step, in which it is; where steps overlap, everything
        goes once the one in flight is home, before another is planned."""
        if self.failure is None and not self._closed:
            self._flush_due = self._flying
            if not self._flush_due:
                self.memory.flush()
                self._flush_due = self.scheduler.has_closing

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do: sequences, memory to give back, or events to hand out."""
        return bool(self._outbox) or (self.failure is None and self._has_steps)

    @property
    def _has_steps(self) -> bool:
        return self.scheduler.has_work or self._flying

    @property
    def _flying(self) -> bool:
        return self._overlap is not None and self._overlap.flying

    @property
    def live_count(self) -> int:
        """Sequences that run or wait."""
        return len(self._streams)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model since the start: cheaper than ``stats`` after each step."""
        return self._counts["computed_tokens"]

    def step(self) -> list[TokenEvent]:
        """One step; returns what it brought, in run order, after what was cancelled since the last one.
        Never raises for what a request or the executor did: see ``failure``. An interrupt (Ctrl-C) inside
        the step ends the engine too, and is raised on."""
        if self.failure is None and self._has_steps:
            try:
                self._run_step() if self._overlap is None else self._overlap.step()
            except BaseException as error:
                # Also when interrupted: a step that is half done cannot be done again (states moved on).
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
        events, self._outbox = self._outbox, []
        return events

    def _run_step(self) -> None:
        """The plain loop: each verb after the other. ``weft.engine.overlap`` is the second one."""
        began_s = self._clock()
        plan = self._start(began_s)
        assert plan is not None
        result = self.executor.execute(plan)
        if self._flush_due:
            self.flush_cache()
        self._settle(plan, result)
        self._count(plan, began_s)

    def _start(self, now: float) -> StepPlan | None:
        """Plan and commit; None where nothing can be done before the step in flight is home."""
        plan = self.scheduler.plan()
        if plan is not None:
            self.scheduler.commit(plan)
            self._ages.note(self.memory.version, now)
            self._note_started(plan, now)
        return plan

    def _land(self, plan: StepPlan, result: StepResult, since_s: float) -> None:
        """A step of the overlapped loop is home: it was advanced over when it began."""
        if self._flush_due:
            self.flush_cache()
        self._bring_home(plan, result)
        self._count(plan, since_s)

    def _count(self, plan: StepPlan, since_s: float) -> None:
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += plan.token_count
        self._last_step = (plan.token_count, plan.decode_count, self._clock() - since_s)
        for listener in self.on_step:
            listener(plan, self._last_step[2])

    def _note_started(self, plan: StepPlan, now: float) -> None:
        first_run = plan.run_count - len(plan.admissions)
        openings = plan.reservation.opened
        for run, (admission, opening) in enumerate(zip(plan.admissions, openings, strict=True), first_run):
            assert opening.seq == admission.seq
            stream = self._streams[admission.seq]
            if not stream.started:
                stream.started, stream.plain = True, False
                stream.lost = told(opening.match.lost)
                stream.queued_s = now - stream.accepted_s
                stream.cached_tokens = int(plan.starts[run])
                self._counts["cached_tokens"] += stream.cached_tokens

    def _settle(self, plan: StepPlan, result: StepResult) -> None:
        self.scheduler.advance(plan, result.tokens)
        self._bring_home(plan, result)

    def _bring_home(self, plan: StepPlan, result: StepResult) -> None:
        for seq_id in plan.preempted:
            stream = self._streams.get(seq_id)
            if stream is not None and stream.seq.prompt_logprobs_due:
                stream.prompt_logprobs = [None]  # its prompt is computed again from the start
                stream.plain = False
        for run in plan.prompt_logprob_runs:
            self._add_prompt_logprobs(plan, run, result)
        streams, outbox = self._streams, self._outbox
        logprobs, failures = result.logprobs, result.failures
        generated = 0
        for run, (seq_id, token) in enumerate(zip(plan.seqs, result.tokens.tolist(), strict=True)):
            stream = streams.get(seq_id)
            if stream is None:  # it ended while the step was in flight: nobody hears of this
                if token != PAD:
                    self.scheduler.learn_late(plan, run, token)
                continue
            if token == PAD:
                self._settle_unsampled(plan, run, stream)
                continue
            made = stream.generated
            made.append(token)
            if failures and run in failures:
                outbox.append(self._end(stream, [], "error", error=failures[run], own_fault=True))
                continue
            generated += 1
            if stream.plain and token not in stream.stop_ids and len(made) < stream.made_max:
                outbox.append(stream.plain_event(token))
                continue
            reason = stream.rule.reason(token, len(made))
            token_logprobs = logprobs[run] if stream.wants_logprobs else None
            if reason is None:
                outbox.append(stream.event([token], logprobs=token_logprobs))
            else:
                outbox.append(self._end(stream, [token], reason, logprobs=token_logprobs))
        self._counts["generation_tokens"] += generated

    def _settle_unsampled(self, plan: StepPlan, run: int, stream: Stream) -> None:
        """A chunk inside a prefill brings nothing; the end of one that asked for no token is the end."""
        assert not plan.samples[run], f"run {run} of step {plan.step} had to choose a token and did not"
        seq = stream.seq
        if not seq.samples and plan.starts[run] + plan.lengths[run] == seq.known_count:
            self._outbox.append(self._end(stream, [], "length"))

    def _add_prompt_logprobs(self, plan: StepPlan, run: int, result: StepResult) -> None:
        stream = self._streams.get(plan.seqs[run])
        if stream is None:
            return
        assert stream.prompt_logprobs is not None
        stream.prompt_logprobs += result.prompt_logprobs.get(run, [])
        if plan.starts[run] + plan.lengths[run] == stream.seq.prompt.size:
            assert len(stream.prompt_logprobs) == stream.seq.prompt.size, "one entry for each prompt token"
            stream.seq.prompt_logprobs_due = False

    # ------------------------------------------------------------------ ends

    def _end(self, stream: Stream, tokens: list[int], reason: FinishReason, *,
             logprobs: TokenLogprobs | None = None, error: str | None = None,
             own_fault: bool = False) -> TokenEvent:
        """The one place where a sequence ends: its last event, and out of every table."""
        self.scheduler.finish(stream.seq)
        self._forget(stream)
        self._finished[reason] += 1
        return stream.event(tokens, logprobs=logprobs, finish_reason=reason, error=error, own_fault=own_fault)

    def _forget(self, stream: Stream) -> None:
        del self._streams[stream.seq.id]
        live = self._requests[stream.request_id]
        del live[stream.index]
        if not live:
            del self._requests[stream.request_id]

    def _fail(self, error: BaseException) -> None:
        self.failure = error
        if self._overlap is not None:
            self._overlap.forget()
        words = f"the engine failed: {error!r}"
        for stream in list(self._streams.values()):
            self._forget(stream)
            self._finished["error"] += 1
            self._outbox.append(stream.event([], finish_reason="error", error=words))

    def close(self) -> list[TokenEvent]:
        """Cancel everything and free the device. Returns the events not yet handed out. Idempotent."""
        if not self._closed:
            self._closed = True
            for request_id in list(self._requests):
                self.cancel(request_id)
            if self._overlap is not None:
                self._overlap.forget()
            self.executor.close()
        events, self._outbox = self._outbox, []
        return events

    # ------------------------------------------------------------------ numbers

    def audit(self) -> None:
        """Recounts memory, rows and queues from their owners (law L1); AssertionError when they differ."""
        self.memory.audit()
        self.scheduler.audit(self._overlap.in_flight if self._overlap is not None else ())
        live = {seq for ids in self._requests.values() for seq in ids.values()}
        assert live == set(self._streams), "requests and streams differ"
        scheduled = {seq.id for seq in (*self.scheduler.running, *self.scheduler.waiting)}
        assert live <= scheduled, f"sequences that nobody schedules: {live - scheduled}"
        assert live >= scheduled, f"sequences that nobody waits for: {scheduled - live}"

    def stats(self) -> EngineStats:
        counts, (tokens, decodes, seconds) = self._counts, self._last_step
        return EngineStats(
            running=len(self.scheduler.running), waiting=len(self.scheduler.waiting),
            rows_max=self.sizes.rows_max, queue_max=self.sizes.queue_max, memory=self.memory.usage(),
            steps=counts["steps"], last_step_tokens=tokens, last_step_decodes=decodes, last_step_s=seconds,
            requests=counts["requests"], requests_refused=counts["requests_refused"],
            prompt_tokens=counts["prompt_tokens"], cached_tokens=counts["cached_tokens"],
            generation_tokens=counts["generation_tokens"], computed_tokens=counts["computed_tokens"],
            preemptions=self.scheduler.preemption_count,
            recomputed_tokens=self.scheduler.recomputed_tokens, finished=dict(self._finished),
            sleep=self.sleep_state)
