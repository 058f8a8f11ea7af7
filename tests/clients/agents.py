"""Coding agents, from their packages, each against a tape (``tests.clients.tape``) on a server of this checkout.

    python -m tests.clients.agents FOLDER [AGENT...]      a table; exit code 1 if something fails
    AGENTS_TRIALS=call,small                              only these trials

What each is to do:

    call        write a file with a tool, whose call is streamed and whose result goes back, and print the last words
    20 calls    the same tool 20 times: each prompt computes no more than what is new and a page
    small       a context that leaves less than the agent's constant ``max_tokens``
    cut         Ctrl-C while it runs: the server goes on
    overflow    a prompt beyond the context: the agent knows the error

The requests are recorded. A field, block or tool type that ``tests/server/agent_bodies.py`` does not name is reported:
then a release sends something that no test knows.
"""

from __future__ import annotations

import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients import tape
from tests.clients.recorder import Recorder, fields
from tests.server.agent_bodies import KNOWN

ROOT = Path(__file__).resolve().parents[2]
LAST_WORDS = "All is done: the file is there."
TEXT = "hello from weft"
PAGE_TOKENS = 64
CONTEXT = 200_000
"""In tokens of a tape, which are bytes: the tools of an agent alone are 80,000."""
LIMIT_S = 90.0


@dataclass(frozen=True)
class Agent:
    """``packages``: of npm, or of PyPI (``pip``). ``script``: run once after the installation. ``tool``: that it is to
    call, with its arguments for a file. ``command``: its line, ``set_up``: writes its settings into its home."""

    packages: tuple[str, ...]
    command: Callable[[Path, Path, str], list[str]]
    tool: Callable[[Path], tuple[str, dict[str, str]]]
    set_up: Callable[[Path, Path, str, int], None] = lambda home, work, url, context: None
    environment: Callable[[str], Mapping[str, str]] = lambda url: {}
    script: tuple[str, ...] = ()
    pip: bool = False
    overflow: str = ""
    """What it prints or sends when it has understood that a prompt is too long."""


def _bin(folder: Path, name: str) -> str:
    return str(folder / "node_modules" / ".bin" / name)


def _write(path: Path, value: Any) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(value if isinstance(value, str) else json.dumps(value, indent=2))


def _codex(home: Path, work: Path, url: str, context: int) -> None:
    _write(
        home / ".codex" / "config.toml",
        f'model = "default"\nmodel_provider = "weft"\nmodel_context_window = {context}\n\n'
        f'[model_providers.weft]\nname = "weft"\nbase_url = "{url}/v1"\nwire_api = "responses"\n',
    )


def _opencode(home: Path, work: Path, url: str, context: int) -> None:
    models = {"default": {"name": "default", "limit": {"context": context, "output": 4096}}}
    options = {"baseURL": f"{url}/v1"}
    provider = {"npm": "@ai-sdk/openai-compatible", "name": "weft", "options": options, "models": models}
    _write(work / "opencode.json", {"provider": {"weft": provider}})


def _pi(home: Path, work: Path, url: str, context: int) -> None:
    models = [{"id": "default", "contextWindow": context, "maxTokens": 32_000}]
    provider = {"baseUrl": f"{url}/v1", "api": "openai-completions", "apiKey": "none", "models": models}
    _write(home / ".pi" / "agent" / "models.json", {"providers": {"weft": provider}})


def _continue(home: Path, work: Path, url: str, context: int) -> None:
    _write(
        home / ".continue" / "config.yaml",
        "name: weft\nversion: 0.0.1\nschema: v1\nmodels:\n  - name: default\n    provider: openai\n"
        f"    model: default\n    apiBase: {url}/v1\n    apiKey: none\n    roles: [chat]\n"
        f"    capabilities: [tool_use]\n    defaultCompletionOptions:\n      contextLength: {context}\n"
        "      maxTokens: 4096\n",
    )


def _cline(home: Path, work: Path, url: str, context: int) -> None:
    folder = Path(os.environ["AGENTS_FOLDER"]) / "cline"
    given = [_bin(folder, "cline"), "auth", "-p", "openai-compatible", "-k", "none", "-m", "default", "-b", f"{url}/v1"]
    subprocess.run(given, env={**os.environ, "HOME": str(home)}, check=True, capture_output=True, timeout=60)


AGENTS: dict[str, Agent] = {
    "claude": Agent(
        packages=("@anthropic-ai/claude-code",),
        script=("node", "node_modules/@anthropic-ai/claude-code/install.cjs"),
        command=lambda folder, work, text: [
            *(_bin(folder, "claude"), "-p", text, "--allowedTools", "Write", "--permission-mode", "acceptEdits")
        ],
        environment=lambda url: {
            "ANTHROPIC_BASE_URL": url,
            "ANTHROPIC_AUTH_TOKEN": "none",
            "ANTHROPIC_MODEL": "default",
            "ANTHROPIC_SMALL_FAST_MODEL": "default",
            "CLAUDE_CODE_DISABLE_NONESSENTIAL_TRAFFIC": "1",
        },
        tool=lambda file: ("Write", {"file_path": str(file), "content": TEXT}),
        overflow="(?i)prompt is too long",
    ),
    "codex": Agent(
        packages=("@openai/codex",),
        command=lambda folder, work, text: [
            *(
                _bin(folder, "codex"),
                "exec",
                "--skip-git-repo-check",
                "--dangerously-bypass-approvals-and-sandbox",
                text,
            )
        ],
        set_up=_codex,
        tool=lambda file: ("exec_command", {"cmd": f"printf '{TEXT}' > {file}"}),
        overflow="(?i)context window",
    ),
    "opencode": Agent(
        packages=("opencode-ai",),
        script=("node", "node_modules/opencode-ai/postinstall.mjs"),
        command=lambda folder, work, text: [_bin(folder, "opencode"), "run", "-m", "weft/default", text],
        set_up=_opencode,
        tool=lambda file: ("write", {"filePath": str(file), "content": TEXT}),
        overflow="(?i)compact|context",
    ),
    "qwen": Agent(
        packages=("@qwen-code/qwen-code",),
        command=lambda folder, work, text: [
            *(_bin(folder, "qwen"), "-p", text, "--auth-type", "openai", "--approval-mode", "yolo")
        ],
        environment=lambda url: {"OPENAI_BASE_URL": f"{url}/v1", "OPENAI_MODEL": "default", "OPENAI_API_KEY": "none"},
        tool=lambda file: ("write_file", {"file_path": str(file), "content": TEXT}),
        overflow="(?i)maximum context length",
    ),
    "pi": Agent(
        packages=("@earendil-works/pi-coding-agent",),
        command=lambda folder, work, text: [
            *(_bin(folder, "pi"), "-p", "--provider", "weft", "--model", "default", text)
        ],
        set_up=_pi,
        tool=lambda file: ("write", {"path": str(file), "content": TEXT}),
        overflow="(?i)maximum context length|compact",
    ),
    "cline": Agent(
        packages=("cline",),
        command=lambda folder, work, text: [
            *(_bin(folder, "cline"), "-P", "openai-compatible", "-m", "default", "-c", str(work), text)
        ],
        set_up=_cline,
        tool=lambda file: ("editor", {"path": str(file), "new_text": TEXT}),
        overflow="(?i)maximum context length|compact",
    ),
    "continue": Agent(
        packages=("@continuedev/cli",),
        command=lambda folder, work, text: [_bin(folder, "cn"), "-p", "--auto", text],
        set_up=_continue,
        tool=lambda file: ("Write", {"filepath": str(file), "content": TEXT}),
        overflow="(?i)context",
    ),
    "aider": Agent(
        packages=("aider-chat",),
        pip=True,
        command=lambda folder, work, text: [
            *(str(folder / "bin" / "aider"), "--model", "openai/default", "--message", text, "--yes-always"),
            *("--no-git", "--no-show-model-warnings", "--edit-format", "whole", "--no-check-update", "hello.txt"),
        ],
        environment=lambda url: {"OPENAI_API_BASE": f"{url}/v1", "OPENAI_API_KEY": "none"},
        tool=lambda file: ("", {}),
        overflow="(?i)context",
    ),
}


class Server:
    """``weft serve`` on a tape, behind a recorder."""

    def __init__(self, model: Path, log: Path, *more: str) -> None:
        environment = {**os.environ, "PYTHONPATH": str(ROOT / "src"), "WEFT_FILE_STORE": "off"}
        environment |= {"WEFT_RESPONSE_STORE": "off", "WEFT_NAME_STORE": "off", "OMP_NUM_THREADS": "2"}
        line = [sys.executable, "-m", "weft", "serve", str(model), "--served-model-name", "default", "--port", "0"]
        self._log = log.open("w+")
        self.process = subprocess.Popen(
            [*line, "--memory", "1GiB", *more], env=environment, stdout=self._log, stderr=subprocess.STDOUT
        )
        deadline = time.monotonic() + LIMIT_S
        while not (found := re.search(r"http://127\.0\.0\.1:\d+", text := log.read_text())) or "Ctrl-C" not in text:
            if self.process.poll() is not None or time.monotonic() > deadline:
                raise RuntimeError(f"the server does not start: {text[-2000:]}")
            time.sleep(0.2)
        self.recorder = Recorder(found.group())

    def close(self) -> None:
        self.recorder.close()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(30)


@dataclass
class Result:
    agent: str
    version: str
    works: list[str] = field(default_factory=list)
    fails: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def row(self) -> str:
        fails = "; ".join(self.fails + [f"unknown field: {name}" for name in self.unknown])
        return f"| {self.agent} | {self.version} | {', '.join(self.works)} | {fails} |"


def install(folder: Path, name: str) -> str:
    """Install the agent into ``folder`` and return its version."""
    agent = AGENTS[name]
    here = folder / name
    if not (here / "complete").exists():
        here.mkdir(parents=True, exist_ok=True)
        if agent.pip:
            subprocess.run([sys.executable, "-m", "venv", str(here)], check=True)
            subprocess.run([here / "bin" / "pip", "install", "-q", *agent.packages], check=True)
        else:
            subprocess.run(["npm", "init", "-y"], cwd=here, check=True, stdout=subprocess.DEVNULL)
            line = ["npm", "install", "--silent", "--no-audit", "--no-fund", *agent.packages]
            subprocess.run(line, cwd=here, check=True)
            if agent.script:
                subprocess.run(agent.script, cwd=here, check=True, stdout=subprocess.DEVNULL)
        (here / "complete").touch()
    if agent.pip:
        [found] = here.glob(f"lib/python*/site-packages/{agent.packages[0].replace('-', '_')}-*.dist-info")
        return found.name.removesuffix(".dist-info").rpartition("-")[2]
    return str(json.loads((here / "node_modules" / agent.packages[0] / "package.json").read_text())["version"])


class Trial:
    """One agent with a home and a working folder of its own."""

    def __init__(self, folder: Path, name: str, scratch: Path) -> None:
        self.agent, self.folder = AGENTS[name], folder / name
        self.home, self.work = scratch / "home", scratch / "work"
        for path in (self.home, self.work):
            path.mkdir(parents=True)
        self.file = self.work / "hello.txt"

    def says(self) -> dict[str, str]:
        tool, arguments = self.agent.tool(self.file)
        if not tool:  # edits come as text
            return {"\t": f"{LAST_WORDS}\n\nhello.txt\n```\n{TEXT}\n```\n"}
        return {"\n": f"I write it now.{tape.call(tool, arguments)}", "\t": LAST_WORDS}

    def start(self, url: str, context: int, text: str = "Write a greeting into hello.txt.") -> subprocess.Popen[str]:
        self.agent.set_up(self.home, self.work, url, context)
        environment = {
            name: value for name, value in os.environ.items() if not name.startswith(("CLAUDE", "ANTHROPIC"))
        }
        environment |= {"HOME": str(self.home), "PWD": str(self.work), "NO_COLOR": "1", **self.agent.environment(url)}
        return subprocess.Popen(
            self.agent.command(self.folder, self.work, text),
            cwd=self.work,
            env=environment,
            stdin=subprocess.DEVNULL,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            start_new_session=True,
        )

    def run(self, url: str, context: int, **more: str) -> str:
        process = self.start(url, context, **more)
        try:
            return process.communicate(timeout=LIMIT_S)[0]
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return process.communicate()[0] + "\n[it did not end]"


def generations(recorder: Recorder) -> list[dict[str, Any]]:
    paths = ("/v1/chat/completions", "/v1/responses", "/v1/messages")
    return [one for one in recorder.exchanges if one["method"] == "POST" and one["path"] in paths]


def usage_of(answer: str) -> tuple[int, int]:
    """(prompt tokens, those from the cache) of an answer or a stream."""
    prompt = [int(found) for found in re.findall(r'"(?:prompt_tokens|input_tokens)":(\d+)', answer)]
    cached = [int(found) for found in re.findall(r'"(?:cached_tokens|cache_read_input_tokens)":(\d+)', answer)]
    added = max(cached, default=0) if "cache_read_input_tokens" in answer else 0
    return max(prompt, default=0) + added, max(cached, default=0)


def check_call(trial: Trial, server: Server, output: str) -> None:
    refused = [one for one in generations(server.recorder) if one["status"] != 200]
    assert not refused, f"{refused[0]['status']}: {refused[0]['answer'][:300]}"
    assert trial.file.exists(), f"no file; it says {output[-500:]!r}"
    assert trial.file.read_text().strip() == TEXT, trial.file.read_text()[:100]
    assert LAST_WORDS.partition(":")[0] in output, f"the last words are missing: {output[-500:]!r}"


def check_cache(server: Server, count: int) -> None:
    """Each prompt of the loop but the first computes at most what is new and a page."""
    usages = [usage_of(one["answer"]) for one in generations(server.recorder) if (one["body"] or {}).get("tools")]
    assert len(usages) > count, f"{len(usages)} requests with tools"
    for (before, _), (prompt, cached) in itertools.pairwise(usages):
        new = max(prompt - before, 0)
        assert prompt - cached <= new + PAGE_TOKENS, f"of {prompt} tokens {new} are new and {cached} were cached"


def unknown_fields(recorder: Recorder) -> list[str]:
    found = {f"{one['path']} {name}" for one in generations(recorder) for name in fields(one["body"])}
    return sorted(found - KNOWN)


def check(folder: Path, name: str, scratch: Path) -> Result:
    result = Result(name, install(folder, name))
    has_tools = bool(AGENTS[name].tool(Path("x"))[0])

    only = os.environ.get("AGENTS_TRIALS", "").split(",")

    def attempt(what: str, calls: int, context: int, judge: Callable[[Trial, Server], None]) -> None:
        if only != [""] and what not in only:
            return
        place = scratch / name / what.replace(" ", "-")
        trial = Trial(folder, name, place)
        model = tape.make(place / "model", trial.says(), calls=calls)
        server = Server(model, place / "log", "--max-model-len", str(context))
        try:
            judge(trial, server)
            result.works.append(what)
        except (AssertionError, RuntimeError) as error:
            result.fails.append(f"{what}: {' '.join(str(error).split())[:400]}")
        finally:
            result.unknown = sorted({*result.unknown, *unknown_fields(server.recorder)})
            with (scratch / f"{name}.jsonl").open("a") as out:
                out.writelines(json.dumps(one) + "\n" for one in server.recorder.exchanges)
            server.close()

    def calls(trial: Trial, server: Server) -> None:
        check_call(trial, server, trial.run(server.recorder.url, CONTEXT))

    def many(trial: Trial, server: Server) -> None:
        check_call(trial, server, trial.run(server.recorder.url, CONTEXT))
        check_cache(server, 20)

    def small(trial: Trial, server: Server) -> None:
        check_call(trial, server, trial.run(server.recorder.url, CONTEXT))

    def cut(trial: Trial, server: Server) -> None:
        process = trial.start(server.recorder.url, CONTEXT)
        deadline = time.monotonic() + LIMIT_S
        while len(generations(server.recorder)) < 5 and time.monotonic() < deadline and process.poll() is None:
            time.sleep(0.05)
        os.killpg(process.pid, signal.SIGINT)
        time.sleep(1)
        os.killpg(process.pid, signal.SIGKILL) if process.poll() is None else None
        process.communicate()
        assert server.process.poll() is None, "the server ended"
        trial.file.unlink(missing_ok=True)
        again = trial.start(server.recorder.url, CONTEXT)
        time.sleep(8)
        assert len(generations(server.recorder)) > 5, "the server answers no more"
        os.killpg(again.pid, signal.SIGKILL)
        again.communicate()

    def overflow(trial: Trial, server: Server) -> None:
        output = trial.run(server.recorder.url, CONTEXT)
        refusals = [
            one for one in generations(server.recorder) if "maximum" in one["answer"] and "tokens" in one["answer"]
        ]
        assert refusals, f"no prompt was too long: {output[-300:]!r}"
        assert re.search(AGENTS[name].overflow, output), f"it says {output[-300:]!r}"

    attempt("call", 1, CONTEXT, calls)
    needed = max(
        (usage_of(one["answer"])[0] or len(json.dumps(one["body"])) for one in _recorded(scratch, name)), default=0
    )
    if has_tools:
        attempt("20 calls", 20, CONTEXT, many)
        attempt("cut", 10_000, CONTEXT, cut)
    attempt("small", 1, needed + 1024, small)
    attempt("overflow", 1, max(needed // 2, 256), overflow)
    return result


def _recorded(scratch: Path, name: str) -> list[dict[str, Any]]:
    file = scratch / f"{name}.jsonl"
    lines = file.read_text().splitlines() if file.exists() else []
    return [one for one in map(json.loads, lines) if one["method"] == "POST" and isinstance(one["body"], dict)]


def main(arguments: Sequence[str]) -> int:
    folder = Path(arguments[0]).resolve()
    os.environ["AGENTS_FOLDER"] = str(folder)
    names = arguments[1:] or list(AGENTS)
    scratch = Path(os.environ.get("AGENTS_SCRATCH", folder / "runs"))
    shutil.rmtree(scratch, ignore_errors=True)
    scratch.mkdir(parents=True)
    print("| agent | version | works | fails |\n|---|---|---|---|", flush=True)
    failed = False
    for name in names:
        result = check(folder, name, scratch)
        failed |= bool(result.fails or result.unknown)
        print(result.row(), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
