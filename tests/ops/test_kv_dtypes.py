"""Keys and values in every dtype of a page: what is stored, and that attention over it is its twin's."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, poison_scratch, positions_of, span, tokens_in
from tests.ops.kv_pages import KV_DTYPES, blank_pages, filled_pages
from tests.support.naive_ops import latent_attention as naive_latent_attention
from tests.support.naive_ops import paged_attention as naive_paged_attention
from tests.support.naive_ops import window_attention as naive_window_attention
from tests.support.naive_ops import write_kv as naive_write_kv
from weft.tensor.few_bits import narrowed, quantized
from weft.tensor.layout import unpack_k, unpack_v
from weft.tensor.ops import paged_attention as paging
from weft.tensor.ops.latent_attention import latent_attention
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.ops.window_attention import window_attention
from weft.tensor.ops.write_kv import write_kv
from weft.units import PAGE_TOKENS

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
KV_HEADS, DIM, PAGES = 2, 16, 60
MIXED = (
    [Run(5), PAD_ROW, Run(0), Run(300), Run(16), Run(15)],
    [Run(0, 65), Run(40, 30), Run(16, 1), Run(0, 1), Run(70, 20)],
)
FP8 = torch.float8_e4m3fn
each_dtype = pytest.mark.parametrize("dtype", KV_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize(("dtype", "most"), [(FP8, 448.0), (torch.float16, 65504.0)])
def test_a_number_too_large_is_the_largest_and_never_infinite_or_nan(dtype: torch.dtype, most: float) -> None:
    x = torch.tensor([most, most * 1.01, 1e30, float("inf"), -1e30, 0.0, float("nan")])
    stored = narrowed(x, dtype).float()
    assert stored[:5].tolist() == [most, most, most, most, -most]
    assert stored[6].isnan()


def test_an_int8_token_is_within_half_a_step_of_itself_whatever_its_size() -> None:
    x = noise(200, 2, 64) * torch.logspace(-20, 4, 200)[:, None, None]
    x[7] = 0.0
    whole, scale = quantized(x)
    step = scale.float()[..., None]
    # 127 steps of a rounded scale may end up to a 512th before the largest number.
    assert ((whole.float() * step - x).abs() <= 0.75 * step).all()
    assert whole.abs().amax(-1).min() == 0
    assert (whole.abs().amax(-1) >= 126).sum() == 200 * 2 - 2


def test_a_broken_token_is_seen_in_int8_too() -> None:
    x = noise(3, 2, 16)
    x[0, 0, 3], x[1, 1, 5] = float("nan"), float("inf")
    whole, scale = quantized(x)
    read = whole.float() * scale.float()[..., None]
    assert read[0, 0].isnan().all()
    assert read[1, 1].isnan().any()
    assert read[0, 1].isfinite().all()


@each_dtype
def test_what_is_written_is_what_the_twin_writes_and_nothing_else_changes(dtype: torch.dtype) -> None:
    runs = make_runs(*MIXED, pages=PAGES)
    k, v = noise(tokens_in(runs), KV_HEADS, DIM) * 3, noise(tokens_in(runs), KV_HEADS, DIM, seed=4) * 40
    k[2], v[3] = 1e6, 0.0
    mine, twin = blank_pages(PAGES, KV_HEADS, DIM, dtype), blank_pages(PAGES, KV_HEADS, DIM, dtype)
    write_kv(k, v, mine.k, mine.v, positions_of(runs), runs, mine.scales)
    naive_write_kv(k, v, twin.k, twin.v, positions_of(runs), runs, twin.scales)
    for got, want in zip(mine.raw(), twin.raw(), strict=True):
        assert torch.equal(got, want)
    touched = (unpack_k(mine.k).contiguous().view(torch.uint8) != 0xFF).flatten(1).any(1)
    assert touched.sum() == tokens_in(runs) - 1
    page, place = int(runs.page_table_RP[3, 300 // PAGE_TOKENS]), 300 % PAGE_TOKENS
    read = unpack_v(mine.v)[page * PAGE_TOKENS + place].float()
    assert torch.equal(read, torch.zeros_like(read))


@each_dtype
@pytest.mark.parametrize("heads", [2, 6])
def test_attention_over_bytes_of_0xff_equals_one_query_at_a_time(dtype: torch.dtype, heads: int) -> None:
    runs = make_runs(*MIXED, pages=PAGES)
    pages = filled_pages(runs, PAGES, KV_HEADS, DIM, dtype)
    q = noise(tokens_in(runs), heads, DIM)
    poison_scratch()
    got = paged_attention(q, pages.k, pages.v, runs, 0.3, scales=pages.scales)
    want = naive_paged_attention(q, pages.k, pages.v, runs, 0.3, scales=pages.scales)
    torch.testing.assert_close(got, want, **CLOSE)
    assert (got[span(runs, 1)] == 0).all()


@pytest.mark.parametrize("dtype", [FP8, torch.int8])
@pytest.mark.parametrize("gather_bytes", [1, 3000, 2 << 20])
@pytest.mark.parametrize("window", [None, 7, 40])
def test_groups_and_windows_over_narrow_pages_equal_one_query_at_a_time(
    dtype: torch.dtype, gather_bytes: int, window: int | None, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "GATHER_BYTES", gather_bytes)
    runs = make_runs([Run(start) for start in (0, 200, 3, 90, 17, 15)], [Run(90, 100)], pages=PAGES)
    pages = filled_pages(runs, PAGES, KV_HEADS, DIM, dtype)
    q = noise(tokens_in(runs), 4, DIM)
    got = paged_attention(q, pages.k, pages.v, runs, 0.3, window, pages.scales)
    want = naive_paged_attention(q, pages.k, pages.v, runs, 0.3, window, pages.scales)
    torch.testing.assert_close(got, want, **CLOSE)


@each_dtype
def test_one_wrong_number_at_a_written_place_is_seen_in_its_run_alone(dtype: torch.dtype) -> None:
    """The control: 0xFF is noticed where it is read, so that it was not read where it was not noticed."""
    runs = make_runs(*MIXED, pages=PAGES)
    pages = filled_pages(runs, PAGES, KV_HEADS, DIM, dtype)
    q = noise(tokens_in(runs), 4, DIM)
    whole = paged_attention(q, pages.k, pages.v, runs, 0.3, scales=pages.scales)
    broken = pages.v if pages.scales is None else pages.scales
    broken[int(runs.page_table_RP[3, 4])].view(torch.uint8).fill_(0xFF)
    hurt = paged_attention(q, pages.k, pages.v, runs, 0.3, scales=pages.scales)
    assert hurt[span(runs, 3)].isnan().any()
    for run in range(runs.run_count):
        assert run == 3 or torch.equal(hurt[span(runs, run)], whole[span(runs, run)])


@each_dtype
def test_latent_attention_equals_its_twin_over_bytes_of_0xff(dtype: torch.dtype) -> None:
    width = 24
    runs = make_runs([Run(5), PAD_ROW, Run(70)], [Run(0, 33), Run(40, 20)], pages=20)
    q, rows = noise(tokens_in(runs), 3, width), noise(tokens_in(runs), width, seed=4)
    made = []
    for op in (latent_attention, naive_latent_attention):
        pages = filled_pages(runs, 20, 1, width, dtype)
        scales = None if pages.scales is None else pages.scales[:, :1]
        made.append((op(q, rows, pages.k, positions_of(runs), runs, 0.3, 16, scales), pages.raw()))
    torch.testing.assert_close(made[0][0], made[1][0], **CLOSE)
    for got, want in zip(made[0][1], made[1][1], strict=True):
        assert torch.equal(got, want)


@pytest.mark.parametrize("dtype", [FP8, torch.float16, torch.bfloat16])
def test_a_ring_in_few_bits_equals_its_twin(dtype: torch.dtype) -> None:
    runs = make_runs(
        [Run(30, slot=1), Run(3, slot=2), PAD_ROW],
        [Run(0, 40, slot=3, fresh=True), Run(20, 9, slot=4), Run(0, 3, slot=5, fresh=True)],
    )
    q, k, v = (noise(tokens_in(runs), heads, 8, seed=seed) for seed, heads in ((3, 4), (4, 2), (5, 2)))
    rings = [narrowed(noise(6, 2, 2, 24, 8, seed=6), dtype) for _ in range(2)]
    for ring in rings:
        ring[3].view(torch.uint8).fill_(0xFF)
    got = window_attention(q, k, v, rings[0], runs, 0.3)
    want = naive_window_attention(q, k, v, rings[1], runs, 0.3)
    live = [t for run in (0, 1, 3, 4, 5) for t in range(*span(runs, run).indices(1000))]
    torch.testing.assert_close(got[live], want[live], **CLOSE)
    assert torch.equal(rings[0].view(torch.uint8), rings[1].view(torch.uint8))
