"""Pages of any dtype with 0xFF in every byte that no run has written, and numbers in the others."""

from __future__ import annotations

from dataclasses import dataclass

import torch

from tests.ops.batches import written_places
from tests.support.page_packing import pack_k, pack_v
from weft.spec import KvLayoutName
from weft.tensor.few_bits import narrowed, quantized
from weft.tensor.inputs import Runs
from weft.tensor.layout import k_block_shape, v_block_shape
from weft.units import PAGE_TOKENS

KV_DTYPES = [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn, torch.int8]


@dataclass
class Pages:
    """Of one layer, with gaps between pages as in the arena. ``scales``: int8 alone."""

    k: torch.Tensor
    v: torch.Tensor
    scales: torch.Tensor | None

    def clone(self) -> Pages:
        return Pages(self.k.clone(), self.v.clone(), None if self.scales is None else self.scales.clone())

    def parts(self) -> list[torch.Tensor]:
        return [self.k, self.v] if self.scales is None else [self.k, self.v, self.scales]

    def raw(self) -> list[torch.Tensor]:
        """All bytes, for comparing."""
        return [part.contiguous().view(torch.uint8) for part in self.parts()]


def blank_pages(count: int, kv_heads: int, dim: int, dtype: torch.dtype, layout: KvLayoutName = "vnni") -> Pages:
    block = kv_heads * dim * PAGE_TOKENS * dtype.itemsize
    arena = torch.full((count, 3 * block + 256 * kv_heads), 0xFF, dtype=torch.uint8)
    shapes = k_block_shape(kv_heads, dim, dtype, layout), v_block_shape(kv_heads, dim, dtype, layout)
    k, v = (arena[:, i * block : (i + 1) * block].view(dtype).view(count, *shape) for i, shape in enumerate(shapes))
    scales = arena[:, 2 * block : 2 * block + 64 * kv_heads].view(torch.bfloat16)
    scales = scales.view(count, 2, kv_heads, PAGE_TOKENS)
    return Pages(k, v, scales if dtype == torch.int8 else None)


def filled_pages(
    runs: Runs, count: int, kv_heads: int, dim: int, dtype: torch.dtype, layout: KvLayoutName = "vnni"
) -> Pages:
    """Random keys and values at the places of the runs' contexts."""
    noise = torch.Generator().manual_seed(11)
    pages = blank_pages(count, kv_heads, dim, dtype, layout)
    seen_T = written_places(runs, count).flatten()
    for part, (cache, pack) in enumerate(((pages.k, pack_k), (pages.v, pack_v))):
        x_THD = torch.randn(count * PAGE_TOKENS, kv_heads, dim, generator=noise)
        if pages.scales is not None:
            x_THD, scale_TH = quantized(x_THD)
            scale_TH[~seen_T] = float("nan")
            pages.scales[:, part] = scale_TH.view(count, PAGE_TOKENS, kv_heads).transpose(1, 2)
            x_THD[~seen_T] = -1
        else:
            x_THD[~seen_T] = float("nan")
            x_THD = narrowed(x_THD, dtype)
        cache.copy_(pack(x_THD, layout))
    return pages
