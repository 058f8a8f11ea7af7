"""Streams: queues of work that runs when something waits for it, and the order between them.

    stream A   a1  a2  record(e)  a3           the host waits for e: a1, a2 run; a3 does not
    stream B   b1  wait(e)  b2                 b2 runs behind a2; b1 at any time

Nothing runs before the host waits for it, or before a queue is full (``DEPTH``, as the driver's). Then
exactly what was waited for runs; with a seed, other streams' work runs in between.

**Clocks.** Each work has a vector clock: for each stream the number of works that are ordered before it, by
the order of its own stream, by events, and by waits of the host. Bytes remember who wrote and read them last.
Work that touches bytes after another one that its clock does not have is reported with both places. This is
what a thread sanitizer does, and it finds a missing event in any order of execution.
"""

from __future__ import annotations

import collections
import random
import threading
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch

from tests.emulated_gpu.places import place_of_caller

DEPTH = 1024
"""Works in a queue before the host has to wait for room."""

LOOK_AGAIN = 2000
"""Touched bytes of a stream before those are forgotten that everything is ordered behind."""

Span = tuple[int, int]
"""Addresses: the first byte, and the one behind the last."""


@dataclass(eq=False)
class Work:
    """``run`` computes on the host. ``reads``, ``writes``: the bytes, known before; ``run`` may return more
    of both, known only then. ``after``: a work of another stream that comes first."""

    name: str
    run: Callable[[], tuple[Sequence[Span], Sequence[Span]] | None]
    reads: Sequence[Span] = ()
    writes: Sequence[Span] = ()
    after: tuple[StreamQueue, int] | None = None
    place: str = ""
    clock: dict[int, int] = field(default_factory=dict)
    held: Sequence[tuple[Any, int]] = ()
    """Of a recorded work: weak references to memory outside of the graph's pool, and its generation."""

    def again(self) -> Work:
        """Of a replay."""
        return Work(self.name, self.run, self.reads, self.writes, None, self.place)


@dataclass(eq=False)
class StreamQueue:
    number: int
    waiting: collections.deque[Work] = field(default_factory=collections.deque)
    issued: int = 0
    done: int = 0
    clock: dict[int, int] = field(default_factory=dict)


@dataclass(slots=True)
class _Touch:
    first: int
    end: int
    writes: bool
    number: int
    what: str


class Order:
    """All streams of the card. ``report`` takes what is not ordered."""

    def __init__(self, report: Callable[[str, str], None], seed: int | None) -> None:
        self.lock = threading.RLock()
        self.queues: list[StreamQueue] = []
        self.random = None if seed is None else random.Random(seed)
        self.host_clock: dict[int, int] = {}
        self.error: Exception | None = None
        self._report = report
        self._touched: dict[int, list[_Touch]] = collections.defaultdict(list)
        """By stream."""
        self._most = LOOK_AGAIN
        self._running = False

    def queue(self) -> StreamQueue:
        self.queues.append(StreamQueue(len(self.queues)))
        return self.queues[-1]

    def enqueue(self, queue: StreamQueue, work: Work) -> int:
        """-> its number."""
        with self.lock:
            queue.issued += 1
            work.place = work.place or place_of_caller()
            _join(queue.clock, self.host_clock)
            queue.clock[queue.number] = queue.issued
            work.clock = dict(queue.clock)
            queue.waiting.append(work)
            if len(queue.waiting) > DEPTH:
                self.run_to(queue, queue.done + DEPTH // 2)
            return queue.issued

    def wait_event(self, queue: StreamQueue, of: StreamQueue, number: int, clock: dict[int, int]) -> None:
        """What ``queue`` gets from now on comes after the first ``number`` works of ``of``."""
        with self.lock:
            _join(queue.clock, clock)
            if of is not queue and of.done < number:
                self.enqueue(queue, Work("wait", lambda: None, after=(of, number)))

    def host_waits(self, queue: StreamQueue, number: int, clock: dict[int, int]) -> None:
        """Until the first ``number`` works of ``queue`` are done. Raises what one of them raised."""
        with self.lock:
            self.run_to(queue, number)
            _join(self.host_clock, clock)
        if self.error is not None:
            raise self.error

    def run_to(self, queue: StreamQueue, number: int) -> None:
        with self.lock:
            while queue.done < number:
                if self.random is not None and self.random.random() < 0.1:
                    other = self.random.choice(self.queues)
                    if other.waiting and other is not queue:
                        self._run_one(other)
                        continue  # it may have waited for this one
                self._run_one(queue)

    def _run_one(self, queue: StreamQueue) -> None:
        work = queue.waiting[0]
        if work.after is not None:
            self.run_to(*work.after)
            if not queue.waiting or queue.waiting[0] is not work:
                return  # it ran in between
        queue.waiting.popleft()
        number = queue.done + 1
        if self.error is None:
            try:
                with torch._C._DisableTorchDispatch(), torch.inference_mode():
                    more = work.run() or ((), ())
                if len(self.queues) > 1:
                    self._check(work, queue.number, number, [*work.reads, *more[0]], [*work.writes, *more[1]])
            except Exception as error:  # as CUDA: whoever waits next gets it, and nothing runs any more
                error.add_note(f"in {work.name}, launched at {work.place}")
                self.error = error
        queue.done = number

    def _check(self, work: Work, stream: int, number: int, reads: Sequence[Span], writes: Sequence[Span]) -> None:
        for other, touched in self._touched.items():
            behind = work.clock.get(other, 0)
            for old in () if other == stream else touched:
                if behind >= old.number:
                    continue
                clash = next((span for span in writes if span[0] < old.end and old.first < span[1]), None)
                if clash is None and not (
                    old.writes and any(first < old.end and old.first < end for first, end in reads)
                ):
                    continue
                verb, did = "writes" if clash else "reads", "written" if old.writes else "read"
                self._report(
                    "order",
                    f"{work.name} at {work.place} {verb} bytes that {old.what} has {did}, with no event in between",
                )
        what = f"{work.name} at {work.place}"
        own = self._touched[stream]
        own += [_Touch(*span, False, number, what) for span in reads]
        own += [_Touch(*span, True, number, what) for span in writes]
        if len(own) > self._most:
            self._forget()

    def _forget(self) -> None:
        """What every later work of every stream is ordered behind."""
        clocks = {
            queue.number: queue.waiting[0].clock
            if queue.waiting
            else queue.clock
            | {stream: max(number, queue.clock.get(stream, 0)) for stream, number in self.host_clock.items()}
            for queue in self.queues
        }
        for stream, touched in self._touched.items():
            known = min((clock.get(stream, 0) for other, clock in clocks.items() if other != stream), default=0)
            self._touched[stream] = [old for old in touched if old.number > known]
        self._most = 2 * max(LOOK_AGAIN, *(len(touched) for touched in self._touched.values()))


def _join(clock: dict[int, int], other: dict[int, int]) -> None:
    for stream, number in other.items():
        if clock.get(stream, 0) < number:
            clock[stream] = number


def span_of(memory: torch.Tensor) -> Span:
    """From its first byte to its last."""
    last = sum((size - 1) * stride for size, stride in zip(memory.shape, memory.stride(), strict=True))
    first = memory.data_ptr()
    return (first, first + (last + 1) * memory.itemsize) if memory.numel() else (first, first)
