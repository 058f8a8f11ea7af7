"""write_kv and paged_attention: pages, contexts, masks."""

from __future__ import annotations

from itertools import pairwise

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, poison_scratch, positions_of, span, tokens_in, written_places
from tests.support.naive_ops import paged_attention as naive_paged_attention
from tests.support.naive_ops import write_kv as naive_write_kv
from tests.support.page_packing import pack_k, pack_v
from weft.tensor.inputs import Runs
from weft.tensor.layout import k_block_shape, unpack_k, unpack_v, v_block_shape
from weft.tensor.ops import paged_attention as paging
from weft.tensor.ops.paged_attention import group_decodes, paged_attention
from weft.tensor.ops.write_kv import write_kv
from weft.units import PAD, PAGE_TOKENS

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
KV_HEADS, DIM = 2, 8

MIXED = (
    [Run(5), PAD_ROW, Run(0), Run(300), Run(16), Run(15)],
    [Run(0, 65), Run(40, 30), Run(16, 1), Run(0, 1), Run(70, 20)],
)


def cache_strides(pages: int, dtype: torch.dtype, fill: float) -> tuple[torch.Tensor, torch.Tensor]:
    """K and V of one layer, with gaps between pages as in the arena; all of it ``fill``."""
    k_shape, v_shape = k_block_shape(KV_HEADS, DIM, dtype), v_block_shape(KV_HEADS, DIM, dtype)
    size = KV_HEADS * DIM * PAGE_TOKENS
    arena = torch.full((pages, 3 * size), fill).to(dtype)
    return arena[:, :size].view(pages, *k_shape), arena[:, size : 2 * size].view(pages, *v_shape)


def filled_caches(
    runs: Runs, pages: int, dtype: torch.dtype = torch.float32, unwritten: float = float("nan")
) -> tuple[torch.Tensor, torch.Tensor]:
    """Random K and V at the places of the runs' contexts, ``unwritten`` everywhere else."""
    noise = torch.Generator().manual_seed(11)
    seen = written_places(runs, pages).flatten()[:, None, None]
    caches = []
    for cache, pack in zip(cache_strides(pages, dtype, unwritten), (pack_k, pack_v), strict=True):
        values = torch.randn(pages * PAGE_TOKENS, KV_HEADS, DIM, generator=noise)
        cache.copy_(pack(torch.where(seen, values, torch.tensor(unwritten)).to(dtype)))
        caches.append(cache)
    return caches[0], caches[1]


def queries(runs: Runs, heads: int = 6) -> torch.Tensor:
    return torch.randn(tokens_in(runs), heads, DIM, generator=torch.Generator().manual_seed(3))


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
def test_written_tokens_are_where_the_layout_says_and_nothing_else_changes(dtype: torch.dtype) -> None:
    pages = 60
    runs = make_runs(*MIXED, pages=pages)
    k, v = queries(runs, KV_HEADS), queries(runs, KV_HEADS) + 1
    mine, twin = cache_strides(pages, dtype, -3.0), cache_strides(pages, dtype, -3.0)
    write_kv(k, v, *mine, positions_of(runs), runs)
    naive_write_kv(k, v, *twin, positions_of(runs), runs)
    assert torch.equal(mine[0], twin[0])
    assert torch.equal(mine[1], twin[1])
    page, place = int(runs.page_table_RP[3, 300 // PAGE_TOKENS]), 300 % PAGE_TOKENS
    assert torch.equal(unpack_k(mine[0])[page * PAGE_TOKENS + place], k[3].to(dtype))
    assert torch.equal(unpack_v(mine[1])[page * PAGE_TOKENS + place], v[3].to(dtype))
    assert (unpack_k(mine[0]) == -3.0).all(dim=(1, 2)).sum() == pages * PAGE_TOKENS - (tokens_in(runs) - 1)


def test_tokens_at_pad_positions_and_on_pad_pages_are_not_written() -> None:
    runs = make_runs([PAD_ROW, Run(3)], [Run(10, 10)], pages=4)
    runs.page_table_RP[2, 1] = PAD
    caches = cache_strides(4, torch.float32, 0.0)
    write_kv(queries(runs, KV_HEADS), queries(runs, KV_HEADS), *caches, positions_of(runs), runs)
    assert (unpack_k(caches[0]) != 0).any(dim=(1, 2)).sum() == 1 + 6
    runs_without_pad_page = make_runs([PAD_ROW, Run(3)], [Run(10, 10)], pages=4)  # the control
    write_kv(queries(runs, KV_HEADS), queries(runs, KV_HEADS), *caches, positions_of(runs), runs_without_pad_page)
    assert (unpack_k(caches[0]) != 0).any(dim=(1, 2)).sum() == 1 + 10


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16])
@pytest.mark.parametrize("heads", [2, 6])
def test_a_mixed_batch_over_nan_memory_equals_one_query_at_a_time(dtype: torch.dtype, heads: int) -> None:
    pages = 60
    runs = make_runs(*MIXED, pages=pages)
    caches = filled_caches(runs, pages, dtype)
    poison_scratch()
    got = paged_attention(queries(runs, heads), *caches, runs, 0.3)
    torch.testing.assert_close(got, naive_paged_attention(queries(runs, heads), *caches, runs, 0.3), **CLOSE)
    assert (got[span(runs, 1)] == 0).all()


@pytest.mark.parametrize("start", [0, 1, 15, 16, 64, 130])
@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_a_prefill_of_any_length_from_any_position(start: int, length: int) -> None:
    runs = make_runs([], [Run(start, length)], pages=20)
    caches = filled_caches(runs, 20)
    got = paged_attention(queries(runs), *caches, runs, 0.3)
    torch.testing.assert_close(got, naive_paged_attention(queries(runs), *caches, runs, 0.3), **CLOSE)


@pytest.mark.parametrize("gather_bytes", [1, 3000, 20_000, 1 << 30])
def test_how_decodes_are_grouped_changes_nothing(gather_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    decodes = [Run(start) for start in (0, 500, 3, 90, 95, 17, 33, 480, 15, 16, 250)] + [PAD_ROW]
    monkeypatch.setattr(paging, "GATHER_BYTES", gather_bytes)
    runs = make_runs(decodes, [], pages=150)
    caches = filled_caches(runs, 150)
    got = paged_attention(queries(runs), *caches, runs, 0.3)
    torch.testing.assert_close(got, naive_paged_attention(queries(runs), *caches, runs, 0.3), **CLOSE)
    groups, empty = group_decodes(runs, 1024)
    assert sorted(row for group in groups for row in group.rows_N.tolist()) == list(range(11))
    assert empty is not None
    assert empty.tolist() == [11]


@pytest.mark.parametrize("window", [1, 7, 16, 40, 300, 1000])
@pytest.mark.parametrize("gather_bytes", [1, 3000, 2 << 20])
def test_a_window_over_pages_equals_one_query_at_a_time(
    window: int, gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "GATHER_BYTES", gather_bytes)
    runs = make_runs(MIXED[0], [*MIXED[1], Run(90, 100)], pages=60)
    caches = filled_caches(runs, 60)
    poison_scratch()
    got = paged_attention(queries(runs), *caches, runs, 0.3, window)
    want = naive_paged_attention(queries(runs), *caches, runs, 0.3, window)
    torch.testing.assert_close(got, want, **CLOSE)
    if window < 300:  # the control: a window that is ignored shows
        assert (got - paged_attention(queries(runs), *caches, runs, 0.3)).abs().max() > 1e-2


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("gather_bytes", [3000, 2 << 20])
def test_sinks_take_part_in_sums_and_add_nothing(
    window: int | None, gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "GATHER_BYTES", gather_bytes)
    runs = make_runs(MIXED[0], [*MIXED[1], Run(90, 100)], pages=60)
    caches, q = filled_caches(runs, 60), queries(runs, 6)
    own = torch.randn(tokens_in(runs), 6, generator=torch.Generator().manual_seed(3))  # of each token
    for sinks in (torch.tensor([-3.0, 0.0, 0.5, 2.0, 4.0, 1.0]), torch.full((6,), -80.0), own):
        sinks = sinks.expand(len(q), -1)
        got = paged_attention(q, *caches, runs, 0.3, window, sinks_TH=sinks)
        want = naive_paged_attention(q, *caches, runs, 0.3, window, sinks_TH=sinks)
        torch.testing.assert_close(got, want, **CLOSE)
        plain = paged_attention(q, *caches, runs, 0.3, window)
        # The control, both ways: a sink is seen, and one far below all scores is none.
        assert bool((got - plain).abs().max() > 1e-2) == bool(sinks.max() > -80)


@pytest.mark.parametrize(("window", "gather_bytes"), [(None, 3000), (40, 2 << 20)])
def test_a_bias_by_distance_is_each_querys_own_and_ends(
    window: int | None, gather_bytes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(paging, "GATHER_BYTES", gather_bytes)
    monkeypatch.setattr(paging, "_BIASES", 3000)  # prompts in several parts
    runs = make_runs(MIXED[0], [*MIXED[1], Run(90, 100)], pages=60)
    caches = filled_caches(runs, 60)
    noise = torch.Generator().manual_seed(5)
    states = torch.randn(tokens_in(runs), 6, 3, generator=noise)
    q = torch.cat((queries(runs, 6), states), -1)
    for extent in (30, 1000):
        bank = torch.randn(3, extent, generator=noise)
        got = paged_attention(q, *caches, runs, 0.3, window, bank_RE=bank)
        want = naive_paged_attention(q, *caches, runs, 0.3, window, bank_RE=bank)
        torch.testing.assert_close(got, want, **CLOSE)
        sinks = torch.randn(len(q), 6, generator=noise)
        got_sunk = paged_attention(q, *caches, runs, 0.3, window, sinks_TH=sinks, bank_RE=bank)
        want = naive_paged_attention(q, *caches, runs, 0.3, window, sinks_TH=sinks, bank_RE=bank)
        torch.testing.assert_close(got_sunk, want, **CLOSE)
        # The controls: a bias or a sink that is left out shows.
        assert (got_sunk - got).abs().max() > 1e-2
        assert (got - paged_attention(queries(runs, 6), *caches, runs, 0.3, window)).abs().max() > 1e-2


def test_a_window_reads_only_its_pages() -> None:
    """What lies wholly behind the window may be anything: it is not gathered."""
    runs = make_runs([Run(200)], [Run(150, 20)], pages=60)
    caches = filled_caches(runs, 60)
    want = paged_attention(queries(runs), *caches, runs, 0.3, 40)
    for run, first in ((0, 200 - 39), (1, 150 - 39)):
        for page in runs.page_table_RP[run, : first // PAGE_TOKENS].tolist():
            caches[0][page] = caches[1][page] = float("nan")
    assert torch.equal(paged_attention(queries(runs), *caches, runs, 0.3, 40), want)


def test_what_unwritten_memory_holds_changes_nothing() -> None:
    runs = make_runs(*MIXED, pages=60)
    made = [
        paged_attention(queries(runs), *filled_caches(runs, 60, unwritten=fill), runs, 0.3)
        for fill in (0.0, float("nan"), 1e30)
    ]
    assert torch.equal(made[0], made[1])
    assert torch.equal(made[0], made[2])
    caches = filled_caches(runs, 60)  # the control: NaN at a written place must show, in its run alone
    caches[1][int(runs.page_table_RP[3, 4]), :, 0] = float("nan")
    hurt = paged_attention(queries(runs), *caches, runs, 0.3)
    assert hurt[span(runs, 3)].isnan().any()
    for run in range(runs.run_count):
        assert run == 3 or torch.equal(hurt[span(runs, run)], made[0][span(runs, run)])


def test_a_wrong_page_in_the_table_is_seen() -> None:
    runs = make_runs([Run(60)], [Run(40, 5)], pages=20)
    caches = filled_caches(runs, 20, unwritten=0.0)
    right = paged_attention(queries(runs), *caches, runs, 0.3)
    swapped = make_runs([Run(60)], [Run(40, 5)], pages=20)
    swapped.page_table_RP[:, 0] = swapped.page_table_RP[:, 0].flip(0)
    wrong = paged_attention(queries(runs), *caches, swapped, 0.3)
    assert ((right - wrong).abs().amax(dim=(1, 2)) > 1e-3).all()


def test_a_prompt_in_pieces_equals_one_run() -> None:
    k, v, q = torch.randn(3, 100, KV_HEADS, DIM, generator=torch.Generator().manual_seed(2)).unbind(0)
    made = {}
    for cuts in ((0, 100), (0, 37, 64, 99, 100)):
        caches = cache_strides(10, torch.float32, float("nan"))
        parts = []
        for begin, end in pairwise(cuts):
            run = [Run(begin, end - begin)]
            runs = make_runs(run, [], pages=10) if begin == 99 else make_runs([], run, pages=10)
            write_kv(k[begin:end], v[begin:end], *caches, positions_of(runs), runs)
            parts.append(paged_attention(q[begin:end], *caches, runs, 0.35))
        made[len(cuts)] = torch.cat(parts)
    torch.testing.assert_close(made[2], made[5], **CLOSE)


def test_half_precision_queries_come_back_in_their_dtype() -> None:
    runs = make_runs(*MIXED, pages=60)
    caches = filled_caches(runs, 60, torch.bfloat16)
    q = queries(runs).bfloat16()
    got = paged_attention(q, *caches, runs, 0.3)
    assert got.dtype == torch.bfloat16
    torch.testing.assert_close(got, naive_paged_attention(q, *caches, runs, 0.3), rtol=1e-2, atol=1e-3)


@pytest.mark.parametrize("window", [None, 7, 40])
@pytest.mark.parametrize("biases", [1, 1 << 22])
def test_scores_with_a_cap_equal_one_query_at_a_time(
    window: int | None, biases: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    """``biases`` of 1: a query of a prompt at a time."""
    monkeypatch.setattr(paging, "_BIASES", biases)
    runs = make_runs(MIXED[0], [*MIXED[1], Run(90, 100)], pages=60)
    caches, q = filled_caches(runs, 60), queries(runs, 6)
    poison_scratch()
    got = paged_attention(q, *caches, runs, 0.3, window, cap=0.5)
    torch.testing.assert_close(got, naive_paged_attention(q, *caches, runs, 0.3, window, cap=0.5), **CLOSE)
    assert (got - paged_attention(q, *caches, runs, 0.3, window)).abs().max() > 1e-2


def test_in_chunks_each_token_sees_only_its_own_chunk() -> None:
    """Decodes and prompts that begin, end and cross where chunks do, against a mask over everything."""
    pages, chunk = 60, 48
    runs = make_runs(
        [Run(5), PAD_ROW, Run(48), Run(95), Run(300)], [Run(0, 65), Run(40, 100), Run(96, 48)], pages=pages
    )
    k, v = filled_caches(runs, pages)
    q = queries(runs)
    cut = runs.in_chunks(chunk)
    assert [cut.lengths[run] for run in range(5, cut.run_count)] == [48, 17, 8, 48, 44, 48]
    assert cut.decode_count == runs.decode_count
    found = paged_attention(q, k, v, cut, 0.3)
    keys, values = unpack_k(k), unpack_v(v)
    for run in range(runs.run_count):
        if runs.starts[run] == PAD:
            continue
        for place in range(runs.lengths[run]):
            position = runs.starts[run] + place
            seen = torch.arange(position // chunk * chunk, position + 1)
            at = runs.page_table_RP[run, seen // PAGE_TOKENS].long() * PAGE_TOKENS + seen % PAGE_TOKENS
            row = runs.offsets[run] + place
            for head in range(q.shape[1]):
                scores = keys[at, head // 3] @ q[row, head] * 0.3
                torch.testing.assert_close(found[row, head], scores.softmax(0) @ values[at, head // 3], **CLOSE)


def test_runs_inside_the_first_chunk_are_not_cut() -> None:
    runs = make_runs([Run(5), PAD_ROW], [Run(0, 48)], pages=8)
    assert runs.in_chunks(48) is runs
    assert runs.in_chunks(32).run_count == 4
