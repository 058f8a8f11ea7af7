"""One server for the folder: `weft serve` on the file, with a store of responses."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer, running_server
from tests.support.real_model import real_model


@pytest.fixture(scope="session")
def model() -> Path:
    return real_model()


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[RunningServer]:
    with running_server("", engine={"model": str(model), "memory": "256MiB", "threads": 1}) as running:
        yield running
