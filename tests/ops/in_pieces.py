"""A text that comes in pieces, for attention that sees chosen blocks: what it was shown and what it gave."""

from __future__ import annotations

from collections.abc import Callable

import torch

from tests.ops.batches import Run, make_runs
from weft.tensor.inputs import LayerCache, Runs
from weft.tensor.layout import k_block_shape, v_block_shape
from weft.tensor.ops.chosen_blocks import Seen

LENGTH, PAGES = 150, 12
Step = Callable[[slice, Runs], tuple[Seen, torch.Tensor]]
"""Writes and attends the tokens of one piece."""


def numbers(*shape: int, seed: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def unwritten(kv_heads: int, dim: int, index_width: int, dtype: torch.dtype) -> tuple[LayerCache, LayerCache]:
    """A cache with an index of that width, and the index: NaN in all pages."""
    index = LayerCache(k=torch.full((PAGES, *k_block_shape(1, index_width, dtype)), torch.nan, dtype=dtype))
    return LayerCache(
        k=torch.full((PAGES, *k_block_shape(kv_heads, dim, dtype)), torch.nan, dtype=dtype),
        v=torch.full((PAGES, *v_block_shape(kv_heads, dim, dtype)), torch.nan, dtype=dtype),
        index=index,
    ), index


def in_pieces(cuts: list[int], masks: torch.Tensor, step: Step) -> tuple[torch.Tensor, torch.Tensor]:
    """``masks`` [..., LENGTH, LENGTH] filled, and outputs, of a text in pieces between ``cuts``."""
    outputs = []
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        own = slice(begin, end)
        seen, output = step(own, make_runs([], [Run(begin, end - begin)], pages=PAGES))
        masks[..., own, :end] = torch.ones(end, end).tril().bool()[begin:] if seen[0] is None else seen[0]
        outputs.append(output)
    return masks, torch.cat(outputs)


def attended(masks: torch.Tensor, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, scale: float) -> torch.Tensor:
    """Of queries [T, heads, D] that see ``masks`` [KV heads, T, T], a token and a head at a time."""
    group, outputs = q.shape[1] // k.shape[1], []
    for p in range(len(q)):
        for head in range(q.shape[1]):
            kv = head // group
            seen = masks[kv, p]
            weights = torch.softmax(scale * (k[seen, kv].double() @ q[p, head].double()), 0)
            outputs.append(weights @ v[seen, kv].double())
    return torch.stack(outputs).view(q.shape).float()
