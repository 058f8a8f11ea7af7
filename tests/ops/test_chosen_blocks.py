"""The choice of blocks and the reading of them, against a token at a time over all that was written."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import positions_of
from tests.ops.in_pieces import LENGTH, attended, in_pieces, numbers, unwritten
from weft.families.mixers.attention import Index
from weft.tensor.inputs import Runs
from weft.tensor.ops.chosen_blocks import Seen, attend_seen, choose_blocks, sees_all, write_index
from weft.tensor.ops.write_kv import write_kv

SHAPE = Index(3, 8, 6, 5)
"""Blocks of 6 tokens: pages end inside of them."""
HEADS, KV_HEADS, DIM = 4, 2, 16


ROWS, ASKED = numbers(LENGTH, 8, seed=1), numbers(LENGTH, 3, 8, seed=2)
WEIGHTS = numbers(LENGTH, 3, seed=3).abs()
Q, K, V = (
    numbers(LENGTH, HEADS, DIM, seed=4),
    numbers(LENGTH, KV_HEADS, DIM, seed=5),
    numbers(LENGTH, KV_HEADS, DIM, seed=6),
)


def keys(rows_NKW: torch.Tensor, numbers_N: torch.Tensor) -> torch.Tensor:
    return rows_NKW.mean(1) + 0.1 * numbers_N[:, None]


def computed(cuts: list[int], dtype: torch.dtype, *, damaged: int | None = None) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks [LENGTH, LENGTH] and outputs. ``damaged``: a place whose index row is lost before the last
    piece."""
    cache, index = unwritten(KV_HEADS, DIM, 8, dtype)

    def step(own: slice, runs: Runs) -> tuple[Seen, torch.Tensor]:
        if damaged is not None and own.stop == LENGTH:
            index.k[runs.page_table_RP[0, damaged // 16], 0, :, damaged % 16] = 9.0
        positions = positions_of(runs)
        write_index(ROWS[own], keys, index, positions, runs, SHAPE)
        write_kv(K[own], V[own], cache.k, cache.v, positions, runs)
        seen = choose_blocks(ASKED[own], WEIGHTS[own], index, runs, SHAPE)
        assert (seen[0] is None) == sees_all(runs, SHAPE)
        return seen, attend_seen(Q[own], cache, runs, 0.3, seen)

    return in_pieces(cuts, torch.zeros(LENGTH, LENGTH, dtype=torch.bool), step)


def expected() -> tuple[torch.Tensor, torch.Tensor]:
    masks = torch.zeros(LENGTH, LENGTH, dtype=torch.bool)
    for p in range(LENGTH):
        blocks = (p + 1) // SHAPE.block
        scores = []
        for block in range(blocks):
            key = ROWS[block * SHAPE.block : (block + 1) * SHAPE.block].double().mean(0) + 0.1 * block
            scores.append(float((torch.relu(ASKED[p].double() @ key) * WEIGHTS[p].double()).sum()))
        for block in sorted(range(blocks), key=lambda b: -scores[b])[: SHAPE.chosen]:
            masks[p, block * SHAPE.block : (block + 1) * SHAPE.block] = True
        masks[p, blocks * SHAPE.block : p + 1] = True
    return masks, attended(masks.expand(KV_HEADS, -1, -1), Q, K, V, 0.3)


@pytest.mark.parametrize("cuts", [[], [64, 128], [3, 47, 48, 49, 101], list(range(1, LENGTH))])
def test_a_text_in_any_pieces_sees_the_blocks_of_its_twin_and_nothing_unwritten(cuts: list[int]) -> None:
    masks, outputs = computed(cuts, torch.float32)
    wanted_masks, wanted = expected()
    assert torch.equal(masks, wanted_masks)
    torch.testing.assert_close(outputs, wanted, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_every_cut_sees_the_same_blocks() -> None:
    whole, _ = computed([], torch.bfloat16)
    pieces, _ = computed([64, 100, 101, 102, 149], torch.bfloat16)
    assert torch.equal(whole, pieces)


def test_a_lost_key_of_a_block_shows() -> None:
    whole, _ = computed([64, 140], torch.float32)
    damaged, _ = computed([64, 140], torch.float32, damaged=SHAPE.block * 7 - 1)
    assert not torch.equal(whole, damaged)
