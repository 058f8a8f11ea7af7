"""One table of recorded steps: decodes, steps with prompts, the same with rows of adapters, drafts of the head.

    staging --one copy--> memory of the shape     the block of a step: real runs first, then PAD
                              |                   (``graph_shapes`` has its numbers)
                              v
    graph of (set, shape)  rows -> page table [runs, pages] -> every layer -> hidden [tokens, D]

A decode step of a small model is some hundred launches of a few microseconds each, a step of a thousand tokens some
thousand. The host needs longer to issue them than the device needs to run them. Recorded, they are one call.

A step of only decodes is a shape without other runs. What differs between steps is a value: the shape, and the set. A
set is a forward function with its shapes: of the base model, with the factors of adapters (the adapter of a row, and
the addresses of its factors, are data: ``tensor.kernels.adapters``), of the model's own head.

Recording fixes every address that a graph reads or writes, so each such tensor has an owner that outlives the graph:
the numbers of a shape here, for all sets; rows of pictures and the blocks of adapters (``tensor.adapter_rows``), which
are written before a replay. After a sleep all graphs are recorded again. PAD rows read and write nothing (L4), so a
replay touches only pages and slots of live rows (L5).

The replay of a shape's verify runs reads the log that its step wrote (``tensor.replay_log``), and is recorded right
after it. No other graph is replayed between the two, so the log may be in the memory that all graphs share.

Memory. All graphs record into one pool, the largest shape first, so that each further graph adds only its nodes.
``reserve`` measures both before the arena takes the rest.

A recorded step computes the output of all tokens in the last layer, as it cannot know which ones sample. A library for
prompts that plans on the host (FlashInfer) cannot be recorded; the refusal is reported at start. A shape that cannot be
recorded costs only that shape.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from typing import Any, Literal

import torch

from weft.runner.graph_shapes import GraphShape, replayable, split_fields
from weft.runner.graphs import Capture, Replay, UnreadableList, first_line, known_tokens, refusals
from weft.runner.pictures import PictureRows
from weft.runner.staging import Staging
from weft.tensor import gpu
from weft.tensor.adapter_rows import BLOCK_ROWS, AdapterBlocks, RowGroups, StepAdapters, most_blocks
from weft.tensor.gpu import runs as device_runs
from weft.tensor.inputs import EmbeddedRows, LayerCache, Runs, StepInputs
from weft.tensor.replay_log import ReplayLog
from weft.units import PAD

Forward = Callable[[StepInputs, list[LayerCache]], torch.Tensor]
SetName = Literal["base", "adapted", "draft"]
_SETS: dict[SetName, str] = {"base": "", "adapted": "with adapters, ", "draft": "drafts of the model's head, "}
"""Name of each set in messages."""


@dataclass(frozen=True, slots=True)
class GraphSet:
    """Steps to record: ``forward`` over ``caches``, at all of ``shapes`` (ascending)."""

    name: SetName
    shapes: Sequence[GraphShape]
    forward: Forward
    caches: list[LayerCache]


@dataclass(frozen=True, slots=True)
class StepBlock:
    """A step, padded to ``shape``. ``flat``: int64 [shape.block_numbers], on the device. ``adapters``: of the tokens,
    in ``most_blocks`` blocks; None if all are of the base model. ``rows_ND``: rows of its pictures.
    """

    shape: GraphShape
    flat: torch.Tensor
    adapters: StepAdapters | None = None
    rows_ND: torch.Tensor | None = None


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


class StepGraphs:
    """Graphs of steps, by set and shape. ``table``: the rows' page table, int32 [rows + 1, pages], whose last row is
    always PAD; ``chosen``: the last token of each row, int64 [rows + 1]. ``shapes``: of the model's steps, ascending.
    ``pictures``: of a model that reads some.
    """

    def __init__(
        self,
        table: torch.Tensor,
        chosen: torch.Tensor,
        shapes: Sequence[GraphShape],
        capture: Capture,
        pictures: PictureRows | None = None,
    ) -> None:
        self.shapes = tuple(shapes)
        self.seconds = 0.0
        """Seconds that the last recording took."""
        self._table, self._chosen, self._capture = table, chosen, capture
        tokens = max(shape.tokens for shape in shapes)
        self._deltas = None if pictures is None else pictures.deltas_R
        pictured = max((shape.tokens for shape in shapes if shape.picture_fields), default=0)
        self._rows_ND = None if pictures is None else pictures.room(pictured)
        self._adapter_rows = RecordedAdapters(tokens, table.device)
        self._log: ReplayLog | None = None
        """Log of the verify runs that were recorded last."""
        states = [shape.block_numbers for shape in shapes if not shape.forward]
        self._replays = Staging(table.device, 8 * max(states, default=0))
        self._memory: dict[GraphShape, torch.Tensor] = {}
        """Numbers that the graphs of a shape read by address."""
        self._recorded: dict[tuple[SetName, GraphShape], Replay] = {}
        self._refused: dict[tuple[SetName, GraphShape], str] = {}
        self._shapes_of: dict[SetName, tuple[GraphShape, ...]] = {}

    @torch.inference_mode()
    def record(self, *sets: GraphSet) -> None:
        """Record ``sets`` one after the other, each from its largest shape on: the others fit into its memory. Earlier
        graphs are dropped: arena and weights may have moved.
        """
        self.forget()
        started = time.perf_counter()
        self._adapter_rows.clear()
        for graphs in sets:
            for shape in reversed(graphs.shapes):
                self._record(graphs, shape)
            self._shapes_of[graphs.name] = replayable(
                sorted(shape for of, shape in self._recorded if of == graphs.name)
            )
        self._log = None
        if self._table.is_cuda:
            torch.cuda.empty_cache()  # the runs before the recordings left blocks that no step will use
        self.seconds = time.perf_counter() - started

    def _record(self, graphs: GraphSet, shape: GraphShape) -> None:
        key = graphs.name, shape
        memory = self._memory.setdefault(shape, self._pad_memory(shape))
        run = self._step_of(graphs, shape, memory) if shape.forward else self._states_of(graphs, shape, memory)
        try:
            self._recorded[key] = self._capture.capture(run)
        except refusals() as error:
            self._refused[key] = first_line(error)

    def forget(self) -> None:
        """Drop the graphs and free their memory; ``record`` may follow."""
        for by_key in (self._recorded, self._refused, self._memory, self._shapes_of):
            by_key.clear()

    def recorded(self, name: SetName = "base") -> tuple[GraphShape, ...]:
        """Return the shapes of a set that can be replayed, ascending."""
        return self._shapes_of.get(name, ())

    def refused_in_words(self) -> str | None:
        """Return the shapes without a graph and the reason for each, the last one first; None if all are recorded."""
        names_of: dict[tuple[str, str], list[str]] = {}
        for (of, shape), reason in reversed(self._refused.items()):
            kind, name = shape.name
            names_of.setdefault((_SETS[of] + kind, reason), []).append(name)
        lines = [
            f"{kind}{'s' if len(names) > 1 else ''} {', '.join(names)}: {reason}"
            for (kind, reason), names in names_of.items()
        ]
        return "; ".join(lines) or None

    def replay(self, block: StepBlock, name: SetName | None = None) -> torch.Tensor:
        """Return the result of the graph of ``block``, valid until the next replay: hidden [tokens, D] after the final
        norm. ``name``: of the set; None for a step of the model.
        """
        self._memory[block.shape][: block.flat.numel()].copy_(block.flat)
        if block.rows_ND is not None:
            assert self._rows_ND is not None, "a picture for a model that reads none"
            self._rows_ND[: len(block.rows_ND)].copy_(block.rows_ND)
        if block.adapters is not None:
            self._adapter_rows.take(block.adapters, block.shape.tokens)
        return self._recorded[name or _set_of(block), block.shape]()

    def replay_states(
        self,
        block: StepBlock,
        starts: Sequence[int],
        lengths: Sequence[int],
        right: Sequence[int],
        slots: Sequence[int],
    ) -> None:
        """Compute the states of the verify runs of ``block``, the last replayed step, after the ``right`` tokens of
        each. ``lengths``: all tokens of each run.
        """
        again = replace(block.shape, forward=False)
        offsets = [sum(lengths[:run]) for run in range(len(lengths))]
        self._replays.begin()
        piece = self._replays.add(again.states_block(offsets, list(starts), list(right), list(slots)))
        self._replays.send()
        self.replay(StepBlock(again, piece.device), _set_of(block))

    def warm(self) -> None:
        """Replay each graph once, in a step without a sequence."""
        for name, shapes in self._shapes_of.items():
            for shape in shapes:
                self.idle(shape, name)

    def idle(self, shape: GraphShape, name: SetName = "base") -> torch.Tensor:
        """Replay a step without a sequence. It reads and writes nothing of the arena, except the bytes of a slot for
        verify runs, whose contents stay the same.
        """
        adapters = self._adapter_rows.step(shape.tokens) if name == "adapted" else None
        block = StepBlock(shape, self._pad_memory(shape)[: shape.block_numbers], adapters)
        hidden = self.replay(block, name)
        if shape.verifies:
            self.replay_states(block, [], [], [], [])
        return hidden

    def _pad_memory(self, shape: GraphShape) -> torch.Tensor:
        return torch.from_numpy(shape.pad_memory(self._table.shape[0] - 1)).to(self._table.device)

    def _memo(self, shape: GraphShape, memory: torch.Tensor) -> dict[str, Any]:
        """Return the memo of a step's runs, with their table if the Triton kernels read it."""
        if not gpu.fits(self._table):
            return {}
        table = memory[shape.table_at :].view(torch.int32)
        return {"device_runs": device_runs.unpack(table, shape.runs, shape.decodes * shape.forward, shape.chunks)}

    def _step_of(self, graphs: GraphSet, shape: GraphShape, memory: torch.Tensor) -> Callable[[], torch.Tensor]:
        adapters = self._adapter_rows.step(shape.tokens) if graphs.name == "adapted" else None
        decodes, count, alone = shape.decodes, shape.runs, shape.decodes_alone
        (tokens_T, positions_T), by_run = split_fields(memory, shape.tokens, count)
        starts_R, slots_R, context_R, rows_R = by_run
        memo = self._memo(shape, memory)
        embedded = turns = None
        if shape.picture_fields:
            assert self._rows_ND is not None
            pictured_T, *turns_3 = (fields := shape.fields_of(memory))
            embedded, turns = EmbeddedRows(pictured_T, self._rows_ND), fields[1:] if turns_3 else None

        def run() -> torch.Tensor:
            runs = Runs(
                offsets=_listed("offsets", count, range(decodes + 1)),
                starts=_listed("starts", count, self._host(starts_R)),
                lengths=_listed("lengths", count, [1] * decodes),
                slots=_listed("slots", count, self._host(slots_R)),
                fresh=_listed("fresh", count, [False] * decodes),
                decode_count=decodes,
                starts_R=starts_R,
                slots_R=slots_R,
                context_R=context_R,
                page_table_RP=self._table.index_select(0, rows_R),
                taps=() if alone else _listed("taps", count),
                padded=True,
                memo=dict(memo),
                verify_count=shape.verifies,
                log=ReplayLog(decodes, shape.verify_tokens) if shape.verifies else None,
            )
            self._log = runs.log
            tokens = known_tokens(tokens_T[:decodes], rows_R[:decodes], self._chosen)
            if not alone:
                tokens = torch.cat((tokens, tokens_T[decodes:]))
            turned = turns
            if alone and self._deltas is not None:
                turned = positions_T + self._deltas.index_select(0, rows_R)
            inputs = StepInputs(tokens, positions_T, runs, adapters=adapters, embedded=embedded, turns=turned)
            return graphs.forward(inputs, graphs.caches)

        return run

    def _states_of(self, graphs: GraphSet, shape: GraphShape, memory: torch.Tensor) -> Callable[[], torch.Tensor]:
        """Return the function that replays the states of the verify runs of ``shape``."""
        count = shape.runs
        starts_R, slots_R, context_R = memory[: shape.table_at].view(3, -1)[:, :count].unbind()
        memo = self._memo(shape, memory)

        def run() -> torch.Tensor:
            if self._log is None or (graphs.name, replace(shape, forward=True)) not in self._recorded:
                raise RuntimeError("the step before it is not recorded")
            again = Runs(
                offsets=_listed("offsets", count),
                starts=_listed("starts", count),
                lengths=_listed("lengths", count),
                slots=_listed("slots", count),
                fresh=_listed("fresh", count),
                decode_count=0,
                starts_R=starts_R,
                slots_R=slots_R,
                context_R=context_R,
                page_table_RP=self._table[:count],
                padded=True,
                memo=dict(memo),
            )
            self._log.replay(slice(0, self._log.rows), again)
            return starts_R

        return run

    def _host(self, numbers_R: torch.Tensor) -> Sequence[int]:
        """Return what a step may read of ``numbers_R`` on the host: all if the function runs at every replay."""
        return numbers_R.tolist() if self._capture.reads_host else ()


def _listed(name: str, length: int, known: Sequence[int] = ()) -> Any:
    """Return the list of ``Runs.name``: ``known`` values, which are the same at every replay, then unreadable ones."""
    return list(known[:length]) if len(known) >= length else UnreadableList(name, length, known)


def _set_of(block: StepBlock) -> SetName:
    return "base" if block.adapters is None else "adapted"
