"""Positions of numbers of K and V inside a KV page.

A page holds ``PAGE_TOKENS`` (16) tokens of every attention layer. Inside it each layer has a K block and a V
block. Their order is a fact of the arena's plan (``kv_layout``), by device:

    vnni     CPUs    pack = 4 // itemsize: fp32 1, bf16/fp16 2, fp8/int8 4

    K block [kv_heads, D/pack, 16, pack]      summed axis is D (a query against a token)

        head h   d=0,1  | t0.0 t0.1  t1.0 t1.1  ...  t15.0 t15.1 |     one 64-byte line = 16 lanes
                 d=2,3  | t0.2 t0.3  t1.2 t1.3  ...  t15.2 t15.3 |
                 ...

    V block [kv_heads, 16/pack, D, pack]      summed axis is the token

        head h   t=0,1  | d0.0 d0.1  d1.0 d1.1  ...  (pair = tokens 0 and 1 of channel d) |
                 t=2,3  | ...

    rows     GPUs    a row of D numbers for each token, in K and V alike: [kv_heads, 16, D]

        head h   t=0    | d0 d1 d2 ... |
                 t=1    | ...

*Packed*: the widening dot instructions of CPUs (bf16 pairs, fp8 quads) take ``pack`` neighbours of the summed
axis and add them into one fp32 lane: a token for Q K^T, a channel for P V. No horizontal sum is needed.

*Rows*: tensor cores read rows from shared memory directly. It is the layout HND of FlashInfer, and NHD with other
strides, so libraries read the pages in place.

Both are one shape: rows are the vnni form with pack = D for K and pack = 1 for V. Blocks have the same bytes, so no
plan changes its sizes.
"""

from __future__ import annotations

import torch

from weft.spec import KvLayoutName
from weft.units import PAGE_TOKENS

DTYPES: dict[str, torch.dtype] = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
    "float8_e4m3": torch.float8_e4m3fn,
    "int8": torch.int8,
}
"""Names used by the torch-free half -> torch dtypes."""


def pack_of(dtype: torch.dtype) -> int:
    """Return the neighbours of the summed axis that share one 32-bit lane: 4 // itemsize."""
    assert dtype.itemsize <= 4, f"KV pages of {dtype} have no vnni layout"
    return 4 // dtype.itemsize


def k_block_shape(
    kv_heads: int, head_dim: int, dtype: torch.dtype, layout: KvLayoutName = "vnni"
) -> tuple[int, int, int, int]:
    pack = head_dim if layout == "rows" else pack_of(dtype)
    assert head_dim % pack == 0, f"head_dim {head_dim} is not a multiple of the pack {pack}"
    return kv_heads, head_dim // pack, PAGE_TOKENS, pack


def v_block_shape(
    kv_heads: int, head_dim: int, dtype: torch.dtype, layout: KvLayoutName = "vnni"
) -> tuple[int, int, int, int]:
    pack = 1 if layout == "rows" else pack_of(dtype)
    return kv_heads, PAGE_TOKENS // pack, head_dim, pack


def unpack_k(k_pages: torch.Tensor) -> torch.Tensor:
    """Return [n*16, H, D] of [n, H, D/pack, 16, pack], contiguous copy."""
    pages, heads, lanes, tokens, pack = k_pages.shape
    return k_pages.permute(0, 3, 1, 2, 4).reshape(pages * tokens, heads, lanes * pack)


def unpack_v(v_pages: torch.Tensor) -> torch.Tensor:
    """Return [n*16, H, D] of [n, H, 16/pack, D, pack], contiguous copy."""
    pages, heads, lanes, dim, pack = v_pages.shape
    return v_pages.permute(0, 2, 4, 1, 3).reshape(pages * lanes * pack, heads, dim)


def k_rows(k_pages: torch.Tensor) -> torch.Tensor:
    """Return [n, H, 16, D] of K in the layout of rows, without a copy."""
    assert k_pages.shape[2] == 1, f"K pages of shape {tuple(k_pages.shape)} are vnni"
    return k_pages.squeeze(2)


def v_rows(v_pages: torch.Tensor) -> torch.Tensor:
    """Return [n, H, 16, D] of V in the layout of rows, without a copy."""
    assert v_pages.shape[4] == 1, f"V pages of shape {tuple(v_pages.shape)} are vnni"
    return v_pages.squeeze(4)
