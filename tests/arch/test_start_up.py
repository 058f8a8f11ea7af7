"""`weft --help` feels instant because it imports little: counted in modules, whatever the machine does."""

from __future__ import annotations

import importlib.util
import subprocess
import sys

import pytest

HELP_MODULES_MAX = 180
"""Modules in memory after `weft --help`; bare python has about 40, click makes it about 110."""

HEAVY = ("torch", "transformers", "numpy", "rich", "msgspec", "starlette", "uvicorn", "httpx", "tokenizers")
RUN_HELP = "from weft.cli.main import main\nmain({arguments!r})"


def _modules_after(arguments: list[str], before: str = "pass") -> set[str]:
    help_run = RUN_HELP.format(arguments=arguments)
    code = f"{before}\n{help_run}\nimport sys\nprint('LOADED', *sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(answer.stdout.rsplit("LOADED", 1)[1].split())


def _heavy_after(arguments: list[str], before: str = "pass") -> set[str]:
    return _modules_after(arguments, before) & set(HEAVY)


def test_help_imports_few_modules() -> None:
    assert len(_modules_after(["--help"])) < HELP_MODULES_MAX


def test_a_help_that_imports_a_server_would_be_over_the_limit() -> None:
    assert len(_modules_after(["--help"], before="import httpx")) > HELP_MODULES_MAX


@pytest.mark.parametrize("arguments", [["--help"], ["--version"], ["version"], ["launch"]])
def test_help_and_version_import_nothing_heavy(arguments: list[str]) -> None:
    assert _heavy_after(arguments) == set()


@pytest.mark.parametrize("verb", ["serve", "generate", "chat", "eval", "plan", "doctor"])
def test_the_help_of_a_verb_imports_no_torch(verb: str) -> None:
    assert not _heavy_after([verb, "--help"]) & {"torch", "transformers", "numpy"}


def test_a_heavy_import_is_noticed() -> None:
    assert _heavy_after(["--help"], before="import numpy") == {"numpy"}


SERVER_NEEDS_NOT = {
    "numpy",
    "httpx",
    "pygments",
    "torch",
    "weft.assemble",
    "weft.memory.memory",
    "weft.schedule.plan",
    "weft.schedule.scheduler",
    "weft.memory.prefix_store",
    "weft.rpc.listener",
    "weft.fleet.ray_fleet",
    "weft.server.workers.supervisor",
    "weft.server.openapi.document",
}
"""Modules that ``weft serve`` on one machine, with one HTTP worker, never runs in the HTTP process."""


def _loaded_after(code: str) -> set[str]:
    code += "\nimport sys\nprint('LOADED', *sys.modules)"
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    return set(answer.stdout.rsplit("LOADED", 1)[1].split())


def test_the_http_process_imports_no_part_of_an_engine() -> None:
    """Check the imports of the HTTP process: they cost time at each start and in each HTTP worker."""
    loaded = _loaded_after("import weft.server.launch, weft.server.http")
    assert not loaded & SERVER_NEEDS_NOT
    assert {"weft.server.app", "weft.fleet.fleet", "weft.engine.stats"} <= loaded


def test_the_engine_is_started_before_http_is_imported() -> None:
    """Check that launching imports no HTTP: the engine process starts first, and both processes import in parallel."""
    loaded = _loaded_after("import weft.cli.serve, weft.server.launch")
    assert not loaded & {"starlette", "uvicorn", "jinja2", "tokenizers", "prometheus_client", "http.client"}
    assert "weft.fleet.fleet" in loaded


def test_the_names_that_the_http_process_needs_not_are_names_of_modules() -> None:
    assert [name for name in SERVER_NEEDS_NOT if importlib.util.find_spec(name) is None] == []


ENGINE = """
import weft.rpc.engine_process
from weft.assemble.assembly import assemble
from weft.config import EngineConfig

assemble(EngineConfig(memory='64MB'))
import sys

print('LOADED', *sys.modules)
"""
ENGINE_NEEDS_NOT = {
    "torch._dynamo",
    "sympy",
    "starlette",
    "sqlite3",
    "prometheus_client",
    "weft.server.config",
    "weft.ranks.peers",
    "weft.store.directory_store",
    "weft.models.gguf.view",
    "weft.models.forms.words",
    "weft.models.vision.tower",
    "weft.images.settings",
}


def test_an_engine_starts_without_the_compiler_of_torch_and_the_parts_it_has_no_flag_for() -> None:
    """Check that no start imports torch's compiler, as arithmetic on "meta" tensors would: it takes seconds."""
    answer = subprocess.run([sys.executable, "-c", ENGINE], capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.split("LOADED", 1)[1].split())
    assert "torch" in loaded
    assert not loaded & ENGINE_NEEDS_NOT
