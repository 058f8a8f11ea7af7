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
from weft.engine.guides import GuideCompiler
from weft.engine.seeds import split
from weft.engine.stats import EngineStats
from weft.engine.stopping import StopRule, stop_ids, stop_rule
from weft.errors import ContextLengthError, EngineUnavailableError, QueueFullError, RequestError
from weft.memory.memory import Memory
from weft.memory.reservation import Lost
from weft.memory.shape import CacheShape
from weft.request import FinishReason, LostTokens, Request, SamplingParams, TokenEvent, TokenLogprobs
from weft.schedule.checkpoints import AUTO, CheckpointPolicy
from weft.schedule.plan import Int32s, StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.schedule.sequence import Sequence
from weft.units import PAD, SeqId

_NOTHING_LOST = LostTokens()


class _Stream:
    """One sequence and where its tokens go."""

    __slots__ = ("accepted_s", "cached_tokens", "index", "lost", "prompt_logprobs", "queued_s", "request_id",
                 "rule", "seq", "started", "wants_logprobs")

    def __init__(self, request_id: str, index: int, seq: Sequence, rule: StopRule, accepted_s: float) -> None:
        self.request_id = request_id
        self.index = index
        self.seq = seq
        self.rule = rule
        self.accepted_s = accepted_s
        self.wants_logprobs = seq.sampling.logprobs is not None
        self.started = False
        self.cached_tokens = 0
        # What the next event has to bring besides tokens; None once it was sent.
        self.queued_s: float | None = None
        self.lost: LostTokens | None = None
        self.prompt_logprobs: list[TokenLogprobs | None] | None = [None] if seq.prompt_logprobs_due else None

    def event(self, tokens: list[int], *, logprobs: TokenLogprobs | None = None,
              finish_reason: FinishReason | None = None, error: str | None = None) -> TokenEvent:
        stop_reason = self.rule.stop_reason(tokens[-1]) if finish_reason == "stop" else None
        queued_s, self.queued_s = self.queued_s, None
        lost, self.lost = self.lost, None
        prompt_logprobs = None
        if self.prompt_logprobs is not None and not self.seq.prompt_logprobs_due:
            prompt_logprobs, self.prompt_logprobs = self.prompt_logprobs, None
        return TokenEvent(
            request_id=self.request_id, index=self.index, tokens=tokens,
            logprobs=None if logprobs is None else [logprobs], prompt_logprobs=prompt_logprobs,
            finish_reason=finish_reason, stop_reason=stop_reason, error=error,
            cached_tokens=self.cached_tokens, preemptions=self.seq.preemption_count, queued_s=queued_s,
            lost=lost, recomputed_tokens=self.seq.recomputed_tokens)


def _told(lost: Lost) -> LostTokens | None:
    """What a client learns of ``lost``: nothing about the prompts of other salts (law L10)."""
    told = LostTokens(no_checkpoint=lost.no_checkpoint, evicted_state=lost.evicted_state,
                      evicted_kv=lost.evicted_kv, not_ready=lost.not_ready)
    return told if told != _NOTHING_LOST else None


class EngineCore:
    """See the module. ``clock`` returns seconds and never goes back; ``eos_ids`` are the model's own.
    Whether prefixes are cached is up to ``memory``; ``checkpoints`` says where states are kept then.
    ``guides`` compiles the grammars of requests that bring one."""

    def __init__(self, *, vocab_size: int, sizes: Sizes, memory: Memory, executor: Executor,
                 clock: Callable[[], float], seed: int, eos_ids: tuple[int, ...],
                 checkpoints: CheckpointPolicy = AUTO, guides: GuideCompiler | None = None) -> None:
        self.vocab_size = vocab_size
        self.sizes = sizes
        self.memory = memory
        self.executor = executor
        self.eos_ids = eos_ids
        self.guides = guides or GuideCompiler(None, eos_ids, vocab_size)
        self.scheduler = Scheduler(memory, sizes, checkpoints)
        self.failure: BaseException | None = None
        """What ended the engine: the exception that ``execute`` (or an assert) raised."""
        self.on_step: Callable[[StepPlan, float], None] | None = None
        """Told each step that was computed and its seconds; for recording."""
        self._clock = clock
        self._seed = seed
        self._closed = False
        self._flush_due = False
        self._streams: dict[SeqId, _Stream] = {}
        self._requests: dict[str, dict[int, SeqId]] = {}
        self._outbox: list[TokenEvent] = []
        self._next_seq = 0
        self._ages = Ages()
        self._counts = Counter[str]()
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "cancelled": 0, "error": 0}
        self._last_step = (0, 0, 0.0)

    # ------------------------------------------------------------------ requests

    def submit(self, request: Request) -> None:
        """Accept ``request``: its ``n`` sequences wait from now on.

        Raises RequestError (a field is out of range, the prompt is empty, a token is not in the
        vocabulary, the id is in use), ContextLengthError (both numbers in the message), QueueFullError
        (names --max-queued-requests) or EngineUnavailableError (failed or closed). Nothing is accepted then.
        """
        if self.failure is not None or self._closed:
            raise EngineUnavailableError("the engine has stopped" if self.failure is None
                                         else f"the engine has failed: {self.failure!r}")
        sampling = request.sampling
        sampling.check(self.vocab_size)
        if request.request_id in self._requests:
            raise RequestError(f"request_id {request.request_id!r} is in use by a request that has not ended",
                               param="request_id")
        self._check_length(len(request.prompt_tokens), sampling)
        request.check_marks()
        prompt = self._prompt_array(request.prompt_tokens)
        waiting = len(self.scheduler.waiting)
        if waiting + sampling.n > self.sizes.queue_max:
            self._counts["requests_refused"] += 1
            raise QueueFullError(
                f"{waiting} sequences are waiting and this request brings {sampling.n}; the limit is "
                f"{self.sizes.queue_max} (--max-queued-requests). Try again later, or raise the limit",
                param="--max-queued-requests", code="queue_full")
        guide = None if sampling.guide is None else self.guides.compile(sampling.guide)
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
                           guide=guide)
            self._next_seq += 1
            self._streams[seq.id] = _Stream(request.request_id, index, seq, rule, now)
            self._requests[request.request_id][index] = seq.id
            self.scheduler.submit(seq)

    def _check_length(self, prompt_tokens: int, sampling: SamplingParams) -> None:
        limit = self.sizes.max_model_len
        if prompt_tokens == 0:
            raise RequestError("the prompt is empty: it needs at least one token", param="prompt")
        least = max(sampling.min_tokens, 1) if sampling.max_tokens is None else sampling.max_tokens
        if prompt_tokens + least > limit:
            asked = "max_tokens" if sampling.max_tokens is not None else "min_tokens"
            named = sampling.max_tokens is not None or sampling.min_tokens > 0
            answer = f"{least} ({asked})" if named else f"at least {least}"
            raise ContextLengthError(
                f"the prompt has {prompt_tokens} tokens and the answer {answer}: {prompt_tokens + least} "
                f"in all; the longest context served is {limit} tokens (--max-model-len)",
                param="prompt" if prompt_tokens + 1 > limit else asked, code="context_length_exceeded")

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

    def cache_shape(self) -> CacheShape:
        """What the prefix cache holds, in sizes and uses. Between steps only, and not free: it looks at every
        node (``weft.memory.shape``)."""
        now = self._clock()
        return self.memory.cache_shape(lambda version: self._ages.seconds_since(version, now))

    def flush_cache(self) -> None:
        """Drop every prefix that no running sequence reads. Answers in progress go on unharmed. What has
        ended and is not closed yet goes with the next step, in which it is."""
        if self.failure is None and not self._closed:
            self.memory.flush()
            self._flush_due = self.scheduler.has_closing

    # ------------------------------------------------------------------ steps

    @property
    def has_work(self) -> bool:
        """Whether ``step`` has anything to do: sequences, memory to give back, or events to hand out."""
        return bool(self._outbox) or (self.failure is None and self.scheduler.has_work)

    @property
    def computed_tokens(self) -> int:
        """Tokens that went through the model since the start: cheaper than ``stats`` after each step."""
        return self._counts["computed_tokens"]

    def step(self) -> list[TokenEvent]:
        """One step; returns what it brought, in run order, after what was cancelled since the last one.
        Never raises for what a request or the executor did: see ``failure``. An interrupt (Ctrl-C) inside
        the step ends the engine too, and is raised on."""
        if self.failure is None and self.scheduler.has_work:
            try:
                self._run_step()
            except BaseException as error:
                # Also when interrupted: a step that is half done cannot be done again (states moved on).
                self._fail(error)
                if not isinstance(error, Exception):
                    raise
        events, self._outbox = self._outbox, []
        return events

    def _run_step(self) -> None:
        began_s = self._clock()
        plan = self.scheduler.plan()
        assert plan is not None
        self.scheduler.commit(plan)
        self._ages.note(self.memory.version, began_s)
        self._note_started(plan, began_s)
        result = self.executor.execute(plan)
        if self._flush_due:
            self.flush_cache()
        self._settle(plan, result)
        self._counts["steps"] += 1
        self._counts["computed_tokens"] += plan.token_count
        self._last_step = (plan.token_count, plan.decode_count, self._clock() - began_s)
        if self.on_step is not None:
            self.on_step(plan, self._last_step[2])

    def _note_started(self, plan: StepPlan, now: float) -> None:
        first_run = plan.run_count - len(plan.admissions)
        openings = plan.reservation.opened
        for run, (admission, opening) in enumerate(zip(plan.admissions, openings, strict=True), first_run):
            assert opening.seq == admission.seq
            stream = self._streams[admission.seq]
            if not stream.started:
                stream.started = True
                stream.lost = _told(opening.match.lost)
                stream.queued_s = now - stream.accepted_s
                stream.cached_tokens = int(plan.starts[run])
                self._counts["cached_tokens"] += stream.cached_tokens
        for seq in plan.preempted:
            stream = self._streams[seq]
            if stream.seq.prompt_logprobs_due:
                stream.prompt_logprobs = [None]  # its prompt is computed again from the start

    def _settle(self, plan: StepPlan, result: StepResult) -> None:
        self.scheduler.advance(plan, result.tokens)
        for run in plan.prompt_logprob_runs:
            self._add_prompt_logprobs(plan, run, result)
        streams, outbox = self._streams, self._outbox
        logprobs = result.logprobs
        generated = 0
        for run, (seq_id, token) in enumerate(zip(plan.seqs, result.tokens.tolist(), strict=True)):
            stream = streams.get(seq_id)
            if stream is None:
                continue  # cancelled while the step was in flight: what it computed is dropped
            if token == PAD:
                self._settle_unsampled(plan, run, stream)
                continue
            if run in result.failures:
                outbox.append(self._end(stream, [], "error", error=result.failures[run]))
                continue
            seq = stream.seq
            seq.generated.append(token)
            generated += 1
            reason = stream.rule.reason(token, len(seq.generated))
            token_logprobs = logprobs[run] if stream.wants_logprobs else None
            if reason is None:
                outbox.append(stream.event([token], logprobs=token_logprobs))
            else:
                outbox.append(self._end(stream, [token], reason, logprobs=token_logprobs))
        self._counts["generation_tokens"] += generated

    def _settle_unsampled(self, plan: StepPlan, run: int, stream: _Stream) -> None:
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

    def _end(self, stream: _Stream, tokens: list[int], reason: FinishReason, *,
             logprobs: TokenLogprobs | None = None, error: str | None = None) -> TokenEvent:
        """The one place where a sequence ends: its last event, and out of every table."""
        self.scheduler.finish(stream.seq)
        self._forget(stream)
        self._finished[reason] += 1
        return stream.event(tokens, logprobs=logprobs, finish_reason=reason, error=error)

    def _forget(self, stream: _Stream) -> None:
        del self._streams[stream.seq.id]
        live = self._requests[stream.request_id]
        del live[stream.index]
        if not live:
            del self._requests[stream.request_id]

    def _fail(self, error: BaseException) -> None:
        self.failure = error
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
            self.executor.close()
        events, self._outbox = self._outbox, []
        return events

    # ------------------------------------------------------------------ numbers

    def audit(self) -> None:
        """Recounts memory, rows and queues from their owners (law L1); AssertionError when they differ."""
        self.memory.audit()
        self.scheduler.audit()
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
            recomputed_tokens=self.scheduler.recomputed_tokens, finished=dict(self._finished))
