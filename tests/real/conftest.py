"""The file, what its header says, and one server of it for the folder."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.real.reference import Original
from tests.server.running import RunningServer, running_server
from tests.server.test_tools import TEMPLATES
from tests.support.real_model import real_model


@pytest.fixture(scope="session")
def model() -> Path:
    return real_model()


@pytest.fixture(scope="session")
def original(model: Path) -> Original:
    return Original(model)


@pytest.fixture(scope="session")
def server(model: Path) -> Iterator[RunningServer]:
    """With a template that has tools: the model's own has none."""
    engine = {"model": str(model), "memory": "256MiB", "threads": 1}
    with running_server("", engine=engine, server={"chat_template": str(TEMPLATES / "hermes_think.jinja")}) as running:
        yield running


@pytest.fixture(scope="session")
def plain_server(model: Path) -> Iterator[RunningServer]:
    """As `weft serve FILE` starts it."""
    with running_server("", engine={"model": str(model), "memory": "256MiB", "threads": 1}) as running:
        yield running
