"""How prefill runs are cut into chunks: the absolute grid, and the order the scan needs."""

from __future__ import annotations

import torch

from tests.ops.batches import Run, make_runs, positions_of, span
from weft.tensor.chunks import BLOCK_CHUNKS, chunk_layout, pairwise_decay
from weft.tensor.inputs import TapPoint
from weft.units import CHUNK_TOKENS


def test_a_token_sits_in_its_chunk_where_its_position_sits_on_the_grid() -> None:
    runs = make_runs([Run(9, slot=0)], [Run(40, 171), Run(0, 71), Run(100, 3)])
    layout = chunk_layout(runs)
    positions = positions_of(runs)[1:]
    assert layout.size == CHUNK_TOKENS
    assert torch.equal(layout.place_T % CHUNK_TOKENS, positions % CHUNK_TOKENS)
    assert layout.place_T.unique().numel() == layout.place_T.numel()
    for run in (1, 2, 3):  # tokens share a chunk exactly if they share a cell of the grid
        at = slice(span(runs, run).start - 1, span(runs, run).stop - 1)
        chunk, cell = layout.place_T[at] // CHUNK_TOKENS, positions[at] // CHUNK_TOKENS
        assert torch.equal(chunk[:, None] == chunk, cell[:, None] == cell)


def test_each_step_of_the_scan_is_a_slice_of_the_chunks_and_a_prefix_of_the_runs() -> None:
    runs = make_runs([], [Run(0, 71), Run(40, 171), Run(100, 3)], taps=(TapPoint(1, 88, 5),))
    layout = chunk_layout(runs)
    assert layout.order == (1, 0, 2)
    assert [(step.first, step.rows) for step in layout.steps] == [(0, 3), (3, 2), (5, 1), (6, 1)]
    (tap,) = layout.steps[1].taps  # 88 tokens from position 40: the end of the second chunk
    assert (tap.row, tap.places, tap.slot, tap.whole) == (0, 64, 5, True)


def test_a_batch_of_short_prompts_gets_small_chunks() -> None:
    for longest, size in ((1, 16), (16, 16), (17, 32), (33, 64), (64, 64)):
        layout = chunk_layout(make_runs([], [Run(0, longest), Run(7, 1)]))
        assert (layout.size, layout.chunk_count) == (size, 2)


def test_blocks_cover_every_step_once_and_stay_bounded() -> None:
    layout = chunk_layout(make_runs([], [Run(0, 64 * 70), Run(0, 64 * 50), Run(5, 64)]))
    blocks = list(layout.blocks())
    assert [step for _, _, steps in blocks for step in steps] == list(layout.steps)
    assert [first for first, _, _ in blocks] == [0, *(first + count for first, count, _ in blocks)][:-1]
    assert all(count <= BLOCK_CHUNKS for _, count, _ in blocks)


def test_decay_between_places_is_zero_ahead_and_never_infinite() -> None:
    sums = torch.tensor([-1.0, -500.0, -500.5, -9000.0], dtype=torch.float64)
    got = pairwise_decay(sums, torch.full((4, 4), float("nan")))
    assert got.triu(1).count_nonzero() == 0
    assert (got.diagonal() == 1.0).all()
    torch.testing.assert_close(got[2, 1], torch.tensor(-0.5).exp())
    assert 0 < got[3, 0] < 1e-30
