"""The state grid: how many tokens the recurrent kernels compute at once.

    in chunks (torch, Triton)    | 0 ........ 63 | 64 ....... 127 |    resuming inside a chunk would cut other
                                                                       chunks: other sums
    token by token (C++)         |0|1|2|3|4|5| ...                     the same sums from anywhere

A prompt that resumes from a checkpoint must be computed as it would be from its beginning (promise 1). The
finer grid saves each request that shares a prefix up to 48 tokens: decision 0017.
"""

from __future__ import annotations

import torch

from weft.spec import ModelSpec, StatePart
from weft.tensor import native
from weft.tensor.ops.conv import KERNEL_MAX
from weft.tensor.ops.delta_rule import KEY_DIM_MAX
from weft.tensor.ops.mamba2 import STATE_DIM_MAX
from weft.units import CHUNK_TOKENS, PAGE_TOKENS


def grid_tokens(spec: ModelSpec, device: torch.device) -> int:
    """PAGE_TOKENS where the C++ kernels take every state of ``spec``, else CHUNK_TOKENS. Call it after the
    kernels are chosen."""
    parts = [part for layer in spec.layers for part in layer.state]
    sequential = (device.type == "cpu" and native.in_use() and spec.dtype in ("float32", "bfloat16")
                  and all(map(_sequential, parts)))
    return PAGE_TOKENS if sequential else CHUNK_TOKENS


def _sequential(part: StatePart) -> bool:
    """The kernels' own ``supported``, from shapes alone; a ring does not depend on where a run begins."""
    if part.name == "window":
        return True
    if part.name == "conv":
        channels, window = part.shape
        return channels % native.LANES == 0 and 1 <= window < KERNEL_MAX
    *heads, lines, width = part.shape
    if not heads:  # Mamba-1: lines are channels
        return lines % native.LANES == 0 and width <= STATE_DIM_MAX
    return (lines % native.LANES == 0 and lines <= KEY_DIM_MAX
            and width % native.LANES == 0 and width <= STATE_DIM_MAX)
