"""Steps for the op tests: runs made from a few numbers, and pages and slots with nothing but NaN in them."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.tensor.inputs import Runs, TapPoint
from weft.tensor.scratch import scratch
from weft.units import PAD, PAGE_TOKENS, pages_for


@dataclass(frozen=True)
class Run:
    start: int
    length: int = 1
    slot: int = PAD
    fresh: bool = False


PAD_ROW = Run(start=PAD)


def make_runs(
    decodes: list[Run], prefills: list[Run], *, taps: tuple[TapPoint, ...] = (), pages: int = 0, seed: int = 0
) -> Runs:
    """``pages``: pages in the cache; each run gets its own, in random order."""
    runs = [*decodes, *prefills]
    assert all(run.length == 1 for run in decodes)
    offsets = [sum(run.length for run in runs[:i]) for i in range(len(runs))]
    contexts = [0 if run.start == PAD else run.start + run.length for run in runs]
    width = max(pages_for(context) for context in contexts) + 2
    table = torch.full((len(runs), width), PAD, dtype=torch.int32)
    free = torch.randperm(pages, generator=torch.Generator().manual_seed(seed)).tolist()
    if pages:
        for row, context in enumerate(contexts):
            for index in range(pages_for(context)):
                table[row, index] = free.pop()
    return Runs(
        offsets=offsets,
        starts=[run.start for run in runs],
        lengths=[run.length for run in runs],
        slots=[run.slot for run in runs],
        fresh=[run.fresh for run in runs],
        decode_count=len(decodes),
        starts_R=torch.tensor([run.start for run in runs]),
        slots_R=torch.tensor([run.slot for run in runs]),
        context_R=torch.tensor(contexts),
        page_table_RP=table,
        taps=taps,
    )


def tokens_in(runs: Runs) -> int:
    return sum(runs.lengths)


def positions_of(runs: Runs) -> torch.Tensor:
    """int64 [T], PAD for the token of a PAD row."""
    return torch.cat(
        [
            torch.arange(start, start + length) if start != PAD else torch.tensor([PAD])
            for start, length in zip(runs.starts, runs.lengths, strict=True)
        ]
    )


def span(runs: Runs, run: int) -> slice:
    """The tokens of one run in T."""
    return slice(runs.offsets[run], runs.offsets[run] + runs.lengths[run])


def written_places(runs: Runs, pages: int) -> torch.Tensor:
    """bool [pages, 16]: places inside some run's context."""
    seen = torch.zeros(pages, PAGE_TOKENS, dtype=torch.bool)
    for row in range(runs.run_count):
        positions = torch.arange(int(runs.context_R[row]))
        seen[runs.page_table_RP[row, positions // PAGE_TOKENS], positions % PAGE_TOKENS] = True
    return seen


def poison_scratch() -> None:
    """NaN into every step buffer: what an op leaves there must not be read by the next call."""
    for buffer in scratch._buffers.values():
        if buffer.is_floating_point():
            buffer.fill_(float("nan"))
