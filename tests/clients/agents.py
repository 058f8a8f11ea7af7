"""Coding agents, from their packages, each against a tape (``tests.clients.tape``) on a server of this checkout.

    python -m tests.clients.agents FOLDER [AGENT...]      a table; exit code 1 if something fails
    AGENTS_TRIALS=call,small                              only these trials

Each is set up by its block of docs/agents.md. What it is to do:

    call        reason, write a file with a tool, whose call is streamed and whose result goes back, and print the last
                words
    again       another task: most of its prompts is in the cache
    20 calls    a file with each: a prompt computes no more than what is new and a page
    cut         Ctrl-C in an answer, again until it stops: the answer ends on the server, which goes on
    small       a context that leaves less than the agent's constant ``max_tokens``
    overflow    a first prompt beyond the context: the agent says so
    compacts    files that exceed the context together: the agent sums up, and prints the last words
    recovers    the same, where the agent was told of a longer context: the error makes it sum up, or it says so

Aider calls no tools. It edits by a text; a test command whose output goes back stands for the result, and 20
messages for 20 calls.

The requests are recorded. A field, block or tool type that ``tests/server/agent_bodies.py`` does not name is reported,
and so is an endpoint that the server does not have: then a release sends something that no test knows.
"""

from __future__ import annotations

import functools
import itertools
import json
import os
import re
import shutil
import signal
import subprocess
import sys
import time
import urllib.request
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from tests.clients import tape
from tests.clients.agent_table import AGENTS, ROOT, Agent, programs, settings
from tests.clients.recorder import Recorder, fields
from tests.server.agent_bodies import KNOWN

TASK = "Write a greeting into hello.txt."
LAST_WORDS = "All is done: the file is there."
TEXT = "hello from weft"
MARK = "nothing new was in them"
SUMMARY = f"<summary>\nThe files were read one by one, and {MARK}.\n</summary>"
PAGE_TOKENS = 64
NODE = 22
"""The oldest major version that the newest releases run on."""
CONTEXT = 131_072
LIMIT_S = 300.0
PRESS_AGAIN_S, PRESSES_MAX = 3.0, 10
COMPUTED = "weft:request_prefill_kv_computed_tokens_sum"
GENERATIONS = ("/v1/chat/completions", "/v1/responses", "/v1/messages")


class Server:
    """``weft serve`` on a tape, with a recorder before it."""

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
        self.url = found.group()
        self.recorder = Recorder(self.url)

    def metric(self, name: str) -> float:
        """Return the sum of a metric over its labels."""
        with urllib.request.urlopen(f"{self.url}/metrics", timeout=30) as answer:
            lines = answer.read().decode().splitlines()
        return sum(float(line.rpartition(" ")[2]) for line in lines if re.match(rf"{name}(\{{.*\}})? ", line))

    def tokens_of(self, body: dict[str, Any]) -> list[int]:
        """Return the ids of the prompt of a chat request."""
        asked = {name: body[name] for name in ("messages", "tools") if body.get(name)}
        request = urllib.request.Request(
            f"{self.url}/tokenize",
            data=json.dumps({"model": "default", **asked}).encode(),
            headers={"content-type": "application/json"},
        )
        with urllib.request.urlopen(request, timeout=30) as answer:
            return list(json.load(answer)["tokens"])

    def generations(self) -> list[dict[str, Any]]:
        return [one for one in self.recorder.exchanges if one["method"] == "POST" and one["path"] in GENERATIONS]

    def close(self) -> None:
        self.recorder.close()
        self.process.send_signal(signal.SIGINT)
        self.process.wait(60)


@dataclass
class Result:
    agent: str
    version: str
    works: list[str] = field(default_factory=list)
    fails: list[str] = field(default_factory=list)
    unknown: list[str] = field(default_factory=list)

    def row(self) -> str:
        fails = "; ".join(self.fails + [f"unknown: {name}" for name in self.unknown])
        return f"| {self.agent} | {self.version} | {', '.join(self.works)} | {fails} |"


def install(folder: Path, name: str) -> str:
    """Install the agent into ``folder`` and return its version."""
    agent = AGENTS[name]
    here = folder / name
    if not (here / "complete").exists():
        here.mkdir(parents=True, exist_ok=True)
        if agent.python:
            subprocess.run([_interpreter(agent.python), "-m", "venv", str(here)], check=True)
            for packages in (("--upgrade", "pip"), agent.packages):
                subprocess.run([here / "bin" / "pip", "install", "-q", *packages], check=True)
        else:
            _npm(here, *agent.packages, path=_node(folder))
            if agent.script:
                environment = os.environ | {"PATH": _path(_node(folder))}
                subprocess.run(agent.script, cwd=here, check=True, stdout=subprocess.DEVNULL, env=environment)
        (here / "complete").touch()
    if agent.python:
        [found] = here.glob(f"lib/python*/site-packages/{agent.packages[0].replace('-', '_')}-*.dist-info")
        return found.name.removesuffix(".dist-info").rpartition("-")[2]
    return str(json.loads((here / "node_modules" / agent.packages[0] / "package.json").read_text())["version"])


def _path(*first: Path) -> str:
    return os.pathsep.join([*map(str, first), os.environ["PATH"]])


def _npm(here: Path, *packages: str, path: Path) -> None:
    environment = os.environ | {"PATH": _path(path)}
    for line in (["init", "-y"], ["install", "--silent", "--no-audit", "--no-fund", *packages]):
        subprocess.run(["npm", *line], cwd=here, env=environment, check=True, stdout=subprocess.DEVNULL)


@functools.cache
def _node(folder: Path) -> Path:
    """Return the folder of a Node.js that the newest releases run on: npm takes older ones for an older one. Where the
    system has none, its package brings it."""
    found = shutil.which("node")
    version = subprocess.run([found, "--version"], capture_output=True, text=True, check=True).stdout if found else ""
    if found and int(version.removeprefix("v").partition(".")[0]) >= NODE:
        return Path(found).parent
    here = folder / "node"
    if not (here / "complete").exists():
        here.mkdir(parents=True, exist_ok=True)
        _npm(here, f"node@{NODE}", path=here)
        (here / "complete").touch()
    return here / "node_modules" / ".bin"


def _interpreter(oldest: tuple[int, int]) -> str:
    if sys.version_info >= oldest:
        return sys.executable
    for minor in range(oldest[1], 20):
        path = shutil.which(f"python3.{minor}")
        # One in PATH may be a name that leads nowhere.
        if path and subprocess.run([path, "-c", "import venv"], capture_output=True, check=False).returncode == 0:
            return path
    raise RuntimeError(f"it needs Python {oldest[0]}.{oldest[1]}, and none is in PATH")


class Trial:
    """One agent with a home and a working folder of its own, and a server that says ``script``."""

    def __init__(self, folder: Path, name: str, scratch: Path, script: tape.Script, served: int) -> None:
        self.agent, self.folder, self.name = AGENTS[name], folder, name
        self.home, self.work, self.model = scratch / "home", scratch / "work", scratch / "model"
        for path in (self.home, self.work):
            path.mkdir(parents=True)
        self.file = self.work / "hello.txt"
        self.output = scratch / "output"
        self.server = Server(tape.make(self.model, script), scratch / "log", "--max-model-len", str(served))

    def start(self, text: str, context: int, *more: str, stdin: str | None = None) -> subprocess.Popen[str]:
        """Start the agent with the settings of the page. ``context``: told to it. What it prints goes to a file: a pipe
        that nobody reads would stop it."""
        found = settings(self.agent.title, self.server.recorder.url, context)
        for path, body in found.files.items():
            file = self.home / path.removeprefix("~/") if path.startswith("~/") else self.work / path
            file.parent.mkdir(parents=True, exist_ok=True)
            file.write_text(body)
        kept = {name: value for name, value in os.environ.items() if not name.startswith(("CLAUDE", "ANTHROPIC"))}
        path = _path(*programs(self.folder, self.name), *(() if self.agent.python else (_node(self.folder),)))
        own = {"HOME": str(self.home), "PWD": str(self.work), "NO_COLOR": "1", "PATH": path}
        environment = {**kept, **own, **self.agent.environment, **found.variables}
        for line in found.lines[:-1]:
            subprocess.run(line, cwd=self.work, env=environment, check=True, capture_output=True, timeout=60)
        with self.output.open("w") as output:
            return subprocess.Popen(
                [*self.agent.unattended(found.lines[-1], text), *more],
                cwd=self.work,
                env=environment,
                stdin=subprocess.DEVNULL if stdin is None else subprocess.PIPE,
                stdout=output,
                stderr=subprocess.STDOUT,
                text=True,
                start_new_session=True,
            )

    def end(self, process: subprocess.Popen[str]) -> str:
        """Return what the agent printed; one that still runs is killed."""
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
        process.wait()
        return self.output.read_text(errors="replace")

    def run(self, text: str, context: int, *more: str, stdin: str | None = None) -> str:
        process = self.start(text, context, *more, stdin=stdin)
        late = ""
        try:
            process.communicate(stdin, timeout=LIMIT_S)
        except subprocess.TimeoutExpired:
            late = "\n[it did not end]"
        return self.end(process) + late


def end_daemons(home: Path) -> None:
    """End the processes that an agent left: those whose home it was."""
    for entry in Path("/proc").glob("[0-9]*/environ"):
        try:
            if f"HOME={home}\0".encode() in entry.read_bytes():
                os.kill(int(entry.parent.name), signal.SIGKILL)
        except OSError:  # it ended, or is another user's
            continue


def usage_of(answer: str) -> tuple[int, int]:
    """(prompt tokens, those from the cache) of an answer or a stream."""
    prompt = [int(found) for found in re.findall(r'"(?:prompt_tokens|input_tokens)":(\d+)', answer)]
    cached = [int(found) for found in re.findall(r'"(?:cached_tokens|cache_read_input_tokens)":(\d+)', answer)]
    added = max(cached, default=0) if "cache_read_input_tokens" in answer else 0
    return max(prompt, default=0) + added, max(cached, default=0)


def check_done(trial: Trial, output: str) -> None:
    refused = [one for one in trial.server.generations() if one["status"] != 200]
    assert not refused, f"{refused[0]['status']}: {refused[0]['answer'][:300]}"
    assert trial.file.exists(), f"no file; it says {output[-500:]!r}"
    assert trial.file.read_text().strip() == TEXT, trial.file.read_text()[:100]
    assert LAST_WORDS.partition(":")[0] in output, f"the last words are missing: {output[-500:]!r}"
    streamed = any((one["body"] or {}).get("stream") for one in trial.server.generations())
    assert streamed == trial.agent.streams, f"streamed: {streamed}"


def _common(one: Sequence[int], other: Sequence[int]) -> int:
    return next((at for at, (a, b) in enumerate(zip(one, other, strict=False)) if a != b), min(len(one), len(other)))


def check_cache(server: Server, count: int, *, of_tools: bool) -> None:
    """Each prompt but the first computes at most what no prompt before had, and a page."""
    asked = [one for one in server.generations() if bool((one["body"] or {}).get("tools")) == of_tools]
    assert len(asked) >= count, f"{len(asked)} requests of the conversation"
    prompts = [server.tokens_of(one["body"]) for one in asked if one["path"] == "/v1/chat/completions"]
    usages = [usage_of(one["answer"]) for one in asked]
    if prompts:
        new = [
            len(ids) - max((_common(ids, earlier) for earlier in prompts[:at]), default=0)
            for at, ids in enumerate(prompts)
        ]
    else:
        new = [max(prompt - before, 0) for (before, _), (prompt, _) in itertools.pairwise([(0, 0), *usages])]
    if not any(prompt for prompt, _ in usages):  # Aider asks for no usage
        computed, allowed = server.metric(COMPUTED), sum(new) + len(new) * PAGE_TOKENS
        assert 0 < computed <= allowed, f"{computed} tokens were computed, and {sum(new)} are new"
        return
    for added, (prompt, cached) in zip(new, usages, strict=True):
        assert 0 < prompt - cached <= added + PAGE_TOKENS, (
            f"of {prompt} tokens {added} are new and {cached} were cached"
        )


def limits_of(body: dict[str, Any]) -> set[str]:
    return {name for name in ("max_tokens", "max_completion_tokens", "max_output_tokens") if body.get(name)}


class Trials:
    """The trials of one agent; each raises AssertionError with what it saw."""

    def __init__(self, folder: Path, name: str, scratch: Path) -> None:
        self.folder, self.name, self.scratch = folder, name, scratch
        self.agent: Agent = AGENTS[name]
        self.needed = 0
        """Tokens of the longest prompt of ``call``."""

    def trial(self, what: str, script: tape.Script, served: int = CONTEXT) -> Trial:
        return Trial(self.folder, self.name, self.scratch / what.replace(" ", "-"), script, served)

    def script(self, what: str, calls: int = 1, *, endless: bool = False) -> tape.Script:
        """Write into as many files; where edits are texts, into the first."""
        work = self.scratch / what.replace(" ", "-") / "work"
        if self.agent.write is None:
            return tape.Script(last=f"{LAST_WORDS}\n\nhello.txt\n```\n{TEXT}\n```\n", endless=endless)
        files = [work / ("hello.txt" if at == 0 else f"hello-{at}.txt") for at in range(calls)]
        said = [
            f"<think>\nI plan part {at + 1}.\n</think>\n\nPart {at + 1}.{tape.call(*self.agent.write(file, TEXT))}"
            for at, file in enumerate(files)
        ]
        return tape.Script(last=LAST_WORDS, calls=said, endless=endless)

    def call(self, what: str) -> Iterator[Trial]:
        trial = self.trial(what, self.script(what))
        yield trial
        if self.agent.write:
            check_done(trial, trial.run(TASK, CONTEXT))
        else:
            command = "cat seen 2>/dev/null || { echo once more > seen; echo the test fails; false; }"
            check_done(trial, output := trial.run(TASK, CONTEXT, "--auto-test", "--test-cmd", command))
            last = trial.server.generations()[-1]["body"]["messages"]
            assert any("the test fails" in str(message["content"]) for message in last), output[-300:]
        asked = trial.server.generations()
        self.needed = max(usage_of(one["answer"])[0] for one in asked)
        if not self.needed:  # Aider asks for no usage
            self.needed = max(len(trial.server.tokens_of(one["body"])) for one in asked)

    def again(self, what: str) -> Iterator[Trial]:
        trial = self.trial(what, self.script(what))
        yield trial
        trial.run(TASK, CONTEXT)
        first = len(trial.server.generations())
        computed = trial.server.metric(COMPUTED)
        trial.run("Another greeting is wanted in hello.txt, please.", CONTEXT)
        prompts = [usage_of(one["answer"])[0] for one in trial.server.generations()[first:]]
        share = (trial.server.metric(COMPUTED) - computed) / (sum(prompts) or self.needed)
        assert 0 < share < 0.5, f"it computed {share:.0%} of the prompts of a second conversation"

    def many_calls(self, what: str) -> Iterator[Trial]:
        trial = self.trial(what, self.script(what, 20))
        yield trial
        if self.agent.write:
            check_done(trial, trial.run(TASK, CONTEXT))
            assert len(list(trial.work.glob("hello*.txt"))) == 20
        else:
            lines = "".join(f"Write greeting {at}.\n" for at in range(20))
            check_done(trial, trial.run("", CONTEXT, stdin=f"{lines}/exit\n"))
        check_cache(trial.server, 20, of_tools=self.agent.write is not None)

    def cut(self, what: str) -> Iterator[Trial]:
        said = " ".join(f"Line {at} of it." for at in range(40))
        script = tape.Script(last=said, calls=[said] if self.agent.write else (), endless=True)
        trial = self.trial(what, script)
        yield trial
        server, count = trial.server, "weft:generation_tokens_total"
        for _ in range(2):  # the second time shows that the server goes on
            before = server.metric(count)
            process = trial.start(TASK, CONTEXT)
            _until(lambda: server.metric(count) > before + 100 or process.poll() is not None, LIMIT_S)  # noqa: B023
            assert process.poll() is None, f"it ended: {trial.end(process)[-300:]!r}"
            _press_ctrl_c(process, lambda: server.metric("weft:num_requests_running") == 0)
            stopped = server.metric(count)
            time.sleep(1)
            assert server.metric(count) == stopped, "the answer goes on"
            trial.end(process)
        assert server.process.poll() is None, "the server ended"

    def small(self, what: str) -> Iterator[Trial]:
        trial = self.trial(what, self.script(what), self.needed + 512)
        yield trial
        check_done(trial, trial.run(TASK, CONTEXT))
        for one in trial.server.generations():
            limits = limits_of(one["body"])
            cut = {limit for limit in limits if one["body"][limit] > self.needed + 512}
            assert cut <= set(one["ignored"].split(", ")), f"{cut} were not named: {one['ignored']}"

    def overflow(self, what: str) -> Iterator[Trial]:
        trial = self.trial(what, self.script(what), max(self.needed // 2, 256))
        yield trial
        process = trial.start(TASK, CONTEXT)
        _until(lambda: process.poll() is not None or any(map(asks_for_summary, trial.server.generations())), LIMIT_S)
        output = trial.end(process)
        assert any(map(is_overflow, trial.server.generations())), f"none was too long: {output[-300:]!r}"
        if not any(map(asks_for_summary, trial.server.generations())):
            assert re.search(self.agent.overflow, output), f"it says {output[-300:]!r}"

    def compacts(self, what: str) -> Iterator[Trial]:
        trial, told = self._long(what)
        yield trial
        self._check_summed_up(trial, self._read_all(trial, told))

    def recovers(self, what: str) -> Iterator[Trial]:
        trial, _ = self._long(what)
        yield trial
        output = self._read_all(trial, CONTEXT)
        assert any(map(is_overflow, trial.server.generations())), "no prompt was too long"
        if self.agent.gives_up:
            assert re.search(self.agent.gives_up, output), f"it says {output[-500:]!r}"
        else:
            self._check_summed_up(trial, output)

    def _read_all(self, trial: Trial, told: int) -> str:
        if self.agent.read:
            return trial.run("Read the parts.", told)
        lines = "".join(f"Tell part {at}.\n" for at in range(20 if told == CONTEXT else 6))
        output = trial.run("", told, stdin=f"{lines}/exit\n")
        # Aider drops a summary if its history grew meanwhile, as an applied edit has it. One of an earlier
        # conversation stays.
        return output if told == CONTEXT else trial.run("Tell the last part.", told, "--restore-chat-history")

    def _check_summed_up(self, trial: Trial, output: str) -> None:
        bodies = [json.dumps(one["body"]) for one in trial.server.generations()]
        assert any(MARK in body for body in bodies), f"no conversation has a summary; it says {output[-500:]!r}"
        assert LAST_WORDS.partition(":")[0] in output, f"the last words are missing: {output[-500:]!r}"

    def _long(self, what: str) -> tuple[Trial, int]:
        """A trial whose conversation exceeds the context, and that context. Where edits are texts, the conversation
        exceeds the part of it that the agent keeps for a history."""
        work = self.scratch / what / "work"
        if self.agent.read is None:
            lines = " ".join(f"Line {at} of it." for at in range(60))
            last = f"{LAST_WORDS} {lines}\n\nhello.txt\n```\n{TEXT}\n```\n"
            return self.trial(what, tape.Script(last=last, summary=SUMMARY, mark=MARK), self.needed + 2500), 16_384
        files = [work / f"part-{at}.txt" for at in range(24)]
        said = [f"Part {at + 1}.{tape.call(*self.agent.read(file))}" for at, file in enumerate(files)]
        served = self.needed + 40_000
        trial = self.trial(what, tape.Script(last=LAST_WORDS, calls=said, summary=SUMMARY, mark=MARK), served)
        for at, file in enumerate(files):
            file.write_text("".join(f"part {at}, line {line}: there is nothing to see here\n" for line in range(400)))
        return trial, served

    def all(self) -> dict[str, Callable[[str], Iterator[Trial]]]:
        return {
            "call": self.call,
            "again": self.again,
            "20 calls": self.many_calls,
            "cut": self.cut,
            "small": self.small,
            "overflow": self.overflow,
            "compacts": self.compacts,
            "recovers": self.recovers,
        }


def is_overflow(exchange: dict[str, Any]) -> bool:
    return any(words in exchange["answer"] for words in ("maximum context length is", "prompt is too long"))


def asks_for_summary(exchange: dict[str, Any]) -> bool:
    body = exchange["body"] or {}
    last = json.dumps((body.get("messages") or body.get("input") or [])[-2:]).lower()
    return any(words in last for words in tape.SUM_UP)


def _press_ctrl_c(process: subprocess.Popen[str], is_over: Callable[[], bool]) -> None:
    """Press Ctrl-C as a user does, again every few seconds until the answer is over or the agent ended."""
    for _ in range(PRESSES_MAX):
        if is_over() or process.poll() is not None:
            break
        os.killpg(process.pid, signal.SIGINT)
        end = time.monotonic() + PRESS_AGAIN_S
        while time.monotonic() < end and not is_over() and process.poll() is None:
            time.sleep(0.1)
    _until(is_over)


def _until(condition: Callable[[], bool], seconds: float = 60.0) -> None:
    deadline = time.monotonic() + seconds
    while not condition():
        assert time.monotonic() < deadline, "it takes too long"
        time.sleep(0.1)


def unknown_fields(exchanges: Sequence[dict[str, Any]]) -> set[str]:
    """Return the fields, blocks and tool types that no body of the suite has."""
    found = {f"{one['path']} {name}" for one in exchanges for name in fields(one["body"])}
    return found - KNOWN


def unknown_endpoints(exchanges: Sequence[dict[str, Any]]) -> set[str]:
    """Return the endpoints that the server does not have."""
    return {f"{one['method']} {one['path']}" for one in exchanges if one["status"] in (404, 405)}


def check(folder: Path, name: str, scratch: Path) -> Result:
    try:
        result = Result(name, install(folder, name))
    except (subprocess.CalledProcessError, RuntimeError) as error:
        return Result(name, "", fails=[f"not installed: {error}"])
    trials = Trials(folder, name, scratch / name)
    only = [one for one in os.environ.get("AGENTS_TRIALS", "").split(",") if one]
    for what, run in trials.all().items():
        if only and what not in {*only, "call"}:
            continue
        began = time.monotonic()
        steps = run(what)
        trial = next(steps)
        try:
            next(steps, None)
            result.works.append(what)
        except AssertionError as error:
            result.fails.append(f"{what}: {' '.join(str(error).split())[:400]}")
        finally:
            outcome = "works" if what in result.works else "fails"
            print(f"{name} {what}: {outcome}, {time.monotonic() - began:.0f} s", file=sys.stderr, flush=True)
            new = unknown_fields(trial.server.generations()) | unknown_endpoints(trial.server.recorder.exchanges)
            result.unknown = sorted(new.union(result.unknown))
            with (scratch / f"{name}.jsonl").open("a") as out:
                out.writelines(json.dumps({"trial": what, **one}) + "\n" for one in trial.server.recorder.exchanges)
            trial.server.close()
            end_daemons(trial.home)
            shutil.rmtree(trial.model)
    return result


def main(arguments: Sequence[str]) -> int:
    # A shell has the processes in its background ignore Ctrl-C, and so would the agents.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    folder = Path(arguments[0]).resolve()
    names = arguments[1:] or list(AGENTS)
    scratch = Path(os.environ.get("AGENTS_SCRATCH", folder / "runs"))
    scratch.mkdir(parents=True, exist_ok=True)
    print("| agent | version | works | fails |\n|---|---|---|---|", flush=True)
    failed = False
    for name in names:
        shutil.rmtree(scratch / name, ignore_errors=True)
        (scratch / f"{name}.jsonl").unlink(missing_ok=True)
        result = check(folder, name, scratch)
        failed |= bool(result.fails or result.unknown)
        print(result.row(), flush=True)
    return int(failed)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
