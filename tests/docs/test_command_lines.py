"""Every command line of the README and the docs is one that its command accepts: names, flags and values.

A `weft` line is parsed by the real command without running it; a `python -m` line names a module that exists,
with flags that its source knows; a `make` line names a target.
"""

from __future__ import annotations

import re
from dataclasses import fields
from pathlib import Path

import click
import pytest

from tests.arch.rules import ROOT, tracked_files
from tests.docs.commands import CommandLine, commands_of, commands_of_pages
from weft.cli.flags import TableSetting
from weft.cli.main import cli
from weft.config import EngineConfig
from weft.server.config import ServerConfig

PAGES = sorted(path for path in tracked_files() if path.suffix == ".md")
COMMANDS = commands_of_pages(PAGES, ROOT)
PLACEHOLDERS = {"...", "…"}


def weft_complaint(words: tuple[str, ...]) -> str | None:
    """Why `weft WORDS` would be refused before it does anything; None if it would not."""
    group: click.Command = cli
    try:
        context = cli.make_context("weft", list(words))
        while isinstance(group, click.Group):
            _, group, rest = group.resolve_command(context, [*context._protected_args, *context.args])
            assert group is not None
            with _without_files(group):
                context = group.make_context(group.name, list(rest), parent=context)
    except click.exceptions.Exit:
        return None  # --help
    except click.ClickException as error:
        return error.format_message()
    return None


class _without_files:
    """Files that a page names need not exist where the test runs."""

    def __init__(self, command: click.Command) -> None:
        self._paths = [option.type for option in command.params if isinstance(option.type, click.Path)]
        self._exists = [path.exists for path in self._paths]

    def __enter__(self) -> None:
        for path in self._paths:
            path.exists = False

    def __exit__(self, *_: object) -> None:
        for path, exists in zip(self._paths, self._exists, strict=True):
            path.exists = exists


def module_complaint(words: tuple[str, ...]) -> str | None:
    """Why `python -m WORDS` would be refused; None if it would not, as far as its source tells."""
    module = words[0].replace(".", "/")
    places = [
        ROOT / f"{module}.py",
        ROOT / module / "__main__.py",
        ROOT / "src" / f"{module}.py",
        ROOT / "src" / module / "__main__.py",
    ]
    place = next((path for path in places if path.exists()), None)
    if place is None:
        return f"there is no module {words[0]}"
    source = "".join(
        path.read_text(encoding="utf-8")
        for path in (place.parent.glob("*.py") if place.name == "__main__.py" else [place])
    )
    flags = [word.partition("=")[0] for word in words[1:] if word.startswith("--")]
    unknown = [flag for flag in flags if f'"{flag}"' not in source]
    return f"{place.relative_to(ROOT)} knows no {unknown[0]}" if unknown else None


def make_complaint(words: tuple[str, ...]) -> str | None:
    """Why `make WORDS` would be refused."""
    targets = set(re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(encoding="utf-8"), re.MULTILINE))
    named = [word for word in words if "=" not in word and not word.startswith("-")]
    missing = [word for word in named if word not in targets]
    return f"the Makefile has no target {missing[0]}" if missing else None


def complaint_of(command: CommandLine) -> str | None:
    words = command.words
    if not words or PLACEHOLDERS.intersection(words):
        return None
    match words:
        case ("weft", *rest):
            return weft_complaint(tuple(rest))
        case (("python" | "python3"), "-m", ("weft"), *rest):
            return weft_complaint(tuple(rest))
        case (("python" | "python3"), "-m", ("pip" | "venv" | "pytest"), *_):
            return None
        case (("python" | "python3"), "-m", "tests.emulated_gpu", *rest):  # weft's own words, on that GPU
            return weft_complaint(tuple(rest))
        case (("python" | "python3"), "-m", *rest):
            return module_complaint(tuple(rest))
        case (("python" | "python3"), path, *rest) if path.endswith(".py"):
            return None if Path(ROOT / path).exists() else f"there is no file {path}"
        case ("make", *rest):
            return make_complaint(tuple(rest))
    return None


def test_no_page_writes_a_key_of_the_config_file_as_a_flag() -> None:
    keys = {
        f.name.replace("_", "-")
        for config in (EngineConfig, ServerConfig)
        for f in fields(config)
        if "table" in f.metadata
    }
    context = click.Context(cli)
    verbs = [cli.get_command(context, verb) for verb in cli.list_commands(context)]
    keys -= {
        name.lstrip("-")
        for verb in verbs
        if verb is not None
        for option in verb.params
        if not isinstance(option, TableSetting)
        for name in option.opts
    }  # such as `simulate --router`
    assert "ray-cpus" in keys
    flag = re.compile(rf"--(?:no-)?(?:{'|'.join(sorted(keys))})(?![a-z-])")
    assert [(str(page), found) for page in PAGES for found in flag.findall(page.read_text(encoding="utf-8"))] == []


def test_the_pages_have_command_lines() -> None:
    programs = [command.words[0] for command in COMMANDS if command.words]
    assert programs.count("weft") > 20
    assert programs.count("make") > 2


@pytest.mark.parametrize("command", COMMANDS, ids=str)
def test_a_command_line_of_a_page_is_accepted(command: CommandLine) -> None:
    assert complaint_of(command) is None, str(command)


@pytest.mark.parametrize(
    "line",
    [
        "weft serve --no-such-flag",
        "weft nonsense",
        "weft plan --memory",
        "python -m benchmarks.nowhere",
        "python -m benchmarks.prefix --no-such-flag",
        "make nowhere",
        "weft bench nonsense",
        "A=1 weft serve --port many",
    ],
)
def test_a_line_that_would_be_refused_is_noticed(line: str) -> None:
    [command] = commands_of("page.md", f"```bash\n{line}\n```\n")
    assert complaint_of(command) is not None


def test_lines_are_joined_and_cut_as_a_shell_does() -> None:
    text = "```bash\nX=1 weft plan A \\\n  --tp 2   # why\necho a | weft generate > out.txt\n```\n"
    assert [(one.line, one.words, one.variables) for one in commands_of("page.md", text)] == [
        (2, ("weft", "plan", "A", "--tp", "2"), ("X=1",)),
        (4, ("echo", "a"), ()),
        (4, ("weft", "generate"), ()),
    ]
