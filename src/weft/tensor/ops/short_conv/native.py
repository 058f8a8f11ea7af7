"""short_conv by ``csrc/conv.inl``, with its gates."""

from __future__ import annotations

import torch

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import Runs
from weft.tensor.ops.causal_conv.native import NO_GATE, weights_of
from weft.tensor.ops.causal_conv.native import supported as conv_supported
from weft.tensor.replay_log import Replay


def supported(projected_TJ: torch.Tensor, weight_CK: torch.Tensor, window_SCW: torch.Tensor) -> bool:
    return conv_supported(projected_TJ, weight_CK, window_SCW)


def short_conv(projected_TJ: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
               window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    tokens, channels = projected_TJ.shape[0], weight_CK.shape[0]
    y_TC = torch.empty((tokens, channels), dtype=projected_TJ.dtype)
    if runs.log is not None:
        rows = projected_TJ[runs.log.first:runs.log.first + runs.log.rows]
        room = runs.log.room(_replay(weight_CK, bias_C, window_SCW), 2 * channels, projected_TJ.dtype)
        torch.cat((rows[:, :channels], rows[:, 2 * channels:]), dim=1, out=room)
    address, stride, one, dtype = native.plain_rows_of(projected_TJ)
    b, c, x = ((address + i * channels * projected_TJ.itemsize, stride, one, dtype) for i in range(3))
    native.extension().conv(native.runs_of(runs), x, b, c, weights_of(weight_CK, bias_C), False,
                            y_TC.data_ptr(), native.slots_of(window_SCW), channels)
    return y_TC


def _replay(weight_CK: torch.Tensor, bias_C: torch.Tensor | None, window_SCW: torch.Tensor) -> Replay:
    def replay(logged_TJ: torch.Tensor, again: Runs) -> None:
        channels = weight_CK.shape[0]
        dropped_TC = torch.empty((logged_TJ.shape[0], channels), dtype=logged_TJ.dtype)
        b, x = (native.plain_rows_of(logged_TJ[:, at:at + channels]) for at in (0, channels))
        native.extension().conv(native.runs_of(again), x, b, NO_GATE, weights_of(weight_CK, bias_C), False,
                                dropped_TC.data_ptr(), native.slots_of(window_SCW), channels)

    return replay


def log(dtype: torch.dtype, weight_CK: torch.Tensor, bias_C: torch.Tensor | None, window_SCW: torch.Tensor,
        runs: Runs) -> None:
    """The next fused call with this window and ``runs`` copies its projection into the log of the step."""
    channels = weight_CK.shape[0]
    native.log_projected(runs, window_SCW, 2 * channels, (channels, channels), dtype,
                         _replay(weight_CK, bias_C, window_SCW))


def run_fused(fused: FusedBlock, x_TD: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
              window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor | None:
    bound = fused.bound(x_TD)
    if bound is None or not supported(x_TD, weight_CK, window_SCW):
        return None
    out_TD = fused.out(x_TD)
    log(x_TD.dtype, weight_CK, bias_C, window_SCW, runs)
    bound.short_conv(native.runs_of(runs), native.projected_of(x_TD), weights_of(weight_CK, bias_C),
                     native.slots_of(window_SCW), out_TD.data_ptr())
    return out_TD


def staged(fused: FusedBlock, x_TD: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
           window_SCW: torch.Tensor) -> FusedLayer | None:
    if fused.bound(x_TD) is None or not supported(x_TD, weight_CK, window_SCW):
        return None
    return FusedLayer(fused, 1, conv=weights_of(weight_CK, bias_C), first=native.slots_of(window_SCW))
