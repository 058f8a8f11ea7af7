"""/health of a server: one answer for all of its models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.server.models import Models

OK: dict[str, Any] = {"status": "ok"}
ASLEEP: dict[str, Any] = {"status": "sleeping", "level": 1, "missing": ["kv_cache"]}


def restarts(why: str) -> dict[str, Any]:
    return {"status": "degraded", "reason": why}


def health(*each: dict[str, Any], states: tuple[str | None, ...] = (None,)) -> tuple[int, dict[str, Any]]:
    hosted: Any = [
        SimpleNamespace(health=lambda one=one: one, state=state)
        for one, state in zip(each, states * len(each), strict=False)
    ]
    return Models(hosted).health()


@pytest.mark.parametrize(
    ("each", "status", "said"),
    [
        ((OK, OK), 200, OK),
        ((OK, restarts("engine 0 died")), 200, restarts("engine 0 died")),
        ((restarts("x"), OK, restarts("y")), 200, restarts("x; y")),
        ((ASLEEP,), 200, ASLEEP),
        ((ASLEEP, OK), 200, OK),
        (({"status": "starting", "reason": "reads"}, OK), 503, {"status": "starting", "reason": "reads"}),
        ((restarts("x"), {"status": "dead", "reason": "gone"}), 503, {"status": "dead", "reason": "gone"}),
    ],
)
def test_the_gravest_status_of_a_model_is_that_of_the_server(
    each: tuple[dict[str, Any], ...], status: int, said: dict[str, Any]
) -> None:
    assert health(*each) == (status, said)


def test_models_that_come_and_go_are_counted_by_state() -> None:
    status, said = health(OK, OK, OK, states=("loaded", "absent", "loaded"))
    assert (status, said["models"]) == (200, {"loaded": 2, "absent": 1})
    assert "models" not in health(OK)[1]
