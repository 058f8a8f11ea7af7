"""CPU time of the soak by kind of process: what a request costs, and where.

    roots       the soak itself, the fleet's supervisor, the lone engine's
    children    named by what they run: engines, HTTP processes, workers for templates and grammars
    ended       what killed processes took since the last look, from the times their parents waited for

Times are user and system together, as the kernel counts them.
"""

from __future__ import annotations

import contextlib
from collections import Counter
from collections.abc import Mapping

import psutil

KINDS = {
    "weft.rpc.engine_process": "engines",
    "weft.server.workers.process": "HTTP processes",
    "weft.text.worker_main": "templates and grammars",
}


class CpuTimes:
    """``seconds`` by kind, over all looks."""

    def __init__(self) -> None:
        self.seconds = Counter[str]()
        self._before: dict[int, dict[int, float]] = {}
        self._waited: dict[int, float] = {}

    def look(self, roots: Mapping[str, int], *, of_starts: bool = False) -> None:
        """Adds what has been used since the last look. ``of_starts``: under a name of its own."""
        for name, pid in roots.items():
            with contextlib.suppress(psutil.NoSuchProcess):
                for kind, seconds in self._of_tree(name, psutil.Process(pid)).items():
                    self.seconds["starts of servers" if of_starts else kind] += seconds

    def _of_tree(self, name: str, root: psutil.Process) -> Counter[str]:
        before, now, found = self._before.get(root.pid, {}), {}, Counter[str]()
        children = [] if name == "soak" else root.children(recursive=True)
        for process in [root, *children]:
            with contextlib.suppress(psutil.NoSuchProcess):
                times = process.cpu_times()
                now[process.pid] = times.user + times.system
                kind = name if process is root or name == "lone engine" else _kind(process)
                found[kind] += now[process.pid] - before.get(process.pid, 0.0)
        times = root.cpu_times()
        waited = times.children_user + times.children_system
        gone = sum(seconds for pid, seconds in before.items() if pid not in now)
        if name != "soak":  # it waits for the servers themselves
            found["ended"] += max(0.0, waited - self._waited.get(root.pid, 0.0) - gone)
        self._before[root.pid], self._waited[root.pid] = now, waited
        return found


def _kind(process: psutil.Process) -> str:
    line = " ".join(process.cmdline())
    return next((kind for module, kind in KINDS.items() if module in line), "others")
