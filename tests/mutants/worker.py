"""One pytest process that has imported and collected everything, and forks for each mutant.

    map      each file of tests in a child, all mutants off: what each test reaches, its time, whether it passes
    run      each mutant in a child: the nearest tests that reach it, until the first failure
    control  a test that failed and waits for others, in another child with the mutant off: else it proves nothing

Places that are reached while modules are imported cannot be switched later: such a mutant gets a pytest of its own. A
server of a test is forked from a process that has imported the server's modules, and that lives as long as this one;
its places are switched in the shared file like any other. Children that outlive a test are killed.

Each stage has its folders of tests. What no test of a stage kills is tried with those of the next one.
"""

from __future__ import annotations

import contextlib
import ctypes
import fcntl
import hashlib
import importlib.util
import itertools
import json
import os
import select
import signal
import subprocess
import sys
import time
from collections import defaultdict
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.mutants.equivalent import is_equivalent
from tests.mutants.sample import Mutant
from tests.mutants.switches import CODE, MODULE, NONE, Switches

UNIT_FOLDERS = ("memory", "schedule", "engine", "store", "text", "costs", "router", "speculation")
STAGES = (
    ("tests/unit", "tests/property", "tests/rpc"),
    ("tests/server", "tests/fleet", "tests/api"),
    ("tests/sim", "tests/cli"),
)
ALONE = (*(f"tests/unit/{name}" for name in UNIT_FOLDERS), "tests/property", "tests/sim")
"""Folders whose tests wait for no process and no thread: a failure needs no control, since they passed before."""
TESTS_MAX, TESTS_S_MAX = 40, 8.0
"""Tests that one stage runs for a mutant, if nothing else is asked for, and their usual seconds together."""
FILE_TESTS_MAX = 12
"""Those of one file."""
WIDER = 5
"""Survivors are tried again with so many times the tests."""
LIMIT_S, LIMIT_FACTOR = (10.0, 30.0, 30.0), 6.0
"""A mutant's time limit: seconds of each stage, plus the usual seconds of its tests times the factor. Seconds in which
the tests are ready and wait for a CPU do not count, so a busy machine changes no outcome."""
MAP_LIMIT_S = 600.0
PR_SET_CHILD_SUBREAPER = 36  # sys/prctl.h
TIME_LIMIT, KILLED, SURVIVED, NO_TEST = "time limit", "killed", "survived", "no test"

Seen = dict[str, tuple[float, bool, list[int]]]
"""By a test its seconds, whether it passes, and the places that it reaches."""


class Files:
    """``sample``, ``map/`` (one for each file of tests) and ``results`` (by the key of a mutant) in a folder."""

    def __init__(self, build: Path) -> None:
        self.build = build
        self.tree = build / "tree"

    def read(self, name: str) -> dict[str, Any]:
        file = self.build / f"{name}.json"
        return dict(json.loads(file.read_text())) if file.exists() else {}

    def write(self, name: str, value: dict[str, Any]) -> None:
        file = self.build / f"{name}.json"
        file.parent.mkdir(parents=True, exist_ok=True)
        file.with_suffix(".new").write_text(json.dumps(value, indent=1))
        file.with_suffix(".new").replace(file)

    def add_result(self, key: str, result: dict[str, Any]) -> None:
        """Write one of the results, which other workers write too."""
        with (self.build / "results.lock").open("w") as lock:
            fcntl.flock(lock, fcntl.LOCK_EX)
            self.write("results", self.read("results") | {key: result})

    def mutants(self) -> list[Mutant]:
        return [Mutant(**one) for one in self.read("sample")["mutants"]]


class Place:
    """Folder of one worker: its shared file and what its children write. The first that no other worker has."""

    def __init__(self, files: Files) -> None:
        for number in itertools.count():
            self.folder = files.build / f"worker-{number}"
            self.folder.mkdir(exist_ok=True)
            self._lock = (self.folder / "lock").open("w")
            with contextlib.suppress(BlockingIOError):
                fcntl.flock(self._lock, fcntl.LOCK_EX | fcntl.LOCK_NB)
                break
        self.switches = self.folder / "switches"
        (self.folder / f"{MODULE}.py").write_text(CODE.format(path=str(self.switches)))
        self.seen, self.log = self.folder / "seen.json", self.folder / "child.log"
        self.options = ["-q", "-p", "no:cacheprovider", f"--basetemp={self.folder / 'tmp'}"]


class Claims:
    """Locks on bytes of one file, by which workers share the work. They end with their process; children have none."""

    def __init__(self, files: Files) -> None:
        self._file = (files.build / "claims").open("a+b")

    @contextlib.contextmanager
    def claim(self, name: str, waits: bool) -> Iterator[bool]:
        """Hold ``name``, and say whether it is held: another worker may have it, unless this one ``waits`` for it."""
        at = int(hash_of(name), 16) >> 2
        try:
            fcntl.lockf(self._file, fcntl.LOCK_EX | (0 if waits else fcntl.LOCK_NB), 1, at)
        except OSError:
            yield False
            return
        try:
            yield True
        finally:
            fcntl.lockf(self._file, fcntl.LOCK_UN, 1, at)


def _descendants(pid: int) -> Iterator[int]:
    for task in Path(f"/proc/{pid}/task").glob("*"):
        with contextlib.suppress(OSError):
            for child in map(int, (task / "children").read_text().split()):
                yield child
                yield from _descendants(child)


def kill_children(spared: set[int]) -> None:
    """Kill what a child has left, but for the processes ``spared``."""
    for _ in range(100):
        left = [pid for pid in _descendants(os.getpid()) if pid not in spared]
        for pid in left:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        with contextlib.suppress(ChildProcessError):
            while os.waitpid(-1, os.WNOHANG)[0]:
                pass
        if not left:
            break
        time.sleep(0.01)


def _used_s(pid: int) -> float:
    """Return a clock less the seconds for which the process ``pid`` was ready and had no CPU."""
    waited_ns = 0
    with contextlib.suppress(OSError):  # no statistics, or the process has ended
        waited_ns = int(Path(f"/proc/{pid}/schedstat").read_text().split()[1])
    return time.monotonic() - waited_ns / 1e9


def _wait(pid: int, limit_s: float) -> int | None:
    """Return the exit code of a child, or None at the limit."""
    end_s = time.monotonic() + limit_s
    descriptor = os.pidfd_open(pid)
    waiting = select.poll()
    waiting.register(descriptor, select.POLLIN)
    while (left_s := end_s - _used_s(pid)) > 0:
        if waiting.poll(left_s * 1000 + 1):
            break
    os.close(descriptor)
    if left_s <= 0:
        return None
    return os.waitstatus_to_exitcode(os.waitpid(pid, 0)[1])


class Worker:
    """Plugin of pytest that runs mutants in place of the tests."""

    def __init__(self, files: Files, place: Place, given: dict[str, Any]) -> None:
        """``given``: the arguments of ``tests.mutants.__main__``."""
        self.files, self.place, self.claims = files, place, Claims(files)
        self.mutants = files.mutants()
        self.numbers = {path: len(self.mutants) + at for at, path in enumerate(files.read("sample")["files"])}
        self.switches = Switches(place.switches, len(self.mutants) + len(self.numbers))
        self.switches.clear()
        self.end_s = time.monotonic() + given["seconds"]
        first, places = list(enumerate(self.mutants))[: given["first"]], tuple(given["places"] or ["src/"])
        self.due = [(at, one) for at, one in first if one.path.startswith(places) and not is_equivalent(one)]
        self.only = set(given["files"])
        self.again, self.wide, self.run = bool(given["again"]), bool(given["wide"]), float(given["run"])
        self.pause = Path(given["pause"]) if given["pause"] else None
        self.stages = set(given["stages"])
        self.tests_max, self.tests_s_max = int(given["tests"]), float(given["tests_seconds"])
        self.seen: Seen = {}
        self.spared: set[int] = set()

    # ------------------------------------------------------------------ in a child

    @pytest.hookimpl(wrapper=True)
    def pytest_runtest_protocol(self, item: pytest.Item, nextitem: pytest.Item | None) -> Iterator[None]:
        self.switches.clear()
        failed, begin_s = self.session.testsfailed, _used_s(os.getpid())
        result = yield
        seconds = round(_used_s(os.getpid()) - begin_s, 3)
        self.seen[item.nodeid] = seconds, self.session.testsfailed == failed, self.switches.reached()
        return result

    def run_items(self, items: list[pytest.Item], to_first_failure: bool) -> None:
        for item, following in zip(items, [*items[1:], None], strict=True):
            item.config.hook.pytest_runtest_protocol(item=item, nextitem=following)
            if self.session.testsfailed and to_first_failure:
                break

    # ------------------------------------------------------------------ in the process that forks

    def child(self, run: Callable[[], None], limit_s: float) -> int | None:
        """Return the exit code of a child that calls ``run`` and leaves ``seen`` in a file, or None at the limit."""
        self.place.seen.unlink(missing_ok=True)
        pid = os.fork()
        if pid == 0:
            code = 3
            try:
                os.setsid()
                output = os.open(self.place.log, os.O_WRONLY | os.O_CREAT | os.O_TRUNC, 0o644)
                for descriptor, opened in ((0, os.open(os.devnull, os.O_RDONLY)), (1, output), (2, output)):
                    os.dup2(opened, descriptor)
                run()
                code = 1 if self.session.testsfailed else 0
                self.place.seen.write_text(json.dumps(self.seen))
            finally:
                os._exit(code)
        code_or_none = _wait(pid, limit_s)
        kill_children(self.spared)
        if self.spared and (code_or_none is None or not self.spared & set(_descendants(os.getpid()))):
            kill_children(set())  # it may hold an answer for the child that is gone
            self.start_fork_server()
        return code_or_none

    def last_seen(self) -> Seen:
        with contextlib.suppress(FileNotFoundError, json.JSONDecodeError):
            return dict(json.loads(self.place.seen.read_text()))
        return {}

    def is_over(self) -> bool:
        while self.pause is not None and self.pause.exists():
            time.sleep(1)
        return time.monotonic() > self.end_s

    @pytest.hookimpl(tryfirst=True)
    def pytest_runtestloop(self, session: pytest.Session) -> bool:
        self.session = session
        session.testsfailed = 0  # files that could not be collected
        ctypes.CDLL(None).prctl(PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
        self.imported = set(self.switches.reached())
        self.items: dict[str, list[pytest.Item]] = defaultdict(list)
        for item in session.items:
            self.items[item.nodeid.split("::")[0]].append(item)
        for number, folders in enumerate(STAGES):
            if number in self.stages:
                if number == 1:
                    self.start_fork_server()
                self.map(folders)
                self.run_stage(number, folders)
        return True

    def start_fork_server(self) -> None:
        """Start the process that servers of tests are forked from, for all children that will use it."""
        from tests.server import running

        running.fork_server.cache_clear()
        forks = running.fork_server(frozenset(running.server_environment().items()))
        self.spared = {forks.process.pid}

    def shared(self, names: Iterable[str]) -> Iterator[str]:
        """Yield the names that no other worker has, then wait for each of those, in case its worker has ended."""
        names = list(names)
        for waits in (False, True):
            for name in names:
                with self.claims.claim(name, waits) as is_own:
                    if is_own and not self.is_over():
                        yield name

    def map(self, folders: tuple[str, ...]) -> None:
        for name in self.shared(name for name in self.items if self.is_used(name, folders)):
            text = hash_of(Path(name).read_text())
            if self.files.read(f"map/{name}").get("text") == text:
                continue
            self.seen = {}
            begin_s = time.monotonic()
            items = self.items[name]
            self.child(lambda chosen=items: self.run_items(chosen, False), MAP_LIMIT_S)  # type: ignore[misc]
            tests = self.last_seen()
            self.files.write(f"map/{name}", {"text": text, "tests": tests})
            print(f"map {name}: {len(tests)} of {len(items)} tests, {time.monotonic() - begin_s:.1f} s", flush=True)

    def tests_of(self, number: int, mapped: dict[str, Any]) -> list[str]:
        """Return the tests that reach a mutant, the nearest files and the fastest tests first."""
        mutant = self.mutants[number]
        own = {number} if number not in self.imported else self.of_file(mutant.path)
        top, *inner = Path(mutant.path).with_suffix("").parts[2:]
        words = {part.removesuffix("s") for part in inner}
        is_named = bool(self.only) and number in self.imported
        """A table without functions: no call tells which tests read it."""
        wider = WIDER if self.again or self.wide else 1
        reaching: dict[str, list[tuple[float, str]]] = {}
        for name, file in mapped.items():
            tests = [
                (seconds, test)
                for test, (seconds, passes, places) in file["tests"].items()
                if passes and (is_named or own & set(places))
            ]
            reaching[name] = sorted(tests)[: wider * FILE_TESTS_MAX]

        def distance(name: str) -> tuple[int, bool, float]:
            seconds = sum(seconds for seconds, _ in reaching[name])
            return (-sum(word in Path(name).stem for word in words), f"/{top}/" not in name, seconds)

        chosen: list[str] = []
        sum_s = 0.0
        for name in sorted(reaching, key=distance):
            for seconds, test in reaching[name]:
                is_room = len(chosen) < wider * self.tests_max and sum_s + seconds <= wider * self.tests_s_max
                if is_room or not chosen:
                    chosen.append(test)
                    sum_s += seconds
        return chosen

    def of_file(self, path: str) -> set[int]:
        """Return the numbers of the places of a file, and that of the file."""
        return {at for at, one in enumerate(self.mutants) if one.path == path and at not in self.imported} | {
            self.numbers[path]
        }

    def run_stage(self, stage: int, folders: tuple[str, ...]) -> None:
        mapped = self.mapped(folders)
        numbers = {mutant.key: number for number, mutant in self.due}
        for key in self.shared(numbers):
            number = numbers[key]
            own = self.files.read("results").get(key, {"stage": -1, "outcome": NO_TEST, "seconds": 0.0})
            if self.again or self.wide:
                is_due = own["stage"] >= 0 and own["run"] != [self.run, stage]
            else:
                is_due = own["stage"] < stage
            if own["outcome"] in (KILLED, TIME_LIMIT) or not is_due:
                continue
            begin_s = time.monotonic()
            outcome, killer = self.outcome_of(number, self.tests_of(number, mapped), LIMIT_S[stage])
            if outcome == NO_TEST:
                outcome = own["outcome"]
            own |= {"outcome": outcome, "stage": max(stage, own["stage"]), "killer": killer, "run": [self.run, stage]}
            own["seconds"] = round(own["seconds"] + time.monotonic() - begin_s, 2)
            if not self.again:
                own["first"] = outcome
            self.files.add_result(key, own)
            print(f"{stage} {outcome} {own['seconds']:.1f} s {key} {killer}", flush=True)
        if not self.only:
            self.repeat_limits(stage, mapped)

    def repeat_limits(self, stage: int, mapped: dict[str, Any]) -> None:
        """Run again each mutant of a stage that met its time limit, with twice the limit."""
        numbers = {mutant.key: number for number, mutant in self.due}
        for key in self.shared(numbers):
            number = numbers[key]
            own = self.files.read("results").get(key, {})
            if own.get("outcome") != TIME_LIMIT or own["stage"] != stage or own.get("repeated"):
                continue
            tests = self.tests_of(number, mapped)
            own["outcome"], own["killer"] = self.outcome_of(number, tests, LIMIT_S[stage], 2.0)
            own["repeated"] = True
            if not self.again:
                own["first"] = own["outcome"]
            self.files.add_result(key, own)
            print(f"{stage} repeated: {own['outcome']} {key} {own['killer']}", flush=True)

    def is_used(self, name: str, folders: tuple[str, ...]) -> bool:
        return name.startswith(folders) and (not self.only or name in self.only)

    def mapped(self, folders: tuple[str, ...]) -> dict[str, Any]:
        """Return what the files of tests in ``folders`` reach."""
        files = {name: self.files.read(f"map/{name}") for name in self.items if self.is_used(name, folders)}
        mapped = {name: file for name, file in files.items() if file}
        self.usual_s = {test: one[0] for file in mapped.values() for test, one in file["tests"].items()}
        return mapped

    def outcome_of(self, number: int, tests: list[str], least_s: float, factor: float = 1.0) -> tuple[str, str]:
        """Return killed, time limit, survived or no test, and the test that killed."""
        outcome = NO_TEST
        while tests:
            outcome = SURVIVED
            limit_s = factor * (least_s + LIMIT_FACTOR * sum(self.usual_s[test] for test in tests))
            self.switches.switch(number)
            if number in self.imported:
                code, seen = self.run_alone(tests, limit_s)
            else:
                items = self.items_of(tests)
                code = self.child(lambda chosen=items: self.run_items(chosen, True), limit_s)  # type: ignore[misc]
                seen = self.last_seen()
            self.switches.switch(NONE)
            if code is None:
                return TIME_LIMIT, ""
            if code == 0:
                return SURVIVED, ""
            failed = [test for test, (_, passes, _) in seen.items() if not passes] or tests
            if failed[0].startswith(ALONE):
                return KILLED, failed[0]
            control = self.items_of(tests[: tests.index(failed[0]) + 1])
            if self.child(lambda chosen=control: self.run_items(chosen, True), limit_s) == 0:  # type: ignore[misc]
                return KILLED, failed[0]
            tests = [test for test in tests if test not in failed]
            print(f"control: {failed} fails without {self.mutants[number].key}", flush=True)
        return outcome, ""

    def items_of(self, tests: list[str]) -> list[pytest.Item]:
        by_name = {item.nodeid: item for name in {test.split("::")[0] for test in tests} for item in self.items[name]}
        return [by_name[test] for test in tests if test in by_name]

    def run_alone(self, tests: list[str], limit_s: float) -> tuple[int | None, Seen]:
        """Run tests in a pytest of its own, which imports the mutant."""
        command = [sys.executable, "-m", "pytest", "-x", "-rfE", *self.place.options, *tests]
        output = self.place.log
        with output.open("w") as log:
            process = subprocess.Popen(
                command, stdin=subprocess.DEVNULL, stdout=log, stderr=log, start_new_session=True
            )
        code = _wait(process.pid, limit_s)
        kill_children(self.spared)
        lines = output.read_text(errors="replace").split("\n")
        named = [line.split(" ")[1] for line in lines if line.startswith(("FAILED ", "ERROR "))]
        return code, {test: (0.0, False, []) for test in tests if any(test.startswith(name) for name in named)}


def hash_of(text: str) -> str:
    return hashlib.blake2b(text.encode(), digest_size=8).hexdigest()


def main() -> None:
    """Run the mutants; arguments come as JSON from ``tests.mutants.__main__``."""
    given = json.loads(sys.argv[1])
    files = Files(Path(given["build"]))
    found = [str(spec.origin) for spec in [importlib.util.find_spec("weft")] if spec is not None]
    assert found[0].startswith(str(files.tree)), f"{found[0]} has no switches"
    place = Place(files)
    sys.path.insert(0, str(place.folder))
    os.environ["PYTHONPATH"] = os.pathsep.join([str(place.folder), os.environ["PYTHONPATH"]])
    worker = Worker(files, place, given)
    folders = [folder for number, stage in enumerate(STAGES) if number in given["stages"] for folder in stage]
    options = ["-s", "--continue-on-collection-errors", *place.options]
    sys.exit(pytest.main([*options, *(given["files"] or folders)], plugins=[worker]))


if __name__ == "__main__":
    main()
