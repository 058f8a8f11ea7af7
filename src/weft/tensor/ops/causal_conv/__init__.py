"""Depthwise causal convolution over time, with its window as state."""

from __future__ import annotations

from typing import Literal

import torch

from weft.tensor import gpu
from weft.tensor.inputs import Runs
from weft.tensor.ops.causal_conv import cpu, native
from weft.tensor.state_rows import restored


def causal_conv(x_TC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
                activation: Literal["silu"] | None, window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    """``y[t, c] = act(bias[c] + sum_k weight[c, k] * x[t - (K-1) + k, c])`` within each run.

    ``x_TC`` [T, C] any float dtype; ``weight_CK`` [C, K], K >= 2; ``window_SCW`` [S, C, K-1]: the last K-1
    inputs of each slot, oldest first. The window is the history before the run (zeros if ``fresh``), and is
    updated in place to the run's own last inputs. Returns [T, C] in the dtype of ``x_TC``; sums are float32.

    Runs with slot PAD start from zeros and write nothing. A tap writes the window after ``offset`` tokens of
    its run. [0, n) in one run equals [0, k) then [k, n).

    Source: the causal conv of Mamba (Gu and Dao, 2023), and of LFM2's short convolution.
    """
    if runs.log is not None:
        def replay(logged_TC: torch.Tensor, again: Runs) -> torch.Tensor:
            return causal_conv(logged_TC, weight_CK, bias_C, activation, window_SCW, again)

        runs.log.note(replay, x_TC)
    if gpu.fits(x_TC, weight_CK, window_SCW):
        from weft.tensor.kernels import causal_conv as triton

        with restored(window_SCW, runs):
            return triton.causal_conv(x_TC, weight_CK, bias_C, activation, window_SCW, runs)
    if native.supported(x_TC, weight_CK, window_SCW):
        return native.causal_conv(x_TC, weight_CK, bias_C, activation, window_SCW, runs)
    return cpu.causal_conv(x_TC, weight_CK, bias_C, activation, window_SCW, runs)
