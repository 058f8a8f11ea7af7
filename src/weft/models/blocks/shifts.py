"""Rows of the tokens before, for convolutions whose kernels a token makes.

    x_TC -> x of this token, of the one before, of the one before that ..
            each from the last by a shift: a convolution of two, (1, 0), whose window is in the slot

The sum over them is of operators of torch, in float32, and rounds once.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass

import torch

from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.conv import causal_conv


@dataclass(slots=True)
class Shifts:
    """Shifts by a token. ``taps`` [C, 2]; ``reach``: tokens back. Windows are the parts "conv.1", "conv.2" .. of the
    state.
    """

    taps: torch.Tensor
    reach: int

    @classmethod
    def of(cls, channels: int, reach: int, like: torch.Tensor) -> Shifts:
        """Return the shifts of ``channels``, with taps of dtype and device of ``like``."""
        zeros_C = like.new_zeros(channels)
        return cls(torch.stack((zeros_C + 1, zeros_C), 1), reach)

    def __call__(self, x_TC: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> Iterator[torch.Tensor]:
        """Yield [T, C], float32: the rows of each token, then those of the tokens before it; zeros before a text."""
        yield x_TC.float()
        for number in range(1, self.reach + 1):
            x_TC = causal_conv(x_TC, self.taps, None, None, cache.state[f"conv.{number}"], inputs.runs)
            yield x_TC.float()
