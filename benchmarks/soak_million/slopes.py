"""What must stay flat while requests come and go: samples of processes and files, their slopes, their limits.

    sample   requests so far --> memory, descriptors, threads of each watched process; files and bytes on disk
    slope    per 100,000 requests: the median over pairs of the medians of blocks, the warm-up left out
    range    where the true slope lies in four of five such runs (Sen 1968), however much the values jump
    verdict  grows (the whole range is above the limit), flat (all below it), open (too few requests to say)

A process that is killed starts again at nothing and would hide its leak. So the soak watches processes that
it spares: the supervisor, one HTTP worker, one engine, and itself.
"""

from __future__ import annotations

import contextlib
import os
from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from itertools import combinations, pairwise
from math import ceil, floor, sqrt
from pathlib import Path
from statistics import median
from typing import Literal

import psutil

PER = 100_000
BLOCKS = 10
WARM_UP = 0.35
"""Of the samples of one server: caches fill, arenas are touched for the first time."""
SIGMAS = 1.28
"""Of the normal distribution, on both sides: four of five."""
_MIB = 1 << 20
LIMITS = {"memory": 10.0, "descriptors": 5.0, "threads": 2.0, "files": 10.0, "disk": 5.0, "ledger": 2.0}
"""For PER requests; memory, disk and ledger in MiB. 10 MiB are 105 bytes for each request."""
Verdict = Literal["flat", "grows", "open"]


@dataclass(frozen=True, slots=True)
class Sample:
    """``server``: number of the start of the server, as each begins at nothing. ``values`` by "who: what"."""

    server: int
    requests: int
    values: dict[str, float]


@dataclass(frozen=True, slots=True)
class Slope:
    """For PER requests, with its range. ``lives``: of the two servers that lived the longest, requests and
    value at the middle of each block, the warm-up too: a bounded thing is seen to stop there."""

    name: str
    slope: float
    low: float
    high: float
    limit: float
    lives: tuple[tuple[tuple[float, float], ...], ...] = ()

    @property
    def verdict(self) -> Verdict:
        if self.low > self.limit:
            return "grows"
        return "flat" if self.high <= self.limit else "open"

    def line(self) -> str:
        return (
            f"{self.name:<28}{self.slope:>10.3f}  ({self.low:.3f} to {self.high:.3f})"
            f"  limit {self.limit:g}  {self.verdict}"
        )


def of_process(name: str, pid: int, port: int) -> dict[str, float]:
    """Nothing for a process that has just ended. Its descriptors are counted without the connections to
    ``port``, the server's own, that are open on both sides: an HTTP process takes over the clients of one
    that was killed, and keeps as many of them as do not pause. One that its client has left counts."""
    with contextlib.suppress(psutil.Error):
        process = psutil.Process(pid)
        with process.oneshot():
            clients = sum(
                one.status == psutil.CONN_ESTABLISHED and one.laddr.port == port
                for one in process.net_connections("tcp")
            )
            return {
                f"{name}: memory": process.memory_full_info().uss / _MIB,
                f"{name}: descriptors": process.num_fds() - clients,
                f"{name}: threads": process.num_threads(),
            }
    return {}


def of_folder(name: str, folder: Path, *, besides: Iterable[Path] = ()) -> dict[str, float]:
    """Of all files below it, sockets too."""
    left_out = set(besides)
    count = size = ledger = 0
    for parent, _, names in os.walk(folder):
        for file in names:
            path = Path(parent, file)
            if path in left_out:
                continue
            with contextlib.suppress(FileNotFoundError):
                count, bytes_ = count + 1, path.lstat().st_blocks * 512
                size += bytes_
                ledger += bytes_ if file.startswith("ledger-") else 0
    values: dict[str, float] = {f"{name}: files": count, f"{name}: disk": size / _MIB}
    return values | ({f"{name}: ledger": ledger / _MIB} if ledger else {})


def slopes(samples: Sequence[Sample]) -> list[Slope]:
    """Of every value, where a server lived long enough for BLOCKS of samples."""
    rows = []
    names = sorted({name for sample in samples for name in sample.values})
    for name in names:
        lives = [
            [
                (sample.requests, sample.values[name])
                for sample in samples
                if sample.server == server and name in sample.values
            ]
            for server in sorted({sample.server for sample in samples})
        ]
        by_life = [_steps(points[int(len(points) * WARM_UP) :]) for points in lives]
        steps = sorted(step for one in by_life for step in one)
        if len(steps) > 1:
            low, high = _range(steps, sum(map(bool, by_life)))
            rows.append(
                Slope(
                    name,
                    median(steps),
                    low,
                    high,
                    LIMITS[name.rpartition(": ")[2]],
                    tuple(tuple(_blocks(one)) for one in sorted(lives, key=len)[-2:]),
                )
            )
    return rows


def _range(steps: Sequence[float], lives: int) -> tuple[float, float]:
    """Of the slope behind sorted ``steps``: those as far from the middle as Kendall's statistic of so
    many series without a slope is from zero (Sen 1968; of several series, Hirsch, Slack and Smith 1982). The
    spread of the steps themselves would stay as wide as the values jump, however long the run."""
    spread = SIGMAS * sqrt(lives * BLOCKS * (BLOCKS - 1) * (2 * BLOCKS + 5) / 18)
    middle, last = (len(steps) - 1) / 2, len(steps) - 1
    return steps[max(0, floor(middle - spread / 2))], steps[min(last, ceil(middle + spread / 2))]


def _steps(points: Sequence[tuple[int, float]]) -> list[float]:
    """Slopes between all pairs of blocks."""
    if len(points) < 2 * BLOCKS:
        return []
    return [
        (later[1] - earlier[1]) / (later[0] - earlier[0]) * PER
        for earlier, later in combinations(_blocks(points), 2)
        if later[0] > earlier[0]
    ]


def _blocks(points: Sequence[tuple[int, float]]) -> list[tuple[float, float]]:
    ends = [len(points) * block // BLOCKS for block in range(BLOCKS + 1)]
    return [
        (median(at for at, _ in part), median(value for _, value in part))
        for part in (points[begin:end] for begin, end in pairwise(ends))
        if part
    ]
