"""/metrics in Prometheus text: the rows of ``metric_table``, and what events say as they pass.

    from EngineStats, when scraped       gauges of now, counters since the start
    from events, as they pass            latency and size histograms, one observation per sequence or token
    from the fleet, when scraped         engines that are up, restarts, resumes
    from HTTP workers                    files that prometheus_client reads and adds up

The label ``engine`` is the number of the replica. What the HTTP process measures has the label 0. The
counters of an engine process begin at 0 with each process, as Prometheus expects of a restart.

With ``debug.metrics_prefix vllm`` published dashboards load as they are.

The registry is this object's, not the library's global one, so that two servers in one process (tests)
do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Counter, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric
from prometheus_client.registry import Collector

from weft.request import SamplingParams, TokenEvent
from weft.server.edge import HttpEdge
from weft.server.metric_table import (
    COUNTERS,
    EDGE,
    ENGINE,
    FLEET,
    HISTOGRAMS,
    REPLICA,
    ROUTER,
    FleetReport,
    Row,
    Source,
    shares_a_store,
)

CONTENT_TYPE = prometheus_client.CONTENT_TYPE_LATEST
_LABELS = ("model_name", "engine")
_FIRST_ENGINE = "0"
"""The label of what the HTTP process measures for all engines together."""


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
        self._counters = {name: Counter(f"{prefix}:{name}", text, (*_LABELS, label), registry=self._registry)
                          for name, (text, label) in COUNTERS.items()}
        self._families = {
            name: Histogram(f"{prefix}:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in HISTOGRAMS.items()}
        edge.on_refusal = lambda code: self._count("http_refusals", code)
        self._fleet: FleetReport | None = None
        self.name_model("")
        self._registry.register(self)

    def name_model(self, name: str) -> None:
        """Until a model is served, series carry an empty name and nothing is observed."""
        self._model = name
        if name:
            self._histograms = {key: family.labels(name, _FIRST_ENGINE)
                                for key, family in self._families.items()}
            for reason in ("stop", "length", "abort"):
                self._count("request_success", reason, 0)

    def text(self, fleet: FleetReport, workers_folder: str | None = None) -> bytes:
        """``workers_folder``: where HTTP workers count, which adds to what this process has."""
        self._fleet = fleet
        if workers_folder is None:
            return prometheus_client.generate_latest(self._registry)
        from prometheus_client.multiprocess import MultiProcessCollector

        workers = MultiProcessCollector(None, workers_folder)  # type: ignore[no-untyped-call]
        return prometheus_client.generate_latest(SummedSeries([self._registry, workers]))

    def _count(self, name: str, label: str, amount: int = 1) -> None:
        self._counters[name].labels(self._model, _FIRST_ENGINE, label).inc(amount)

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
        self._count("request_success", reason)
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
        yield from self._rows(EDGE, self._edge, _FIRST_ENGINE)
        fleet = self._fleet
        if fleet is None:
            return
        yield from self._rows(FLEET, fleet, _FIRST_ENGINE)
        for engine in fleet.engines:
            number = str(engine.number)
            yield from self._rows(REPLICA, engine, number)
            if engine.stats is not None:
                shared = shares_a_store(engine, fleet.engines)
                yield from self._rows([row for row in ENGINE if not (shared and row.combine == "once")],
                                      engine.stats, number)
            if engine.number in fleet.router:
                yield from self._rows(ROUTER, fleet.router[engine.number], number)

    def _rows(self, rows: Sequence[Row[Source]], source: Source, engine: str) -> Iterator[Metric]:
        for row in rows:
            value = row.read(source)
            if value is None:
                continue
            kind = CounterMetricFamily if row.kind == "counter" else GaugeMetricFamily
            own = [row.label] if row.label else []
            family = kind(f"{self._prefix}:{row.name}", row.help, labels=[*_LABELS, *own])
            for label, number in value.items() if isinstance(value, Mapping) else (("", value),):
                family.add_metric([self._model, engine, label][:len(_LABELS) + len(own)], number)
            yield family


class SummedSeries(CollectorRegistry):
    """Samples of ``parts`` with the same name and labels add up: counters and histograms by their meaning.
    A gauge is in one part alone."""

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
