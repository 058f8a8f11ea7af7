"""latent_attention in Triton: rows that are keys and values at once, in every dtype of a page."""

from __future__ import annotations

import pytest
import torch

from tests.gpu.steps import on_device, pages_on
from tests.gpu.tolerances import close
from tests.ops.batches import PAD_ROW, Run, make_runs, positions_of, span, tokens_in
from tests.ops.kv_pages import KV_DTYPES, filled_pages
from tests.support.naive_ops import latent_attention as naive_latent_attention
from weft.tensor.ops.latent_attention import latent_attention


def noise(*shape: int, seed: int = 3) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


@pytest.mark.parametrize("dtype", KV_DTYPES, ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize(("width", "value_dim"), [(40, 32), (24, 20)])
def test_a_mixed_batch_over_bytes_of_0xff_equals_one_query_at_a_time(
    dtype: torch.dtype, width: int, value_dim: int, device: torch.device
) -> None:
    runs = make_runs([Run(5), PAD_ROW, Run(290)], [Run(0, 33), Run(60, 20)], pages=40)
    q, rows = noise(tokens_in(runs), 3, width), noise(tokens_in(runs), width, seed=4)
    twin = filled_pages(runs, 40, 1, width, dtype, "rows")
    mine = pages_on(twin, device)
    made, scales = [], []
    for pages in (mine, twin):
        scales.append(None if pages.scales is None else pages.scales[:, :1])
    want = naive_latent_attention(q, rows, twin.k, positions_of(runs), runs, 0.3, value_dim, scales[1])
    for last in (rows, rows * 1.5):  # the second is the control: other rows are seen
        made.append(
            latent_attention(
                q.to(device),
                last.to(device),
                mine.k,
                positions_of(runs).to(device),
                on_device(runs, device),
                0.3,
                value_dim,
                scales[0],
            ).cpu()
        )
        if len(made) == 1:
            for got, held in zip(mine.raw(), twin.raw(), strict=True):
                assert torch.equal(got.cpu(), held)
    torch.testing.assert_close(made[0], want, **close(torch.float32))
    assert (made[0][span(runs, 1)] == 0).all()
    assert (made[1] - want).abs().max() > 1e-2
