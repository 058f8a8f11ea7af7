"""window_attention in Triton: rings in slots, hand-over, taps, every dtype of a ring."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.gpu.steps import on_device, strided_on
from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, span, tokens_in
from tests.support.naive_ops import window_attention as naive_window_attention
from weft.tensor.few_bits import narrowed
from weft.tensor.inputs import TapPoint
from weft.tensor.ops.window_attention import window_attention

FP8 = torch.float8_e4m3fn
MIXED = (
    [Run(30, slot=1), Run(3, slot=2), PAD_ROW, Run(24, slot=6, fresh=True)],
    [Run(0, 70, slot=3, fresh=True), Run(20, 9, slot=4), Run(0, 3, slot=5, fresh=True), Run(50, 2)],
)


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def rings(dtype: torch.dtype, window: int, slots: int = 10) -> torch.Tensor:
    """Numbers in slots 1, 2 and 4, with gaps between slots; bytes of 0xFF in all others, and in the places
    that slot 2 has not reached."""
    size = 2 * 2 * window * 8
    held = torch.full((slots, (size + 64) * dtype.itemsize), 0xFF, dtype=torch.uint8)
    ring = held.view(dtype)[:, :size].view(slots, 2, 2, window, 8)
    for slot in (1, 2, 4):
        places = 3 if slot == 2 else window
        ring[slot][:, :, :places] = narrowed(noise(2, 2, places, 8, seed=slot), dtype)
    return ring


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, FP8])
def test_a_mixed_batch_with_taps_equals_one_query_at_a_time(dtype: torch.dtype, device: torch.device) -> None:
    runs = make_runs(*MIXED, taps=(TapPoint(4, 64, 7), TapPoint(4, 70, 8), TapPoint(5, 9, 9)))
    q, k, v = (noise(tokens_in(runs), heads, 8, seed=seed) for seed, heads in ((3, 6), (4, 2), (5, 2)))
    twin = rings(dtype, 20)
    mine = strided_on(twin, device)
    want = naive_window_attention(q, k, v, twin, runs, 0.3)
    got = window_attention(q.to(device), k.to(device), v.to(device), mine, on_device(runs, device), 0.3).cpu()
    live = [token for run in range(runs.run_count) if run != 2 for token in range(*span(runs, run).indices(1000))]
    torch.testing.assert_close(got[live], want[live], **close(torch.float32))
    assert got[span(runs, 2)].isfinite().all()
    assert torch.equal(mine.cpu().contiguous().view(torch.uint8), twin.contiguous().view(torch.uint8))


def test_sinks_take_part_in_sums(device: torch.device) -> None:
    runs = make_runs(*MIXED)
    q, k, v = (noise(tokens_in(runs), heads, 8, seed=seed) for seed, heads in ((3, 6), (4, 2), (5, 2)))
    sinks, twin = torch.tensor([-2.0, 0.0, 1.0, 3.0, 0.5, 2.0]), rings(torch.float32, 20)
    mine, plain = strided_on(twin, device), strided_on(twin, device)
    sinks = sinks.expand(len(q), -1)
    want = naive_window_attention(q, k, v, twin, runs, 0.3, sinks_TH=sinks)
    on = [x.to(device) for x in (q, k, v)]
    got = window_attention(*on, mine, on_device(runs, device), 0.3, sinks_TH=sinks.to(device)).cpu()
    without = window_attention(*on, plain, on_device(runs, device), 0.3).cpu()
    live = [token for run in range(runs.run_count) if run != 2 for token in range(*span(runs, run).indices(1000))]
    torch.testing.assert_close(got[live], want[live], **close(torch.float32))
    assert (got[live] - without[live]).abs().max() > 0.1


def test_a_bias_by_distance_is_each_querys_own(device: torch.device) -> None:
    runs = make_runs(*MIXED)
    q, k, v = (noise(tokens_in(runs), heads, 8, seed=seed) for seed, heads in ((3, 6), (4, 2), (5, 2)))
    q, bank = torch.cat((q, noise(len(q), 6, 3, seed=6)), -1), noise(3, 13, seed=7)
    twin = rings(torch.float32, 20)
    mine = strided_on(twin, device)
    sinks = noise(len(q), 6, seed=8)  # of each token
    want = naive_window_attention(q, k, v, twin, runs, 0.3, sinks_TH=sinks, bank_RE=bank)
    on = [x.to(device) for x in (q, k, v)]
    beside = {"sinks_TH": sinks.to(device), "bank_RE": bank.to(device)}
    got = window_attention(*on, mine, on_device(runs, device), 0.3, **beside).cpu()
    live = [token for run in range(runs.run_count) if run != 2 for token in range(*span(runs, run).indices(1000))]
    torch.testing.assert_close(got[live], want[live], **close(torch.float32))


def test_a_sequence_in_pieces_equals_one_run(device: torch.device) -> None:
    q, k, v = noise(3, 90, 2, 8, seed=2).to(device).unbind(0)
    made, left = [], []
    for cuts in ((0, 90), (0, 37, 64, 88, 89, 90), (0, 64, 90)):
        ring = strided_on(rings(torch.float32, 24), device)
        parts = []
        for begin, end in pairwise(cuts):
            # The control: the last of the three forgets what came before its second piece.
            run = [Run(begin, end - begin, slot=3, fresh=begin == 0 or len(cuts) == 3)]
            runs = on_device(make_runs(run, []) if end - begin == 1 else make_runs([], run), device)
            at = slice(begin, end)
            parts.append(window_attention(q[at], k[at], v[at], ring, runs, 0.35))
        made.append(torch.cat(parts).cpu())
        left.append(ring[3].cpu())
    torch.testing.assert_close(made[0], made[1], **close(torch.float32))
    assert torch.equal(left[0], left[1])
    assert (made[0] - made[2]).abs().max() > 1e-2


def test_capped_scores_are_those_of_torch(device: torch.device) -> None:
    """The kernels have no cap."""
    runs = make_runs(*MIXED)
    q, k, v = (noise(tokens_in(runs), heads, 8, seed=seed) for seed, heads in ((3, 6), (4, 2), (5, 2)))
    capped, plain = (window_attention.torch(q, k, v, rings(torch.float32, 20), runs, 3.0, cap=cap) for cap in (1.5, 0))
    on, ring = [x.to(device) for x in (q, k, v)], strided_on(rings(torch.float32, 20), device)
    got = window_attention(*on, ring, on_device(runs, device), 3.0, cap=1.5).cpu()
    live = [token for run in range(runs.run_count) if run != 2 for token in range(*span(runs, run).indices(1000))]
    torch.testing.assert_close(got[live], capped[live], **close(torch.float32))
    assert (plain[live] - capped[live]).abs().max() > 1e-2
