"""Rotary frequencies, and cos / sin of the positions of one step.

The angles are computed in float32 from the positions, as transformers does, so that the numbers agree to the
last bit. With the C++ kernels a step of decodes gathers its rows from a table of the first positions.

If a token has three positions (time, row and column of a picture), each frequency turns by one of them.
For tokens of text the three are equal: then every bit is that of plain positions.

Sources: RoPE (Su et al., 2021); linear interpolation (Chen et al., 2023); YaRN (Peng et al., 2023,
"NTK-by-parts", equations 17-22); llama3 scaling (the Llama 3.1 release's reference code); LongRoPE (Ding et al., 2024).
"""

from __future__ import annotations

import math
from typing import Any

import numpy as np
import numpy.typing as npt
import torch

from weft.families.mixers.attention import Rope
from weft.families.vision import turn_axes
from weft.tensor import native

TABLE_BYTES_MAX = 16 << 20
"""Most bytes of the table of cos and sin of one rope."""
DECODES_MAX = 256
"""Most positions that are gathered rather than computed."""
_POSITIONS_FIRST = 1024


class RotaryTable:
    """Cos and sin for the layers of one model, on ``device`` (the CPU by default). ``sections``: see
    ``families.vision.turn_axes``.
    """

    def __init__(self, rope: Rope, device: torch.device | None = None, sections: tuple[int, ...] = ()) -> None:
        # Computed on the CPU for every device, so that the bits are the same everywhere.
        self.frequencies = inverse_frequencies(rope).to(device or torch.device("cpu"))
        self._axis_of_F = torch.tensor(turn_axes(sections, len(self.frequencies)), device=device)
        self.attention_factor = rope.attention_factor
        self.rotary_dim = rope.rotary_dim
        self._gathered = _Gathered(self) if self.frequencies.device.type == "cpu" else None

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return cos, sin float32 [T, rotary_dim] of int64 [T]; both halves carry the same angles. PAD positions give
        finite values. Valid until the next call. [3, T]: time, row and column.
        """
        # With few rows torch's operators cost the host more than the arithmetic: rows come from a table.
        if (
            self._gathered is not None
            and positions_T.ndim == 1
            and positions_T.shape[0] <= DECODES_MAX
            and native.in_use()
        ):
            gathered = self._gathered.at(positions_T)
            if gathered is not None:
                return gathered
        return self.computed(positions_T)

    def computed(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return ``at``'s result, without a table."""
        if positions_T.ndim == 2:
            angles = positions_T.to(torch.float32).index_select(0, self._axis_of_F).t() * self.frequencies
        else:
            angles = positions_T.to(torch.float32)[:, None] * self.frequencies
        angles = torch.cat((angles, angles), dim=-1)
        cos, sin = angles.cos(), angles.sin()
        if self.attention_factor != 1.0:
            cos, sin = cos * self.attention_factor, sin * self.attention_factor
        return cos, sin


class _Gathered:
    """Cos and sin of the first positions, and room for one step's."""

    __slots__ = ("_cos", "_most", "_positions", "_positions_T", "_result", "_rooms", "_rotary", "_sin")

    def __init__(self, rotary: RotaryTable) -> None:
        self._rotary = rotary
        self._most = TABLE_BYTES_MAX // (8 * max(1, rotary.rotary_dim))
        self._cos = self._sin = np.empty((0, rotary.rotary_dim), np.float32)
        self._positions_T: torch.Tensor | None = None
        self._positions: npt.NDArray[np.int64] = np.empty(0, np.int64)
        self._rooms: tuple[npt.NDArray[Any], ...] = ()
        self._result: tuple[torch.Tensor, torch.Tensor] | None = None

    def at(self, positions_T: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor] | None:
        """Return cos and sin, None if a position is beyond the table."""
        if positions_T is not self._positions_T:  # a step of the same decodes passes the same tensor
            self._make_room(positions_T)
        cos, sin = self._rooms
        try:
            self._cos.take(self._positions, axis=0, out=cos)
        # The table grows with the positions in use; numpy checks them anyway.
        except IndexError:
            if not self._grow():
                return None
            self._cos.take(self._positions, axis=0, out=cos)
        self._sin.take(self._positions, axis=0, out=sin)
        return self._result

    def _make_room(self, positions_T: torch.Tensor) -> None:
        self._positions_T, self._positions = positions_T, positions_T.numpy()
        cos, sin = torch.empty((2, positions_T.shape[0], self._rotary.rotary_dim))
        self._rooms, self._result = (cos.numpy(), sin.numpy()), (cos, sin)

    def _grow(self) -> bool:
        """Grow the table to the positions of the step. Return False if that is more than the most."""
        count = 1 << max(_POSITIONS_FIRST - 1, int(self._positions.max())).bit_length()
        if count > self._most:
            return False
        cos, sin = self._rotary.computed(torch.arange(count))
        self._cos, self._sin = cos.numpy(), sin.numpy()
        return True


def inverse_frequencies(rope: Rope) -> torch.Tensor:
    """Return float32 [rotary_dim / 2]: radians per position, of each pair of dims, after the rope's scaling."""
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
    if rope.kind == "longrope":
        return plain / torch.tensor(rope.divisors)
    return plain


def _llama3(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Return llama3's frequencies: long wavelengths are interpolated, short ones kept, those between blended by
    wavelength.
    """
    wavelengths = 2 * math.pi / plain
    share = (rope.original_positions / wavelengths - rope.low_freq_factor) / (
        rope.high_freq_factor - rope.low_freq_factor
    )
    share = share.clamp(0.0, 1.0)
    return (1 - share) * plain / rope.factor + share * plain


def _yarn(rope: Rope, plain: torch.Tensor) -> torch.Tensor:
    """Return YaRN's frequencies: dims that turn more than beta_fast times over the original context stay; dims that
    turn less than beta_slow times are interpolated; a linear ramp covers the dims between.
    """

    def dim_of(turns: float) -> float:
        return rope.rotary_dim * math.log(rope.original_positions / (turns * 2 * math.pi)) / (2 * math.log(rope.theta))

    low, high = dim_of(rope.beta_fast), dim_of(rope.beta_slow)
    if rope.truncate:
        low, high = math.floor(low), math.ceil(high)
    low, high = max(low, 0), min(high, rope.rotary_dim - 1)
    steps = torch.arange(rope.rotary_dim // 2, dtype=torch.float32)
    ramp = ((steps - low) / (high - low if high != low else 0.001)).clamp(0, 1)
    return plain / rope.factor * ramp + plain * (1 - ramp)
