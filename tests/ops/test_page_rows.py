"""Pages of rows, the layout of GPUs: torch's operators give the numbers that they give over packed pages."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, tokens_in
from tests.ops.kv_pages import KV_DTYPES, Pages, blank_pages, filled_pages
from weft.spec import KvLayoutName
from weft.tensor.inputs import Runs
from weft.tensor.layout import unpack_k, unpack_v
from weft.tensor.ops.latent_attention import latent_attention
from weft.tensor.ops.paged_attention import paged_attention
from weft.tensor.ops.write_kv import write_kv

PAGES, HEADS, DIM = 30, 2, 24
LAYOUTS: tuple[KvLayoutName, ...] = ("vnni", "rows")
each_dtype = pytest.mark.parametrize("dtype", KV_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def steps() -> Runs:
    return make_runs([Run(5), PAD_ROW, Run(40)], [Run(0, 33), Run(20, 30)], pages=PAGES)


@each_dtype
@pytest.mark.parametrize("window", [None, 20])
def test_attention_reads_rows_as_it_reads_packed_pages(dtype: torch.dtype, window: int | None) -> None:
    runs = steps()
    q = noise(tokens_in(runs), 4, DIM)
    packed, rows = (filled_pages(runs, PAGES, HEADS, DIM, dtype, layout) for layout in LAYOUTS)
    want, got = (
        paged_attention.torch(q, pages.k, pages.v, steps(), 0.3, window, pages.scales) for pages in (packed, rows)
    )
    torch.testing.assert_close(got, want, **close(torch.float32))
    other = Pages(rows.k, rows.v.flip(0), rows.scales)  # the control: other pages are seen
    hurt = paged_attention.torch(q, other.k, other.v, steps(), 0.3, window, other.scales)
    assert not torch.equal(hurt, got)


@each_dtype
def test_keys_and_values_are_written_into_rows(dtype: torch.dtype) -> None:
    runs = steps()
    k, v = noise(tokens_in(runs), HEADS, DIM), noise(tokens_in(runs), HEADS, DIM, seed=4)
    bytes_by_token = []
    for layout in LAYOUTS:
        pages = blank_pages(PAGES, HEADS, DIM, dtype, layout)
        write_kv.torch(k, v, pages.k, pages.v, positions_of(runs), steps(), pages.scales)
        parts = [unpack_k(pages.k), unpack_v(pages.v)]
        bytes_by_token.append([part.contiguous().view(torch.uint8) for part in parts])
    for packed, rows in zip(*bytes_by_token, strict=True):
        assert torch.equal(packed, rows)
        assert (packed != 0xFF).flatten(1).any(1).sum() == tokens_in(runs) - 1, "all but the PAD row"


@each_dtype
def test_latent_attention_writes_and_reads_rows(dtype: torch.dtype) -> None:
    runs = steps()
    q, x = noise(tokens_in(runs), 3, DIM), noise(tokens_in(runs), DIM, seed=4)
    made = []
    for layout in LAYOUTS:
        pages = filled_pages(runs, PAGES, 1, DIM, dtype, layout)
        scales = None if pages.scales is None else pages.scales[:, :1]
        out = latent_attention.torch(q, x, pages.k, positions_of(runs), steps(), 0.3, 20, scales)
        made.append((out, unpack_k(pages.k).contiguous().view(torch.uint8)))
    torch.testing.assert_close(made[1][0], made[0][0], **close(torch.float32))
    assert torch.equal(made[1][1], made[0][1])
    assert made[0][0].abs().max() > 0.1
