"""Blocks that an attention's own keys choose, against a token at a time over all that was written."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import positions_of
from tests.ops.in_pieces import LENGTH, attended, in_pieces, numbers, unwritten
from weft.families.mixers.attention import KeyIndex
from weft.tensor.inputs import Runs
from weft.tensor.ops.chosen_blocks import Seen, attend_seen
from weft.tensor.ops.mean_keys import choose_by_means, sees_all, write_means
from weft.tensor.ops.write_kv import write_kv

SHAPE = KeyIndex(stride=4, block=12, chosen=5, first=1, near=1, dense=64)
"""Blocks of 12 tokens: pages end inside of them."""
HEADS, KV_HEADS, DIM, SCALE = 6, 2, 18, 0.4
WIDTH = 10
"""A mean has 36 numbers, which 4 tokens hold: one is padding, for pairs of bfloat16."""


Q, K, V = (
    numbers(LENGTH, HEADS, DIM, seed=1),
    numbers(LENGTH, KV_HEADS, DIM, seed=2),
    numbers(LENGTH, KV_HEADS, DIM, seed=3),
)


def computed(
    cuts: list[int], dtype: torch.dtype, *, wrong_drafts: bool = False, damaged: int | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    """Masks [KV_HEADS, LENGTH, LENGTH] and outputs. ``wrong_drafts``: each piece was written with other keys
    first. ``damaged``: a mean that is lost before the last piece."""
    cache, index = unwritten(KV_HEADS, DIM, WIDTH, dtype)

    def step(own: slice, runs: Runs) -> tuple[Seen, torch.Tensor]:
        for keys in [-K] * wrong_drafts + [K]:
            write_kv(keys[own], V[own], cache.k, cache.v, positions_of(runs), runs)
            write_means(cache, runs, SHAPE)
        if damaged is not None and own.stop == LENGTH:
            token = damaged * SHAPE.stride
            index.k[runs.page_table_RP[0, token // 16], 0, :, token % 16] = 9.0
        seen = choose_by_means(Q[own], cache, runs, SHAPE, SCALE)
        assert (seen[0] is None) == sees_all(runs, SHAPE)
        return seen, attend_seen(Q[own], cache, runs, SCALE, seen)

    return in_pieces(cuts, torch.zeros(KV_HEADS, LENGTH, LENGTH, dtype=torch.bool), step)


def chosen(head: int, p: int) -> list[int]:
    """The blocks that the token at ``p`` sees, by the formulas."""
    keys, group = K[: p + 1, head].double(), HEADS // KV_HEADS
    queries = Q[p, head * group : (head + 1) * group].double() * SCALE

    def ended(size: int, stride: int) -> torch.Tensor:
        starts = range(0, p + 2 - size, stride)
        return torch.stack([queries @ keys[start : start + size].mean(0) for start in starts])

    wide = ended(8 * SHAPE.stride, 4 * SHAPE.stride)
    shares = (ended(2 * SHAPE.stride, SHAPE.stride).exp() / wide.exp().sum(0)).sum(1)
    blocks, each = p // SHAPE.block + 1, SHAPE.block // SHAPE.stride
    always = [b for b in range(blocks) if b < SHAPE.first or b >= blocks - 1 - SHAPE.near]
    score = {b: float(shares[max(0, b * each - 1) : b * each + each].max()) for b in range(blocks) if b not in always}
    return [*always, *sorted(score, key=lambda b: -score[b])[: SHAPE.chosen - len(always)]]


def expected() -> tuple[torch.Tensor, torch.Tensor]:
    masks = torch.zeros(KV_HEADS, LENGTH, LENGTH, dtype=torch.bool)
    for p in range(LENGTH):
        for head in range(KV_HEADS):
            if p + 1 < SHAPE.dense:
                masks[head, p, : p + 1] = True
                continue
            for block in chosen(head, p):
                masks[head, p, block * SHAPE.block : min(p + 1, (block + 1) * SHAPE.block)] = True
    return masks, attended(masks, Q, K, V, SCALE)


@pytest.mark.parametrize("cuts", [[], [64, 128], [3, 47, 48, 49, 101], list(range(1, LENGTH))])
def test_a_text_in_any_pieces_sees_the_blocks_of_its_twin_and_nothing_unwritten(cuts: list[int]) -> None:
    masks, outputs = computed(cuts, torch.float32)
    wanted_masks, wanted = expected()
    assert torch.equal(masks, wanted_masks)
    assert not torch.equal(masks[0], masks[1]), "heads that choose alike show nothing"
    torch.testing.assert_close(outputs, wanted, rtol=1e-5, atol=1e-5)


def test_in_bfloat16_every_cut_sees_the_same_blocks_and_wrong_drafts_leave_nothing() -> None:
    whole, _ = computed([], torch.bfloat16)
    assert torch.equal(whole, computed([64, 100, 101, 102, 149], torch.bfloat16)[0])
    assert torch.equal(whole, computed([64, 70, 77, 100, 149], torch.bfloat16, wrong_drafts=True)[0])


def test_a_lost_mean_shows() -> None:
    whole, _ = computed([64, 140], torch.float32)
    assert not torch.equal(whole, computed([64, 140], torch.float32, damaged=13)[0])
