"""The snippets of the README work as they stand, against a server on another port."""

from __future__ import annotations

import contextlib
import io
import json
import re
import shlex
from collections.abc import Iterator
from pathlib import Path

import httpx
import pytest

from weft.cli.own_server import own_server
from weft.config import EngineConfig

README = (Path(__file__).resolve().parents[2] / "README.md").read_text(encoding="utf-8")
PRINTED_URL = "http://127.0.0.1:8000"


@pytest.fixture(scope="module")
def url() -> Iterator[str]:
    with own_server(EngineConfig(memory="64MiB")) as url:
        yield url


def _snippet(language: str, mark: str) -> str:
    blocks: list[str] = re.findall(rf"```{language}\n(.*?)```", README, flags=re.DOTALL)
    [block] = [block for block in blocks if mark in block]
    return block


def test_the_curl_snippet_is_answered(url: str) -> None:
    words = shlex.split(_snippet("bash", "curl"))
    assert words[0] == "curl"
    given = dict(zip(words[2::2], words[3::2], strict=True))
    assert set(given) == {"-H", "-d"}
    name, _, value = given["-H"].partition(": ")
    goal = words[1].replace(PRINTED_URL, url)
    response = httpx.post(goal, content=given["-d"], headers={name: value}, timeout=60)
    assert response.status_code == 200, response.text
    [call] = response.json()["choices"][0]["message"]["tool_calls"]
    said = f"`{call['function']['name']}` with `{call['function']['arguments']}`"
    assert f"The answer is a call of the tool: {said}." in README
    assert json.loads(given["-d"])["model"] == "default"


def test_the_openai_snippet_prints_the_answer(url: str) -> None:
    code = _snippet("python", "openai").replace(PRINTED_URL, url)
    assert url in code
    with contextlib.redirect_stdout(io.StringIO()) as printed:
        exec(compile(code, "README.md", "exec"), {})
    assert printed.getvalue() == "Oshan: 7750"
