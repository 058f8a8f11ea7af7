"""``emulated()``: the card in the place of torch's public names for CUDA."""

from __future__ import annotations

import contextlib
import threading
import weakref
from collections.abc import Iterator
from typing import Any
from unittest import mock

import torch
from triton.runtime import interpreter
from triton.runtime.interpreter import InterpretedFunction

from tests.emulated_gpu import launches, tensors
from tests.emulated_gpu.allocator import Pool
from tests.emulated_gpu.card import Capture, Card, Wait
from tests.emulated_gpu.nccl import ProcessGroupNCCL
from tests.emulated_gpu.places import place_of_caller
from tests.emulated_gpu.streams import Work
from tests.emulated_gpu.tensors import Emulation, card
from tests.emulated_gpu.trace import WatchedMemory
from tests.gpu import quick_interpreter
from weft.tensor.gpu.host_memory import HostBuffer
from weft.tensor.scratch import scratch

CARD_BYTES = 192 << 20


class Event:
    def __init__(self, *_: Any, **__: Any) -> None:
        self._queue: Any = None
        self._number = 0
        self._clock: dict[int, int] = {}
        self._asked = False

    def record(self, stream: Any = None) -> None:
        one = card()
        one.refuse_other_card("an event is recorded")
        with one.lock:
            self._queue = one.current if stream is None else stream.queue
            self._asked = False
            if self._queue in one.captures:
                self._number, self._clock = 0, {}
                return
            self._number, self._clock = self._queue.issued, dict(self._queue.clock)

    def query(self) -> bool:
        """Time passes while somebody asks: the second answer is yes."""
        if self._queue is None or self._queue.done >= self._number:
            self.synchronize()
            return True
        if self._asked:
            self.synchronize()
            return True
        card().refuse_in_capture("Event.query")
        self._asked = True
        return False

    def synchronize(self) -> None:
        if self._queue is None:
            return
        card().refuse_in_capture("Event.synchronize")
        card().order.host_waits(self._queue, self._number, self._clock)

    def wait(self, stream: Any = None) -> None:
        queue = card().current if stream is None else stream.queue
        if self._queue is not None:
            card().order.wait_event(queue, self._queue, self._number, self._clock)


class Stream:
    def __init__(self, device: Any = None, queue: Any = None, **_: Any) -> None:
        self.queue = queue if queue is not None else card().order.queue()
        self.device = card().device

    @property
    def cuda_stream(self) -> int:
        return int(self.queue.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, Stream) and other.queue is self.queue

    def __hash__(self) -> int:
        return hash(self.queue.number)

    def wait_stream(self, other: Stream) -> None:
        self.wait_event(other.record_event())

    def wait_event(self, event: Event) -> None:
        event.wait(self)

    def record_event(self, event: Event | None = None) -> Event:
        event = event or Event()
        event.record(self)
        return event

    def query(self) -> bool:
        return self.record_event().query()

    def synchronize(self) -> None:
        card().waits.append(_wait("Stream.synchronize"))
        card().late("wait", "Stream.synchronize")
        self.record_event().synchronize()


def _wait(kind: str) -> Wait:
    return Wait(kind, place_of_caller())


class CUDAGraph:
    """Recorded work, on the addresses that it had."""

    def __init__(self, keep_graph: bool = False) -> None:
        self._works: list[Work] = []
        self._capture: Capture | None = None
        self._pool: Pool | None = None
        self._uploaded = False

    def capture_begin(self, pool: Any = None, capture_error_mode: str = "global") -> None:
        one = card()
        queue = one.current
        if queue is one.default:
            raise RuntimeError("CUDA graphs must be captured on a non-default stream.")
        pool = pool or Pool()
        if pool.recording:
            raise RuntimeError(f"beginAllocateToPool: already recording to mempool_id {id(pool)}")
        if pool.stream is not None and pool.stream is not queue:
            one.report(
                "pool",
                f"graphs of one pool are recorded on several streams, which share no memory, at {place_of_caller()}",
            )
        pool.recording, pool.users, pool.stream = True, pool.users + 1, queue
        self._pool = pool
        self._capture = one.captures[queue] = Capture(
            queue, pool, threading.get_ident(), everywhere=capture_error_mode == "global"
        )

    def capture_end(self) -> None:
        one, capture = card(), self._capture
        assert capture is not None, "no capture has begun"
        with one.lock:
            one.settle_frees()
            del one.captures[capture.queue]
        self._capture = None
        if capture.broken is not None:
            one.caught[capture.queue] = capture.pool
            raise RuntimeError(f"CUDA error: operation failed due to a previous error during capture: {capture.broken}")
        capture.pool.recording = False
        self._works = capture.works

    def replay(self) -> None:
        one = card()
        one.refuse_in_capture("CUDAGraph.replay")
        if not self._uploaded:
            one.late("upload", "a graph is replayed for the first time")
            self._uploaded = True
        one.replays += 1
        with one.lock:
            one.settle_frees()
            for work in self._works if one.computes else ():
                one.look_for_freed(work)
                one.order.enqueue(one.current, work.again())

    def reset(self) -> None:
        self._works = []
        if self._pool is not None:
            self._pool.users -= 1
            self._pool = None

    def __del__(self) -> None:
        self.reset()

    def pool(self) -> Any:
        return self._pool


@contextlib.contextmanager
def _graph(
    graph: CUDAGraph, pool: Any = None, stream: Any = None, capture_error_mode: str = "global"
) -> Iterator[None]:
    """``torch.cuda.graph``"""
    one = card()
    one.refuse_other_card("a graph is recorded")
    one.synchronize()
    one.allocator.empty_cache()
    with one.on((stream or Stream()).queue):
        graph.capture_begin(pool, capture_error_mode)
        try:
            yield
        finally:
            graph.capture_end()


@contextlib.contextmanager
def _stream(stream: Stream | None) -> Iterator[None]:
    with contextlib.nullcontext() if stream is None else card().on(stream.queue):
        yield


class Runtime:
    """``torch.cuda.cudart()``"""

    @staticmethod
    def cudaHostRegister(address: int, size: int, flags: int) -> int:
        import ctypes

        card().refuse_in_capture("cudaHostRegister")
        memory = torch.frombuffer((ctypes.c_uint8 * size).from_address(address), dtype=torch.uint8)
        card().pin(memory, "registered")
        return 0

    @staticmethod
    def cudaHostUnregister(address: int) -> int:
        card().unpin(address)
        return 0


def _empty_cache() -> None:
    one = card()
    one.refuse_in_capture("empty_cache")
    one.synchronize()
    one.allocator.empty_cache()


def _settled() -> Any:
    one = card()
    with one.lock:
        one.settle_frees()
    return one.allocator


def _reset_peak(*_: Any) -> None:
    allocator = _settled()
    allocator.peak = allocator.allocated


def _unpin() -> None:
    """The card ends, and what is pinned for it, though an engine still lives."""
    registry: Any = weakref.finalize._registry  # type: ignore[attr-defined]
    for finalizer in list(registry):
        held = finalizer.peek()
        if held is not None and getattr(held[1], "__func__", None) is HostBuffer.close:
            finalizer()


class _Device:
    """``torch.cuda.device``: it may be entered again and again."""

    def __init__(self, device: Any) -> None:
        self._device, self._before = device, 0

    def __enter__(self) -> None:
        self._before = card().current_index
        card().use(self._device)

    def __exit__(self, *_: Any) -> None:
        card().use(self._before)


def _names(bytes_total: int) -> dict[str, Any]:
    """Of ``torch.cuda``."""
    return {
        "_lazy_init": lambda: None,
        "init": lambda: None,
        "is_available": lambda: True,
        "is_initialized": lambda: True,
        "device_count": lambda: card().device.index + 1,
        "current_device": lambda: card().current_index,
        "set_device": lambda device: card().use(device),
        "device": _Device,
        "get_device_name": lambda *_: "emulated",
        "get_device_capability": lambda *_: (9, 0),
        "mem_get_info": lambda *_: (_settled().free_bytes, bytes_total),
        "memory_allocated": lambda *_: _settled().allocated,
        "max_memory_allocated": lambda *_: _settled().peak,
        "memory_reserved": lambda *_: _settled().reserved,
        "reset_peak_memory_stats": _reset_peak,
        "empty_cache": _empty_cache,
        "synchronize": lambda *_: card().synchronize(),
        "current_stream": lambda *_: Stream(queue=card().current),
        "default_stream": lambda *_: Stream(queue=card().default),
        "Stream": Stream,
        "Event": Event,
        "stream": _stream,
        "graph": _graph,
        "CUDAGraph": CUDAGraph,
        "graph_pool_handle": Pool,
        "is_current_stream_capturing": lambda: card().current in card().captures,
        "get_rng_state": lambda *_: torch.random.get_rng_state(),
        "set_rng_state": lambda state, *_: torch.random.set_rng_state(state),
        "cudart": Runtime,
    }


@contextlib.contextmanager
def emulated(card_bytes: int = CARD_BYTES, *, seed: int | None = None, index: int = 0) -> Iterator[Card]:
    """Inside, torch has a GPU with ``card_bytes``, the last of ``index`` + 1. Threads that begin inside see
    it too."""
    one = Card(card_bytes, seed, index)
    bootstrap = threading.Thread._bootstrap_inner  # type: ignore[attr-defined]

    def inner(thread: threading.Thread) -> None:
        with Emulation():
            bootstrap(thread)
        one.end_thread()

    quick_interpreter.install()
    tensors.use_card(one)
    patches = [mock.patch.object(torch.cuda, name, value) for name, value in _names(card_bytes).items()]
    patches.append(mock.patch.object(torch.distributed, "ProcessGroupNCCL", ProcessGroupNCCL, create=True))
    patches.append(mock.patch.object(threading.Thread, "_bootstrap_inner", inner))
    patches += [mock.patch.object(torch, name, tensors.tensor) for name in ("tensor", "as_tensor")]
    patches.append(mock.patch.object(InterpretedFunction, "run", launches.run))
    memory = WatchedMemory(interpreter._interpreter)  # type: ignore[attr-defined]
    patches.append(mock.patch.object(interpreter, "_interpreter", memory))
    with contextlib.ExitStack() as stack:
        for patch in patches:
            stack.enter_context(patch)
        try:
            with Emulation():
                yield one
        except Exception as error:
            for report in one.reports:
                error.add_note(str(report))
            raise
        finally:
            _unpin()
            scratch.device = torch.device("cpu")  # steps of the card left theirs behind
