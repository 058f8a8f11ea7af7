"""rotary by ``csrc/elementwise.inl``."""

from __future__ import annotations

import torch

from weft.tensor import native


def supported(q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor) -> bool:
    return (native.fits(q_THD, k_THD) and cos_TD.dtype == torch.float32 and q_THD.stride(-1) == 1
            and k_THD.stride(-1) == 1)


def rotary(q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor,
           sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    assert cos_TD.is_contiguous()
    assert sin_TD.is_contiguous()
    assert sin_TD.dtype == torch.float32
    q_out, k_out = torch.empty(q_THD.shape, dtype=q_THD.dtype), torch.empty(k_THD.shape, dtype=k_THD.dtype)
    native.extension().rotary(
        native.rows_of(q_THD), native.rows_of(k_THD), cos_TD.data_ptr(), sin_TD.data_ptr(), q_THD.shape[0],
        q_THD.shape[1], k_THD.shape[1], q_THD.shape[2], cos_TD.shape[1], q_out.data_ptr(), k_out.data_ptr())
    return q_out, k_out
