"""Rotary frequencies, and cos / sin of the positions of one step.

A table over all positions was rejected: at 262,144 positions it costs more memory than a small model, and a
step needs a few hundred rows of it. The angles are computed in float32 from the positions, as transformers
does, so that the numbers agree to the last bit.

Sources: RoPE (Su et al., 2021); linear interpolation (Chen et al., 2023); YaRN (Peng et al., 2023,
"NTK-by-parts", equations 17-22); llama3 scaling (the Llama 3.1 release's reference code).
"""

from __future__ import annotations

import math

import torch

from weft.architecture import Rope


class RotaryTable:
    """cos and sin for the layers of one model, on ``device`` (the CPU by default). The frequencies are worked
    out on the CPU wherever they go: everywhere the same bits."""

    def __init__(self, rope: Rope, device: torch.device | None = None) -> None:
        self.frequencies = inverse_frequencies(rope).to(device or torch.device("cpu"))
        self.attention_factor = rope.attention_factor
        self.rotary_dim = rope.rotary_dim

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """int64 [T] -> cos, sin float32 [T, rotary_dim]; both halves carry the same angles. PAD positions
        give finite values."""
        angles = positions_T.to(torch.float32)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """float32 [rotary_dim / 2]: radians per position, of each pair of dims, after the rope's scaling."""
    exponents = torch.arange(0, rope.rotary_dim, 2, dtype=torch.float32) / rope.rotary_dim
    plain = 1.0 / (rope.theta**exponents)
    if rope.kind == "linear":
        return plain / rope.factor
    if rope.kind == "llama3":
        return _llama3(rope, plain)
    if rope.kind == "proportional":
        turning = torch.arange(plain.numel()) < rope.turning_dim // 2
        return torch.where(turning, plain / rope.factor, 0.0)
    if rope.kind == "yarn":
        return _yarn(rope, plain)
    return plain


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Long wavelengths are interpolated, short ones kept, those between blended by wavelength."""
    wavelengths = 2 * math.pi / plain
    share = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor)
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Dims that turn more than beta_fast times over the original context are kept, those that turn less than
    beta_slow times interpolated, with a linear ramp over the dims between."""
    def dim_of(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (
            2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
