"""The metrics of several HTTP processes as one: samples with the same name and labels add up.

    registry --series--> names, labels, values --ipc--> SummedSeries --> Prometheus text

Counters and the buckets of histograms add up by their meaning. The gauges of an HTTP process (connections,
buffered bytes) are parts of a whole, so they add up too. Gauges of engines come from the supervisor alone.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from prometheus_client import CollectorRegistry
from prometheus_client.core import Metric

from weft.server.workers.messages import Series


def series_of(registry: CollectorRegistry) -> Series:
    return [(family.name, family.type, family.documentation,
             [(sample.name, dict(sample.labels), float(sample.value)) for sample in family.samples])
            for family in registry.collect()]


class SummedSeries(CollectorRegistry):
    """``parts``: of each process."""

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
