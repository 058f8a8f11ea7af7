"""Two versions of weft on one machine: each from its own sources, with the dependencies of this environment.

A version is a checkout of its commit under build/upgrade. It runs without C++ kernels (torch alone), so that nothing is
compiled and both versions have the same arithmetic.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import subprocess
import sys
import sysconfig
import time
from collections.abc import Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import httpx

ROOT = Path(__file__).resolve().parents[2]
START_LIMIT_S = 300.0
MEMORY = "64MiB"


@dataclass(frozen=True, slots=True)
class Version:
    """``name``: as `weft --version` says it. ``root``: its checkout."""

    root: Path
    name: str = ""

    def environment(self, state: Path) -> dict[str, str]:
        """Return the variables of its processes; ``state``: where databases and tokens are."""
        packages, info = sysconfig.get_path("purelib"), self.root / "build" / "upgrade-info"
        return {
            **{name: value for name, value in os.environ.items() if not name.startswith("WEFT_")},
            # No hook of an editable install: the interpreter below an environment reads none of its .pth files.
            "PYTHONPATH": os.pathsep.join(map(str, (info, self.root / "src", packages))),
            "PYTHONUNBUFFERED": "1",
            "OMP_NUM_THREADS": "1",
            "OMP_WAIT_POLICY": "passive",
            "HF_HUB_OFFLINE": "1",
            "WEFT_MEMORY": MEMORY,
            "XDG_STATE_HOME": str(state),
        }

    def run(self, state: Path, *words: str, limit_s: float = 120.0) -> subprocess.CompletedProcess[str]:
        """Run `weft` with ``words`` to its end."""
        return subprocess.run(
            [_interpreter(), "-m", "weft", *words], env=self.environment(state), cwd=state, timeout=limit_s,
            stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip


def _interpreter() -> str:
    return str(getattr(sys, "_base_executable", sys.executable))


def checked_out(commit: str) -> Version:
    """Return the version of ``commit``, in a checkout that is made at its first use."""
    known = subprocess.run(
        ["git", "rev-parse", "--short=8", f"{commit}^{{commit}}"], cwd=ROOT, capture_output=True, text=True
    )
    if known.returncode:
        raise SystemExit(f"{commit} is no commit or tag of this repository")
    place = ROOT / "build" / "upgrade" / known.stdout.strip()
    if not (place / "src").is_dir():
        shutil.rmtree(place, ignore_errors=True)
        subprocess.run(["git", "worktree", "prune"], cwd=ROOT, check=True)
        subprocess.run(["git", "worktree", "add", "--quiet", "--detach", str(place), commit], cwd=ROOT, check=True)
    return named(place)


def named(root: Path) -> Version:
    """Return the version at ``root``, with metadata as its wheel has. Raises SystemExit where it does not start."""
    commit = subprocess.run(["git", "-C", str(root), "rev-parse", "--short=8", "HEAD"], capture_output=True, text=True)
    name = f"0.1.0+g{commit.stdout.strip()}"
    info = root / "build" / "upgrade-info" / f"weft-{name}.dist-info"
    shutil.rmtree(info.parent, ignore_errors=True)
    info.mkdir(parents=True)
    (info / "METADATA").write_text(f"Metadata-Version: 2.1\nName: weft\nVersion: {name}\n")
    said = Version(root).run(ROOT, "--version")
    if said.returncode:
        raise SystemExit(f"{root}: weft --version failed:\n{said.stdout[-2000:]}")
    return Version(root, said.stdout.strip().removeprefix("weft "))


@dataclass(slots=True)
class Serving:
    """A server process of one version."""

    version: Version
    process: subprocess.Popen[str]
    log: Path
    url: str = ""
    client: httpx.Client = field(default_factory=lambda: httpx.Client(timeout=120))

    @property
    def output(self) -> str:
        return self.log.read_text()

    def post(self, path: str, body: dict[str, Any]) -> dict[str, Any]:
        """Return the answer as JSON. Raises AssertionError for an error."""
        answer = self.client.post(self.url + path, json=body)
        assert answer.status_code == 200, f"{self.version.name}: {path}: {answer.status_code} {answer.text}"
        return dict(answer.json())

    def stop(self) -> int:
        """End it as a supervisor does; requests in flight end first."""
        if self.process.poll() is None:
            self.process.send_signal(signal.SIGTERM)
        return self.process.wait(120)


@contextlib.contextmanager
def serving(version: Version, state: Path, *flags: str) -> Iterator[Serving]:
    """Start a server of ``version`` on a free port; it is ready when the block begins."""
    log = state / f"serve-{time.monotonic_ns()}.log"
    with log.open("w") as out:
        process = subprocess.Popen(
            [_interpreter(), "-m", "weft", "serve", "--port", "0", *flags],
            env=version.environment(state), cwd=state, stdout=out, stderr=subprocess.STDOUT, text=True,
        )  # fmt: skip
    server = Serving(version, process, log)
    try:
        end_s = time.monotonic() + START_LIMIT_S
        while not server.url or not _is_ready(server):
            if process.poll() is not None or time.monotonic() > end_s:
                raise RefusedError(server.output)
            found = re.search(r"http://127\.0\.0\.1:\d+", server.output)
            server.url = found[0] if found else ""
            time.sleep(0.1)
        yield server
    finally:
        if process.poll() is None:
            process.kill()
        process.wait()
        server.client.close()


class RefusedError(Exception):
    """A server that ended before it was ready: what it printed."""

    @property
    def line(self) -> str:
        return next((line for line in str(self).splitlines() if "error:" in line), str(self)[-300:])


def _is_ready(server: Serving) -> bool:
    try:
        return server.client.get(f"{server.url}/health").status_code == 200
    except httpx.TransportError:
        return False
