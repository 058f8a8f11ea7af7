"""Writing of keys and values of a step's tokens into their pages.

Torch scatters once for K and once for V, over the full step. The C++ kernel is in csrc/elementwise.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.tensor import native
from weft.tensor.few_bits import as_bytes, narrowed, quantized
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit, op
from weft.units import PAGE_TOKENS


@dataclass(frozen=True, slots=True)
class Places:
    """Destinations of tokens. ``tokens``: indices into T of the written tokens; None if every token is written."""

    tokens: torch.Tensor | None
    pages: torch.Tensor
    places: torch.Tensor


@op("weft.tensor.kernels.write_kv")
def write_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    positions_T: torch.Tensor,
    runs: Runs,
    scales: torch.Tensor | None = None,
) -> None:
    """Write token t of run r to page ``page_table_RP[r, position // 16]``, place ``position % 16``.

    ``k_THD``, ``v_THD`` [T, kv_heads, D] of any float dtype, rounded to the cache's as in ``kv_numbers``.
    int8 needs ``scales`` bfloat16 [P, 2, kv_heads, 16], which are written too. Caches as in
    ``tensor.layout``; ``positions_T`` int64 [T]. Tokens at position PAD, and tokens with a PAD page, are not
    written (L4). Nothing else of the cache changes.
    """
    where = places_of(positions_T, runs)
    if where.tokens is not None:
        k_THD, v_THD = k_THD[where.tokens], v_THD[where.tokens]
    if scales is not None:
        k_THD, k_scale_TH = quantized(k_THD)
        v_THD, v_scale_TH = quantized(v_THD)
        scales.permute(0, 3, 1, 2).index_put_((where.pages, where.places), torch.stack((k_scale_TH, v_scale_TH), dim=1))
    # K goes in words of 32 bits, whose elements are neighbours in a page and in a token's row.
    word_view = cache_k.view(torch.int32).permute(0, 3, 1, 2, 4)
    k_words = narrowed(k_THD, cache_k.dtype).contiguous().view(torch.int32)
    word_view.index_put_((where.pages, where.places), k_words.view(-1, *word_view.shape[2:]))
    # V's pairs are two tokens: its elements go one by one.
    pack = cache_v.shape[-1]
    token_view = as_bytes(cache_v).permute(0, 2, 4, 1, 3)
    token_view.index_put_(
        (where.pages, where.places // pack, where.places % pack), as_bytes(narrowed(v_THD, cache_v.dtype))
    )


@write_kv.in_cpp
def _write_kv(
    k_THD: torch.Tensor,
    v_THD: torch.Tensor,
    cache_k: torch.Tensor,
    cache_v: torch.Tensor,
    positions_T: torch.Tensor,
    runs: Runs,
    scales: torch.Tensor | None = None,
) -> Unfit | None:
    if not (
        native.fits(k_THD, v_THD)
        and cache_k.dtype in native.KV_DTYPES
        and k_THD.stride(-1) == 1
        and v_THD.stride(-1) == 1
    ):
        return UNFIT
    assert cache_k.dtype == cache_v.dtype
    # The kernel takes the positions from the runs: `positions_T` says the same.
    native.extension().write_kv(
        native.runs_of(runs),
        native.rows_of(k_THD),
        native.rows_of(v_THD),
        cache_k.data_ptr(),
        cache_v.data_ptr(),
        native.slot_stride(cache_k),
        native.slot_stride(cache_v),
        k_THD.shape[1],
        k_THD.shape[2],
        *native.page_table_of(runs),
        native.KV_DTYPES[cache_k.dtype],
        *native.token_scales(scales),
    )
    return None


def places_of(positions_T: torch.Tensor, runs: Runs) -> Places:
    """Return the places of the step's tokens, found once for all layers."""
    return runs.once("write_kv", lambda: _find_places(positions_T, runs))


def _find_places(positions_T: torch.Tensor, runs: Runs) -> Places:
    device = positions_T.device
    lengths = torch.tensor(runs.lengths, dtype=torch.int64, device=device)
    # Without output_size a device is asked for the sum, and the host waits.
    run_T = torch.repeat_interleave(
        torch.arange(runs.run_count, device=device), lengths, output_size=positions_T.numel()
    )
    # A PAD position may index page 0 here: `written_T` drops it.
    known_T = positions_T.clamp_min(0)
    page_T = runs.page_table_RP[run_T, known_T // PAGE_TOKENS].long()
    written_T = (positions_T >= 0) & (page_T >= 0)
    if bool(written_T.all()):
        return Places(None, page_T, known_T % PAGE_TOKENS)
    tokens = written_T.nonzero().squeeze(1)
    return Places(tokens, page_T[tokens], known_T[tokens] % PAGE_TOKENS)
