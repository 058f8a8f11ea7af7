"""/metrics in Prometheus text, with the field's names, labels and buckets behind a prefix of our own.

    from EngineStats, when scraped       gauges of now, counters since the start
    from events, as they pass            latency and size histograms, one observation per sequence or token
    from the fleet, when scraped         engines that are up, restarts, resumes

The label ``engine`` is the number of the replica. What the HTTP process measures has the label 0. The
counters of an engine process begin at 0 with each process, as Prometheus expects of a restart.

With ``debug.metrics_prefix vllm`` published dashboards load as they are. ``kv_cache_usage_perc`` is the share
of the whole arena in use, which is what "full" means where pages and states share one memory;
``state_cache_usage_perc`` is the share of state slots. Cached bytes give way to running sequences, so they
are not in use.

The registry is this object's, not the library's global one, so that two servers in one process (tests)
do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weft.engine.stats import EngineStats
from weft.memory.usage import MemoryUsage
from weft.request import SamplingParams, TokenEvent
from weft.router.protocol import RouterCounts
from weft.schedule.tier_values import NO_TIER, TierStats
from weft.server.cache import memory_bytes
from weft.server.edge import HttpEdge
from weft.server.metrics_sum import SummedSeries, series_of
from weft.server.sleep import STATES, state_name
from weft.server.workers.messages import Series
from weft.speculation.stats import SpeculationStats

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_LABELS = ("model_name", "engine")
_FIRST_ENGINE = "0"
"""The label of what the HTTP process measures for all engines together."""
_TTFT = (.001, .005, .01, .02, .04, .06, .08, .1, .25, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80, 160, 640,
         2560)
_BETWEEN = (.01, .025, .05, .075, .1, .15, .2, .3, .4, .5, .75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (.3, .5, .8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SMALL_COUNTS = (1, 2, 5, 10, 20)

_HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
    "time_to_first_token_seconds": ("From arrival to the first token.", _TTFT),
    "inter_token_latency_seconds": ("Between two tokens of one sequence.", _BETWEEN),
    "request_time_per_output_token_seconds": ("Mean time per token after the first.", _BETWEEN),
    "e2e_request_latency_seconds": ("From arrival to the last token.", _LATENCY),
    "request_queue_time_seconds": ("From acceptance to the first step.", _LATENCY),
    "request_prefill_time_seconds": ("From the first step to the first token.", _LATENCY),
    "request_decode_time_seconds": ("From the first token to the last.", _LATENCY),
    "request_inference_time_seconds": ("From the first step to the last token.", _LATENCY),
    "request_prompt_tokens": ("Tokens of the prompt.", _TOKENS),
    "request_generation_tokens": ("Tokens generated.", _TOKENS),
    "request_max_num_generation_tokens": ("Tokens the longest of the n answers has.", _TOKENS),
    "request_params_n": ("The n of requests.", _SMALL_COUNTS),
    "request_params_max_tokens": ("The max_tokens of requests that set it.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed, not found in the cache.", _TOKENS),
    "request_num_preemptions": ("How often a sequence was preempted.", _SMALL_COUNTS),
    "iteration_tokens_total": ("Tokens computed by one step.", _STEP_TOKENS),
}


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One replica, as /metrics shows it. ``restarts``: processes after its first."""

    number: int
    up: bool
    restarts: int
    stats: EngineStats | None


@dataclass(frozen=True, slots=True)
class FleetReport:
    """``resumes`` of requests; ``deadly``: requests that were refused because engines died of them."""

    engines: list[EngineReport]
    resumes: int
    deadly: int
    router: dict[int, RouterCounts] = field(default_factory=dict)
    """By replica; empty for a router that predicts nothing."""


class SequenceTimes:
    """The clock of one sequence; readings of ``time.perf_counter``."""

    __slots__ = ("arrived_s", "cached_tokens", "finish_reason", "first_s", "last_s", "preemptions",
                 "prompt_tokens", "queued_s")

    def __init__(self, arrived_s: float, prompt_tokens: int) -> None:
        self.arrived_s = arrived_s
        self.prompt_tokens = prompt_tokens
        self.queued_s = 0.0
        self.first_s: float | None = None
        self.last_s = arrived_s
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.preemptions = 0


class Metrics:
    """``prefix`` has been checked by ``ServerConfig.check``."""

    def __init__(self, prefix: str, edge: HttpEdge) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._prefix = prefix
        self._edge = edge
        self._registry = CollectorRegistry()
        self._families = {
            name: Histogram(f"{prefix}:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in _HISTOGRAMS.items()}
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
        self._engine = _FIRST_ENGINE
        self._fleet: FleetReport | None = None
        self.name_model("")
        self._registry.register(self)

    def name_model(self, name: str) -> None:
        """Until a model is served, series carry an empty name and nothing is observed."""
        self._model = name
        if name:
            self._histograms = {key: family.labels(name, _FIRST_ENGINE)
                                for key, family in self._families.items()}

    def text(self, fleet: FleetReport, others: Sequence[Series] = ()) -> bytes:
        """``others``: the series of further HTTP processes, which are added."""
        self._fleet = fleet
        if not others:
            return prometheus_client.generate_latest(self._registry)
        return prometheus_client.generate_latest(SummedSeries([series_of(self._registry), *others]))

    def series(self) -> Series:
        """What this process measured."""
        return series_of(self._registry)

    # ------------------------------------------------------------------ observations

    def request_came(self, sampling: SamplingParams) -> None:
        self._histograms["request_params_n"].observe(sampling.n)
        if sampling.max_tokens is not None:
            self._histograms["request_params_max_tokens"].observe(sampling.max_tokens)

    def steps_ran(self, engine: int, sizes: list[int]) -> None:
        if self._model:
            histogram = self._families["iteration_tokens_total"].labels(self._model, str(engine))
            for size in sizes:
                histogram.observe(size)

    def event_came(self, times: SequenceTimes, event: TokenEvent, now: float) -> None:
        """``now``: when it arrived (``time.perf_counter``)."""
        if event.queued_s is not None:
            times.queued_s = event.queued_s
        times.cached_tokens = max(times.cached_tokens, event.cached_tokens)
        times.preemptions = max(times.preemptions, event.preemptions)
        if not event.tokens:
            return
        if times.first_s is None:
            times.first_s = now
            self._histograms["time_to_first_token_seconds"].observe(now - times.arrived_s)
        else:
            between_s = (now - times.last_s) / len(event.tokens)
            for _ in event.tokens:
                self._histograms["inter_token_latency_seconds"].observe(between_s)
        times.last_s = now

    def sequence_ended(self, times: SequenceTimes, reason: str, generated_tokens: int) -> None:
        times.finish_reason = reason
        self._finished[reason] = self._finished.get(reason, 0) + 1
        if reason == "abort":
            return
        seen = self._histograms
        first_s = times.last_s if times.first_s is None else times.first_s
        began_s = min(times.arrived_s + times.queued_s, first_s)
        seen["e2e_request_latency_seconds"].observe(times.last_s - times.arrived_s)
        seen["request_queue_time_seconds"].observe(times.queued_s)
        seen["request_prefill_time_seconds"].observe(first_s - began_s)
        seen["request_decode_time_seconds"].observe(times.last_s - first_s)
        seen["request_inference_time_seconds"].observe(times.last_s - began_s)
        if generated_tokens > 1:
            per_token_s = (times.last_s - first_s) / (generated_tokens - 1)
            seen["request_time_per_output_token_seconds"].observe(per_token_s)
        seen["request_prompt_tokens"].observe(times.prompt_tokens)
        seen["request_generation_tokens"].observe(generated_tokens)
        seen["request_prefill_kv_computed_tokens"].observe(times.prompt_tokens - times.cached_tokens)
        seen["request_num_preemptions"].observe(times.preemptions)

    def request_ended(self, longest_answer_tokens: int) -> None:
        self._histograms["request_max_num_generation_tokens"].observe(longest_answer_tokens)

    # ------------------------------------------------------------------ the engine's numbers

    def collect(self) -> Iterator[Metric]:
        """Called by the registry. Series of several engines are one family."""
        families: dict[str, Metric] = {}
        for metric in self._all_metrics():
            family = families.setdefault(metric.name, metric)
            if family is not metric:
                family.samples += metric.samples
        yield from families.values()

    def _all_metrics(self) -> Iterator[Metric]:
        self._engine = _FIRST_ENGINE
        yield self._by("request_success", "Sequences that ended, by reason.", "finished_reason",
                       self._finished)
        edge = self._edge
        yield self._gauge("http_connections", "Open connections.", edge.connection_count)
        yield self._gauge("http_buffered_bytes", "Bytes of bodies of unfinished requests.",
                          edge.own_buffered_bytes)
        yield self._by("http_refusals", "Requests refused by a limit of the HTTP edge.", "code",
                       dict(edge.refusals))
        fleet = self._fleet
        if fleet is None:
            return
        yield self._counter("request_resumes", "Requests that another engine process took over.",
                            fleet.resumes)
        yield self._counter("request_deadly", "Requests refused because engines died of them.", fleet.deadly)
        for engine in fleet.engines:
            self._engine = str(engine.number)
            yield self._gauge("engine_up", "1 while the engine process is alive and ready.", float(engine.up))
            yield self._counter("engine_restarts", "Engine processes started after the first.",
                                engine.restarts)
            if engine.stats is not None:
                yield from self._of_engine(engine.stats)
            if engine.number in fleet.router:
                yield from self._of_router(fleet.router[engine.number])

    def _of_engine(self, stats: EngineStats) -> Iterator[Metric]:
        memory = stats.memory
        now = state_name(stats.sleep)
        yield self._gauges("engine_sleep_state", "1 for the one that it is in.", "sleep_state",
                           {state: int(state == now) for state in STATES})
        slots = memory.slots_held + memory.slots_available
        yield self._gauge("num_requests_running", "Sequences that run.", stats.running)
        yield self._gauge("num_requests_waiting", "Sequences that wait.", stats.waiting)
        evictable = memory.evictable_bytes / memory.arena_bytes if memory.arena_bytes else 0.0
        yield self._gauge("kv_cache_usage_perc", "Share of the arena in use, 1 is all.",
                          max(0.0, memory.used_share - evictable))
        yield self._gauge("state_cache_usage_perc", "Share of state slots in use, 1 is all.",
                          (memory.slots_held - memory.slots_cached) / slots if slots else 0.0)
        yield self._counter("prompt_tokens", "Prompt tokens of accepted requests.", stats.prompt_tokens)
        yield self._counter("prompt_tokens_cached", "Prompt tokens found in the cache.", stats.cached_tokens)
        yield self._counter("prefix_cache_queries", "Prompt tokens looked for in the cache.",
                            stats.prompt_tokens)
        yield self._counter("prefix_cache_hits", "Prompt tokens found in the cache.", stats.cached_tokens)
        yield from self._cache(memory, has_arena="kv_cache" not in stats.sleep.missing,
                               has_store=stats.store is not None)
        yield from self._store(stats.store or NO_TIER)
        yield self._counter("generation_tokens", "Tokens generated.", stats.generation_tokens)
        yield self._counter("computed_tokens", "Tokens that went through the model.", stats.computed_tokens)
        yield self._counter("recomputed_tokens", "Tokens computed again after preemption.",
                            stats.recomputed_tokens)
        yield self._counter("num_preemptions", "Sequences preempted.", stats.preemptions)
        yield from self._speculation(stats.speculation)
        ranks = stats.ranks
        yield self._gauge("ranks", "Processes that compute the model together.", ranks.size)
        if ranks.size > 1:
            yield self._counter("rank_collective_seconds", "Seconds that rank 0 waited for other ranks.",
                                ranks.collective_s)
        if ranks.expert_choices:
            yield self._by("expert_choices", "Choices of experts by tokens, over all layers.", "expert",
                           {str(expert): count for expert, count in enumerate(ranks.expert_choices)})
        yield self._by("admission_rejections", "Requests turned away.", "reason",
                       {"queue_full": stats.requests_refused})

    def _of_router(self, counts: RouterCounts) -> Iterator[Metric]:
        yield self._counter("router_predicted_tokens", "Cached tokens that the router expected of requests.",
                            counts.predicted_tokens)
        yield self._counter("router_cached_tokens", "Cached tokens that the engine had for these requests.",
                            counts.cached_tokens)
        yield self._gauge("router_checkpoints", "Checkpoints that the router knows.", counts.checkpoints)
        yield self._gauge("router_table_stale", "1 while its table of checkpoints waits for a snapshot.",
                          float(counts.is_stale))
        yield self._counter("router_report_gaps", "How often reports of checkpoints were lost.", counts.gaps)

    def _store(self, tier: TierStats) -> Iterator[Metric]:
        restores, writes, store = tier.restores, tier.writes, tier.store
        yield self._gauge("store_bytes", "Bytes of records in the store.", store.stored_bytes)
        yield self._gauge("store_capacity_bytes", "Most bytes of the store.", store.capacity_bytes)
        yield self._gauge("store_checkpoints", "Checkpoints of this model in the store.", store.checkpoints)
        yield self._gauge("store_requests_waiting", "Requests that wait for the store.", tier.waiting)
        yield self._gauge("store_buffer_bytes", "Host memory between the arena and the store.",
                          tier.buffer_bytes)
        yield self._counter("store_restores", "Prefixes read from the store.", restores.restores)
        yield self._counter("store_restored_tokens", "Tokens of those prefixes.", restores.restored_tokens)
        yield self._counter("store_saved_seconds", "Estimated seconds of computing that restores saved.",
                            max(0.0, restores.saved_s))
        yield self._counter("store_late_restores", "Restores given up at their deadline.", restores.late)
        yield self._counter("store_damaged", "Prefixes whose stored bytes were wrong.", restores.damaged)
        yield self._counter("store_read_bytes", "Bytes read from the store.", store.fetched_bytes)
        yield self._counter("store_written_bytes", "Bytes written to the store.", store.written_bytes)
        yield self._by("store_packing_bytes", "Bytes of records that went through packing.", "side",
                       {"before": store.raw_bytes, "after": store.packed_bytes})
        yield self._by("store_writes", "Checkpoints that became candidates, by outcome.", "outcome",
                       {"written": writes.written, "dropped": writes.dropped, "skipped": writes.skipped,
                        "lost": writes.lost})

    def _cache(self, memory: MemoryUsage, *, has_arena: bool, has_store: bool) -> Iterator[Metric]:
        counts = memory.cache
        used = {use: size if has_arena else 0 for use, size in memory_bytes(memory).items()}
        yield self._gauge("prefix_cache_bytes", "Bytes of cached pages and states.", memory.cached_bytes)
        yield self._gauge("prefix_cache_state_bytes", "Of them, states.", used["cached_states"])
        yield self._gauge("prefix_cache_states", "States cached.",
                          memory.slots_cached + memory.states_compressed)
        yield self._gauge("prefix_cache_compressed_states", "Of them, in 8 bits.", memory.states_compressed)
        yield self._counter("prefix_cache_compresses", "States that went into 8 bits.", counts.compressed)
        yield self._counter("prefix_cache_restores", "Requests that began on one of those.", counts.restored)
        yield self._gauge("prefix_cache_compressed_pages", "Compressed KV, pages.", memory.pages_compressed)
        yield self._counter("prefix_cache_page_compresses", "Pages that were compressed.",
                            counts.compressed_pages)
        yield self._counter("prefix_cache_page_restores", "Of them, those read again.", counts.restored_pages)
        yield self._counter("prefix_cache_inexact_hits", "Requests that began on what was in 8 bits once, "
                            "or was computed behind it.", counts.hits_inexact)
        yield self._gauges("memory_bytes", "Bytes of the arena by use; they add up.", "use", used)
        lost = {"no_checkpoint": counts.lost_no_checkpoint, "evicted_state": counts.lost_evicted_state,
                "evicted_kv": counts.lost_evicted_kv, "not_ready": counts.lost_not_ready}
        if counts.lost_salt:  # not looked for without debug.count_salt, and 0 would say that there is none
            lost["salt"] = counts.lost_salt
        if has_store:
            lost |= {"stored": counts.lost_stored, "damaged": counts.lost_damaged,
                     "store_busy": counts.lost_store_busy}
        yield self._by("prefix_cache_lost_tokens", "Tokens that were cached in part and had to be computed.",
                       "reason", lost)
        yield self._by("prefix_cache_evictions", "What gave way to others: tails are states inside a page.",
                       "kind", {"state": counts.evicted_states - counts.evicted_tails,
                                "tail": counts.evicted_tails, "page": counts.evicted_pages})
        moves = memory.moves
        yield self._by("compaction_moves", "Pages and states moved to empty a frame.", "kind",
                       {"page": moves.pages, "state": moves.slots})
        yield self._counter("compaction_bytes", "Bytes copied for such moves.", moves.bytes)
        yield self._counter("frames_converted", "Frames that became the other kind, and were zeroed for it.",
                            moves.frames_converted)

    def _speculation(self, stats: SpeculationStats) -> Iterator[Metric]:
        """The field's names, by source where it has one sum."""
        counts = stats.sources
        yield self._counter("spec_decode_num_drafts", "Windows of drafts that steps verified.",
                            stats.sequence_steps)
        yield self._by("spec_decode_num_draft_tokens", "Draft tokens that steps verified.", "source",
                       {source: one.drafted for source, one in counts.items()})
        yield self._by("spec_decode_num_accepted_tokens", "Draft tokens that were right.", "source",
                       {source: one.accepted for source, one in counts.items()})
        yield self._counter("spec_decode_steps", "Steps that verified drafts.", stats.steps)
        yield self._gauge("spec_decode_saved_seconds", "Seconds that drafts saved, by the measured cost of "
                          "steps; negative where they cost more.", stats.saved_s)

    def _gauge(self, name: str, text: str, value: float) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        family.add_metric((self._model, self._engine), value)
        return family

    def _gauges(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = GaugeMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, label))
        for value, size in values.items():
            family.add_metric((self._model, self._engine, value), size)
        return family

    def _by(self, name: str, text: str, label: str, values: dict[str, int]) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=(*_LABELS, label))
        for value, count in values.items():
            family.add_metric((self._model, self._engine, value), count)
        return family

    def _counter(self, name: str, text: str, value: float) -> Metric:
        family = CounterMetricFamily(f"{self._prefix}:{name}", text, labels=_LABELS)
        family.add_metric((self._model, self._engine), value)
        return family
