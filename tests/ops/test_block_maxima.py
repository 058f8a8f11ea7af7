"""Blocks that each KV head chooses by their best token, windows, and sinks: against a token at a time."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import positions_of
from tests.ops.in_pieces import LENGTH, attended, in_pieces, numbers, unwritten
from weft.families.mixers.attention import Index
from weft.tensor.inputs import Runs
from weft.tensor.ops.chosen_blocks import Seen, attend_seen, choose_by_maxima, sees_all, within, write_index
from weft.tensor.ops.write_kv import write_kv

HEADS, KV_HEADS, DIM, WINDOW = 4, 2, 16, 37
SHAPE = Index(KV_HEADS, 8, 6, 5, "maxima", near=2)
ROWS, QUERIES = numbers(LENGTH, 8, seed=1), numbers(LENGTH, KV_HEADS, 8, seed=2)
Q = numbers(LENGTH, HEADS, DIM, seed=4)
K, V = numbers(LENGTH, KV_HEADS, DIM, seed=5), numbers(LENGTH, KV_HEADS, DIM, seed=6)
SINKS = torch.tensor([0.5, -1.0, 2.0, 0.0])
CUTS = [[], [64, 128], [3, 47, 48, 49, 101], list(range(1, LENGTH))]


def no_keys(rows_NKW: torch.Tensor, numbers_N: torch.Tensor) -> torch.Tensor:
    raise AssertionError("the row of a token is its key")


def blocks_of(head: int, p: int) -> list[int]:
    own = p // SHAPE.block
    scores = (ROWS[: p + 1].double() @ QUERIES[p, head].double()).split(SHAPE.block)
    before = sorted(range(own - 1), key=lambda block: -float(scores[block].max()))
    return [own, own - 1, *before][: SHAPE.chosen]


@pytest.mark.parametrize("cuts", CUTS)
def test_each_kv_head_sees_the_blocks_of_its_best_tokens_and_the_near_ones(cuts: list[int]) -> None:
    cache, index = unwritten(KV_HEADS, DIM, 8, torch.float32)

    def step(own: slice, runs: Runs) -> tuple[Seen, torch.Tensor]:
        write_index(ROWS[own], no_keys, index, positions_of(runs), runs, SHAPE)
        write_kv(K[own], V[own], cache.k, cache.v, positions_of(runs), runs)
        seen = choose_by_maxima(QUERIES[own], index, runs, SHAPE)
        assert (seen[0] is None) == sees_all(runs, SHAPE)
        return seen, attend_seen(Q[own], cache, runs, 0.3, seen)

    masks, outputs = in_pieces(cuts, torch.zeros(KV_HEADS, LENGTH, LENGTH, dtype=torch.bool), step)
    for head in range(KV_HEADS):
        for p in range(LENGTH):
            assert {int(token) // SHAPE.block for token in masks[head, p].nonzero()} == {
                block for block in blocks_of(head, p) if block >= 0
            }
    assert not torch.equal(masks[0], masks[1]), "heads that choose alike show nothing"
    torch.testing.assert_close(outputs, attended(masks, Q, K, V, 0.3), rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("cuts", CUTS)
def test_a_window_and_sinks(cuts: list[int]) -> None:
    cache, _ = unwritten(KV_HEADS, DIM, 8, torch.float32)

    def step(own: slice, runs: Runs) -> tuple[Seen, torch.Tensor]:
        write_kv(K[own], V[own], cache.k, cache.v, positions_of(runs), runs)
        seen = within(WINDOW, runs) or [None]
        return seen, attend_seen(Q[own], cache, runs, 0.3, seen, sinks_H=SINKS)

    masks, outputs = in_pieces(cuts, torch.zeros(LENGTH, LENGTH, dtype=torch.bool), step)
    assert torch.equal(masks.sum(1), torch.arange(1, LENGTH + 1).clamp(max=WINDOW))
    for p in range(LENGTH):
        for head in range(HEADS):
            keys, values = (x[masks[p], head * KV_HEADS // HEADS].double() for x in (K, V))
            scores = torch.cat((0.3 * (keys @ Q[p, head].double()), SINKS[head : head + 1].double()))
            wanted = torch.softmax(scores, 0)[:-1] @ values
            torch.testing.assert_close(outputs[p, head].double(), wanted, rtol=1e-4, atol=1e-5)
