"""Rows of K and V into pages: the inverses of ``unpack_k`` and ``unpack_v`` of ``weft.tensor.layout``."""

from __future__ import annotations

import torch

from weft.spec import KvLayoutName
from weft.tensor.layout import k_block_shape, v_block_shape
from weft.units import PAGE_TOKENS


def pack_k(k_THD: torch.Tensor, layout: KvLayoutName = "vnni") -> torch.Tensor:
    """Pack [n*16, H, D] to [n, H, D/pack, 16, pack]; a view of the input's data (strided, not contiguous)."""
    tokens, heads, dim = k_THD.shape
    _, lanes, _, pack = k_block_shape(heads, dim, k_THD.dtype, layout)
    return k_THD.reshape(tokens // PAGE_TOKENS, PAGE_TOKENS, heads, lanes, pack).permute(0, 2, 3, 1, 4)


def pack_v(v_THD: torch.Tensor, layout: KvLayoutName = "vnni") -> torch.Tensor:
    """Pack [n*16, H, D] to [n, H, 16/pack, D, pack]; a view of the input's data."""
    tokens, heads, dim = v_THD.shape
    _, lanes, _, pack = v_block_shape(heads, dim, v_THD.dtype, layout)
    return v_THD.reshape(tokens // PAGE_TOKENS, lanes, pack, heads, dim).permute(0, 3, 1, 4, 2)
