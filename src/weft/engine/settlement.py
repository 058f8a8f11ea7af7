"""Settle, the last verb of a step: the tokens of a step become events, and sequences end.

    plan + StepResult --> for each run: append the token -> does it end the sequence? -> one TokenEvent
                      --> drafts of the model's own head, last: the device may compute them meanwhile

A sequence that ended while its step was in flight gets no event. The scheduler still learns the token
(``Scheduler.learn_late``): cached pages and states are indexed by exactly the tokens that they have seen.

A decode whose token changes nothing else is settled with all others like it (``decode_columns``).
"""

from __future__ import annotations

from weft.engine.decode_columns import DecodeColumns
from weft.engine.draft_feed import DraftFeed
from weft.engine.stats import EngineCounters
from weft.engine.streams import Stream, StreamTable
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.scheduler import Scheduler
from weft.units import PAD


class Settlement:
    """The last verb of a step: it makes events of ``streams`` from computed tokens. ``feed`` reports to the drafter;
    None without one."""

    def __init__(
        self, scheduler: Scheduler, streams: StreamTable, counters: EngineCounters, feed: DraftFeed | None = None
    ) -> None:
        self._scheduler = scheduler
        self._streams = streams
        self._counters = counters
        self._feed = feed
        self._columns: DecodeColumns | None = None
        """Columns of the decodes of the last step, if it had any."""

    def note_admissions(self, plan: StepPlan, now_s: float) -> None:
        """Note the queue time and the cached tokens of each sequence that the committed ``plan`` admits for the first
        time."""
        if plan.preempted:
            self._columns = None  # a step in flight may use these columns, which have counted that step
        first_run = plan.run_count - len(plan.admissions)
        openings = [opening for opening in plan.reservation.opened if not opening.loads]
        for run, (admission, opening) in enumerate(zip(plan.admissions, openings, strict=True), first_run):
            assert opening.seq == admission.seq
            stream = self._streams.by_seq[admission.seq]
            if not stream.started:
                # A sequence that resumes may find tokens of its answer in the cache too.
                cached = min(int(plan.starts[run]), stream.seq.prompt.size)
                stream.start(now_s, cached, opening.match.lost)
                self._counters.cached_tokens += stream.cached_tokens
                if self._feed is not None:
                    self._feed.admitted(stream.seq)

    def settle(self, plan: StepPlan, result: StepResult) -> None:
        """Make events for all that ``plan`` computed. The scheduler has advanced over it."""
        for seq_id in plan.preempted:
            stream = self._streams.by_seq.get(seq_id)
            if stream is not None:
                stream.restart_prompt()
        for run in plan.prompt_logprob_runs:
            self._add_prompt_logprobs(plan, run, result)
        for run in plan.pooled_runs:
            pooled_of = self._streams.by_seq.get(plan.seqs[run])
            if pooled_of is not None:
                pooled_of.add_pooled(result.pooled[run])
        feed = self._feed if self._feed is not None and self._feed.awake else None
        tokens = result.tokens.tolist()
        generated_count = self._settle_decodes(plan, tokens, result, feed)
        for run in range(plan.decode_count, plan.run_count):
            generated_count += self._settle_run(plan, run, tokens[run], result, feed)
        self._counters.generation_tokens += generated_count
        if self._feed is not None:
            self._feed.offer(plan, result.head())

    def _settle_decodes(self, plan: StepPlan, tokens: list[int], result: StepResult, feed: DraftFeed | None) -> int:
        """Settle the decodes. Returns the number of tokens that clients get, as the methods below do."""
        count = plan.decode_count
        if not count:
            self._columns = None
            return 0
        seqs = plan.seqs if count == plan.run_count else plan.seqs[:count]
        columns = self._columns
        if columns is None or not columns.fit(seqs):
            columns = self._columns = DecodeColumns(seqs, self._streams)
        chosen = tokens[:count]
        rare = columns.rare(chosen, (run for run in result.failures if run < count))
        generated_count, settled = count - len(rare), 0
        for run in (*rare, count):
            columns.settle(chosen, settled, run, self._streams.outbox)
            if feed is not None:
                for index, stream in columns.streams_of(settled, run):
                    feed.settled(stream.seq, [chosen[index]])
            if run < count:
                generated_count += self._settle_run(plan, run, chosen[run], result, feed)
            settled = run + 1
        return generated_count

    def _settle_run(self, plan: StepPlan, run: int, token: int, result: StepResult, feed: DraftFeed | None) -> int:
        """Settle one run; returns the number of tokens that clients get."""
        stream = self._streams.by_seq.get(plan.seqs[run])
        if stream is None or token == PAD or run in result.verified or run in result.failures:
            return self._settle_rare(plan, run, stream, token, result)
        stream.generated.append(token)
        if feed is not None:
            feed.settled(stream.seq, [token])
        reason = stream.rule.reason(token, len(stream.generated))
        logprobs = [result.logprobs[run]] if stream.wants_logprobs else None
        if reason is None:
            self._streams.outbox.append(stream.event([token], logprobs=logprobs))
        else:
            self._streams.end(stream, [token], reason, logprobs=logprobs)
        return 1

    def _settle_rare(self, plan: StepPlan, run: int, stream: Stream | None, token: int, result: StepResult) -> int:
        """Settle a run that did not choose one token for a live stream; returns the number of tokens that clients
        get."""
        if run in result.verified:
            return self._settle_verify_run(plan, run, stream, result)
        if stream is None:  # the sequence ended while the step was in flight: no event
            if token != PAD:
                self._scheduler.learn_late(plan, run, token)
        elif token == PAD:
            self._settle_unsampled(plan, run, stream)
        else:
            stream.generated.append(token)
            self._streams.end(stream, [], "error", error=result.failures[run], own_fault=True)
        return 0

    def _settle_verify_run(self, plan: StepPlan, run: int, stream: Stream | None, result: StepResult) -> int:
        """Settle the tokens of a verify run, one by one. Drafts hold no end of an answer, so only the last token may
        end it."""
        tokens = list(result.verified[run])
        if stream is None:
            for token in tokens:
                self._scheduler.learn_late(plan, run, token)
            return 0
        reason = None
        for token in tokens:
            assert reason is None, f"step {plan.step} run {run}: a draft after the end of its answer"
            stream.generated.append(token)
            reason = stream.rule.reason(token, len(stream.generated))
        failure = result.failures.get(run)
        if self._feed is not None:
            self._feed.settled(stream.seq, tokens, drafted=int(plan.lengths[run]) - 1)
        if failure is not None:
            tokens.pop()  # a token that the grammar does not allow does not belong to the answer
        logprobs = result.verified_logprobs[run][: len(tokens)] if stream.wants_logprobs else None
        if failure is not None:
            self._streams.end(stream, tokens, "error", logprobs=logprobs, error=failure, own_fault=True)
        elif reason is None:
            self._streams.outbox.append(stream.event(tokens, logprobs=logprobs))
        else:
            self._streams.end(stream, tokens, reason, logprobs=logprobs)
        return len(tokens)

    def _settle_unsampled(self, plan: StepPlan, run: int, stream: Stream) -> None:
        """Settle a run without a token: a chunk inside a prefill, or the end of a prompt whose request asked for no
        token, which ends the sequence."""
        assert not plan.samples[run], f"run {run} of step {plan.step} had to choose a token and did not"
        seq = stream.seq
        if not seq.samples and plan.starts[run] + plan.lengths[run] == seq.known_count:
            self._streams.end(stream, [], "length")

    def _add_prompt_logprobs(self, plan: StepPlan, run: int, result: StepResult) -> None:
        stream = self._streams.by_seq.get(plan.seqs[run])
        if stream is None:
            return
        assert stream.prompt_logprobs is not None
        stream.prompt_logprobs += result.prompt_logprobs.get(run, [])
        if plan.starts[run] + plan.lengths[run] == stream.seq.prompt.size:
            assert len(stream.prompt_logprobs) == stream.seq.prompt.size, "one entry for each prompt token"
            stream.seq.prompt_logprobs_due = False
