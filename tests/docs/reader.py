"""A reader of the pages: types each command, runs each program, and returns what it printed.

    curl                   sent to the server of the tests, whose port stands for 8000
    weft                   the real command in this process, with its stdin
    weft serve, *.toml     flags read and checked, then the engine built from them; no second server starts
    echo, cat              what a shell does, for pipes and files
    python, ```python      run in this process; blocks of one page share their names

Names that a reader must replace stand for something real: ``path/to/checkpoint``, ``MODEL``, hub names for
the embedded model, ``/var/lib/weft`` and ``DIR`` for a store with prefixes in it. Files go to a directory of
the test.

Rejected: a shell with a process for each command. Each would import torch again: four seconds instead of a
tenth.
"""

from __future__ import annotations

import contextlib
import io
import sys
import types
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import httpx
import pytest

import weft
from tests.docs.blocks import Block
from tests.docs.commands import CommandLine, ShellLine, shell_lines
from weft.cli.main import main
from weft.config import EngineConfig
from weft.server.config import ServerConfig

PORT_ON_PAGES = "127.0.0.1:8000"
EMBEDDED = Path(weft.__file__).parent / "embedded" / "weft-recall"
CHECKPOINTS = ("path/to/checkpoint", "MODEL", "LiquidAI/LFM2-350M", "LiquidAI/LFM2-1.2B")
STORES = ("/var/lib/weft", "DIR")
MEMORY = "64MiB"


class Reader:
    """Reads in ``folder``, with the server at ``url`` and the store ``store``."""

    def __init__(self, folder: Path, url: str, store: Path, patch: pytest.MonkeyPatch) -> None:
        self._folder, self._patch = folder, patch
        self._url, self._store = url, str(store)
        self._names: dict[str, dict[str, Any]] = {}
        patch.chdir(folder)
        patch.setenv("WEFT_MEMORY", MEMORY)
        patch.setenv("XDG_STATE_HOME", str(folder / "state"))
        patch.setenv("COLUMNS", "80")
        patch.setenv("WEFT_URL", url)
        patch.setattr("weft.server.launch.serve", self._serve)

    def read(self, block: Block, skipped: Callable[[ShellLine], bool], prelude: str = "") -> str:
        """What ``block`` prints: the text of all its lines but those that are ``skipped``. ``prelude``: code
        that the page leaves to its reader."""
        if block.language == "python":
            names = self._names.setdefault(block.page, {"__name__": "page"})
            exec(compile(prelude, "prelude", "exec"), names)
            return self._python(self._real(block.text), names, str(block))
        if block.language == "toml":
            (self._folder / "weft.toml").write_text(self._real(block.text))
            return self._weft(["serve", "--config", "weft.toml"], "")
        return "".join(self._line(line) for line in shell_lines(block) if not skipped(line))

    def _line(self, line: ShellLine) -> str:
        text = line.stdin
        for command in line.commands:
            text = self._command(command, text)
        if line.file:
            (self._folder / line.file).write_text(text)
            return ""
        return text

    def _command(self, command: CommandLine, stdin: str) -> str:
        words = [self._real(word) for word in command.words]
        with self._patch.context() as variables:
            for name, _, value in (pair.partition("=") for pair in command.variables):
                variables.setenv(name, value)
            match words:
                case ["weft", *rest]:
                    return self._weft(rest, stdin)
                case ["curl", *rest]:
                    return self._curl(rest)
                case ["echo", *rest]:
                    return " ".join(rest) + "\n"
                case ["cat", *files]:
                    return stdin + "".join((self._folder / file).read_text() for file in files)
                case ["python", "-"]:
                    return self._python(stdin, {"__name__": "page"}, str(command))
        raise AssertionError(f"{command}: no test runs it, and it is not in tests/docs/not_run.py")

    def _real(self, text: str) -> str:
        """``text`` with names that exist."""
        text = text.replace(PORT_ON_PAGES, self._url.removeprefix("http://"))
        for name in CHECKPOINTS:
            text = str(EMBEDDED) if text == name else text.replace(f'"{name}"', f'"{EMBEDDED}"')
        for name in STORES:
            text = self._store if text == name else text.replace(f'"{name}"', f'"{self._store}"')
        return text

    def _weft(self, words: list[str], stdin: str) -> str:
        self._patch.setattr("sys.stdin", io.StringIO(stdin))
        with _printed() as out:
            code = main(words)
        assert code == 0, f"weft {' '.join(words)}: exit code {code}"
        return out.getvalue()

    def _serve(self, engine: EngineConfig, server: ServerConfig) -> int:
        """In place of ``weft serve``: everything up to the first request."""
        from weft.assemble import assemble

        server.check()
        assemble(engine).core.close()
        return 0

    def _curl(self, words: list[str]) -> str:
        method, url, headers, body = "GET", "", {}, None
        while words:
            match words.pop(0):
                case "-N" | "-s":
                    pass
                case "-X":
                    method = words.pop(0)
                case "-H":
                    name, _, value = words.pop(0).partition(": ")
                    headers[name] = value
                case "-d":
                    body, method = words.pop(0), "POST"
                case word:
                    assert word.startswith("http://"), f"curl {word}"
                    url = word
        answer = httpx.request(method, url, headers=headers, content=body, timeout=60)
        assert answer.is_success, f"{url}: {answer.status_code} {answer.text}"
        return answer.text if answer.text.endswith("\n") else answer.text + "\n"

    def _python(self, code: str, names: dict[str, Any], place: str) -> str:
        with _printed() as out, self._patch.context() as inside:
            inside.setitem(sys.modules, "page", types.ModuleType("page"))  # classes of a page look theirs up
            exec(compile(code, place, "exec"), names)
        return out.getvalue()


@contextlib.contextmanager
def _printed() -> Iterator[io.StringIO]:
    with contextlib.redirect_stdout(io.StringIO()) as out:
        yield out
