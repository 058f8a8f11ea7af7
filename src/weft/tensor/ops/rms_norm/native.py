"""rms_norm by ``csrc/norm.inl``: one pass to sum, one to write."""

from __future__ import annotations

import torch

from weft.tensor import native

NO_GATE = (0, 0, 0, 0)


def supported(x: torch.Tensor, weight: torch.Tensor, gate: torch.Tensor | None,
              group_size: int | None) -> bool:
    return (native.fits(x) and weight.dtype in native.DTYPES and 2 <= x.ndim <= 3 and x.stride(-1) == 1
            and (group_size or x.shape[-1]) % native.LANES == 0
            and (gate is None or (gate.dtype == x.dtype and gate.shape == x.shape and gate.stride(-1) == 1)))


def rms_norm(x: torch.Tensor, weight: torch.Tensor, eps: float, *, plus_one: bool,
             gate: torch.Tensor | None, gate_first: bool, group_size: int | None) -> torch.Tensor:
    dim = x.shape[-1]
    group = group_size or dim
    assert dim % group == 0, f"groups of {group} do not divide {dim}"
    assert weight.shape == (dim,)
    assert weight.is_contiguous()
    out = torch.empty(x.shape, dtype=x.dtype)
    rows = x if x.ndim == 3 else x[:, None]
    gates = NO_GATE if gate is None else native.rows_of(gate if gate.ndim == 3 else gate[:, None])
    native.extension().norm(native.rows_of(rows), gates, weight.data_ptr(), native.DTYPES[weight.dtype], eps,
                            plus_one, gate_first, rows.shape[0], rows.shape[1], dim, group, out.data_ptr())
    return out
