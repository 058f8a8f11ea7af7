"""/metrics in Prometheus text: a table of rows, and observations of passing events.

    from EngineStats, when scraped       gauges of now, counters since the start
    from events, as they pass            latency and size histograms, one observation per sequence or token
    from the fleet, when scraped         engines that are up, restarts, resumes
    from HTTP workers                    files that prometheus_client reads and adds up

Every metric is one row: name, kind, help, the source of its number, how replicas add up. ``weft top`` reads the rows
too, and a test holds docs/operating.md against them. The label ``engine`` is the number of the replica; measurements of
the HTTP process have the label 0. With ``debug.metrics_prefix vllm`` published dashboards load.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from typing import Any, Generic, Literal, TypeVar

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram, ProcessCollector
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.engine.stats import EngineStats
from weft.memory.values import LOSS_REASONS
from weft.planning.residency import Resident
from weft.request import SamplingParams, TokenEvent
from weft.router.protocol import RouterCounts
from weft.schedule.tier_values import NO_TIER, TierStats
from weft.server.cache import memory_bytes
from weft.server.edge import HttpEdge
from weft.server.tracing import RequestTrace
from weft.version import weft_version

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_LABELS = ("model_name", "engine")
_METHODS = frozenset({"GET", "HEAD", "POST", "PUT", "PATCH", "DELETE", "OPTIONS"})
_FIRST_ENGINE = "0"
"""Label of measurements of the HTTP process, over all engines together."""


class SequenceTimes:
    """The clock of one sequence; readings of ``time.perf_counter``."""

    __slots__ = (
        "arrived_s",
        "cached_tokens",
        "finish_reason",
        "first_s",
        "last_s",
        "preemptions",
        "prompt_tokens",
        "queued_s",
    )

    def __init__(self, arrived_s: float, prompt_tokens: int) -> None:
        self.arrived_s = arrived_s
        self.prompt_tokens = prompt_tokens
        self.queued_s = 0.0
        self.first_s: float | None = None
        self.last_s = arrived_s
        self.finish_reason: str | None = None
        self.cached_tokens = 0
        self.preemptions = 0


def fold_counts(folder: str, pid: int) -> None:
    """Fold the counts of HTTP worker ``pid``, which has ended, into the files of all ended workers: else each death
    would leave two more files for every scrape to read. Counters and the buckets of histograms add up."""
    from prometheus_client.mmap_dict import MmapedDict

    files: Any = MmapedDict
    for file in sorted(Path(folder).glob(f"*_{pid}.db")):
        total = files(str(file.with_name(f"{file.name.split('_')[0]}_ended.db")))
        for key, value, _, _ in files.read_all_values_from_file(str(file)):
            total.write_value(key, total.read_value(key)[0] + value, 0.0)
        total.close()
        file.unlink()


class Metrics:
    """The metrics of one process. ``prefix`` has been checked by ``ServerConfig.check``."""

    def __init__(self, prefix: str, edge: HttpEdge) -> None:
        prometheus_client.disable_created_metrics()  # type: ignore[no-untyped-call]
        self._prefix = prefix
        self._edge = edge
        self._registry = CollectorRegistry()
        self._counters = {
            name: Counter(f"{prefix}:{name}", text, (*_LABELS, *labels), registry=self._registry)
            for name, (text, labels) in COUNTERS.items()
        }
        self._families = {
            name: Histogram(f"{prefix}:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in HISTOGRAMS.items()
        }
        edge.on_refusal = lambda code: self.count(self._first, "http_refusals", code)
        self._fleets: list[FleetReport] = []
        self._models: dict[str, ModelMetrics] = {}
        self._registry.register(self)
        if "PROMETHEUS_MULTIPROC_DIR" not in os.environ:  # only the process that serves /metrics has the engines
            ProcessCollector(registry=self._registry)

    @property
    def _first(self) -> str:
        """Label of measurements that belong to no model; empty until a model is served."""
        return next(iter(self._models), "")

    def of(self, model: str) -> ModelMetrics:
        """Return the metrics of the requests to a model; its series exist from now on."""
        known = self._models.get(model)
        if known is None:
            known = self._models[model] = ModelMetrics(
                {key: family.labels(model, _FIRST_ENGINE) for key, family in self._families.items()},
                functools.partial(self.count, model, "request_success"),
            )
        return known

    def text(self, fleets: list[FleetReport], workers_folder: str | None = None) -> bytes:
        """Return the text of /metrics. ``fleets``: a report of each model. ``workers_folder``: the files with the
        counts of HTTP workers, which are added to the counts of this process."""
        self._fleets = fleets
        if workers_folder is None:
            return prometheus_client.generate_latest(self._registry)
        from prometheus_client.multiprocess import MultiProcessCollector

        workers = MultiProcessCollector(None, workers_folder)  # type: ignore[no-untyped-call]
        return prometheus_client.generate_latest(SummedSeries([self._registry, workers]))

    def count(self, model: str, name: str, *labels: str, amount: int = 1) -> None:
        """Add ``amount`` to a row of COUNTERS; ``labels`` in the row's order."""
        self._counters[name].labels(model, _FIRST_ENGINE, *labels).inc(amount)

    def request_ended(self, trace: RequestTrace) -> None:
        """Count a request by its route, not by its path: a client could send any number of paths."""
        status = str(trace.status or "none")
        method = trace.method if trace.method in _METHODS else "other"
        self.count(self._first, "http_requests", trace.route, method, status)

    def steps_ran(self, model: str, engine: int, sizes: list[int]) -> None:
        if model:
            histogram = self._families["iteration_tokens_total"].labels(model, str(engine))
            for size in sizes:
                histogram.observe(size)

    # ------------------------------------------------------------------ the engine's numbers

    def collect(self) -> Iterator[Metric]:
        """Yield the families of engines; called by the registry. Series of several engines are one family."""
        families: dict[str, Metric] = {}
        for metric in self._all_metrics():
            family = families.setdefault(metric.name, metric)
            if family is not metric:
                family.samples += metric.samples
        yield from families.values()

    def _all_metrics(self) -> Iterator[Metric]:
        yield from self._rows(EDGE, self._edge, _FIRST_ENGINE)
        for fleet in self._fleets:
            yield from self._of_fleet(fleet)

    def _of_fleet(self, fleet: FleetReport) -> Iterator[Metric]:
        rows = functools.partial(self._rows, model=fleet.model)
        yield from rows(FLEET, fleet, _FIRST_ENGINE)
        if fleet.resident is not None:
            yield from rows(MODEL, fleet.resident, _FIRST_ENGINE)
        for engine in fleet.engines:
            number = str(engine.number)
            yield from rows(REPLICA, engine, number)
            if engine.stats is not None:
                shared = shares_a_store(engine, fleet.engines)
                yield from rows([row for row in ENGINE if not (shared and row.combine == "once")], engine.stats, number)
            if engine.number in fleet.router:
                yield from rows(ROUTER, fleet.router[engine.number], number)

    def _rows(
        self, rows: Sequence[Row[Source]], source: Source, engine: str, model: str | None = None
    ) -> Iterator[Metric]:
        model = self._first if model is None else model
        for row in rows:
            value = row.read(source)
            if value is None:
                continue
            kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            own = [row.label] if row.label else []
            family = kind(f"{self._prefix}:{row.name}", row.help, labels=[*_LABELS, *own])
            for label, number in value.items() if isinstance(value, Mapping) else (("", value),):
                family.add_metric([model, engine, label][: len(_LABELS) + len(own)], number)
            yield family


class ModelMetrics:
    """Metrics of the requests to one model, updated by their events. ``count_end`` takes a reason and an amount."""

    def __init__(self, histograms: dict[str, Histogram], count_end: Callable[..., None]) -> None:
        self._histograms = histograms
        self._ended = count_end
        for reason in ("stop", "length", "abort"):
            count_end(reason, amount=0)

    def request_came(self, sampling: SamplingParams) -> None:
        self._histograms["request_params_n"].observe(sampling.n)
        if sampling.max_tokens is not None:
            self._histograms["request_params_max_tokens"].observe(sampling.max_tokens)

    def event_came(self, times: SequenceTimes, event: TokenEvent, now: float) -> None:
        """Note an event. ``now``: when it arrived (``time.perf_counter``)."""
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
        self._ended(reason)
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


class SummedSeries(CollectorRegistry):
    """A registry that adds up samples of ``parts`` with the same name and labels, as counters and histograms allow. A
    gauge is in only one part."""

    def __init__(self, parts: Sequence[Collector]) -> None:
        super().__init__()
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for family in (family for part in self._parts for family in part.collect()):
            families.setdefault(family.name, Metric(family.name, family.documentation, family.type))
            sums = totals.setdefault(family.name, {})
            for sample in family.samples:
                key = sample.name, tuple(sorted(sample.labels.items()))
                sums[key] = sums.get(key, 0.0) + sample.value
        for name, family in families.items():
            for (sample_name, pairs), value in totals[name].items():
                family.add_sample(sample_name, dict(pairs), value)
            yield family


Source = TypeVar("Source")
STATES = ("awake", "weights_offloaded", "discard_all")
"""Values of the state of sleep: awake, level 1, level 2."""
Kind = Literal["counter", "gauge"]
Combine = Literal["sum", "mean", "once"]
"""Ways to combine the values of replicas: their sum; the mean of shares; the one value that the replicas share."""


@dataclass(frozen=True, slots=True)
class EngineReport:
    """One replica, as /metrics shows it. ``restarts``: processes after the first. ``host``: the joined machine; empty
    for the server's own."""

    number: int
    up: bool
    restarts: int
    stats: EngineStats | None
    host: str = ""


@dataclass(frozen=True, slots=True)
class FleetReport:
    """Figures of one model. ``resumes``: of requests; ``deadly``: requests that were refused because engines died while
    they computed them. ``resident``: the model's memory, on a server with several models."""

    model: str
    engines: list[EngineReport]
    resumes: int
    deadly: int
    router: dict[int, RouterCounts] = field(default_factory=dict)
    """Counters by replica; empty for a router that predicts nothing."""
    handoffs: int = 0
    resident: Resident | None = None
    budget: int | None = None
    """Bytes that the models of a server with several share."""
    sessions: tuple[int, int] | None = None
    """Count and bytes of the sessions of all models; only the report of the first model has them."""


@dataclass(frozen=True)
class Row(Generic[Source]):
    """A metric. ``read`` returns the number, or with a ``label`` a number for each value of the label; None: not shown
    now. ``combine``: how the numbers of replicas become one number."""

    name: str
    kind: Kind
    help: str
    read: Callable[[Source], float | Mapping[str, float] | None]
    label: str = ""
    combine: Combine = "sum"

    @property
    def sample_name(self) -> str:
        return f"{self.name}_total" if self.kind == "counter" else self.name


def _tier(stats: EngineStats) -> TierStats:
    return stats.store or NO_TIER


def _uses(stats: EngineStats) -> dict[str, int]:
    """Return bytes of the arena by use; empty for an engine that sleeps, which has freed the arena."""
    has_arena = "kv_cache" not in stats.sleep.missing
    return {use: size if has_arena else 0 for use, size in memory_bytes(stats.memory).items()}


def _arena_share(stats: EngineStats) -> float:
    """Return the share of the arena in use. Cached bytes can be evicted for running sequences, so they do not count as
    in use."""
    memory = stats.memory
    evictable = memory.evictable_bytes / memory.arena_bytes if memory.arena_bytes else 0.0
    return max(0.0, memory.used_share - evictable)


def _slot_share(stats: EngineStats) -> float:
    slots = stats.memory.slots_held + stats.memory.slots_available
    return (stats.memory.slots_held - stats.memory.slots_cached) / slots if slots else 0.0


def _lost(stats: EngineStats) -> dict[str, int]:
    """Return the lost tokens by reason. Without debug.count_salt the reason of other salts is not counted and left out:
    0 would be false."""
    return {
        reason: tokens
        for reason, tokens in asdict(stats.memory.cache.lost).items()
        if tokens or LOSS_REASONS[reason].is_common or (reason != "salt" and stats.store is not None)
    }


def _evictions(stats: EngineStats) -> dict[str, float]:
    counts = stats.memory.cache
    return {
        "state": counts.evicted_states - counts.evicted_tails,
        "tail": counts.evicted_tails,
        "page": counts.evicted_pages,
    }


def _writes(stats: EngineStats) -> dict[str, float]:
    writes = _tier(stats).writes
    return {"written": writes.written, "dropped": writes.dropped, "skipped": writes.skipped, "lost": writes.lost}


def _uploads(stats: EngineStats) -> dict[str, float]:
    remote = _tier(stats).store.remote
    return {"uploaded": remote.get("uploaded", 0), "lost": remote.get("lost_uploads", 0)}


COUNTERS: dict[str, tuple[str, tuple[str, ...]]] = {
    "request_success": ("Sequences that ended, by reason.", ("finished_reason",)),
    "http_refusals": ("Requests refused by a limit of the HTTP edge.", ("code",)),
    "session_saves": ("Sessions that were saved.", ()),
    "session_hits": ("Requests that continued a session.", ()),
    "session_restores": ("Sessions whose state was restored into memory.", ()),
    "decisions": ("Requests of decisions that were answered, by endpoint.", ("endpoint",)),
    "decision_questions": ("Questions in these requests.", ("endpoint",)),
    "decision_tokens": ("Prompt tokens of these questions: computed, or cached with the text.", ("endpoint", "source")),
    "http_requests": ("Requests that were answered, by path of the API and status.", ("route", "method", "status")),
}
"""Counters of HTTP processes: name, help and labels."""
EDGE = (
    Row[HttpEdge]("build_info", "gauge", "1 for the version of weft.", lambda edge: {weft_version(): 1}, "version"),
    Row[HttpEdge]("http_connections", "gauge", "Open connections.", lambda edge: edge.connection_count),
    Row[HttpEdge](
        "http_buffered_bytes", "gauge", "Bytes of bodies of unfinished requests.", lambda edge: edge.client_bytes
    ),
)
FLEET = (
    Row[FleetReport](
        "request_resumes", "counter", "Requests that another engine process took over.", lambda fleet: fleet.resumes
    ),
    Row[FleetReport](
        "request_handoffs",
        "counter",
        "Requests whose prompt and answer were computed by different engines.",
        lambda fleet: fleet.handoffs,
    ),
    Row[FleetReport](
        "request_deadly",
        "counter",
        "Requests refused because engines died while they computed them.",
        lambda fleet: fleet.deadly,
    ),
    Row[FleetReport](
        "sessions",
        "gauge",
        "Sessions that are kept.",
        lambda fleet: fleet.sessions and fleet.sessions[0],
        combine="once",
    ),
    Row[FleetReport](
        "session_bytes",
        "gauge",
        "Bytes of the tokens and messages of sessions.",
        lambda fleet: fleet.sessions and fleet.sessions[1],
        combine="once",
    ),
    Row[FleetReport](
        "model_memory_budget_bytes",
        "gauge",
        "With several models: the memory that they share.",
        lambda fleet: fleet.budget,
        combine="once",
    ),
)
REPLICA = (
    Row[EngineReport]("engine_up", "gauge", "1 while the engine process is alive and ready.", lambda engine: engine.up),
    Row[EngineReport](
        "engine_restarts", "counter", "Engine processes started after the first.", lambda engine: engine.restarts
    ),
)
MODEL = (
    Row[Resident]("model_loaded", "gauge", "With several models: 1 while this one is in memory.",
                  lambda model: model.state == "loaded"),
    Row[Resident]("model_memory_bytes", "gauge", "With several models: its share of the memory, while it "
                  "takes it.", lambda model: model.used_bytes),
    Row[Resident]("model_requests_waiting", "gauge", "Requests that wait for this model to be loaded.",
                  lambda model: model.waiting),
    Row[Resident]("model_loads", "counter", "How often this model was loaded.", lambda model: model.loads),
    Row[Resident]("model_unloads", "counter", "How often this model was unloaded, or its engines ended.",
                  lambda model: model.unloads),
)  # fmt: skip
E = Row[EngineStats]
ENGINE = (
    E("engine_sleep_state", "gauge", "1 for the state that the engine is in.",
      lambda s: {state: state == STATES[s.sleep.level] for state in STATES}, "sleep_state"),
    E("weights_updates", "counter", "How often the weights were replaced by others.", lambda s: s.weights.updates),
    E("weights_info", "gauge", "1 for the version and the digest of the weights that answer.",
      lambda s: {s.weights.version: 1}, "weight_version"),
    E("paused", "gauge", "1 while no step is computed (/pause).", lambda s: s.paused),
    E("num_requests_running", "gauge", "Sequences that run.", lambda s: s.running),
    E("num_requests_waiting", "gauge", "Sequences that wait.", lambda s: s.waiting),
    E("kv_cache_usage_perc", "gauge", "Share of the arena in use, 1 is all.", _arena_share, combine="mean"),
    E("state_cache_usage_perc", "gauge", "Share of state slots in use, 1 is all.", _slot_share,
      combine="mean"),
    E("prompt_tokens", "counter", "Prompt tokens of accepted requests.", lambda s: s.prompt_tokens),
    E("prompt_tokens_cached", "counter", "Prompt tokens found in the cache.", lambda s: s.cached_tokens),
    E("prefix_cache_queries", "counter", "Prompt tokens looked for in the cache.", lambda s: s.prompt_tokens),
    E("prefix_cache_hits", "counter", "Prompt tokens found in the cache.", lambda s: s.cached_tokens),
    E("prefix_cache_bytes", "gauge", "Bytes of cached pages and states.", lambda s: s.memory.cached_bytes),
    E("pinned_bytes", "gauge", "Bytes of cached states of sessions, and of their KV.", lambda s: s.memory.pinned_bytes),
    E("prefix_cache_state_bytes", "gauge", "Bytes of cached states.", lambda s: _uses(s)["cached_states"]),
    E("prefix_cache_states", "gauge", "States cached.",
      lambda s: s.memory.slots_cached + s.memory.states_compressed),
    E("prefix_cache_compressed_states", "gauge", "Cached states in 8 bits.", lambda s: s.memory.states_compressed),
    E("prefix_cache_compresses", "counter", "States that went into 8 bits.",
      lambda s: s.memory.cache.compressed),
    E("prefix_cache_restores", "counter", "Requests that began on a state in 8 bits.",
      lambda s: s.memory.cache.restored),
    E("prefix_cache_compressed_pages", "gauge", "Compressed KV, pages.", lambda s: s.memory.pages_compressed),
    E("prefix_cache_page_compresses", "counter", "Pages that were compressed.",
      lambda s: s.memory.cache.compressed_pages),
    E("prefix_cache_page_restores", "counter", "Pages of compressed KV that were read again.",
      lambda s: s.memory.cache.restored_pages),
    E("prefix_cache_inexact_hits", "counter", "Requests that began on a prefix that was in 8 bits once, or "
    "was computed after one.", lambda s: s.memory.cache.hits_inexact),
    E("memory_bytes", "gauge", "Bytes of the arena by use; they add up.", _uses, "use"),
    E("prefix_cache_lost_tokens", "counter", "Tokens that were cached in part and had to be computed.", _lost,
      "reason"),
    E("prefix_cache_evictions", "counter", "Evictions by kind: tails are states inside a page.",
      _evictions, "kind"),
    E("compaction_moves", "counter", "Pages and states moved to empty a frame.",
      lambda s: {"page": s.memory.moves.pages, "state": s.memory.moves.slots}, "kind"),
    E("compaction_bytes", "counter", "Bytes copied for such moves.", lambda s: s.memory.moves.bytes),
    E("frames_converted", "counter", "Frames that became the other kind, and were zeroed for it.",
      lambda s: s.memory.moves.frames_converted),
    E("store_bytes", "gauge", "Bytes of records in the store.", lambda s: _tier(s).store.stored_bytes,
      combine="once"),
    E("store_capacity_bytes", "gauge", "Most bytes of the store.", lambda s: _tier(s).store.capacity_bytes,
      combine="once"),
    E("store_checkpoints", "gauge", "Snapshots of this model in the store.",
      lambda s: _tier(s).store.snapshots, combine="once"),
    E("store_requests_waiting", "gauge", "Requests that wait for the store.", lambda s: _tier(s).waiting),
    E("store_buffer_bytes", "gauge", "Host memory between the arena and the store.",
      lambda s: _tier(s).buffer_bytes),
    E("store_restores", "counter", "Prefixes read from the store.", lambda s: _tier(s).restores.restores),
    E("store_restored_tokens", "counter", "Tokens of those prefixes.",
      lambda s: _tier(s).restores.restored_tokens),
    E("store_saved_seconds", "counter", "Estimated seconds of computing that restores saved.",
      lambda s: max(0.0, _tier(s).restores.saved_s)),
    E("store_late_restores", "counter", "Restores given up at their deadline.",
      lambda s: _tier(s).restores.late),
    E("store_damaged", "counter", "Prefixes whose stored bytes were wrong.",
      lambda s: _tier(s).restores.damaged),
    E("store_read_bytes", "counter", "Bytes read from the store.", lambda s: _tier(s).store.fetched_bytes),
    E("store_written_bytes", "counter", "Bytes written to the store.",
      lambda s: _tier(s).store.written_bytes),
    E("store_packing_bytes", "counter", "Bytes of records that went through packing.",
      lambda s: {"before": _tier(s).store.raw_bytes, "after": _tier(s).store.packed_bytes}, "side"),
    E("store_writes", "counter", "Snapshots that became candidates, by outcome.", _writes, "outcome"),
    E("store_uploads", "counter", "Uploads to the bucket, by outcome.", _uploads, "outcome"),
    E("store_uploads_waiting", "gauge", "Snapshots that wait for their upload to the bucket.",
      lambda s: _tier(s).store.remote.get("waiting_uploads", 0)),
    E("store_unreachable_seconds", "counter", "Seconds that the bucket did not answer.",
      lambda s: _tier(s).store.unreachable_s, combine="mean"),
    E("generation_tokens", "counter", "Tokens generated.", lambda s: s.generation_tokens),
    E("computed_tokens", "counter", "Tokens that went through the model.", lambda s: s.computed_tokens),
    E("recomputed_tokens", "counter", "Tokens computed again after preemption.",
      lambda s: s.recomputed_tokens),
    E("num_preemptions", "counter", "Sequences preempted.", lambda s: s.preemptions),
    E("spec_decode_num_drafts", "counter", "Verify runs that steps verified.",
      lambda s: s.speculation.sequence_steps),
    E("spec_decode_num_draft_tokens", "counter", "Draft tokens that steps verified.",
      lambda s: {source: source_stats.drafted for source, source_stats in s.speculation.sources.items()}, "source"),
    E("spec_decode_num_accepted_tokens", "counter", "Draft tokens that were right.",
      lambda s: {source: source_stats.accepted for source, source_stats in s.speculation.sources.items()}, "source"),
    E("handoff_sent_bytes", "counter", "Bytes of records that went to other engines.",
      lambda s: 0 if s.link is None else s.link.sent),
    E("handoff_received_bytes", "counter", "Bytes of records that came from other engines.",
      lambda s: 0 if s.link is None else s.link.received),
    E("handoff_failures", "counter", "Prompts whose records did not get to another engine.",
      lambda s: 0 if s.link is None else s.link.failed),
    E("pictures_encoded", "counter", "Pictures that the encoder computed.", lambda s: s.pictures.encoded),
    E("pictures_reused", "counter", "Pictures whose rows were cached.", lambda s: s.pictures.reused),
    E("pictures_dropped", "counter", "Pictures whose rows were evicted.", lambda s: s.pictures.dropped),
    E("picture_rows_bytes", "gauge", "Bytes of rows of pictures.", lambda s: s.pictures.bytes),
    E("picture_rows_budget_bytes", "gauge", "Bytes that they may take; 0: the model reads text only.",
      lambda s: s.pictures.budget),
    E("pictures_waiting", "gauge", "Sequences that wait for their pictures.", lambda s: s.pictures.waiting),
    E("spec_decode_steps", "counter", "Steps that verified drafts.", lambda s: s.speculation.steps),
    E("spec_decode_saved_seconds", "gauge", "Seconds that drafts saved, by the measured cost of steps; "
      "negative where they cost more.", lambda s: s.speculation.saved_s),
    E("lora_adapters", "gauge", "Adapters in memory.", lambda s: s.adapters.resident),
    E("lora_bytes", "gauge", "Bytes of their factors.", lambda s: s.adapters.held_bytes),
    E("lora_budget_bytes", "gauge", "Bytes that they may take (limits.lora_memory).",
      lambda s: s.adapters.budget_bytes),
    E("lora_loads", "counter", "Adapters read and kept.", lambda s: s.adapters.loads),
    E("lora_evictions", "counter", "Adapters that were evicted.", lambda s: s.adapters.evictions),
    E("graph_steps", "counter", "Steps of a GPU that CUDA graphs computed, and others by the reason.",
      lambda s: s.steps_by_form or None, "form"),
    E("ranks", "gauge", "Processes that compute the model together.", lambda s: s.ranks.size),
    E("rank_collective_seconds", "counter", "Seconds that rank 0 waited for other ranks.",
      lambda s: s.ranks.collective_s if s.ranks.size > 1 else None),
    E("expert_choices", "counter", "Times that tokens chose an expert, over all layers.",
      lambda s: {str(expert): count for expert, count in enumerate(s.ranks.expert_choices)} or None,
      "expert"),
    E("kv_event_batches", "counter", "Batches of KV events that were published.",
      lambda s: None if s.kv_events is None else s.kv_events.batches),
    E("kv_events", "counter", "KV events in them.", lambda s: None if s.kv_events is None else s.kv_events.events),
    E("kv_event_replays", "counter", "Replays that subscribers asked for.",
      lambda s: None if s.kv_events is None else s.kv_events.replays),
    E("kv_event_resets", "counter", "How often everything was published again, as a lost batch was kept no longer.",
      lambda s: None if s.kv_events is None else s.kv_events.resets),
    E("admission_rejections", "counter", "Requests turned away.",
      lambda s: {"queue_full": s.requests_refused}, "reason"),
)  # fmt: skip
ROUTER = (
    Row[RouterCounts]("router_predicted_tokens", "counter", "Cached tokens that the router expected of "
                      "requests.", lambda counts: counts.predicted_tokens),
    Row[RouterCounts]("router_cached_tokens", "counter", "Cached tokens that the engine had for these "
                      "requests.", lambda counts: counts.cached_tokens),
    Row[RouterCounts]("router_checkpoints", "gauge", "Snapshots that the router knows.",
                      lambda counts: counts.snapshots),
    Row[RouterCounts]("router_table_stale", "gauge", "1 while the table of snapshots waits for a report.",
                      lambda counts: counts.is_stale),
    Row[RouterCounts]("router_report_gaps", "counter", "How often reports of snapshots were lost.",
                      lambda counts: counts.gaps),
)  # fmt: skip

_TTFT = (
    0.001,
    0.005,
    0.01,
    0.02,
    0.04,
    0.06,
    0.08,
    0.1,
    0.25,
    0.5,
    0.75,
    1,
    2.5,
    5,
    7.5,
    10,
    20,
    40,
    80,
    160,
    640,
    2560,
)
_BETWEEN = (0.01, 0.025, 0.05, 0.075, 0.1, 0.15, 0.2, 0.3, 0.4, 0.5, 0.75, 1, 2.5, 5, 7.5, 10, 20, 40, 80)
_LATENCY = (0.3, 0.5, 0.8, 1, 1.5, 2, 2.5, 5, 10, 15, 20, 30, 40, 50, 60, 120, 240, 480, 960, 1920, 7680)
_TOKENS = tuple(digit * 10**power for power in range(6) for digit in (1, 2, 5))
_STEP_TOKENS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 2048, 4096, 8192, 16384)
_SMALL_COUNTS = (1, 2, 5, 10, 20)

HISTOGRAMS: dict[str, tuple[str, tuple[float, ...]]] = {
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
    "request_max_num_generation_tokens": ("Tokens of the longest of the n answers.", _TOKENS),
    "request_params_n": ("The n of requests.", _SMALL_COUNTS),
    "request_params_max_tokens": ("The max_tokens of requests that set it.", _TOKENS),
    "request_prefill_kv_computed_tokens": ("Prompt tokens computed, not found in the cache.", _TOKENS),
    "request_num_preemptions": ("How often a sequence was preempted.", _SMALL_COUNTS),
    "iteration_tokens_total": ("Tokens computed by one step.", _STEP_TOKENS),
}


def combines() -> dict[str, Combine]:
    """Return how the values of replicas combine, by the name of each gauge and counter in Prometheus text."""
    rows = {row.sample_name: row.combine for row in (*EDGE, *FLEET, *MODEL, *REPLICA, *ENGINE, *ROUTER)}
    return rows | dict.fromkeys((f"{name}_total" for name in COUNTERS), "sum")


def shares_a_store(engine: EngineReport, engines: list[EngineReport]) -> bool:
    """Return whether another replica already reports the directory of ``engine``'s store: the replica that writes
    there, or the first of those that only read. The same path on two machines is two directories."""
    if engine.stats is None or engine.stats.store is None or engine.stats.store.store.writable:
        return False
    alike = [
        other
        for other in engines
        if other.stats is not None
        and other.stats.store is not None
        and (other.host, other.stats.store.store.path) == (engine.host, engine.stats.store.store.path)
    ]
    writers = [other for other in alike if other.stats and other.stats.store and other.stats.store.store.writable]
    return (writers or alike)[0] is not engine
