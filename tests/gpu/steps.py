"""The steps and pages of ``tests.ops``, moved to the device under test."""

from __future__ import annotations

import dataclasses

import torch

from tests.ops.kv_pages import Pages, blank_pages
from tests.support.page_packing import pack_k, pack_v
from weft.tensor.inputs import Runs
from weft.tensor.layout import unpack_k, unpack_v


def on_device(runs: Runs, device: torch.device) -> Runs:
    """New runs, with a memo of their own."""
    tensors = {name: getattr(runs, name).to(device) for name in ("starts_R", "slots_R", "context_R")}
    return dataclasses.replace(runs, **tensors, page_table_RP=runs.page_table_RP.to(device), memo={})


def strided_on(x: torch.Tensor, device: torch.device) -> torch.Tensor:
    """A copy on ``device`` with the same strides over a first dim that has gaps, as the arena's views have;
    0xFF in the gaps."""
    count, width = x.shape[0], x.stride(0) * x.itemsize
    held = torch.full((max(1, count) * width,), 0xFF, dtype=torch.uint8, device=device)
    made = held.view(x.dtype).as_strided(x.shape, x.stride())
    made.copy_(x)
    return made


def pages_on(pages: Pages, device: torch.device) -> Pages:
    """Copies in the layout of GPUs, with gaps between pages."""
    if pages.k.shape[2] != 1:
        heads, dim = pages.v.shape[1], pages.v.shape[3]
        rows = blank_pages(len(pages.k), heads, dim, pages.k.dtype, "rows")
        rows.k.copy_(pack_k(unpack_k(pages.k), "rows"))
        rows.v.copy_(pack_v(unpack_v(pages.v), "rows"))
        pages = Pages(rows.k, rows.v, pages.scales)
    return Pages(
        strided_on(pages.k, device),
        strided_on(pages.v, device),
        None if pages.scales is None else strided_on(pages.scales, device),
    )
