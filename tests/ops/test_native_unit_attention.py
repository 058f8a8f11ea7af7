"""Attention over bfloat16 pages by a matrix unit: the twin's numbers, and the same bits for a row in any company.

The software unit serves it on a CPU that multiplies pairs of bfloat16 by vectors; AMX where this process may use it.
Vectors of floats serve other CPUs, with the unit as without.
"""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, tokens_in
from tests.ops.kv_pages import Pages, filled_pages
from tests.ops.test_native import CLOSE, noise
from tests.support import naive_ops, native_ops
from weft.tensor import native
from weft.tensor.inputs import Runs
from weft.units import PAD

BF16 = torch.bfloat16
INSTRUCTIONS = native.extension().instruction_set() if native.MISSING is None else ""
UNITS = [unit for unit in native.matrix_units() if unit != "none"] if "x86_64_v4" in INSTRUCTIONS else []


@pytest.fixture(params=UNITS)
def unit(request: pytest.FixtureRequest, torch_kernels: None) -> Iterator[str]:
    native.choose("native")
    before, threads = native.matrix_unit(), native.extension().threads()
    assert native.use_matrix_unit(request.param)
    yield request.param
    assert native.use_matrix_unit(before)
    native.set_threads(threads)


def mixed_runs() -> Runs:
    """Decodes that share pages, pages of PAD, prompts whose rows end inside a block of 16."""
    runs = make_runs(
        [Run(7), PAD_ROW, Run(200), Run(200), Run(64), Run(570)], [Run(0, 65), Run(40, 9), Run(63, 2)], pages=100
    )
    runs.page_table_RP[3, :11] = runs.page_table_RP[2, :11]
    return runs


def attended(q: torch.Tensor, pages: Pages, runs: Runs, window: int | None = None) -> torch.Tensor:
    return native_ops.paged_attention(q, pages.k, pages.v, runs, 0.1, window)


@pytest.mark.parametrize(
    ("heads", "kv_heads", "dim", "window"),
    [(4, 2, 64, None), (3, 1, 96, 70), (16, 8, 32, None), (6, 1, 256, 15), (20, 1, 160, None)],
)
def test_a_unit_gives_the_twins_numbers_over_pages_of_nan(
    unit: str, heads: int, kv_heads: int, dim: int, window: int | None
) -> None:
    runs = mixed_runs()
    pages = filled_pages(runs, 100, kv_heads, dim, BF16)
    q = noise(3, tokens_in(runs), heads, dim, dtype=BF16)
    want = naive_ops.paged_attention(q, pages.k, pages.v, runs, 0.1, window)
    torch.testing.assert_close(attended(q, pages, runs, window), want, **CLOSE[BF16])
    runs.page_table_RP[5, 33], runs.page_table_RP[6, 0] = PAD, PAD
    got = attended(q, pages, runs, window)
    assert native.use_matrix_unit("none")
    by_vectors = attended(q, pages, runs, window)
    torch.testing.assert_close(got, by_vectors, **CLOSE[BF16])
    assert not torch.allclose(by_vectors, want, **CLOSE[BF16]), "no row sees the pages that are missing"


@pytest.mark.parametrize("threads", [1, 3])
def test_a_row_has_the_same_bits_alone_in_a_prompt_and_with_shared_pages(unit: str, threads: int) -> None:
    native.set_threads(threads)
    together = mixed_runs()
    pages = filled_pages(together, 100, 2, 64, BF16)
    q = noise(3, tokens_in(together), 6, 64, dtype=BF16)
    got = attended(q, pages, together)
    token = 0
    for row, (start, length) in enumerate([(7, 1), (0, 0), (200, 1), (200, 1), (64, 1), (570, 1), (0, 65), (40, 9)]):
        token += length == 0  # of the row of PAD
        for position in range(start, start + length):
            alone = make_runs([Run(position)], [], pages=100)
            count = position // 16 + 1
            alone.page_table_RP[0, :count] = together.page_table_RP[row, :count]
            assert torch.equal(attended(q[token : token + 1], pages, alone)[0], got[token]), (row, position)
            token += 1


def test_units_have_the_same_bits_and_vectors_have_others(unit: str) -> None:
    runs = mixed_runs()
    pages = filled_pages(runs, 100, 2, 64, BF16)
    q = noise(3, tokens_in(runs), 6, 64, dtype=BF16)
    got = attended(q, pages, runs)
    assert native.use_matrix_unit("software")
    assert torch.equal(attended(q, pages, runs), got)
    assert native.use_matrix_unit("none")
    by_vectors = attended(q, pages, runs)
    assert torch.equal(by_vectors, got) == ("bf16" not in INSTRUCTIONS), "the unit multiplied nothing"
