"""Decode steps on a GPU as CUDA graphs: recorded once for each batch size, replayed with one call.

    staging --one copy--> static block     tokens | positions | starts | slots | contexts | rows   [6, width]
                              |                 real rows first, then PAD rows: slot PAD, start PAD, context 0
                              v
    graph of that width   rows -> page table [width, pages] -> every layer -> hidden [width, D]

A decode step of a small model is some hundred launches of a few microseconds each. The host needs longer to
issue them than the device needs to run them. Recorded, they are one call.

Recording fixes every address that a graph reads or writes, so each such tensor has an owner that outlives the graph.
After a sleep all graphs are recorded again. A step is padded to the next recorded width. PAD rows read and write
nothing (L4), so a replay touches only pages and slots of live rows (L5).

A graph would freeze lists of the host (``Runs.starts``, ``Runs.slots``), so ``UnreadableList`` replaces them and
refuses to be read. An op that decides by them, or makes the host wait for the device, cannot be recorded, and says so
at start. A width that cannot be recorded costs only that width.

Steps with rows of adapters have their own graphs, recorded when the first adapter comes: the adapter of a row, and the
addresses of its factors, are data (``tensor.kernels.adapters``).

``Capture`` is the interface: ``CudaCapture`` records; tests without a GPU run the function at every replay.
"""

from __future__ import annotations

import sys
import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

import numpy as np
import numpy.typing as npt
import torch

from weft.tensor import gpu
from weft.tensor.adapter_rows import BLOCK_ROWS, AdapterBlocks, RowGroups, StepAdapters, most_blocks
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.units import PAD

BLOCK_FIELDS = 6
"""Number of fields of a block: tokens, positions, starts, slots, contexts, rows."""
WIDEST = 512
"""Rows of the largest graph. Wider steps are long enough to hide their launches."""

REFUSALS = (RuntimeError, TypeError, ValueError)
"""Errors of an op that cannot be recorded: torch's, or those of an ``UnreadableList``."""

Forward = Callable[[StepInputs, list[LayerCache]], torch.Tensor]
Replay = Callable[[], torch.Tensor]


class Ordered(Protocol):
    """Type of keys: integers, and shapes of steps."""

    def __lt__(self, other: Any, /) -> bool: ...


Key = TypeVar("Key", bound=Ordered)


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


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """A step of only decodes, padded to a recorded ``width``. ``flat_6W``: int64, on the device, fields of
    ``stride_of(width)``; ``starts`` and ``slots`` [width]: the same numbers on the host.
    """

    width: int
    flat_6W: torch.Tensor
    starts: npt.NDArray[np.int64]
    slots: npt.NDArray[np.int64]
    adapters: StepAdapters | None = None
    """Adapters of the ``width`` rows, on the device, in ``most_blocks`` blocks; None if all rows are of the base
    model.
    """


@dataclass(frozen=True, slots=True)
class _Recorded:
    """One graph: ``replay``, and the tensors outside the graph's pool that its kernels read by address."""

    replay: Replay
    tensors: tuple[torch.Tensor, ...]


Step = tuple[Callable[[], torch.Tensor], tuple[torch.Tensor, ...]]
"""A step on static memory. The tensors are outside the graph's pool, and read by address at every replay."""


class Recordings(Generic[Key]):
    """Graphs by key. ``refused``: the error of each key that cannot be recorded; it costs no other key."""

    def __init__(self, capture: Capture) -> None:
        self.refused: dict[Key, str] = {}
        self.seconds = 0.0
        self._capture = capture
        self._recorded: dict[Key, _Recorded] = {}

    @property
    def keys(self) -> tuple[Key, ...]:
        """Keys with a graph, ascending."""
        return tuple(sorted(self._recorded))

    def record(self, keys: Sequence[Key], step_of: Callable[[Key], Step]) -> None:
        """Record the graphs of ``keys`` (ascending), the largest first: the others fit into its memory. Earlier graphs
        are dropped: arena and weights may have moved.
        """
        self.forget()
        started = time.perf_counter()
        for key in reversed(keys):
            run, tensors = step_of(key)
            try:
                replay = self._capture.capture(run)
            except refusals() as error:
                self.refused[key] = first_line(error)
            else:
                self._recorded[key] = _Recorded(replay, tensors)
        self.seconds = time.perf_counter() - started

    def replay(self, key: Key) -> torch.Tensor:
        return self._recorded[key].replay()

    def forget(self) -> None:
        self._recorded.clear()
        self.refused.clear()

    def refused_in_words(self, kind: str, name: Callable[[Key], str]) -> str | None:
        """Return the keys without a graph in words (``name`` of each key, then ``kind``), the last one first, and the
        reason; None if every key has a graph.
        """
        names_of: dict[str, list[str]] = {}
        for key, reason in reversed(self.refused.items()):
            names_of.setdefault(reason, []).append(name(key))
        lines = [
            f"{kind}{'s' if len(names) > 1 else ''} {', '.join(names)}: {reason}" for reason, names in names_of.items()
        ]
        return "; ".join(lines) or None


class RecordedAdapters:
    """Rows of adapters that graphs of up to ``most`` rows read: the same memory at every replay."""

    def __init__(self, most: int, device: torch.device) -> None:
        self._flat = torch.full((most_blocks(most) * (BLOCK_ROWS + 1),), PAD, dtype=torch.int64, device=device)

    def clear(self) -> None:
        self._flat.fill_(PAD)

    def step(self, rows: int) -> StepAdapters:
        """Return the adapters of a step of ``rows`` rows, for its recording."""
        return StepAdapters({rows: RowGroups(device=self._blocks(rows))})

    def take(self, adapters: StepAdapters, rows: int) -> None:
        """Take the adapters of a step of ``rows`` rows, for its replay."""
        source, target = adapters.by_count[rows].device, self._blocks(rows)
        assert source is not None
        target.order.copy_(source.order)
        target.places.copy_(source.places)

    def _blocks(self, rows: int) -> AdapterBlocks:
        return AdapterBlocks.of(self._flat[: most_blocks(rows) * (BLOCK_ROWS + 1)])


class DecodeGraphs:
    """Graphs of decode steps. ``table``: the rows' page table, int32 [rows + 1, pages], whose last row is always PAD;
    ``chosen``: the last token of each row, int64 [rows + 1]. ``widths``: ascending. ``deltas``: the number that each
    row adds to its position before the rotation, int64 [rows + 1], None if that is always 0.
    """

    def __init__(
        self,
        table: torch.Tensor,
        chosen: torch.Tensor,
        widths: Sequence[int],
        capture: Capture,
        deltas: torch.Tensor | None = None,
    ) -> None:
        self.widths = tuple(widths)
        self._table = table
        self._chosen = chosen
        self._deltas = deltas
        self._reads_host = capture.reads_host
        self._static = torch.zeros(
            BLOCK_FIELDS * stride_of(max(widths, default=0)), dtype=torch.int64, device=table.device
        )
        self._starts: dict[int, Sequence[int]] = {}
        self._slots: dict[int, Sequence[int]] = {}
        self._recordings: Recordings[int] = Recordings(capture)
        self._adapted: Recordings[int] = Recordings(capture)
        self._adapter_rows = RecordedAdapters(max(widths, default=0), table.device)

    @torch.inference_mode()
    def record(self, forward: Forward, caches: list[LayerCache]) -> None:
        """Record ``forward`` over ``caches`` at all widths."""
        self._record(self._recordings, forward, caches)

    @torch.inference_mode()
    def record_adapted(self, forward: Forward, caches: list[LayerCache]) -> None:
        """Record ``forward`` again, with the factors of the rows' adapters: the choice of adapters is data."""
        self._adapter_rows.clear()
        self._record(self._adapted, forward, caches)

    def _record(self, recordings: Recordings[int], forward: Forward, caches: list[LayerCache]) -> None:
        adapted = recordings is self._adapted

        def step_of(width: int) -> Step:
            self._static[: BLOCK_FIELDS * stride_of(width)].copy_(self._pad_block(width))
            self._starts[width], self._slots[width] = self._lists(width)
            tensors = self._runs_table(width)
            return self._run_of(width, forward, caches, tensors, adapted), tensors

        recordings.record(self.widths, step_of)
        if self._table.is_cuda:
            torch.cuda.empty_cache()  # the runs before the recordings left blocks that no step will use

    def forget(self) -> None:
        """Drop the graphs and free their memory; ``record`` may follow."""
        self._recordings.forget()
        self._adapted.forget()

    @property
    def adapted_widths(self) -> tuple[int, ...]:
        """Widths recorded by ``record_adapted``, ascending."""
        return self._adapted.keys

    @property
    def recorded_widths(self) -> tuple[int, ...]:
        """Recorded widths, ascending."""
        return self._recordings.keys

    @property
    def recorded_s(self) -> float:
        return self._recordings.seconds

    def refused_in_words(self) -> str | None:
        """Return the widths without a graph and the reason for each; None if all are recorded."""
        return self._recordings.refused_in_words("batch size", str)

    def replay(self, block: DecodeBlock) -> torch.Tensor:
        """Return hidden [width, D] after the final norm, valid until the next replay."""
        self._static[: block.flat_6W.numel()].copy_(block.flat_6W)
        if self._reads_host:
            self._starts[block.width], self._slots[block.width] = block.starts.tolist(), block.slots.tolist()
        if block.adapters is None:
            return self._recordings.replay(block.width)
        self._adapter_rows.take(block.adapters, block.width)
        return self._adapted.replay(block.width)

    def idle(self, width: int, *, adapted: bool = False) -> torch.Tensor:
        """Replay a step of only PAD rows, in the smallest graph with ``width`` rows. It reads and writes nothing of
        the arena.
        """
        recorded = self.adapted_widths if adapted else self.recorded_widths
        padded_width = next(size for size in recorded if size >= width)
        pads = np.full(padded_width, PAD, np.int64)
        adapters = self._adapter_rows.step(padded_width) if adapted else None
        return self.replay(DecodeBlock(padded_width, self._pad_block(padded_width), pads, pads, adapters))

    def _lists(self, width: int) -> tuple[Sequence[int], Sequence[int]]:
        if self._reads_host:
            return [PAD] * width, [PAD] * width
        return UnreadableList("starts", width), UnreadableList("slots", width)

    def _pad_block(self, width: int) -> torch.Tensor:
        block = np.full((BLOCK_FIELDS, stride_of(width)), PAD, np.int64)
        block[0] = 0  # tokens
        block[4] = 0  # contexts
        block[5] = self._table.shape[0] - 1  # rows
        return torch.from_numpy(block.ravel()).to(self._table.device)

    def _runs_table(self, width: int) -> tuple[torch.Tensor, ...]:
        """Return the table of runs for the Triton kernels, the same at every step of this width; () without them."""
        if not gpu.fits(self._table):
            return ()
        flat, _ = device_runs.pack_lists(list(range(width)), [PAD] * width, [1] * width, [False] * width, width, ())
        return (torch.from_numpy(flat).to(self._table.device),)

    def _run_of(
        self, width: int, forward: Forward, caches: list[LayerCache], tensors: tuple[torch.Tensor, ...], adapted: bool
    ) -> Callable[[], torch.Tensor]:
        adapters = self._adapter_rows.step(width) if adapted else None
        block = self._static[: BLOCK_FIELDS * stride_of(width)].view(BLOCK_FIELDS, -1)
        tokens_T, positions_T, starts_R, slots_R, context_R, rows_R = block[:, :width]
        memo: dict[str, Any] = {}
        for runs_table in tensors:  # decodes have no chunks
            memo["device_runs"] = device_runs.unpack(runs_table, width, width, 0)

        def run() -> torch.Tensor:
            runs = Runs(
                offsets=list(range(width)),
                starts=self._starts[width],  # type: ignore[arg-type]
                lengths=[1] * width,
                slots=self._slots[width],  # type: ignore[arg-type]
                fresh=[False] * width,
                decode_count=width,
                starts_R=starts_R,
                slots_R=slots_R,
                context_R=context_R,
                page_table_RP=self._table.index_select(0, rows_R),
                padded=True,
                memo=dict(memo),
            )
            fed_T = known_tokens(tokens_T, rows_R, self._chosen)
            turns = None if self._deltas is None else positions_T + self._deltas.index_select(0, rows_R)
            return forward(StepInputs(fed_T, positions_T, runs, adapters=adapters, turns=turns), caches)

        return run


def refusals() -> tuple[type[Exception], ...]:
    """Return the errors that say that a step cannot be recorded: Triton's too (a kernel that takes more shared memory
    than the card has, say), once Triton is imported.
    """
    errors = sys.modules.get("triton.errors")
    return REFUSALS if errors is None else (*REFUSALS, errors.TritonError)


def first_line(error: Exception) -> str:
    return str(error).strip().split("\n")[0] or type(error).__name__


def decode_widths(rows_max: int) -> tuple[int, ...]:
    """Return the widths 1, 2, 4, then every 8 rows to 256, then every 32. Padding costs little, and recording takes
    seconds.
    """
    widths = [1, 2, 4, *range(8, 256, 8), *range(256, WIDEST + 1, 32)]
    most = min(rows_max, WIDEST)
    return (*(width for width in widths if width < most), most)


def stride_of(width: int) -> int:
    """Return the numbers from one field of a block to the next: every field begins on 16 bytes, as kernels expect."""
    return width + width % 2


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
