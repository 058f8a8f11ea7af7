"""The commands on a real checkpoint: a server of one's own, a conversation through a pipe, a score."""

from __future__ import annotations

import json
import shutil
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import httpx
import psutil
import pytest

from tests.fixtures.checkpoints import checkpoint
from weft.api import Engine
from weft.cli.main import main
from weft.cli.remote import own_server
from weft.config import EngineConfig

MARK = "TESTED_IN_WHOLE"


def _weft(*arguments: str, typed: str = "") -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        input=typed,
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )


def _processes_marked(mark: str) -> list[int]:
    """Processes with ``mark`` in their environment, which children inherit."""
    return [
        p.pid
        for p in psutil.process_iter(["environ"])
        if MARK in (p.info["environ"] or {}) and p.info["environ"][MARK] == mark
    ]


@pytest.fixture(scope="module")
def directory() -> Path:
    return checkpoint("qwen3_5")


def _weft_here(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str]:
    """(exit code, stdout) of the same command in this process, which has imported torch already."""
    code = main(arguments)
    return code, capsys.readouterr().out


def test_generate_samples_with_ollamas_defaults_where_the_checkpoint_is_silent(
    directory: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    silent = shutil.copytree(directory, tmp_path / "silent")
    (silent / "generation_config.json").write_text('{"eos_token_id": []}')

    def first_answer(**fields: Any) -> str:
        with Engine(model=str(silent), memory="32MiB", seed=5) as engine:
            return engine.generate("once upon", max_tokens=16, **fields)[0].text + "\n"

    ollama, openai = first_answer(temperature=0.8, top_k=40, top_p=0.9), first_answer()
    assert ollama != openai
    flags = ("--model", str(silent), "--memory", "32MiB", "--seed", "5", "--max-tokens", "16")
    assert _weft_here(capsys, "generate", "once upon", *flags) == (0, ollama)
    assert _weft_here(capsys, "generate", "once upon", *flags, "--default-sampling", "openai") == (0, openai)


def test_a_prompt_may_be_piped_or_typed_and_only_the_answer_goes_to_stdout(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    flags = ("--model", str(directory), "--temperature", "0", "--memory", "32MiB")
    piped = _weft("generate", *flags, "--max-tokens", "8", typed="once upon")
    code, typed = _weft_here(capsys, "generate", "once upon", *flags, "--max-tokens", "16")
    assert code == 0
    assert (piped.returncode, piped.stderr) == (0, "")
    assert len(piped.stdout) > 1
    assert typed.startswith(piped.stdout.rstrip("\n\ufffd"))
    assert len(typed) > len(piped.stdout)


def test_chat_and_eval_talk_to_a_server_and_leave_none_behind(
    directory: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    config = EngineConfig(model=str(directory), memory="64MiB", max_model_len=1024)
    with own_server(config) as url:
        chat = _weft("chat", "--url", url, "--max-tokens", "8", typed="hello\n/reset\nhello again\n")
        assert (chat.returncode, chat.stderr) == (0, "")
        assert chat.stdout.count("prompt tokens from cache") == 2
        recall = ("eval", "recall", "--url", url, "--length", "128", "--questions")
        code, score = _weft_here(capsys, *recall, "2", "--json")
        assert code == 0
        assert json.loads(score)["asked"] >= 2
        code, low = _weft_here(capsys, *recall, "1", "--pass-at", "1")
        assert code == 1  # random weights remember nothing
        assert "accuracy" in low
    with pytest.raises(httpx.ConnectError):
        httpx.get(f"{url}/health")


def test_chat_starts_its_own_server_and_stops_it(directory: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv(MARK, str(directory))
    sleeper = subprocess.Popen([sys.executable, "-c", "input()"], stdin=subprocess.PIPE)
    assert _processes_marked(str(directory)) == [sleeper.pid]
    sleeper.communicate(b"\n")
    chat = _weft("chat", str(directory), "--memory", "64MiB", "--max-tokens", "4", typed="hello\n")
    assert chat.returncode == 0, chat.stderr
    assert "tokens from cache" in chat.stdout
    deadline = time.monotonic() + 10
    while (left := _processes_marked(str(directory))) and time.monotonic() < deadline:
        time.sleep(0.05)
    assert left == []


def test_what_the_server_says_when_it_cannot_start_is_what_the_user_reads(tmp_path: Path) -> None:
    chat = _weft("chat", str(tmp_path), typed="hello\n")
    assert chat.returncode == 2
    assert chat.stderr.startswith("error: ")
    assert chat.stderr.count("\n") == 1
    assert "config.json" in chat.stderr


@pytest.mark.parametrize(
    "arguments",
    [
        ["plan"],
        ["plan", "LFM2-1.2B", "--memory", "8GiB", "--compare"],
        ["plan", "LFM2-1.2B", "Qwen3.5-4B", "--memory", "24GiB"],
        ["doctor", "--offline"],
        ["simulate", "sample", "--limit", "20", "--model", "LFM2-1.2B", "--memory", "1GiB", "--replicas", "2"],
    ],
    ids=" ".join,
)
def test_tables_are_whole_off_a_terminal_whatever_its_width_is(
    arguments: list[str], monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "30")
    main(arguments)
    shown = capsys.readouterr().out
    assert shown
    assert "…" not in shown
    assert max(len(line) for line in shown.splitlines()) > 40, "it is laid out for more columns than 30"
