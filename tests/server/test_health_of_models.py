"""The health of a server with several models."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest

from weft.server.service import Service


@pytest.mark.parametrize(("reasons", "ailing"), [((None, None), 0), ((None, "restarts"), 1), (("x", "y"), 2)])
def test_models_whose_engines_restart_are_counted(reasons: tuple[str | None, ...], ailing: int) -> None:
    several: Any = SimpleNamespace(
        fleets=[(str(at), SimpleNamespace(degraded_reason=reason)) for at, reason in enumerate(reasons)],
        states=lambda: {"loaded": 2},
    )
    own: Any = SimpleNamespace(draining=False, _store_details=dict)
    status, said = Service._health_of(own, several)
    assert (status, said["status"]) == (200, "degraded" if ailing else "ok")
    assert said.get("reason") == (f"engines of {ailing} of the models restart" if ailing else None)
