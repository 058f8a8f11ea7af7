"""The coding agents that ``tests.clients.agents`` runs: where they come from, how they run without a terminal, and
which of their tools writes or reads a file. Their settings are the blocks of ``docs/agents.md``, as printed there."""

from __future__ import annotations

import re
import shlex
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

ROOT = Path(__file__).resolve().parents[2]
PAGE = ROOT / "docs" / "agents.md"
PRINTED_URL, PRINTED_CONTEXT = "http://127.0.0.1:8000", "65536"
_BLOCK = re.compile(r"(?:`([^`\n]+)`[^`\n]*\n\n)?```(\w*)\n(.*?)^```", re.DOTALL | re.MULTILINE)

Tool = tuple[str, dict[str, Any]]


@dataclass(frozen=True)
class Agent:
    """``title``: its section of the page. ``packages``: of npm, or of PyPI where ``python`` names the interpreter's
    oldest version. ``script`` runs once after the installation. ``unattended`` makes of the line on the page one that
    does a task and ends."""

    title: str
    packages: tuple[str, ...]
    unattended: Callable[[list[str], str], list[str]]
    write: Callable[[Path, str], Tool] | None
    """The tool that writes a text into a file; None: the agent asks for edits as text."""
    read: Callable[[Path], Tool] | None
    overflow: str
    """What it prints when a first prompt is too long."""
    streams: bool = True
    gives_up: str = ""
    """What it prints instead of summing up where it was told of a longer context than the server has."""
    script: tuple[str, ...] = ()
    python: tuple[int, int] | None = None
    environment: Mapping[str, str] = field(default_factory=dict)
    """For a machine that reaches nothing but the server."""


@dataclass
class Settings:
    """Of one section of the page: files by path, variables, and command lines, of which the last is the agent's."""

    files: dict[str, str] = field(default_factory=dict)
    variables: dict[str, str] = field(default_factory=dict)
    lines: list[list[str]] = field(default_factory=list)


def settings(title: str, url: str = PRINTED_URL, context: int | str = PRINTED_CONTEXT) -> Settings:
    """Read the blocks of a section. A block without a language is the file that the text before it names."""
    section = re.search(rf"^## {re.escape(title)}\n(.*?)(?=^## |\Z)", PAGE.read_text(), re.DOTALL | re.MULTILINE)
    assert section is not None, f"{PAGE} has no section {title}"
    found = Settings()
    text = section[1].replace(PRINTED_URL, url).replace(PRINTED_CONTEXT, str(context))
    for path, language, body in _BLOCK.findall(text):
        if not language:
            found.files[path] = body
            continue
        for line in map(shlex.split, body.splitlines()):
            if line[0] == "export":
                found.variables.update([line[1].split("=", 1)])
            else:
                found.lines.append(line)
    return found


def _then(*more: str) -> Callable[[list[str], str], list[str]]:
    """Return a maker of lines: the printed one, ``more``, and the task."""
    return lambda line, text: [*line, *more, text]


def _verb(verb: str, *more: str) -> Callable[[list[str], str], list[str]]:
    """Return a maker of lines in which a verb follows the program."""
    return lambda line, text: [line[0], verb, *line[1:], *more, text]


AGENTS: dict[str, Agent] = {
    "claude": Agent(
        title="Claude Code",
        packages=("@anthropic-ai/claude-code",),
        script=("node", "node_modules/@anthropic-ai/claude-code/install.cjs"),
        unattended=lambda line, text: [
            *(*line, "-p", text, "--allowedTools", "Write,Read", "--permission-mode", "acceptEdits")
        ],
        write=lambda file, text: ("Write", {"file_path": str(file), "content": text}),
        read=lambda file: ("Read", {"file_path": str(file)}),
        overflow="(?i)prompt is too long",
    ),
    "codex": Agent(
        title="Codex",
        packages=("@openai/codex",),
        unattended=_verb("exec", "--skip-git-repo-check", "--dangerously-bypass-approvals-and-sandbox"),
        write=lambda file, text: ("exec_command", {"cmd": f"printf '{text}' > {file}"}),
        read=lambda file: ("exec_command", {"cmd": f"cat {file}"}),
        overflow="(?i)context window",
        gives_up="(?i)ran out of room in the model's context window",
    ),
    "opencode": Agent(
        title="opencode",
        packages=("opencode-ai",),
        script=("node", "node_modules/opencode-ai/postinstall.mjs"),
        unattended=_verb("run"),
        write=lambda file, text: ("write", {"filePath": str(file), "content": text}),
        read=lambda file: ("read", {"filePath": str(file)}),
        overflow="(?i)compact|context",
    ),
    "qwen": Agent(
        title="Qwen Code",
        packages=("@qwen-code/qwen-code",),
        unattended=_then("--approval-mode", "yolo", "-p"),
        write=lambda file, text: ("write_file", {"file_path": str(file), "content": text}),
        read=lambda file: ("read_file", {"file_path": str(file)}),
        overflow="(?i)maximum context length",
    ),
    "pi": Agent(
        title="pi",
        packages=("@earendil-works/pi-coding-agent",),
        unattended=_then("--mode", "json", "-p"),
        write=lambda file, text: ("write", {"path": str(file), "content": text}),
        read=lambda file: ("read", {"path": str(file)}),
        overflow="(?i)maximum context length|compact",
        environment={"PI_OFFLINE": "1"},
    ),
    "cline": Agent(
        title="Cline",
        packages=("cline",),
        unattended=_then(),
        write=lambda file, text: ("editor", {"path": str(file), "new_text": text}),
        read=lambda file: ("read_files", {"files": [{"path": str(file)}]}),
        overflow="(?i)maximum context length|compact",
    ),
    "continue": Agent(
        title="Continue",
        packages=("@continuedev/cli",),
        unattended=_then("--auto", "-p"),
        write=lambda file, text: ("Write", {"filepath": str(file), "content": text}),
        read=lambda file: ("Read", {"filepath": str(file)}),
        overflow="(?i)context",
        gives_up="(?i)context length exceeded",
    ),
    "openhands": Agent(
        title="OpenHands",
        packages=("openhands",),
        python=(3, 12),
        unattended=_then("--headless", "--yolo", "-t"),
        write=lambda file, text: (
            "file_editor",
            {"command": "create", "path": str(file), "file_text": text, "security_risk": "LOW"},
        ),
        read=lambda file: ("terminal", {"command": f"cat {file}", "security_risk": "LOW"}),
        streams=False,
        overflow="(?i)context",
        environment={"LITELLM_LOCAL_MODEL_COST_MAP": "True", "OPENHANDS_SUPPRESS_BANNER": "1"},
    ),
    "aider": Agent(
        title="Aider",
        packages=("aider-chat",),
        python=(3, 10),
        unattended=lambda line, text: [
            *(*line, "--yes-always", "--no-git", "--no-show-model-warnings", "--edit-format", "whole"),
            *("--no-check-update", "--no-fancy-input", "hello.txt"),
            *(("--message", text) if text else ()),
        ],
        write=None,
        read=None,
        overflow="(?i)token limit",
        gives_up="(?i)token limit",
        environment={"AIDER_ANALYTICS": "false", "LITELLM_LOCAL_MODEL_COST_MAP": "True"},
    ),
}


def programs(folder: Path, name: str) -> Sequence[Path]:
    """Return the folders in which the agent's programs are."""
    return (folder / name / "bin", folder / name / "node_modules" / ".bin")
