"""write_kv in Triton, and what it shares with the kernels that read pages."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.gpu.steps import on_device, pages_on
from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, tokens_in
from tests.ops.kv_pages import KV_DTYPES, blank_pages
from tests.support.naive_ops import write_kv as naive_write_kv
from weft.tensor.layout import unpack_k
from weft.tensor.ops.write_kv import write_kv
from weft.units import PAD

PAGES = 60
MIXED = (
    [Run(5), PAD_ROW, Run(0), Run(300), Run(16), Run(15), *[Run(start) for start in range(12)]],
    [Run(0, 65), Run(40, 30), PAD_ROW, Run(16, 1)],
)
each_dtype = pytest.mark.parametrize("dtype", KV_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def bytes_of(part: torch.Tensor) -> torch.Tensor:
    """With one payload for every NaN that was written: a conversion gives it bits of the device's own. Places
    that nobody wrote have all bits set."""
    raw = part.contiguous().view(torch.uint8).view(*part.shape, part.itemsize)
    written = (raw != 0xFF).any(-1)
    if part.is_floating_point():
        raw[part.isnan() & written] = 0x7F
    return raw


@each_dtype
@pytest.mark.parametrize("model", [torch.float32, torch.bfloat16])
def test_pages_hold_the_bytes_that_the_twin_writes_and_no_others(
    dtype: torch.dtype, model: torch.dtype, device: torch.device
) -> None:
    runs = make_runs(*MIXED, pages=PAGES)
    tokens, heads, dim = tokens_in(runs), 2, 24 if model == torch.float32 else 16
    k, v = noise(tokens, heads, dim + 4)[..., 4:] * 3, noise(tokens, heads, dim, seed=4) * 40
    k[2], v[3], k[4, 1, 3], v[4, 0, 7] = 1e6, 0.0, float("nan"), float("inf")
    k, v = k.to(model), v.to(model)
    mine, twin = (blank_pages(PAGES, heads, dim, dtype, "rows") for _ in range(2))
    mine = pages_on(mine, device)
    there = on_device(runs, device)
    write_kv(k.to(device), v.to(device), mine.k, mine.v, positions_of(runs).to(device), there, mine.scales)
    naive_write_kv(k, v, twin.k, twin.v, positions_of(runs), runs, twin.scales)
    for got, want in zip(mine.parts(), twin.parts(), strict=True):
        assert torch.equal(bytes_of(got.cpu()), bytes_of(want))
    touched = (unpack_k(mine.k).contiguous().view(torch.uint8) != 0xFF).flatten(1).any(1)
    assert touched.sum() == tokens - 2


def test_tokens_on_pad_pages_are_not_written(device: torch.device) -> None:
    written = []
    for pad in (True, False):  # the control: with a page they are
        runs = on_device(make_runs([Run(3)], [Run(10, 10)], pages=4), device)
        if pad:
            runs.page_table_RP[1, 1] = PAD
        pages = pages_on(blank_pages(4, 1, 8, torch.float32), device)
        x = noise(11, 1, 8).to(device)
        write_kv(x, x, pages.k, pages.v, positions_of(runs).to(device), runs)
        written.append(int(pages.k.isfinite().flatten(1).sum()) // 8)
    assert written == [1 + 6, 1 + 10]


def test_a_prompt_written_in_pieces_is_the_prompt_written_at_once(device: torch.device) -> None:
    x = noise(100, 1, 16)
    made = []
    for cuts in ((0, 100), (0, 37, 64, 99, 100), (0, 37, 64, 99)):  # the last one is the control
        pages = pages_on(blank_pages(10, 1, 16, torch.bfloat16), device)
        for begin, end in pairwise(cuts):
            run = [Run(begin, end - begin)]
            runs = make_runs(run, [], pages=10) if begin == 99 else make_runs([], run, pages=10)
            write_kv(
                x[begin:end].to(device),
                -x[begin:end].to(device),
                pages.k,
                pages.v,
                positions_of(runs).to(device),
                on_device(runs, device),
            )
        made.append(pages.raw())
    for whole, pieces, less in zip(*made, strict=True):
        assert torch.equal(whole, pieces)
        assert not torch.equal(whole, less)
