"""Decodes that begin with the same pages are computed together: that changes nothing that a row sees."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, tokens_in
from tests.ops.kv_pages import KV_DTYPES, Pages, filled_pages
from tests.ops.test_native import CLOSE, in_each_set, noise
from tests.support import naive_ops, native_ops
from weft.tensor import native
from weft.tensor.inputs import Runs
from weft.units import PAD, PAGE_TOKENS

PAGES = 420
DECODES = [Run(500), Run(333), PAD_ROW, *map(Run, (500, 331, 200, 500, 140, 640, 499, 333))]
SHARING = {0: (0, 30), 3: (0, 30), 6: (0, 25), 8: (0, 31), 9: (0, 30), 1: (1, 20), 4: (1, 20), 10: (1, 8), 7: (5, 5)}
"""Row -> whose pages it begins with, and how many; those of the last are too few to be worth it."""


@pytest.fixture(autouse=True)
def native_kernels(torch_kernels: None) -> Iterator[None]:
    native.choose("native")
    before = native.extension().threads()
    native.set_threads(1)  # so few rows are shared out over many threads one by one
    yield
    native.set_threads(before)


def sharing_runs() -> Runs:
    runs = make_runs(DECODES, [Run(0, 65), Run(40, 90)], pages=PAGES)
    for row, (owner, count) in SHARING.items():
        runs.page_table_RP[row, :count] = runs.page_table_RP[owner, :count]
    return runs


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize(("heads", "kv_heads", "dim"), [(4, 2, 64), (6, 1, 32), (4, 4, 128), (40, 1, 32)])
def test_shared_pages_equal_the_twin(kv_dtype: torch.dtype, heads: int, kv_heads: int, dim: int) -> None:
    runs = sharing_runs()
    pages = filled_pages(runs, PAGES, kv_heads, dim, kv_dtype)
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    q = noise(3, tokens_in(runs), heads, dim, dtype=dtype)
    want = naive_ops.paged_attention(q, pages.k, pages.v, runs, 0.1, None, pages.scales)
    for got in in_each_set(lambda: native_ops.paged_attention(q, pages.k, pages.v, runs, 0.1, None, pages.scales)):
        torch.testing.assert_close(got, want, **CLOSE[dtype])


@pytest.mark.parametrize("threads", [1, 2, 3])
def test_a_row_is_the_same_to_the_last_bit_with_pages_of_its_own(threads: int) -> None:
    """The same numbers in pages that nobody shares: nothing is computed together there."""
    native.set_threads(threads)
    runs = sharing_runs()
    pages = filled_pages(runs, PAGES, 2, 64, torch.float32)
    k, v = torch.cat((pages.k, pages.k)), torch.cat((pages.v, pages.v))
    own = make_runs(DECODES, [Run(0, 65), Run(40, 90)])
    own.page_table_RP.copy_(runs.page_table_RP)
    spare = PAGES
    for row, (_, count) in SHARING.items():
        for page in range(count):
            from_page = runs.page_table_RP[row, page]
            k[spare], v[spare] = pages.k[from_page], pages.v[from_page]
            own.page_table_RP[row, page] = spare
            spare += 1
    q = noise(3, tokens_in(runs), 4, 64)
    together = native_ops.paged_attention(q, k, v, runs, 0.1)
    alone = native_ops.paged_attention(q, k, v, own, 0.1)
    assert torch.equal(together, alone)


def test_one_other_page_among_the_shared_ones_is_seen() -> None:
    runs = sharing_runs()
    pages = filled_pages(runs, PAGES, 2, 64, torch.float32)
    q = noise(3, tokens_in(runs), 4, 64)
    before = native_ops.paged_attention(q, pages.k, pages.v, runs, 0.1)
    changed = sharing_runs()
    changed.page_table_RP[3, 6] = changed.page_table_RP[1, 6]
    got = native_ops.paged_attention(q, pages.k, pages.v, changed, 0.1)
    want = naive_ops.paged_attention(q, pages.k, pages.v, changed, 0.1)
    torch.testing.assert_close(got, want, **CLOSE[torch.float32])
    differs = (got != before).flatten(1).any(1)
    assert differs.nonzero().flatten().tolist() == [3]


def test_a_window_over_shared_pages_equals_the_twin() -> None:
    runs = sharing_runs()
    pages = filled_pages(runs, PAGES, 2, 32, torch.float32)
    q = noise(3, tokens_in(runs), 4, 32)
    want = naive_ops.paged_attention(q, pages.k, pages.v, runs, 0.1, 70)
    got = native_ops.paged_attention(q, pages.k, pages.v, runs, 0.1, 70)
    torch.testing.assert_close(got, want, **CLOSE[torch.float32])


@pytest.mark.parametrize("kv_dtype", KV_DTYPES, ids=str)
@pytest.mark.parametrize("threads", [1, 2])
def test_a_page_of_pad_inside_a_context_is_skipped(kv_dtype: torch.dtype, threads: int) -> None:
    """Law L4: nothing is read in its place, and the row sees its other tokens. Decodes alone, in parts and
    together, and prompts; the last row sees no page at all."""
    native.set_threads(threads)
    runs = make_runs([Run(700), Run(333), PAD_ROW, Run(333), Run(40), Run(20)], [Run(0, 65), Run(40, 90)], pages=PAGES)
    runs.page_table_RP[3, :10] = runs.page_table_RP[1, :10]
    pages = filled_pages(runs, PAGES, 2, 64, kv_dtype)
    dtype = torch.float32 if kv_dtype == torch.float32 else torch.bfloat16
    q = noise(3, tokens_in(runs), 4, 64, dtype=dtype)
    holes = {0: [0, 3, 20, 21, 22, 23, 43], 1: [2, 9], 3: [2, 9, 15], 4: [2], 5: [0, 1], 6: [1], 7: [0, 5]}
    want = torch.zeros(tokens_in(runs), 4, 64, dtype=dtype)
    for row, columns in holes.items():
        left = [page for page in range(runs.page_table_RP.shape[1]) if page not in columns]
        for token in range(runs.lengths[row]):
            want[runs.offsets[row] + token] = without_pages(runs, row, token, left, pages, q)
        runs.page_table_RP[row, columns] = PAD
    for got in in_each_set(lambda: native_ops.paged_attention(q, pages.k, pages.v, runs, 0.1, None, pages.scales)):
        torch.testing.assert_close(got, want, **CLOSE[dtype])


def without_pages(runs: Runs, row: int, token: int, columns: list[int], pages: Pages, q: torch.Tensor) -> torch.Tensor:
    """[heads, D] of one token whose sequence consists of the pages in ``columns`` alone."""
    position = runs.starts[row] + token
    seen = sum(max(0, min(PAGE_TOKENS, position + 1 - column * PAGE_TOKENS)) for column in columns)
    if not seen:
        return torch.zeros(4, 64, dtype=q.dtype)
    alone = make_runs([Run(seen - 1)], [])
    table = runs.page_table_RP[row, columns]
    width = min(len(table), alone.page_table_RP.shape[1])
    alone.page_table_RP[0, :width] = table[:width]
    q_THD = q[runs.offsets[row] + token][None]
    return naive_ops.paged_attention(q_THD, pages.k, pages.v, alone, 0.1, None, pages.scales)[0]
