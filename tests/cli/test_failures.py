"""Every failure is one line on stderr and an exit code; none is a traceback."""

from __future__ import annotations

import io
import os
import socket
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path

import pytest

from weft.cli.generate import read_prompt
from weft.cli.main import VERBS as OWN_VERBS
from weft.cli.main import main
from weft.errors import ConfigError, EngineUnavailableError, WeftError
from weft.foreign import FOREIGN_VERBS
from weft_tools.commands import VERBS as TOOLS_VERBS

VERBS = [*OWN_VERBS, *TOOLS_VERBS]

Failing = Callable[[BaseException], None]


@pytest.fixture
def failing(monkeypatch: pytest.MonkeyPatch) -> Failing:
    """Make `weft --version` raise something."""

    def make(error: BaseException) -> None:
        def fail() -> str:
            raise error

        monkeypatch.setattr("weft.version.weft_version", fail)

    return make


@pytest.mark.parametrize(
    ("error", "code"),
    [
        (ConfigError("--port 1 is taken\n  by another"), 2),
        (EngineUnavailableError("the engine is gone"), 1),
        (WeftError("it broke"), 1),
    ],
)
def test_a_weft_error_is_one_line_and_its_exit_code(
    failing: Failing, capsys: pytest.CaptureFixture[str], error: WeftError, code: int
) -> None:
    failing(error)
    assert main(["--version"]) == code
    captured = capsys.readouterr()
    assert captured.err == "error: " + " ".join(error.message.split()) + "\n"
    assert captured.out == ""


def test_ctrl_c_is_130_and_silent(failing: Failing, capsys: pytest.CaptureFixture[str]) -> None:
    failing(KeyboardInterrupt())
    assert main(["--version"]) == 130
    assert capsys.readouterr().err.strip() == ""


def test_a_bug_keeps_its_traceback(failing: Failing) -> None:
    failing(ZeroDivisionError())
    with pytest.raises(ZeroDivisionError):
        main(["--version"])


def test_a_reader_that_leaves_early_is_no_error() -> None:
    line = f"{sys.executable} -m weft serve --help | head -c 1"
    done = subprocess.run(["bash", "-o", "pipefail", "-c", line], capture_output=True, text=True, check=False)
    assert (done.returncode, done.stderr) == (0, "")


@pytest.mark.parametrize(
    ("arguments", "sentence"),
    [
        (["serv"], "error: weft has no command 'serv'; did you mean `weft serve`?\n"),
        (["collect-env"], "error: weft has no 'collect-env': type `weft doctor --json`\n"),
        (["serve", "--prot", "1"], "error: there is no flag --prot; did you mean --port?\n"),
        (["serve", "--port", "http"], "error: Invalid value for '--port': 'http' is not a valid integer.\n"),
        (["doctor", "--jsn"], "error: there is no flag --jsn; did you mean --json?\n"),
    ],
)
def test_a_wrong_command_line_is_answered_with_the_right_one(
    capsys: pytest.CaptureFixture[str], arguments: list[str], sentence: str
) -> None:
    assert main(arguments) == 2
    assert capsys.readouterr().err == sentence


def test_help_lists_every_verb_and_foreign_verbs_are_not_ours(capsys: pytest.CaptureFixture[str]) -> None:
    assert main([]) == 0
    shown = capsys.readouterr().out
    assert all(f"\n  {verb} " in shown for verb in VERBS)
    assert not set(FOREIGN_VERBS) & set(VERBS)


PACKAGE = """
import click

@click.command("greet")
def greet():
    click.echo("hello")
"""


def installed(folder: Path, table: str) -> None:
    """Write a package of someone else's with one verb into ``folder``, as pip lays it out."""
    (folder / "greeting.py").write_text(PACKAGE + table)
    metadata = folder / "greeting-1.0.dist-info"
    metadata.mkdir(exist_ok=True)
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: greeting\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[weft.commands]\ngreeting = greeting:VERBS\n")


def weft(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    return subprocess.run(
        [sys.executable, "-m", "weft", *arguments],
        env=os.environ | {"PYTHONPATH": str(folder)},
        capture_output=True,
        text=True,
    )


def test_a_package_adds_a_verb_by_entry_point(tmp_path: Path) -> None:
    installed(tmp_path, 'VERBS = {"greet": ("greeting", "Say hello."), "serve": ("greeting", "Nothing.")}')
    assert weft(tmp_path, "greet").stdout == "hello\n"
    shown = weft(tmp_path, "--help").stdout
    assert "Say hello." in shown
    assert OWN_VERBS["serve"][1].split()[0] in shown
    assert "Nothing." not in shown  # a verb of weft's own is not replaced


def test_a_package_whose_verbs_cannot_be_imported_is_named_and_weft_s_own_go_on(tmp_path: Path) -> None:
    installed(tmp_path, "import nowhere_at_all")
    refused = weft(tmp_path, "greet")
    assert refused.returncode == 2
    assert refused.stderr.startswith("error: commands of greeting (weft.commands: greeting:VERBS) cannot be imported")
    assert "Traceback" not in refused.stderr
    assert weft(tmp_path, "version").returncode == 0


def test_a_group_without_a_command_shows_its_help(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval"]) == 0
    shown = capsys.readouterr()
    assert "recall" in shown.out
    assert shown.err == ""


def test_the_help_of_eval_is_not_cut_off(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["eval", "--help"]) == 0
    shown = " ".join(capsys.readouterr().out.split())
    assert "made-up names and numbers, and count the exact answers." in shown
    assert "..." not in shown.replace("[ARGS]...", "")


@pytest.mark.parametrize("verb", VERBS)
def test_every_verb_explains_itself(capsys: pytest.CaptureFixture[str], verb: str) -> None:
    assert main([verb, "--help"]) == 0
    assert capsys.readouterr().out.startswith(f"Usage: weft {verb}")


def test_version_says_versions(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["version"]) == 0
    said = capsys.readouterr().out
    assert said.startswith("weft ")
    assert "Python 3." in said
    assert "torch 2." in said


@pytest.mark.parametrize(("typed", "prompt"), [("Once\n", "Once"), ("One\n\n", "One\n"), ("Once", "Once")])
def test_a_prompt_from_a_pipe_loses_its_last_line_end(typed: str, prompt: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("sys.stdin", io.StringIO(typed))
    assert read_prompt(None) == prompt


def test_generate_without_a_prompt_says_how_to_give_one(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("sys.stdin.isatty", lambda: True, raising=False)
    assert main(["generate"]) == 2
    assert "there is no prompt" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("arguments", "said"),
    [
        (["generate", "x", "--max-tokens", "-3"], "max_tokens is -3; it must be at least 0"),
        (["generate", "x", "--top-p", "7"], "top_p is 7"),
        (["chat", "--min-p", "2"], "min_p is 2"),
        (["chat", "--url", "ftp://host"], "--url 'ftp://host' is not an http URL; write http://HOST:PORT"),
        (["top", "--url", "foo://x"], "--url 'foo://x' is not an http URL"),
        (["serve", "--snapshots", "tail"], "the source 'tail' has another name now: near-end"),
        (["serve", "/nowhere"], "/nowhere: there is no such directory"),
        (["bench", "kernels", "--only", "small"], "python -m benchmarks.kernels --only small"),
        (["serve", "--tp", "3"], "--tp is 3, which does not divide this model: 4 key heads of gated delta"),
        (["serve", "owner/name:Q4_K_M", "--tp", "2"], "--tp is 2, and owner/name:Q4_K_M is a GGUF file"),
        (["serve", "--media-domains", "https://a.example"], "--media-domains 'https://a.example': it takes host"),
        (
            ["serve", "--store", "/nowhere/store", "--store-size", "1KB"],
            "--store-size is '1KB'; it must be at least 16.0 MiB and at most 1.0 EiB",
        ),
    ],
)
def test_a_value_that_cannot_work_is_said_before_anything_loads_or_listens(
    capsys: pytest.CaptureFixture[str], arguments: list[str], said: str
) -> None:
    assert main(arguments) == 2
    captured = capsys.readouterr()
    [line] = captured.err.strip().splitlines()
    assert line.startswith("error: ")
    assert said in line
    assert "listening" not in captured.out


@pytest.mark.parametrize("command", [["chat"], ["top"], ["drain", "0"]])
def test_a_server_that_is_not_there_is_said_at_once_in_words(
    capsys: pytest.CaptureFixture[str], command: list[str]
) -> None:
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        address = f"localhost:{free.getsockname()[1]}"
    assert main([*command, "--url", address]) == 2
    captured = capsys.readouterr()
    assert captured.err.strip() == (
        f"error: nothing answers at http://{address}: connection refused; "
        "start a server with `weft serve`, or name another with --url"
    )
    assert "you>" not in captured.out
