"""latent_attention: rows written and read in pages without a V block, against one token at a time."""

from __future__ import annotations

import pytest
import torch

from tests.ops.batches import PAD_ROW, Run, make_runs, poison_scratch, positions_of, span, tokens_in
from tests.support.naive_ops import latent_attention as naive_latent_attention
from weft.tensor.inputs import Runs
from weft.tensor.layout import k_block_shape, unpack_k
from weft.tensor.ops import paged_attention as paging
from weft.tensor.ops.latent_attention import latent_attention
from weft.units import PAD, PAGE_TOKENS

CLOSE = {"rtol": 1e-5, "atol": 1e-5}
WIDTH, VALUES, HEADS, PAGES = 12, 8, 5, 60

MIXED = (
    [Run(5), PAD_ROW, Run(0), Run(300), Run(16), Run(15)],
    [Run(0, 65), Run(40, 30), Run(16, 1), Run(0, 1), Run(70, 20)],
)


def pages_of(runs: Runs, dtype: torch.dtype = torch.float32) -> torch.Tensor:
    """Random rows at positions before each run, NaN everywhere else; gaps between pages as in the arena."""
    noise = torch.Generator().manual_seed(11)
    arena = torch.full((PAGES, 3 * WIDTH * PAGE_TOKENS), float("nan"), dtype=dtype)
    cache = arena[:, : WIDTH * PAGE_TOKENS].view(PAGES, *k_block_shape(1, WIDTH, dtype))
    for run in range(runs.run_count):
        for position in range(max(runs.starts[run], 0)):
            page, place = int(runs.page_table_RP[run, position // PAGE_TOKENS]), position % PAGE_TOKENS
            row = torch.randn(WIDTH, generator=noise).to(dtype)
            cache[page, 0, :, place] = row.view(-1, cache.shape[-1])
    return cache


def inputs(runs: Runs) -> tuple[torch.Tensor, torch.Tensor]:
    noise = torch.Generator().manual_seed(3)
    return (
        torch.randn(tokens_in(runs), HEADS, WIDTH, generator=noise),
        torch.randn(tokens_in(runs), WIDTH, generator=noise),
    )


def both(runs: Runs, dtype: torch.dtype = torch.float32) -> tuple[torch.Tensor, torch.Tensor]:
    """Outputs of what is used and of the twin; their pages are the same bytes afterwards."""
    outputs, caches = [], []
    poison_scratch()
    for op in (latent_attention, naive_latent_attention):
        cache = pages_of(runs, dtype)
        outputs.append(op(*inputs(runs)[:1], inputs(runs)[1], cache, positions_of(runs), runs, 0.3, VALUES))
        caches.append(cache.nan_to_num(7.0))
    assert torch.equal(*caches)
    return outputs[0], outputs[1]


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_mixed_batch_over_nan_memory_equals_one_query_at_a_time(dtype: torch.dtype) -> None:
    runs = make_runs(*MIXED, pages=PAGES)
    got, want = both(runs, dtype)
    torch.testing.assert_close(got, want, **CLOSE)
    assert (got[span(runs, 1)] == 0).all()


@pytest.mark.parametrize("start", [0, 1, 16, 130])
@pytest.mark.parametrize("length", [1, 63, 64, 65])
def test_a_prefill_of_any_length_from_any_position(start: int, length: int) -> None:
    got, want = both(make_runs([], [Run(start, length)], pages=PAGES))
    torch.testing.assert_close(got, want, **CLOSE)


@pytest.mark.parametrize("gather_bytes", [1, 3000, 20_000])
def test_how_decodes_are_grouped_changes_nothing(gather_bytes: int, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(paging, "GATHER_BYTES", gather_bytes)
    got, want = both(make_runs(MIXED[0], [], pages=PAGES))
    torch.testing.assert_close(got, want, **CLOSE)


def test_a_run_in_two_pieces_and_then_decodes_equals_one() -> None:
    whole = make_runs([], [Run(0, 70)], pages=PAGES)
    q, x = inputs(whole)
    want = latent_attention(q, x, pages_of(whole), positions_of(whole), whole, 0.3, VALUES)
    cache, made = pages_of(whole), []
    for runs in (
        make_runs([], [Run(0, 37)], pages=PAGES),
        make_runs([], [Run(37, 31)], pages=PAGES),
        make_runs([Run(68)], [], pages=PAGES),
        make_runs([Run(69)], [], pages=PAGES),
    ):
        runs.page_table_RP[0] = whole.page_table_RP[0, : runs.page_table_RP.shape[1]]
        at = slice(runs.starts[0], runs.starts[0] + runs.lengths[0])
        made.append(latent_attention(q[at], x[at], cache, positions_of(runs), runs, 0.3, VALUES))
    torch.testing.assert_close(torch.cat(made), want, **CLOSE)
    cache[whole.page_table_RP[0, 1]] = 0.0  # the control: a lost page must show
    lost = latent_attention(q[69:], x[69:], cache, positions_of(runs), runs, 0.3, VALUES)
    assert (lost - made[-1]).abs().max() > 1e-2


def test_tokens_at_pad_positions_and_on_pad_pages_are_not_written() -> None:
    runs = make_runs([PAD_ROW, Run(3)], [Run(10, 6)], pages=4)
    cache = torch.zeros(4, *k_block_shape(1, WIDTH, torch.float32))
    q, x = inputs(runs)
    latent_attention(q, x, cache, positions_of(runs), runs, 0.3, VALUES)
    assert (unpack_k(cache) != 0).any(dim=(1, 2)).sum() == 1 + 6
    assert runs.page_table_RP[0, 0] == PAD
