"""Recorders of a step: a function on the device becomes a call that repeats it, with no launch from Python.

A graph would freeze lists of the host (``Runs.starts``, ``Runs.slots``), so ``UnreadableList`` replaces them and
refuses to be read. An op that decides by them, or makes the host wait for the device, cannot be recorded, and says so
at start.

``Capture`` is the interface: ``CudaCapture`` records; tests without a GPU run the function at every replay. The table
of recorded steps is in ``step_graphs``.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Sequence
from typing import Any, Protocol

import torch

from weft.tensor.inputs import Runs, StepInputs
from weft.units import PAD

REFUSALS = (RuntimeError, TypeError, ValueError)
"""Errors of an op that cannot be recorded: torch's, or those of an ``UnreadableList``."""

Replay = Callable[[], torch.Tensor]


class Capture(Protocol):
    """Recorder that makes a function on the device repeatable."""

    @property
    def reads_host(self) -> bool:
        """Whether the function runs at every replay, and may read lists on the host."""

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        """Return a call that repeats ``run``, and returns the same tensor with its new contents. It need not keep
        ``run`` alive. Raises one of ``refusals()``.
        """


class CudaCapture:
    """Recorder of graphs that share one stream and one pool of memory: a replay overwrites the results of the
    others.
    """

    reads_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._stream: Any = None
        self._pool: Any = None

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        cuda: Any = torch.cuda
        # Torch's own stream for recording belongs to the device that was current at its first use.
        stream = self._stream = self._stream or cuda.Stream(self._device)
        stream.wait_stream(current)
        try:
            with torch.cuda.stream(stream):
                run()
        finally:  # also of a refused step: the next one writes memory that its kernels still read
            current.wait_stream(stream)
        graph = torch.cuda.CUDAGraph()
        pool = self._pool = self._pool or torch.cuda.graph_pool_handle()
        try:
            # "global", the default, would let a call of any other thread (an allocation, say) end the
            # recording.
            with torch.cuda.graph(graph, pool=pool, stream=stream, capture_error_mode="thread_local"):
                hidden = run()
        except BaseException:
            # A recording that CUDA ended leaves torch's pool in the state "recording", and the allocations of
            # its stream in that pool.
            self._stream = self._pool = None
            raise
        current.wait_stream(stream)

        def replay() -> torch.Tensor:
            graph.replay()
            return hidden

        return replay


class UnreadableList(Sequence[int]):
    """List on the host that a recorded step may not read, because only the length and the values in ``known`` are the
    same at every replay.
    """

    def __init__(self, name: str, length: int, known: Sequence[int] = ()) -> None:
        self._name = name
        self._length = length
        self._known = known

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> Any:
        if isinstance(index, int) and 0 <= index < len(self._known):
            return self._known[index]
        raise RuntimeError(f"an op reads Runs.{self._name} on the host, which a graph would freeze")


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors that say that a step cannot be recorded: Triton's too (a kernel that takes more shared memory
    than the card has, say), once Triton is imported.
    """
    errors = sys.modules.get("triton.errors")
    return REFUSALS if errors is None else (*REFUSALS, errors.TritonError)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def known_tokens(tokens_R: torch.Tensor, rows_R: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """Return ``tokens_R`` of decodes with PAD replaced by the last token of its row."""
    return torch.where(tokens_R == PAD, chosen.index_select(0, rows_R), tokens_R)


def pad_rows(width: int, pages: int, device: torch.device) -> StepInputs:
    """Return a decode step of only PAD rows, for a model that runs without graphs. ``pages``: width of the table."""
    pads = [PAD] * width
    pads_R = torch.full((width,), PAD, dtype=torch.int64, device=device)
    nothing_R = torch.zeros_like(pads_R)
    runs = Runs(
        offsets=list(range(width)),
        starts=pads,
        lengths=[1] * width,
        slots=pads,
        fresh=[False] * width,
        decode_count=width,
        starts_R=pads_R,
        slots_R=pads_R,
        context_R=nothing_R,
        page_table_RP=torch.full((width, pages), PAD, dtype=torch.int32, device=device),
        padded=True,
    )
    return StepInputs(nothing_R, pads_R, runs)
