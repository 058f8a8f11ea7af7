"""rotary in torch: writes the two halves straight into the output, without concatenation."""

from __future__ import annotations

import torch


def rotary(q_THD: torch.Tensor, k_THD: torch.Tensor, cos_TD: torch.Tensor,
           sin_TD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
    half = cos_TD.shape[-1] // 2
    cos_T1R, sin_T1R = cos_TD[:, None, :half].float(), sin_TD[:, None, :half].float()
    return _rotate(q_THD, cos_T1R, sin_T1R), _rotate(k_THD, cos_T1R, sin_T1R)


def _rotate(x_THD: torch.Tensor, cos_T1R: torch.Tensor, sin_T1R: torch.Tensor) -> torch.Tensor:
    half = cos_T1R.shape[-1]
    out = torch.empty(x_THD.shape, dtype=x_THD.dtype, device=x_THD.device)
    first, second = x_THD[..., :half].float(), x_THD[..., half : 2 * half].float()
    out[..., :half] = torch.addcmul(first * cos_T1R, second, sin_T1R, value=-1)
    out[..., half : 2 * half] = torch.addcmul(second * cos_T1R, first, sin_T1R)
    if 2 * half < x_THD.shape[-1]:
        out[..., 2 * half :] = x_THD[..., 2 * half :]
    return out
