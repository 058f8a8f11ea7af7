"""A replica for one part of a request whose partner is missing is worth a line."""

from __future__ import annotations

import logging
from types import SimpleNamespace
from typing import Any

import pytest

from weft.fleet.fleet import Fleet


@pytest.mark.parametrize(
    ("roles", "ready", "is_said"),
    [
        (("both", "both"), (True, True), False),
        (("prefill", "decode"), (True, True), False),
        (("prefill", "prefill"), (True, True), True),
        (("prefill", "decode"), (True, False), False),
    ],
)
def test_a_missing_partner_is_said_once_all_of_this_machine_serve(
    roles: tuple[str, ...],
    ready: tuple[bool, ...],
    is_said: bool,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    monkeypatch.setattr(logging.getLogger("weft.server"), "propagate", True)
    replicas = [SimpleNamespace(number=at, role=role, ready=ready[at]) for at, role in enumerate(roles)]
    fleet: Any = SimpleNamespace(replicas=replicas, _own_count=len(replicas))
    replica: Any = replicas[0]
    Fleet._say_partner(fleet, replica)
    assert ("it serves complete requests" in caplog.text) == is_said
