"""What ``weft top`` makes of two readings; with a server: tests/server/test_prefix_cache.py."""

from __future__ import annotations

import dataclasses
from types import SimpleNamespace
from typing import Any

import pytest
from rich.console import Console

from tests.unit.engine.rig import Rig
from weft.cli.top import Reading, frame, look, read_metrics
from weft.errors import UserError
from weft.server.edge import EdgeLimits, HttpEdge
from weft.server.metrics import EngineReport, FleetReport, Metrics

PREFIX: dict[str, Any] = {
    "label": "5f0c1e2d",
    "tokens": 4096,
    "hits": 17,
    "branches": 3,
    "readers": 2,
    "snapshot": True,
    "age_s": 130.0,
    "salt": 1,
}
CACHE = {"nodes": 12, "states": 7, "tree": {"prefixes": [PREFIX], "salt_count": 2}}


def reading(at_s: float, requests: int, *, prefix: str = "weft", alive: bool = True, engine_count: int = 1) -> Reading:
    return read_metrics(metrics(requests, prefix=prefix, alive=alive, engine_count=engine_count), at_s)


def metrics(requests: int, *, prefix: str = "weft", alive: bool = True, engine_count: int = 1) -> str:
    """After so many equal requests, the first of which computes and the others find."""
    rig = Rig(cache=True)
    for number in range(requests):
        rig.submit(f"r{number}", list(range(70)), max_tokens=5)
        rig.run()
    table = Metrics(prefix, HttpEdge(EdgeLimits()))
    table.of("small")
    engine = EngineReport(0, alive, 0, rig.core.stats())
    engines = [engine, dataclasses.replace(engine, number=1, up=False)][:engine_count]
    return table.text([FleetReport("small", engines, 0, 0)]).decode()


def shown(now: Reading, before: Reading | None = None, cache: Any = CACHE, replicas: Any = ()) -> str:
    console = Console(width=100)
    with console.capture() as captured:
        console.print(frame("http://here", now, before, cache, replicas))
    return " ".join(captured.get().split())


def test_the_first_frame_has_totals_and_no_rates() -> None:
    text = shown(reading(0.0, 2))
    assert "small at http://here up" in text
    assert "tokens generated 10" in text
    assert "found 64 45.7%" in text
    assert "1. 5f0c1e2d state kept 4,096 17 3 2 2 min ago" in text
    assert "12 nodes, 7 states, 2 salts" in text
    assert "since the last frame" not in text


def test_compressed_states_are_told_apart_once_there_were_any() -> None:
    compressed = {
        **CACHE,
        "states_compressed": 3,
        "compressed_bytes": 3 << 20,
        "counts": {"compressed": 5, "restored": 2},
    }
    text = shown(reading(0.0, 2), cache=compressed)
    assert "7 states (3 of them compressed in 3.0 MiB; 2 requests began on one), 2 salts" in text
    none = shown(reading(0.0, 2), cache={**compressed, "counts": {"compressed": 0, "restored": 0}})
    assert "12 nodes, 7 states, 2 salts" in none


def test_a_later_frame_has_what_came_since_per_second() -> None:
    text = shown(reading(4.0, 4), reading(2.0, 2))
    assert "tokens generated 5 20" in text
    assert "found since the last frame: 91.4%" in text


def test_a_bucket_that_was_away_and_what_waits_for_it_are_shown() -> None:
    stored = {"store_capacity_bytes": 1000.0, "store_bytes": 10.0, "store_checkpoints": 1.0}
    quiet = reading(0.0, 2)
    quiet = dataclasses.replace(quiet, values={**quiet.values, **stored})
    assert "bucket" not in shown(quiet)
    away = dataclasses.replace(
        quiet,
        values={
            **quiet.values,
            "store_uploads_waiting": 3.0,
            "store_unreachable_seconds_total": 34.0,
            "store_requests_waiting": 2.0,
        },
        by_label={**quiet.by_label, "store_uploads_total": {"uploaded": 9.0, "lost": 2.0}},
    )
    text = shown(away)
    assert "to the bucket: 9 uploaded, 2 lost; 3 wait; unreachable for 34 s so far" in text
    assert "2 requests wait for it" in text


@pytest.mark.parametrize(
    ("saved_s", "said"),
    [(2.04, "2.0 s saved"), (-0.14, "0.1 s slower than without drafts"), (-0.01, "no time saved yet")],
)
def test_drafts_that_cost_time_save_no_negative_seconds(saved_s: float, said: str) -> None:
    before = reading(0.0, 2)
    drafted = {"spec_decode_num_draft_tokens_total": {"tree": 4.0}}
    now = dataclasses.replace(
        before, values={**before.values, "spec_decode_saved_seconds": saved_s}, by_label={**before.by_label, **drafted}
    )
    assert f"verify run, {said}" in shown(now)


def test_a_server_that_was_started_anew_has_no_rates() -> None:
    assert reading(4.0, 1).rate("generation_tokens_total", reading(2.0, 3)) is None


def test_a_prefix_of_metric_names_changes_nothing() -> None:
    assert reading(0.0, 2, prefix="vllm") == reading(0.0, 2)


def test_an_engine_that_is_not_there_is_said_and_the_rest_is_left_empty() -> None:
    text = shown(reading(0.0, 0, alive=False), cache={})
    assert "the engine is not there" in text
    assert "no prefix is shared yet" in text


def test_several_engines_are_added_up_and_shown_one_by_one() -> None:
    row = {"replica": 1, "state": "waiting", "reason": "ended by SIGKILL"}
    text = shown(reading(0.0, 2, engine_count=2), replicas=[row])
    assert "1 of 2 engines up" in text
    assert "tokens generated 20" in text
    assert "0 up 0 0 10" in text
    assert "1 restarting 0 0 10" in text
    assert "restarting" not in shown(reading(0.0, 2))


def test_an_engine_that_died_for_good_is_dead_with_its_reason() -> None:
    row = {"replica": 1, "state": "dead", "reason": "ended by SIGKILL"}
    text = shown(reading(0.0, 2, engine_count=2), replicas=[row])
    assert "1 dead 0 0 10" in text
    assert "engine 1 is dead: ended by SIGKILL; weft drain 1 --start" in text
    assert "restarting" not in text


def test_engines_that_are_all_down_are_shown_with_what_became_of_them() -> None:
    rows = [
        {"replica": 0, "state": "waiting", "reason": "ended by SIGKILL"},
        {"replica": 1, "state": "dead", "reason": " ".join(["a reason"] * 20)},
    ]

    class Server:
        def get(self, path: str, *, timeout_s: float) -> Any:
            text = metrics(0, alive=False, engine_count=2) if path == "/metrics" else ""
            return SimpleNamespace(text=text, json=lambda: {"data": rows})

    now, cache, replicas = look(Server())  # type: ignore[arg-type]
    assert not cache
    text = shown(now, cache=cache, replicas=replicas)
    assert "the engine is not there" in text
    assert "0 restarting 0 0" in text
    assert f"engine 1 is dead: {rows[1]['reason']}; weft drain" in text, "on several lines, none of it cut"


def test_metrics_of_somebody_else_are_refused() -> None:
    with pytest.raises(UserError, match="no metrics of a weft server"):
        read_metrics("# TYPE up gauge\nup 1\n", 0.0)
