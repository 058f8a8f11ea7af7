"""Steps that stand for all that a server computes: what needs the most memory, and what compiles a kernel.

    long prompt      a whole token budget of one new sequence
    short runs       the same tokens in as many runs as there are rows, each after a prefix hit: every run has
                     at least one chunk of float32 states, and starts off the grid of chunks
    mixed            decodes of short contexts beside a prompt: a page table of one page, where attention is
                     not split, so that its kernel has no partial results
    few tokens       prompts of 1, 2, 4, ... tokens: matrix and expert kernels choose tiles by rows
    windows          two windows of drafts behind hits, the states of which are computed again afterwards
    decodes          PAD rows alone, with a page table as wide as that of a CUDA graph

All of them run on a small arena of their own. Rejected: requests through the scheduler (a day of traffic to
reach the same kernels).
"""

from __future__ import annotations

from dataclasses import dataclass, replace

import torch

from weft.runner.graphs import pad_rows
from weft.runner.kv_scales import one_prompt
from weft.tensor.inputs import Runs, StepInputs
from weft.units import PAD, pages_for

HIT_TOKENS = 40
"""Off the grid of chunks: the first chunk of a run ends inside it."""
MIXED_DECODES = 4
MIXED_PROMPT_TOKENS = 16
WINDOW_TOKENS = 4


@dataclass(frozen=True, slots=True)
class StepShape:
    """``decodes``: a CUDA graph may hold this step's memory."""

    name: str
    inputs: StepInputs
    decodes: bool = False


def step_shapes(*, tokens: int, rows: int, positions: int, table_pages: int, vocab_size: int,
                device: torch.device, first_page: int) -> list[StepShape]:
    """``tokens``, ``rows``: the most of a step; ``positions``: the most of a sequence; ``table_pages``: of
    the rows' table; ``first_page``: pages from there on are free, for ``min(tokens, positions)`` tokens."""
    longest = min(tokens, positions)
    # First: its KV fills the pages that the other shapes read.
    shapes = [StepShape("long prompt", one_prompt(longest, vocab_size, device, first_page=first_page))]
    start = min(HIT_TOKENS, longest // 2)
    runs = max(1, min(rows, tokens))
    length = max(1, min(tokens // runs, longest - start))
    shapes.append(StepShape("short runs after hits", _runs(
        [start] * runs, [length] * runs, 0, vocab_size, device, first_page)))
    decodes, prompt = min(MIXED_DECODES, rows), min(MIXED_PROMPT_TOKENS, longest)
    shapes.append(StepShape("mixed, short contexts", _runs(
        [1] * decodes + [0], [1] * decodes + [prompt], decodes, vocab_size, device, first_page)))
    count = 1
    while count < longest:
        shapes.append(StepShape(f"{count} tokens",
                                one_prompt(count, vocab_size, device, first_page=first_page)))
        count *= 2
    if rows > 1 and start + WINDOW_TOKENS <= longest and tokens >= 2 * WINDOW_TOKENS:
        windows = _runs([start] * 2, [WINDOW_TOKENS] * 2, 0, vocab_size, device, first_page)
        shapes.append(StepShape("windows of drafts", replace(
            windows, runs=replace(windows.runs, verify_count=2))))
    shapes.append(StepShape("decodes", pad_rows(rows, table_pages, device), decodes=True))
    return shapes


def _runs(starts: list[int], lengths: list[int], decode_count: int, vocab_size: int, device: torch.device,
          first_page: int) -> StepInputs:
    # Rows that write the same page race; nothing reads the result.
    """Runs without slots that all lie in the same pages."""
    contexts = [start + length for start, length in zip(starts, lengths, strict=True)]
    offsets = [sum(lengths[:run]) for run in range(len(lengths))]
    width = pages_for(max(contexts))
    pages_P = torch.arange(first_page, first_page + width, dtype=torch.int32, device=device)
    positions = [start + i for start, length in zip(starts, lengths, strict=True) for i in range(length)]
    pads_R = torch.full((len(starts),), PAD, dtype=torch.int64, device=device)
    runs = Runs(offsets=offsets, starts=starts, lengths=lengths, slots=[PAD] * len(starts),
                fresh=[start == 0 for start in starts], decode_count=decode_count,
                starts_R=torch.tensor(starts, device=device), slots_R=pads_R,
                context_R=torch.tensor(contexts, device=device),
                page_table_RP=pages_P.expand(len(starts), width).contiguous(), padded=True)
    tokens_T = torch.arange(len(positions), device=device) % vocab_size
    return StepInputs(tokens_T, torch.tensor(positions, device=device), runs)
