"""The card: its memory, streams and captures, what the host waited for, and what went wrong.

``reports`` has what a GPU does silently: bytes that are touched without an order, a host that reads a buffer
before its copy has ended, a compilation inside of a request. What a GPU refuses is an exception here too.
"""

from __future__ import annotations

import collections
import contextlib
import threading
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import Any, Protocol

import numpy as np
import torch

from tests.emulated_gpu.allocator import Allocator, Block, Pool, poison
from tests.emulated_gpu.places import place_of_caller
from tests.emulated_gpu.streams import Order, Span, StreamQueue, Work, span_of

CONTEXT_BYTES = 8 << 20
"""Of the driver; some hundred MiB on a real one."""
HOST_CACHE_MAX = 1 << 20
RESERVE_SLACK = 16 << 10
"""Beyond the reserve: a step begins with some bytes of the one before, which the measurement did not have."""
STREAMS_MAX = 2
"""With products: the one of steps, and the one of recordings."""
WORKSPACE_BYTES = 4 << 20
"""Of cuBLAS, for each thread and stream; 32 MiB on Hopper."""


@dataclass(frozen=True)
class Report:
    """``kind``: order, early (the host reads before a copy has ended), reused (the host writes before), freed
    (a replay works on memory that is not its own any more), bounds, pool (graphs that cannot share memory),
    reserve (more memory than the start counted), wait, compile, workspace, upload, pinning."""

    kind: str
    text: str

    def __str__(self) -> str:
        return f"{self.kind}: {self.text}"


@dataclass(frozen=True)
class Wait:
    kind: str
    place: str

    def __str__(self) -> str:
        return f"{self.kind} at {self.place}"


@dataclass(eq=False)
class Capture:
    """Recorded on ``queue`` by ``thread``. ``broken``: why it is invalid."""

    queue: StreamQueue
    pool: Pool
    thread: int
    works: list[Work] = field(default_factory=list)
    broken: str | None = None
    everywhere: bool = False
    """Calls of other threads end it too."""


class OnCard(Protocol):
    """A tensor of the card: the host's view of its bytes, and the memory that holds them."""

    @property
    def mem(self) -> torch.Tensor: ...

    storage: Storage


class Storage:
    """Device memory of tensors that share it. It may shrink to nothing and grow again, elsewhere."""

    def __init__(self, card: Card, size: int) -> None:
        self.card = card
        self.generation = 0
        self.block: Block | None = None
        self.size = 0
        self._take(size)

    def _take(self, size: int) -> None:
        self.size = size
        self.block = self.card.allocate(size) if size else None
        self.generation += 1

    @property
    def span(self) -> Span:
        return (0, 0) if self.block is None else (self.block.address, self.block.address + self.size)

    def resize(self, size: int) -> None:
        self._free()
        self._take(size)

    def _free(self) -> None:
        if self.block is not None:
            self.card.freed.append(self.block)
            self.block = None

    def __del__(self) -> None:
        self._free()


@dataclass(eq=False)
class _HostCopy:
    """Under way between the card and pinned memory. ``into``: it writes the host's bytes."""

    span: Span
    into: bool
    place: str


class Card:
    """``total``: its bytes. ``seed``: of the order among streams; None for the latest. ``index``: its number;
    the process has the cards before it too, and must not touch them."""

    def __init__(self, total: int, seed: int | None = None, index: int = 0) -> None:
        self.device = torch.device("cuda", index)
        self.allocator = Allocator(total, CONTEXT_BYTES)
        self.reports: list[Report] = []
        self.waits: list[Wait] = []
        self.order = Order(self.report, seed)
        self.lock = self.order.lock
        self.default = self.order.queue()
        self.local = threading.local()
        self.freed: collections.deque[Block] = collections.deque()
        self.captures: dict[StreamQueue, Capture] = {}
        self.caught: dict[StreamQueue, Pool] = {}
        """Pools that never stopped recording, by their stream: its allocations still go there."""
        self.pinned: list[tuple[Span, str]] = []
        self.compiled: dict[Any, str] = {}
        self.compiled_alone: list[str] = []
        """Specialisations of kernels, and where each came first."""
        self.workspaces: dict[tuple[int, StreamQueue], Storage] = {}
        """By handle of the library and stream."""
        self._handles: list[int] = []
        self.serving = False
        self.reserve: Any = None
        """Of the start (``runner.reserve.Reserve``)."""
        self.values = True
        """Without them work is asked for, ordered and waited for, and computes nothing; what comes home is
        zeros."""
        self.computes = True
        """Without it work is asked for and does nothing: for a start that nobody looks at."""
        self.launches = self.replays = 0
        self.launched: collections.Counter[str] = collections.Counter()
        """Launches by kernel that no graph replays, and no recording asked for."""
        self.most_allocated: int | None = None
        """By torch, while the server serves: what the start counted."""
        self._copies: list[_HostCopy] = []
        self._host_cached: collections.Counter[int] = collections.Counter()
        """Pinned blocks that torch's allocator keeps with nothing in them, by size."""
        self._kept: list[Any] = []

    def report(self, kind: str, text: str) -> None:
        one = Report(kind, text)
        if one not in self.reports:
            self.reports.append(one)

    def begin_serving(self) -> None:
        """What belongs to the start is a report from now on, and so is more memory than the start counted."""
        with self.lock:
            self.settle_frees()
        self.serving = True
        if self.reserve is not None:
            self.most_allocated = (
                self.allocator.allocated + self.reserve.step_bytes + self.reserve.picture_bytes + RESERVE_SLACK
            )

    def late(self, kind: str, text: str) -> None:
        """Something that takes long, and belongs to the start."""
        if self.serving:
            self.report(kind, f"{text} at {place_of_caller()}, inside of a request")

    # The current stream of a thread

    @property
    def current(self) -> StreamQueue:
        queue: StreamQueue = getattr(self.local, "queue", self.default)
        return queue

    @contextlib.contextmanager
    def on(self, queue: StreamQueue) -> Iterator[None]:
        before, self.local.queue = self.current, queue
        try:
            yield
        finally:
            self.local.queue = before

    def use(self, device: Any) -> None:
        """``torch.cuda.set_device``, of this thread."""
        self.local.index = device if isinstance(device, int) else device.index

    @property
    def current_index(self) -> int:
        """A thread begins with the first card of the process."""
        index: int = getattr(self.local, "index", 0)
        return index

    def refuse_other_card(self, what: str) -> None:
        """Triton, graphs, streams and events go to the current card of the thread."""
        if self.current_index != self.device.index:
            raise RuntimeError(f"{what} on cuda:{self.current_index}, and the tensors are on {self.device}")

    # Memory

    def allocate(self, size: int) -> Block:
        with self.lock:
            self.settle_frees()
            queue = self.current
            capture = self.captures.get(queue)
            pool = capture.pool if capture is not None else self.caught.get(queue)
            block = self.allocator.take(size, queue, pool)
            beyond = 0 if self.most_allocated is None else self.allocator.allocated - self.most_allocated
            if beyond > 0:
                self.late("reserve", f"{beyond} bytes more than the start counted are taken")
            return block

    def settle_frees(self) -> None:
        """What was freed is poison, and may be given out again."""
        while self.freed:
            block = self.freed.popleft()
            memory = block.memory
            pool, queue, _ = block.key
            work = Work("free", lambda memory=memory: poison(memory), (), [span_of(memory)])
            capture = self.captures.get(queue)
            if capture is not None and capture.pool is pool:
                capture.works.append(work)
            else:
                self.order.enqueue(queue, work)
            self.allocator.give(block)

    # Work

    def enqueue(
        self,
        name: str,
        run: Callable[[], Any],
        reads: Sequence[OnCard],
        writes: Sequence[OnCard],
        held: Sequence[OnCard] = (),
        *,
        always: bool = False,
    ) -> None:
        """``run`` computes, on the host's views of device memory; what it returns are further spans, read and
        written. ``held``: memory that it needs beside ``reads`` and ``writes``. ``always``: without values
        too."""
        tensors = [*reads, *writes, *held]
        segments = [self.allocator.segments.get(one.mem.untyped_storage().data_ptr()) for one in tensors]

        def checked() -> Any:
            if any(segment is not None and not segment.alive for segment in segments):
                raise RuntimeError(
                    "CUDA error: an illegal memory access was encountered: the memory went back to the driver"
                )
            return run() if self.values or always else None

        with self.lock:
            self.settle_frees()
            work = Work(
                name,
                checked,
                [span_of(one.mem) for one in reads],
                [span_of(one.mem) for one in writes],
                place=place_of_caller(),
            )
            queue = self.current
            capture = self.captures.get(queue)
            if capture is not None:
                foreign = [
                    one.storage
                    for one in tensors
                    if one.storage.block is not None and one.storage.block.key[0] is not capture.pool
                ]
                work.held = [(weakref.ref(storage), storage.generation) for storage in foreign]
                capture.works.append(work)
            elif self.computes:
                self.order.enqueue(queue, work)

    def look_for_freed(self, work: Work) -> None:
        """``work`` is replayed."""
        storages = [(ref(), generation) for ref, generation in work.held]
        if any(storage is None or storage.generation != generation for storage, generation in storages):
            self.report(
                "freed",
                f"{work.name}, recorded at {work.place}, is replayed at {place_of_caller()} on memory that was freed",
            )

    def own_capture(self) -> Capture | None:
        """Of this thread."""
        own = threading.get_ident()
        return next((one for one in self.captures.values() if one.thread == own), None)

    def refuse_in_capture(self, what: str) -> None:
        own = threading.get_ident()
        for capture in list(self.captures.values()):
            if capture.thread == own or capture.everywhere:
                capture.broken = what
                raise RuntimeError(
                    f"CUDA error: operation not permitted when stream is capturing: {what} at {place_of_caller()}"
                )

    def wait(self, kind: str) -> None:
        """The host waits for the current stream, without having asked for an event."""
        self.refuse_in_capture(kind)
        self.waits.append(Wait(kind, place_of_caller()))
        self.late("wait", kind)
        queue = self.current
        self.order.host_waits(queue, queue.issued, queue.clock)

    def synchronize(self) -> None:
        self.refuse_in_capture("synchronize")
        with self.lock:
            self.settle_frees()
        for queue in list(self.order.queues):
            self.order.host_waits(queue, queue.issued, queue.clock)

    # Memory of the host

    def pin(self, memory: torch.Tensor, how: str, *, kept: bool = True) -> None:
        with self.lock:
            self.pinned.append((span_of(memory), how))
            if kept:
                self._kept.append(memory)
        self.late("pinning", f"{memory.nbytes} bytes of host memory are pinned ({how})")

    def pin_by_torch(self, memory: torch.Tensor) -> torch.Tensor:
        """``memory`` in a block of torch's allocator: a power of two, which stays pinned for ever, and is
        taken again for a block of its size."""
        size = 1 << max(0, memory.nbytes - 1).bit_length()
        block = np.empty(max(1, memory.nbytes), np.uint8)
        weakref.finalize(block, self._host_cached.update, [size]).atexit = False
        made = torch.from_numpy(block)[: memory.nbytes].view(memory.dtype).view(memory.shape).copy_(memory)
        if self._host_cached[size]:
            self._host_cached[size] -= 1
            with self.lock:
                self.pinned.append((span_of(made), "torch's allocator, again"))
        else:
            self.pin(made, f"torch's allocator, {size} bytes for {memory.nbytes}", kept=False)
        return made

    def look_at_host_memory(self) -> None:
        """At the end: what is pinned for nothing."""
        cached = sum(size * count for size, count in self._host_cached.items())
        if cached > HOST_CACHE_MAX:
            self.report(
                "pinning", f"{cached} bytes of host memory stay pinned in torch's allocator with nothing in them"
            )

    def unpin(self, address: int) -> None:
        with self.lock:
            self.pinned = [one for one in self.pinned if one[0][0] != address]

    def is_pinned(self, memory: torch.Tensor) -> bool:
        first, end = span_of(memory)
        return any(low <= first and end <= high for (low, high), _ in self.pinned)

    def copy_of_host(self, host: torch.Tensor, into: bool) -> _HostCopy:
        copy = _HostCopy(span_of(host), into, place_of_caller())
        self._copies.append(copy)
        return copy

    def copies_of(self, span: Span) -> list[_HostCopy]:
        """Under way."""
        return [copy for copy in self._copies if span[0] < copy.span[1] and copy.span[0] < span[1]]

    def end_copy(self, copy: _HostCopy) -> None:
        if copy in self._copies:
            self._copies.remove(copy)

    def host_touches(self, span: Span, *, writes: bool, where: str = "") -> None:
        """The host reads or writes these bytes now."""
        for copy in self.copies_of(span):
            if copy.into or writes:
                does, did = "writes" if writes else "reads", "writes" if copy.into else "reads"
                self.report(
                    "reused" if writes else "early",
                    f"the host {does} at {where or place_of_caller()} what the copy at {copy.place} "
                    f"{did}, before its end",
                )

    # Libraries

    def product(self) -> None:
        """cuBLAS has a handle for each thread, and a workspace for each handle and stream. A thread that ends
        leaves its handle to the next one that asks."""
        if not hasattr(self.local, "handle"):
            self.local.handle = self._handles.pop() if self._handles else len(self.workspaces)
        key = (self.local.handle, self.current)
        if key not in self.workspaces:
            self.late("workspace", "cuBLAS takes a workspace for a new thread or stream")
            if sum(handle == key[0] for handle, _ in self.workspaces) >= STREAMS_MAX:
                self.report(
                    "workspace",
                    f"one thread multiplies on more than {STREAMS_MAX} streams, each "
                    f"with a workspace, at {place_of_caller()}",
                )
            self.workspaces[key] = Storage(self, WORKSPACE_BYTES)

    def end_thread(self) -> None:
        if hasattr(self.local, "handle"):
            self._handles.append(self.local.handle)

    def compile(self, key: Any, name: str, *, ahead: bool = False) -> None:
        """``ahead``: side by side with others, before the launch that computes."""
        if key in self.compiled:
            return
        if not ahead:
            self.compiled_alone.append(name)
        self.refuse_in_capture(f"compiling {name}")
        self.compiled[key] = place_of_caller()
        self.late("compile", f"{name} compiles")
