"""The table of metrics against the page that lists them, the terminal that shows them, and replicas."""

from __future__ import annotations

import ast
import inspect
import re
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest

from tests.server.test_page import FILES
from tests.unit.engine.rig import Rig
from weft.cli import top
from weft.memory.usage import StoreStats
from weft.schedule.tier_values import RestoreCounts, TierStats, WriteCounts
from weft.server.edge import EdgeLimits, HttpEdge
from weft.server.metrics import HISTOGRAMS, EngineReport, FleetReport, Metrics, _slot_share, combines

PAGE = Path(__file__).resolve().parents[2] / "docs" / "operating.md"


def names_of_the_page(text: str) -> set[str]:
    """Names of metrics in the tables below the heading Metrics; a label stands in braces."""
    section = text.split("\n## Metrics\n")[1].split("\n## ")[0]
    cells = [row.split("|")[2] for row in section.splitlines() if row.startswith("|")]
    return {name for cell in cells for name in re.findall(r"`([a-z][a-z0-9_]+)(?:\{[\w,]+\})?`", cell)}


def test_the_page_lists_every_metric_and_no_other() -> None:
    assert names_of_the_page(PAGE.read_text(encoding="utf-8")) == {*combines(), *HISTOGRAMS}


def test_a_name_that_no_metric_has_is_found_on_a_page() -> None:
    page = "\n## Metrics\n\n| of | names |\n|---|---|\n| a | `ranks`, `no_such_total{reason}` |\n\n## More\n"
    assert names_of_the_page(page) - {*combines(), *HISTOGRAMS} == {"no_such_total"}


def test_the_terminal_asks_for_metrics_that_there_are() -> None:
    asked = {
        node.value
        for node in ast.walk(ast.parse(inspect.getsource(top)))
        if isinstance(node, ast.Constant)
        and isinstance(node.value, str)
        and re.fullmatch(r"[a-z][a-z_]+_total|num_requests_\w+|store_\w+|spec_decode_\w+", node.value)
    }
    assert len(asked) > 15
    assert asked - {"store_busy"} <= set(combines())


def replica(number: int, *, path: str, writable: bool, stored_bytes: int = 0, host: str = "") -> EngineReport:
    store = StoreStats(
        path=path,
        writable=writable,
        snapshots=7,
        kv_records=8,
        stored_bytes=stored_bytes,
        capacity_bytes=1000,
        fetched_bytes=5,
    )
    tier = TierStats(RestoreCounts(), WriteCounts(), store, 0, 0)
    stats = msgspec.structs.replace(Rig(cache=True).core.stats(), store=tier)
    return EngineReport(number, True, 0, stats, host)


def read(*engines: EngineReport) -> top.Reading:
    metrics = Metrics("weft", HttpEdge(EdgeLimits()))
    metrics.of("small")
    return top.read_metrics(metrics.text([FleetReport("small", list(engines), 0, 0)]).decode(), 0.0)


@pytest.mark.parametrize("writer", [0, 1])
def test_a_store_that_replicas_share_is_counted_once(writer: int) -> None:
    engines = [
        replica(number, path="/s", writable=number == writer, stored_bytes=500 * (number == writer))
        for number in range(2)
    ]
    now = read(*engines)
    assert [now.values[name] for name in ("store_bytes", "store_capacity_bytes", "store_checkpoints")] == [500, 1000, 7]
    assert now.values["store_read_bytes_total"] == 10, "what each replica did adds up"
    assert "store_bytes" not in now.engines[str(1 - writer)]


def test_a_store_that_all_replicas_only_read_is_counted_once() -> None:
    now = read(*(replica(number, path="/s", writable=False) for number in range(3)))
    assert now.values["store_checkpoints"] == 7


def test_readers_of_one_path_on_two_machines_have_two_stores() -> None:
    now = read(
        *(
            replica(number, path="/s", writable=False, host=host)
            for number, host in enumerate(("", "", "b.lan", "c.lan", "c.lan"))
        )
    )
    assert now.values["store_checkpoints"] == 3 * 7


def test_the_page_combines_replicas_as_the_table_says() -> None:
    """What adds up is the default there; the page names what is a mean."""
    named = re.search(r"const MEANS = \[(.*?)\]", FILES["readings.js"], re.S)
    assert named is not None
    assert set(re.findall(r'"(\w+)"', named[1])) == {name for name, combine in combines().items() if combine == "mean"}


def test_stores_of_their_own_add_up() -> None:
    elsewhere = read(replica(0, path="/a", writable=True), replica(1, path="/b", writable=False))
    machines = read(replica(0, path="/s", writable=True), replica(1, path="/s", writable=True))
    assert elsewhere.values["store_checkpoints"] == machines.values["store_checkpoints"] == 14


@pytest.mark.parametrize("name", HISTOGRAMS)
def test_the_bounds_of_a_histogram_ascend(name: str) -> None:
    _, bounds = HISTOGRAMS[name]
    assert list(bounds) == sorted(set(bounds))
    assert bounds[0] > 0


def test_shares_of_replicas_do_not_add_up() -> None:
    rig = Rig(cache=True)
    rig.submit("r", list(range(70)), max_tokens=5)
    rig.core.step()
    engines = [EngineReport(number, True, 0, rig.core.stats()) for number in range(2)]
    one, two = read(engines[0]).values, read(*engines).values
    assert two["kv_cache_usage_perc"] == one["kv_cache_usage_perc"] > 0
    assert two["num_requests_running"] == 2


@pytest.mark.parametrize(("held", "cached", "available", "share"), [(3, 1, 1, 0.5), (4, 4, 0, 0.0), (0, 0, 0, 0.0)])
def test_the_share_of_states_in_use_leaves_out_those_that_are_cached(
    held: int, cached: int, available: int, share: float
) -> None:
    stats: Any = SimpleNamespace(
        memory=SimpleNamespace(slots_held=held, slots_cached=cached, slots_available=available)
    )
    assert _slot_share(stats) == share
