"""A forked process runs in what Python would have given it, and its end is told as Python tells it."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
from pathlib import Path

import psutil
import pytest

from tests.support.fork_server import ROOT, ForkServer

REPORT = """
import json, os, sys, threading
facts = dict(
    name=__name__, arguments=sys.argv, path=sys.path, folder=os.getcwd(), environment=dict(os.environ),
    descriptors=os.listdir("/proc/self/fd"), threads=threading.active_count(),
    signals=[line for line in open("/proc/self/status") if line.startswith("Sig")],
    session=os.getsid(0) == os.getpid())
print(json.dumps(facts))
sys.stderr.write("an error\\n")
sys.exit(int(sys.argv[1]))
"""


@pytest.fixture(scope="module")
def environment(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    folder = tmp_path_factory.mktemp("modules")
    (folder / "report_of_a_process.py").write_text(REPORT)
    (folder / "sleeper.py").write_text("import time\nprint('asleep', flush=True)\ntime.sleep(60)\n")
    return {**os.environ, "PYTHONPATH": os.pathsep.join((str(folder), str(ROOT))), "PYTHONUNBUFFERED": "1"}


@pytest.fixture(scope="module")
def forks(environment: dict[str, str]) -> ForkServer:
    return ForkServer(["threading", "json"], environment)


def test_a_forked_process_has_what_one_of_python_has(forks: ForkServer, environment: dict[str, str]) -> None:
    plain = subprocess.run(
        [sys.executable, "-m", "report_of_a_process", "7", "two words"],
        cwd=ROOT,
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        start_new_session=True,
        check=False,
    )
    forked = [forks.start("report_of_a_process", "7", "two words") for _ in range(2)]
    for process in forked:
        facts, error = process.stdout.read().splitlines()
        assert [json.loads(facts), error] == [json.loads(plain.stdout.splitlines()[0]), "an error"]
        assert process.wait(10) == process.poll() == plain.returncode == 7
        assert not psutil.pid_exists(process.pid)


def test_the_end_of_a_forked_process_is_waited_for(forks: ForkServer) -> None:
    process = forks.start("sleeper")
    assert process.stdout.readline() == "asleep\n"
    assert process.poll() is None
    with pytest.raises(subprocess.TimeoutExpired):
        process.wait(0.01)
    process.kill()
    assert process.wait(10) == -signal.SIGKILL
    process.send_signal(signal.SIGTERM)  # its id may be another process's
    assert process.stdout.read() == ""


def test_a_fork_server_ends_with_its_last_child(environment: dict[str, str], tmp_path: Path) -> None:
    forks = ForkServer([], environment)
    child = forks.start("sleeper")
    assert child.stdout.readline() == "asleep\n"
    forks.close()
    with pytest.raises(subprocess.TimeoutExpired):
        forks.process.wait(0.1)
    child.kill()
    assert child.wait(10) == -signal.SIGKILL
    assert forks.process.wait(10) == 0


def test_a_thread_of_an_import_is_refused(environment: dict[str, str], tmp_path: Path) -> None:
    (tmp_path / "threads.py").write_text(
        "import threading, time\nthreading.Thread(target=time.sleep, args=(60,), daemon=True).start()\n"
    )
    path = os.pathsep.join((str(tmp_path), environment["PYTHONPATH"]))
    forks = ForkServer(["threads"], {**environment, "PYTHONPATH": path})
    with pytest.raises(EOFError):
        forks.start("sleeper")
