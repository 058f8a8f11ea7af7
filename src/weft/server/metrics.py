"""/metrics in Prometheus text: the rows of ``metric_table``, and what events say as they pass.

    from EngineStats, when scraped       gauges of now, counters since the start
    from events, as they pass            latency and size histograms, one observation per sequence or token
    from the fleet, when scraped         engines that are up, restarts, resumes
    from further HTTP processes          the series of each, added (``SummedSeries``)

The label ``engine`` is the number of the replica. What the HTTP process measures has the label 0. The
counters of an engine process begin at 0 with each process, as Prometheus expects of a restart.

With ``debug.metrics_prefix vllm`` published dashboards load as they are.

The registry is this object's, not the library's global one, so that two servers in one process (tests)
do not meet.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence

import prometheus_client
from prometheus_client import CollectorRegistry, Histogram
from prometheus_client.core import CounterMetricFamily, GaugeMetricFamily, Metric

from weft.request import SamplingParams, TokenEvent
from weft.server.edge import HttpEdge
from weft.server.metric_table import (
    EDGE,
    ENDED,
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
from weft.server.workers.messages import Series

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
        self._families = {
            name: Histogram(f"{prefix}:{name}", text, _LABELS, buckets=buckets, registry=self._registry)
            for name, (text, buckets) in HISTOGRAMS.items()}
        self._finished: dict[str, int] = {"stop": 0, "length": 0, "abort": 0}
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
        yield from self._rows((ENDED,), self._finished, _FIRST_ENGINE)
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


def series_of(registry: CollectorRegistry) -> Series:
    return [(family.name, family.type, family.documentation,
             [(sample.name, dict(sample.labels), float(sample.value)) for sample in family.samples])
            for family in registry.collect()]


class SummedSeries(CollectorRegistry):
    """``parts``, the series of each process, as one: samples with the same name and labels add up.

    Counters and the buckets of histograms add up by their meaning. The gauges of an HTTP process
    (connections, buffered bytes) are parts of a whole, so they add up too. Gauges of engines come from the
    supervisor alone.
    """

    def __init__(self, parts: Sequence[Series]) -> None:
        super().__init__()
        self._parts = parts

    def collect(self) -> Iterator[Metric]:
        families: dict[str, Metric] = {}
        totals: dict[str, dict[tuple[str, tuple[tuple[str, str], ...]], float]] = {}
        for name, kind, text, samples in (family for part in self._parts for family in part):
            families.setdefault(name, Metric(name, text, kind))
            sums = totals.setdefault(name, {})
            for sample, labels, value in samples:
                key = sample, tuple(labels.items())
                sums[key] = sums.get(key, 0.0) + value
        for name, family in families.items():
            for (sample, pairs), value in totals[name].items():
                family.add_sample(sample, dict(pairs), value)
            yield family
