"""One server per test module: a module names its engine with ``FACTORY`` and its flags with ``SERVER``."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory


@pytest.fixture(scope="session")
def model_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_model_directory(tmp_path_factory.mktemp("scripted"))


@pytest.fixture(scope="module")
def server(
    request: pytest.FixtureRequest, model_directory: Path, tmp_path_factory: pytest.TempPathFactory
) -> Iterator[RunningServer]:
    factory = getattr(request.module, "FACTORY", "build")
    engine = {"model": str(model_directory), **getattr(request.module, "ENGINE", {})}
    names = str(tmp_path_factory.mktemp("names") / "names.json")
    settings = {"name_store": names, **getattr(request.module, "SERVER", {})}
    with running_server(factory, engine=engine, server=settings) as running:
        yield running
