"""Decode steps on a GPU as CUDA graphs: recorded once for each batch size, replayed with one call.

    staging --one copy--> static block     tokens | positions | starts | slots | contexts | rows   [6, width]
                              |                 real rows first, then PAD rows: slot PAD, start PAD, context 0
                              v
    graph of that width   rows -> page table [width, pages] -> every layer -> hidden [width, D]

A decode step of a small model is some hundred launches of a few microseconds each, and the host needs
longer to ask for them than the device to do them. Recorded, they are one call. What a graph reads and
writes is fixed by address when it is recorded: so its inputs are copied into a block that stays where it is,
its page table is gathered from the rows' table inside the graph at its full width (kernels stop at the
context), and the arena and the weights do not move (after a sleep everything is recorded anew). A step is
padded to the next recorded width; PAD rows read and write nothing (L4), so a replay touches the pages and
slots of the live rows and no other (L5), and an idle rank of a data-parallel group can replay PAD rows alone.

Prefill is not recorded: its shapes are never twice the same and its kernels are long.

Recording itself computes nothing; the runs before it, which compile kernels, are of PAD rows. Lists of the
host (``Runs.starts``, ``Runs.slots``) would be frozen into a graph as they were when it was recorded, so they
are replaced by ``Untold``, which refuses to be read: an op that decides by them cannot be recorded, and says
so at start instead of being wrong later. The same holds for whatever makes the host wait for the device.

``Capture`` is the seam: ``CudaCapture`` records, ``EagerCapture`` runs the recorded function itself at every
replay, on the same static block with the same padding; it is how all of this is tested without a GPU.

Rejected: graphs of the sampler (what it does depends on what requests ask for), a graph for each width of the
page table (as many times the recording), and a padding row that points at a real page.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any, NoReturn, Protocol

import numpy as np
import torch

from weft.tensor import gpu
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.units import PAD

BLOCK_FIELDS = 6
"""tokens, positions, starts, slots, contexts, rows."""
WIDEST = 512
"""Rows of the largest graph: from there on a step is long enough to hide its launches."""

REFUSALS = (RuntimeError, TypeError, ValueError)
"""What comes of an op that cannot be recorded: torch's word on it, or what was made of an ``Untold``."""

Forward = Callable[[StepInputs, list[LayerCache]], torch.Tensor]
Replay = Callable[[], torch.Tensor]


class Capture(Protocol):
    """How a function that computes on the device is made repeatable."""

    @property
    def reads_host(self) -> bool:
        """Whether the function is called at every replay, and may look at lists on the host."""
        ...

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        """A call that does again what ``run`` does, and returns the same tensor with its new contents. Raises
        one of ``REFUSALS`` where it cannot."""
        ...


class EagerCapture:
    """Computes at every replay."""

    reads_host = True

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        return run


class CudaCapture:
    """Graphs that share one pool of memory: none is replayed while another one's results are needed."""

    reads_host = False

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._pool: Any = None

    def capture(self, run: Callable[[], torch.Tensor]) -> Replay:
        current = torch.cuda.current_stream(self._device)
        cuda: Any = torch.cuda
        # Torch's own stream for recording is of the device that was current when it was first asked for.
        aside = cuda.Stream(self._device)
        aside.wait_stream(current)
        with torch.cuda.stream(aside):
            for _ in range(2):   # kernels are compiled, and libraries take their workspaces
                run()
        current.wait_stream(aside)
        graph = torch.cuda.CUDAGraph()
        self._pool = self._pool or torch.cuda.graph_pool_handle()
        with torch.cuda.graph(graph, pool=self._pool, stream=aside):
            made = run()
        current.wait_stream(aside)

        def replay() -> torch.Tensor:
            graph.replay()
            return made

        return replay


class Untold(Sequence[int]):
    """A list of the host that a recorded step may not look at: only its length is the same every time."""

    def __init__(self, name: str, length: int) -> None:
        self._name = name
        self._length = length

    def __len__(self) -> int:
        return self._length

    def __getitem__(self, index: Any) -> NoReturn:
        raise RuntimeError(f"an op reads Runs.{self._name} on the host, which a graph would freeze")


@dataclass(frozen=True, slots=True)
class DecodeBlock:
    """A step of decodes alone, padded to a recorded ``width``. ``flat_6W``: int64, on the device, fields of
    ``stride_of(width)``; ``starts`` and ``slots``: the same numbers on the host."""

    width: int
    flat_6W: torch.Tensor
    starts: list[int]
    slots: list[int]


class DecodeGraphs:
    """``table``: the rows' page table, int32 [rows + 1, pages], its last row PAD for ever; ``chosen``: the
    token that each row chose last, int64 [rows + 1]. ``widths``: ascending. Nothing is recorded before
    ``record``."""

    def __init__(self, table: torch.Tensor, chosen: torch.Tensor, widths: Sequence[int],
                 capture: Capture) -> None:
        self.widths = tuple(widths)
        self.recorded_s = 0.0
        self._table = table
        self._chosen = chosen
        self._capture = capture
        self._static = torch.zeros(BLOCK_FIELDS * stride_of(max(widths, default=0)), dtype=torch.int64,
                                   device=table.device)
        self._starts: dict[int, Sequence[int]] = {}
        self._slots: dict[int, Sequence[int]] = {}
        self._replays: dict[int, Replay] = {}

    @torch.inference_mode()
    def record(self, forward: Forward, caches: list[LayerCache]) -> None:
        """``forward`` over ``caches`` at all widths, the largest first: the others fit into its memory. What
        was recorded before is void: arena and weights may have moved. Raises ``REFUSALS`` (with what torch or
        an op says) where the model cannot be recorded; nothing is kept then."""
        self.forget()
        started = time.perf_counter()
        try:
            for width in reversed(self.widths):
                self._static[: BLOCK_FIELDS * stride_of(width)].copy_(self._pad_block(width))
                self._starts[width], self._slots[width] = self._lists(width)
                self._replays[width] = self._capture.capture(self._run_of(width, forward, caches))
        except REFUSALS:
            self.forget()
            raise
        self.recorded_s = time.perf_counter() - started

    def forget(self) -> None:
        """Give back the graphs and their memory; ``record`` may follow."""
        self._replays.clear()

    @property
    def recorded(self) -> bool:
        return bool(self._replays)

    def replay(self, block: DecodeBlock) -> torch.Tensor:
        """hidden [width, D] after the final norm, valid until the next replay."""
        self._static[: block.flat_6W.numel()].copy_(block.flat_6W)
        if self._capture.reads_host:
            self._starts[block.width], self._slots[block.width] = block.starts, block.slots
        return self._replays[block.width]()

    def idle(self, width: int) -> torch.Tensor:
        """A step of PAD rows alone, in the graph that holds ``width`` rows: reads and writes nothing of the
        arena."""
        taken = next(one for one in self.widths if one >= width)
        pads = [PAD] * taken
        return self.replay(DecodeBlock(taken, self._pad_block(taken), pads, pads))

    def _lists(self, width: int) -> tuple[Sequence[int], Sequence[int]]:
        if self._capture.reads_host:
            return [PAD] * width, [PAD] * width
        return Untold("starts", width), Untold("slots", width)

    def _pad_block(self, width: int) -> torch.Tensor:
        block = np.full((BLOCK_FIELDS, stride_of(width)), PAD, np.int64)
        block[0] = 0                            # tokens
        block[4] = 0                            # contexts
        block[5] = self._table.shape[0] - 1     # rows
        return torch.from_numpy(block.ravel()).to(self._table.device)

    def _run_of(self, width: int, forward: Forward, caches: list[LayerCache]) -> Callable[[], torch.Tensor]:
        block = self._static[: BLOCK_FIELDS * stride_of(width)].view(BLOCK_FIELDS, -1)
        tokens_T, positions_T, starts_R, slots_R, context_R, rows_R = block[:, :width]
        memo: dict[str, Any] = {}
        if gpu.fits(self._table):   # the same for every step of this width
            flat, chunks = device_runs.pack_lists(list(range(width)), [PAD] * width, [1] * width,
                                                  [False] * width, width, ())
            memo["device_runs"] = device_runs.unpack(torch.from_numpy(flat).to(self._table.device), width,
                                                     width, chunks)

        def run() -> torch.Tensor:
            runs = Runs(
                offsets=list(range(width)), starts=self._starts[width],  # type: ignore[arg-type]
                lengths=[1] * width, slots=self._slots[width],  # type: ignore[arg-type]
                fresh=[False] * width, decode_count=width, starts_R=starts_R, slots_R=slots_R,
                context_R=context_R, page_table_RP=self._table.index_select(0, rows_R), memo=dict(memo))
            fed_T = known_tokens(tokens_T, rows_R, self._chosen)
            return forward(StepInputs(fed_T, positions_T, runs), caches)

        return run


def decode_widths(rows_max: int) -> tuple[int, ...]:
    """1, 2, 4, then every 8 rows to 256, then every 32: close enough that padding costs little, few enough to
    record in seconds."""
    widths = [1, 2, 4, *range(8, 256, 8), *range(256, WIDEST + 1, 32)]
    most = min(rows_max, WIDEST)
    return (*(width for width in widths if width < most), most)


def stride_of(width: int) -> int:
    """Numbers from one field of a block to the next: every field begins on 16 bytes, as kernels like it."""
    return width + width % 2


def known_tokens(tokens_R: torch.Tensor, rows_R: torch.Tensor, chosen: torch.Tensor) -> torch.Tensor:
    """``tokens_R`` of decodes, and where one is PAD the token that its row chose last."""
    return torch.where(tokens_R == PAD, chosen.index_select(0, rows_R), tokens_R)


def pad_rows(width: int, pages: int, device: torch.device) -> StepInputs:
    """A decode step of PAD rows alone, for a model that is run without graphs. ``pages``: of the table."""
    pads = [PAD] * width
    pads_R = torch.full((width,), PAD, dtype=torch.int64, device=device)
    nothing_R = torch.zeros_like(pads_R)
    runs = Runs(offsets=list(range(width)), starts=pads, lengths=[1] * width, slots=pads,
                fresh=[False] * width, decode_count=width, starts_R=pads_R, slots_R=pads_R,
                context_R=nothing_R,
                page_table_RP=torch.full((width, pages), PAD, dtype=torch.int32, device=device))
    return StepInputs(nothing_R, pads_R, runs)
