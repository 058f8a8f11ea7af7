"""``pip install weft`` serves: nothing is imported that only an extra, or the tests, would install."""

from __future__ import annotations

import re
import subprocess
import sys
import tomllib
from collections.abc import Iterator
from importlib import metadata
from pathlib import Path

import pytest
from packaging.requirements import Requirement
from packaging.utils import canonicalize_name

from tests.arch.rules import ROOT
from tests.server.running import RunningServer, running_server, server_environment

MEMORY = "64MiB"
BLOCK = """
import sys
class Hiding:
    def __init__(self, finder):
        self.finder = finder
    def find_spec(self, name, path=None, target=None):
        if name.partition(".")[0] not in {blocked!r}:
            return self.finder.find_spec(name, path, target)
    def __getattr__(self, name):
        return getattr(self.finder, name)
sys.meta_path[:] = map(Hiding, sys.meta_path)
"""


def installed_by_weft() -> set[str]:
    """Return the distributions that ``pip install weft`` brings, by their canonical names."""
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    waiting = [Requirement(line) for line in project["dependencies"]]
    found: set[str] = set()
    while waiting:
        wanted = waiting.pop()
        name = canonicalize_name(wanted.name)
        extras = ["", *wanted.extras]
        if name in found or (wanted.marker and not any(wanted.marker.evaluate({"extra": one}) for one in extras)):
            continue
        try:
            requirements = metadata.requires(wanted.name) or []
        except metadata.PackageNotFoundError:  # such as CUDA's libraries, beside a build for CPUs
            continue
        found.add(name)
        waiting += [Requirement(line) for line in requirements if "extra ==" not in line]
    return found


def blocked_packages() -> set[str]:
    own = installed_by_weft()
    tops = metadata.packages_distributions()
    return {
        top
        for top, names in tops.items()
        if re.fullmatch(r"\w+", top) and not {canonicalize_name(name) for name in names} & (own | {"weft"})
    }


@pytest.fixture(scope="module")
def alone(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A folder that hides from Python what weft alone does not bring."""
    folder = tmp_path_factory.mktemp("alone")
    (folder / "sitecustomize.py").write_text(BLOCK.format(blocked=blocked_packages()))
    return folder


@pytest.fixture(scope="module")
def server(alone: Path) -> Iterator[RunningServer]:
    with running_server("", engine={"memory": MEMORY, "store": str(alone / "store")}, path=(alone,)) as running:
        yield running


def test_the_extras_and_the_tools_of_tests_are_hidden(alone: Path) -> None:
    blocked = blocked_packages()
    assert {"obstore", "zstandard", "av", "opentelemetry", "transformers", "pytest", "openai"} <= blocked
    assert not {"torch", "numpy", "uvicorn", "h11", "starlette", "tokenizers", "weft"} & blocked
    done = subprocess.run(
        [sys.executable, "-c", "import zstandard"], env=server_environment((alone,)), capture_output=True, text=True
    )
    assert "No module named 'zstandard'" in done.stderr


def test_weft_alone_serves(server: RunningServer) -> None:
    message = {"role": "user", "content": "What is the weather in Paris?"}
    schema = {"type": "object", "properties": {"city": {"type": "string"}}, "required": ["city"]}
    tools = [{"type": "function", "function": {"name": "get_weather", "parameters": schema}}]
    bodies: dict[str, dict[str, object]] = {
        "/v1/chat/completions": {"model": "default", "messages": [message], "tools": tools, "max_tokens": 16},
        "/v1/completions": {"model": "default", "prompt": "Once", "max_tokens": 4},
        "/v1/responses": {"model": "default", "input": "Hello", "max_output_tokens": 16},
        "/v1/messages": {"model": "default", "messages": [message], "max_tokens": 4},
        "/v1/embeddings": {"model": "default", "input": "Hello"},
        "/api/chat": {"model": "default", "messages": [message], "stream": False},
    }
    answers = {path: server.post(path, body) for path, body in bodies.items()}
    assert {path: answer.text for path, answer in answers.items() if answer.status_code != 200} == {}
    for path in ("/", "/metrics", "/openapi.json", "/health", "/v1/models"):
        assert server.get(path).status_code == 200, path


def test_an_extra_that_is_missing_is_one_line_with_the_command_that_brings_it(alone: Path) -> None:
    done = subprocess.run(
        [sys.executable, "-m", "weft", "serve", "--port", "0", "--store", "s3://bucket/place"],
        env=server_environment((alone,)),
        capture_output=True,
        text=True,
        timeout=120,
    )
    assert done.returncode == 2
    assert "pip install 'weft[store]'" in done.stderr
    assert "Traceback" not in done.stderr
