"""Root-mean-square norm, plain and gated."""

from __future__ import annotations

import torch

from weft.tensor import gpu
from weft.tensor.ops.rms_norm import cpu, native


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool = False,
             gate: torch.Tensor | None = None, gate_first: bool = False,
             group_size: int | None = None) -> torch.Tensor:
    """Normalise the last dim: ``x / sqrt(mean(x^2) + eps) * weight``.

    ``x``: [..., D] of any float dtype; ``weight``: [D]; returns the shape and dtype of ``x``. Sums are
    float32. ``plus_one``: the factor is ``1 + weight``, applied before rounding (Qwen3.5). ``gate`` [..., D]:
    a factor ``silu(gate)``, after the norm (Qwen3.5's gated norm) or, with ``gate_first``, before it
    (Mamba-2, Granite-4-H). ``group_size``: the mean is over groups of ``group_size`` neighbours of the last
    dim instead of all of it; must divide D.

    Source: Zhang and Sennrich, 2019; the norms of transformers' qwen3_5 and granitemoehybrid.
    """
    if gpu.fits(x, weight):
        from weft.tensor.kernels import rms_norm as triton
        return triton.rms_norm(x, weight, eps, plus_one=plus_one, gate=gate, gate_first=gate_first,
                               group_size=group_size)
    if native.supported(x, weight, gate, group_size):
        return native.rms_norm(x, weight, eps, plus_one=plus_one, gate=gate, gate_first=gate_first,
                               group_size=group_size)
    return cpu.rms_norm(x, weight, eps, plus_one=plus_one, gate=gate, gate_first=gate_first,
                        group_size=group_size)
