"""paged_attention in Triton: every dtype of a page, masks, splits, hand-over."""

from __future__ import annotations

import dataclasses
from itertools import pairwise
from typing import Any

import pytest
import torch
import triton.language as tl

from tests.gpu.steps import on_device, pages_on
from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, span, tokens_in
from tests.ops.kv_pages import KV_DTYPES, Pages, blank_pages, filled_pages
from tests.support.kernel_variants.attention import of_paged_attention
from tests.support.naive_ops import paged_attention as naive_paged_attention
from weft.tensor.gpu import decode_kernels
from weft.tensor.gpu.pages import FP8_BITS, FP8_HARDWARE
from weft.tensor.inputs import Runs
from weft.tensor.kernels import paged_attention as kernels
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.ops.write_kv import write_kv
from weft.units import PAD, PAGE_TOKENS

KV_HEADS, DIM, PAGES = 2, 16, 60
MIXED = (
    [Run(5), PAD_ROW, Run(0), Run(300), Run(16), Run(15)],
    [Run(0, 65), Run(40, 30), PAD_ROW, Run(16, 1), Run(0, 1), Run(70, 20)],
)
each_dtype = pytest.mark.parametrize("dtype", KV_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def noise(*shape: int, seed: int = 3, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed)).to(dtype)


def attend(q: torch.Tensor, pages: Pages, runs: Runs, device: torch.device, window: int | None = None) -> torch.Tensor:
    there = pages_on(pages, device)
    return paged_attention(q.to(device), there.k, there.v, on_device(runs, device), 0.3, window, there.scales).cpu()


def twin(q: torch.Tensor, pages: Pages, runs: Runs, window: int | None = None) -> torch.Tensor:
    return naive_paged_attention(q, pages.k, pages.v, runs, 0.3, window, pages.scales)


@each_dtype
def test_a_mixed_batch_over_bytes_of_0xff_equals_one_query_at_a_time(dtype: torch.dtype, device: torch.device) -> None:
    runs = make_runs(*MIXED, pages=PAGES)
    pages, q = filled_pages(runs, PAGES, KV_HEADS, DIM, dtype), noise(tokens_in(runs), 6, DIM)
    got = attend(q, pages, runs, device)
    torch.testing.assert_close(got, twin(q, pages, runs), **close(torch.float32))
    assert (got[span(runs, 1)] == 0).all()
    assert (got[span(runs, 8)] == 0).all()
    broken = pages.v if pages.scales is None else pages.scales  # the control: 0xFF is seen where it is read
    broken[int(runs.page_table_RP[3, 4])].view(torch.uint8).fill_(0xFF)
    hurt = attend(q, pages, runs, device)
    assert hurt[span(runs, 3)].isnan().any()
    for run in range(runs.run_count):
        assert run == 3 or torch.equal(hurt[span(runs, run)], got[span(runs, run)])


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
@pytest.mark.parametrize("dim", [64, 80, 256])
def test_queries_of_a_model_in_16_bits_over_heads_of_any_width(
    dtype: torch.dtype, dim: int, device: torch.device
) -> None:
    runs = make_runs([Run(70)], [Run(20, 30)], pages=10)
    pages, q = filled_pages(runs, 10, 1, dim, dtype), noise(tokens_in(runs), 3, dim, dtype=dtype)
    got = attend(q * dim**-0.5, pages, runs, device)
    assert got.dtype == dtype
    torch.testing.assert_close(got, twin(q * dim**-0.5, pages, runs), **close(dtype))


@pytest.mark.parametrize("window", [None, 40])
def test_a_bias_by_distance_is_each_querys_own(window: int | None, device: torch.device) -> None:
    """In splits of long rows, in blocks that all see whole, and in masked ones."""
    runs = make_runs(*MIXED, pages=PAGES)
    pages = filled_pages(runs, PAGES, KV_HEADS, DIM, torch.float32)
    q = noise(tokens_in(runs), 6, DIM + 3)
    bank, there = noise(3, 200, seed=4), pages_on(pages, device)
    sinks = noise(tokens_in(runs), 6, seed=5)  # of each token
    beside = {"sinks_TH": sinks.to(device), "bank_RE": bank.to(device)}
    got = paged_attention(q.to(device), there.k, there.v, on_device(runs, device), 0.3, window, **beside).cpu()
    want = naive_paged_attention(q, pages.k, pages.v, runs, 0.3, window, sinks_TH=sinks, bank_RE=bank)
    torch.testing.assert_close(got, want, **close(torch.float32))
    # The control: a bias that is left out shows.
    assert (got - attend(q[..., :DIM], pages, runs, device, window)).abs().max() > 0.1


WIDE = {80: (1, 64), 86: (1, 32), 89: (1, 32), 90: (2, 64), 100: (2, 32), 120: (1, 32)}
"""Compute capability -> query heads and keys of a program's block, for rows of 512 bytes."""


@pytest.mark.parametrize("capability", [80, 86, 90, 100])
def test_wide_heads_have_blocks_for_each_gpu_and_the_same_result(
    capability: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Rows of 128 numbers of four bytes, which the interpreter multiplies: the bytes of 256 in bfloat16."""
    monkeypatch.setattr(kernels, "capability_of", lambda device: capability)
    runs = make_runs([], [Run(70, 67), PAD_ROW, Run(0, 20)], pages=12)
    pages, q = filled_pages(runs, 12, 1, 128, torch.float32), noise(tokens_in(runs), 3, 128) * 0.3
    want = twin(q, pages, runs)
    torch.testing.assert_close(attend(q, pages, runs, device), want, **close(torch.float32))
    runs.page_table_RP[0, 5] = runs.page_table_RP[0, 4]  # the control: each page counts
    assert (attend(q, pages, runs, device) - want)[span(runs, 0)].abs().max() > 1e-2


def test_the_blocks_of_wide_heads_follow_the_gpu() -> None:
    for product, dim in ((tl.bfloat16, 256), (tl.float32, 128)):
        for capability, (heads, keys) in WIDE.items():
            blocks = kernels.prefill_blocks(dim, 2, 4, product, capability)
            assert (blocks["TILE_HEADS"], blocks["PAGES"] * PAGE_TOKENS) == (heads, keys), capability
            assert kernels.prefill_blocks(dim, 2, 1, product, capability)["TILE_HEADS"] == 1
    for capability in WIDE:  # the compile gate has what each GPU launches
        [one] = [
            one
            for one in of_paged_attention()
            if one.name.endswith("prefill bfloat16 256") and one.only and capability in one.only
        ]
        blocks = kernels.prefill_blocks(256, 2, 4, one.constants["PRODUCT"], capability)
        listed = one.constants | {"num_warps": one.num_warps, "num_stages": one.num_stages}
        assert blocks.items() <= listed.items()


def test_fp8_by_bits_equals_fp8_by_hardware(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    runs = make_runs([Run(700)], [], pages=44)
    pages, q = blank_pages(44, 1, DIM, torch.float8_e4m3fn), noise(1, 1, DIM)
    every = torch.arange(256, dtype=torch.uint8)[torch.arange(256) % 128 != 127]  # all numbers that are some
    for cache in (pages.k, pages.v):
        cache.view(torch.uint8).copy_(every.repeat(44 * DIM)[: cache.numel()].view(cache.shape))
    want = attend(q, pages, runs, device)
    for kind in (FP8_HARDWARE, FP8_BITS):
        monkeypatch.setattr(kernels, "fp8_kind", lambda *_, kind=kind: kind)
        assert torch.equal(attend(q, pages, runs, device), want)
    pages.v.view(torch.uint8)[runs.page_table_RP[0, 3], 0, 0, 5, 0] = 0x7F  # the control, and NaN stays NaN
    assert attend(q, pages, runs, device)[0, 0, 5].isnan()


@pytest.mark.parametrize("window", [1, 40, 300])
def test_a_window_reads_its_places_and_no_others(window: int, device: torch.device) -> None:
    runs = make_runs([Run(5), PAD_ROW, Run(300)], [Run(0, 65), Run(90, 50)], pages=PAGES)
    pages, q = filled_pages(runs, PAGES, KV_HEADS, DIM, torch.float32), noise(tokens_in(runs), 4, DIM)
    want = twin(q, pages, runs, window)
    if window < 300:  # the control: a window that is ignored shows
        assert (want - twin(q, pages, runs)).abs().max() > 1e-2
    for run, first in ((2, 300 - window + 1), (4, 90 - window + 1)):
        for position in range(max(0, first)):
            page = int(runs.page_table_RP[run, position // PAGE_TOKENS])
            pages.k[page, :, :, position % PAGE_TOKENS] = float("nan")
            pages.v[page, :, position % PAGE_TOKENS] = float("nan")
        runs.page_table_RP[run, : max(0, first) // PAGE_TOKENS] = PAD
    torch.testing.assert_close(attend(q, pages, runs, device, window), want, **close(torch.float32))


@pytest.mark.parametrize("context", [1, 128, 129, 2000])
def test_how_a_row_is_split_depends_on_nothing_beside_it(context: int, device: torch.device) -> None:
    """The same bits alone, in a table as narrow as can be, and beside a row of more splits."""
    alone = make_runs([Run(context - 1)], [], pages=130)
    beside = make_runs([Run(context - 1), Run(2050)], [], pages=260)
    pages = filled_pages(beside, 260, 1, DIM, torch.float32)
    q = noise(2, 1, DIM)
    alone.page_table_RP[0] = beside.page_table_RP[0, : alone.page_table_RP.shape[1]]
    got = attend(q, pages, beside, device)
    assert torch.equal(got[:1], attend(q[:1], pages, alone, device))
    torch.testing.assert_close(got, twin(q, pages, beside), **close(torch.float32))
    pages.v[int(alone.page_table_RP[0, 0]), 0, 0] += 1e-3  # the control: a little of one token's value
    assert not torch.equal(got[:1], attend(q[:1], pages, alone, device))


@pytest.mark.parametrize("window", [None, 300])
def test_the_list_of_splits_has_those_with_tokens_and_any_grid_gives_the_same_bits(
    window: int | None, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """As wide a table as one would like: programs are few, and none is for a row that ends earlier."""
    runs = make_runs([Run(599), PAD_ROW, Run(2), Run(128)], [], pages=60)
    wide = torch.full((4, 1000), PAD, dtype=torch.int32)
    wide[:, : runs.page_table_RP.shape[1]] = runs.page_table_RP
    runs = dataclasses.replace(runs, page_table_RP=wide)
    pages, q = filled_pages(runs, 60, KV_HEADS, DIM, torch.float32), noise(4, 4, DIM)
    monkeypatch.setattr(decode_kernels, "ROWS_AT_ONCE", 2)
    memos: list[dict[str, Any]] = []
    monkeypatch.setattr(
        kernels,
        "decode_items",
        lambda runs, *sizes, **more: (memos.append(runs.memo), decode_kernels.decode_items(runs, *sizes, **more))[1],
    )
    got = attend(q, pages, runs, device, window)
    [items] = [value.tolist() for key, value in memos[0].items() if key.startswith("decode_items")]
    listed = items[1 : 1 + 2 * items[0]]
    splits = [(0, split) for split in range(5 if window is None else 3)] + [(2, 0), (3, 0), (3, 1)]
    assert [*zip(listed[::2], listed[1::2], strict=True)] == splits
    torch.testing.assert_close(got, twin(q, pages, runs, window), **close(torch.float32))
    assert decode_kernels.programs_of(256, 32, 8) * 8 == decode_kernels.PROGRAMS
    monkeypatch.setattr(decode_kernels, "PROGRAMS", 3)  # two for each KV head
    assert torch.equal(attend(q, pages, runs, device, window), got)
    assert (got[0] - got[2]).abs().max() > 1e-2, "the control: rows differ"


def test_a_prompt_in_pieces_equals_one_run(device: torch.device) -> None:
    k, v, q = noise(3, 100, KV_HEADS, DIM, seed=2).unbind(0)
    made = {}
    for cuts in ((0, 100), (0, 37, 64, 99, 100), (0, 37, 65, 100)):
        pages = pages_on(blank_pages(10, KV_HEADS, DIM, torch.float32), device)
        parts = []
        for begin, end in pairwise(cuts):
            run = [Run(begin, end - begin)]
            runs = make_runs(run, [], pages=10) if begin == 99 else make_runs([], run, pages=10)
            there = on_device(runs, device)
            shift = int(len(cuts) == 4 and begin == 37)  # the control: a piece that is one token off
            at = slice(begin + shift, end + shift)
            write_kv(k[at].to(device), v[at].to(device), pages.k, pages.v, positions_of(runs).to(device), there)
            parts.append(paged_attention(q[begin:end].to(device), pages.k, pages.v, there, 0.35).cpu())
        made[len(cuts)] = torch.cat(parts)
    torch.testing.assert_close(made[2], made[5], **close(torch.float32))
    assert (made[2] - made[4])[50:].abs().max() > 1e-2


def test_a_step_of_nothing_but_pad_rows_reads_nothing(device: torch.device) -> None:
    runs = make_runs([PAD_ROW] * 3, [], pages=1)
    pages = blank_pages(1, KV_HEADS, DIM, torch.float32)
    assert (attend(noise(3, 4, DIM), pages, runs, device) == 0).all()


def test_no_size_of_a_launch_comes_from_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What a graph is made of: the same launches whatever the rows' contexts."""
    grids: list[tuple[int, ...]] = []

    class Recorder:
        def __getitem__(self, grid: tuple[int, ...]) -> object:
            grids.append(grid)
            return lambda *_, **__: None

    monkeypatch.setattr(kernels, "_decode", Recorder())
    monkeypatch.setattr(kernels, "combine", Recorder())
    pages, q = blank_pages(50, KV_HEADS, DIM, torch.float32), noise(2, 4, DIM)
    for contexts in ((600, 3), (0, 17)):
        runs = on_device(make_runs([Run(600), Run(3)], [], pages=50), device)
        runs.context_R.copy_(torch.tensor(contexts))
        there = pages_on(pages, device)
        paged_attention(q.to(device), there.k, there.v, runs, 0.3)
    assert grids[:2] == grids[2:] == [(10, KV_HEADS), (2, 4)]
