"""Depthwise causal convolution over time, with its window as state; by itself, and between the gates of LFM2.

    padded rows   [ w0 w0 w0 | x0 x0 x0 x0 x0 | w1 w1 w1 | x1 x1 ]      W = K-1 = 3
    y row i       = sum_k weight[k] * padded[i + k]                     belongs to the token at row i + W
    new window    = the last W rows of the run; of a tap, the W rows up to it

In torch, prefill runs are concatenated, each after its own window: one sliding sum of K shifted products serves all
runs. The C++ kernel is csrc/conv.hpp.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any, Literal

import torch
import torch.nn.functional as F

from weft.tensor import native
from weft.tensor.fused_block import FusedBlock, FusedLayer
from weft.tensor.inputs import Runs
from weft.tensor.op import UNFIT, Unfit, op, recurrent_op
from weft.tensor.replay_log import Replay
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import decode_blocks, prefill_rows
from weft.units import PAD

_NO_GATE = (0, 0, 0, 0)
_TILE_BYTES = 1 << 20
"""Bytes of output per tile: the K passes over a tile then stay in the L2 cache."""


@recurrent_op("weft.tensor.kernels.causal_conv")
def causal_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: Literal["silu"] | None,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    """Return ``y[t, c] = act(bias[c] + sum_k weight[c, k] * x[t - (K-1) + k, c])`` within each run.

    ``x_TC`` [T, C] any float dtype; ``weight_CK`` [C, K], K >= 2; ``window_SCW`` [S, C, K-1]: the last K-1
    inputs of each slot, oldest first. Returns [T, C] in the dtype of ``x_TC``; sums are float32.

    Source: the causal conv of Mamba (Gu and Dao, 2023), and of LFM2's short convolution.
    """
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    weight = weight_CK.float()
    bias = None if bias_C is None else bias_C.float()
    n = runs.decode_count
    if n:
        _decode(x_TC[:n], weight, bias, activation, window_SCW, runs, y_TC[:n])
    if n < runs.run_count:
        _prefill(x_TC[n:], weight.t().contiguous(), bias, activation, window_SCW, runs, y_TC[n:])
    return y_TC


def in_cpp_takes(x_TC: torch.Tensor, weight_CK: torch.Tensor, window_SCW: torch.Tensor) -> bool:
    return (
        native.fits(x_TC)
        and weight_CK.dtype in native.DTYPES
        and window_SCW.dtype in native.DTYPES
        and weight_CK.shape[0] % native.LANES == 0
        and x_TC.stride(1) == 1
        and 1 <= window_SCW.shape[2] < native.KERNEL_MAX
    )


@causal_conv.in_cpp
def _causal_conv(
    x_TC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: Literal["silu"] | None,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> torch.Tensor | Unfit:
    if not in_cpp_takes(x_TC, weight_CK, window_SCW):
        return UNFIT
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype)
    native.extension().conv(
        native.runs_of(runs),
        native.plain_rows_of(x_TC),
        _NO_GATE,
        _NO_GATE,
        weights_of(weight_CK, bias_C),
        activation == "silu",
        y_TC.data_ptr(),
        native.slots_of(window_SCW),
        x_TC.shape[1],
    )
    return y_TC


def weights_of(weight_CK: torch.Tensor, bias_C: torch.Tensor | None) -> Any:
    """Return the arguments of the extension: addresses of weight and bias, dtype, kernel size."""
    assert weight_CK.is_contiguous(), f"a conv weight of strides {weight_CK.stride()} is not dense"
    assert bias_C is None or (bias_C.dtype == weight_CK.dtype and bias_C.is_contiguous())
    return (
        weight_CK.data_ptr(),
        0 if bias_C is None else bias_C.data_ptr(),
        native.DTYPES[weight_CK.dtype],
        weight_CK.shape[1],
    )


@dataclass(frozen=True, slots=True)
class _Padded:
    """Rows of the padded buffer: of each token's own input, of each run's window, of each tap's window.
    ``tiles``: spans of tokens [a, b) with the padded rows [begin, end) that hold all their inputs."""

    rows: int
    token_rows: torch.Tensor
    window_rows_RW: torch.Tensor
    last_rows_RW: torch.Tensor
    tap_rows_XW: torch.Tensor
    tap_slots_X: torch.Tensor
    tiles: tuple[tuple[int, int, int, int], ...]


def _finish(y_TC: torch.Tensor, bias_C: torch.Tensor | None, activation: Literal["silu"] | None) -> torch.Tensor:
    if bias_C is not None:
        y_TC.add_(bias_C)
    return F.silu(y_TC, inplace=True) if activation == "silu" else y_TC


def _decode(
    x_RC: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: Literal["silu"] | None,
    window_SCW: torch.Tensor,
    runs: Runs,
    out_RC: torch.Tensor,
) -> None:
    for rows in decode_blocks(runs, window_SCW):
        x = x_RC[rows.span]
        window_RCW = rows.read(window_SCW, "causal_conv.window")
        y = torch.addcmul((window_RCW.float() * weight_CK[:, :-1]).sum(-1), x.float(), weight_CK[:, -1])
        out_RC[rows.span] = _finish(y, bias_C, activation)
        shifted = torch.cat((window_RCW[:, :, 1:], x[:, :, None].to(window_SCW.dtype)), dim=2)
        rows.write_back(window_SCW, shifted)


def _prefill(
    x_TC: torch.Tensor,
    weight_KC: torch.Tensor,
    bias_C: torch.Tensor | None,
    activation: Literal["silu"] | None,
    window_SCW: torch.Tensor,
    runs: Runs,
    out_TC: torch.Tensor,
) -> None:
    width, channels = window_SCW.shape[2], x_TC.shape[1]
    tile_rows = max(16, _TILE_BYTES // (4 * channels))
    layout = runs.once(f"causal_conv.{width}.{tile_rows}", lambda: _lay_out(runs, width, tile_rows))
    rows = prefill_rows(runs, range(runs.decode_count, runs.run_count), "state_rows.prefill")
    padded = scratch.take("causal_conv.padded", (layout.rows, channels), torch.float32)
    padded.index_copy_(0, layout.token_rows, x_TC.float())
    window_RWC = rows.read(window_SCW, "causal_conv.window").transpose(1, 2).float()
    padded.index_copy_(0, layout.window_rows_RW.flatten(), window_RWC.reshape(-1, channels))
    rows.write_back(window_SCW, _windows(padded, layout.last_rows_RW))
    if layout.tap_slots_X.numel():
        window_SCW.index_copy_(0, layout.tap_slots_X, _windows(padded, layout.tap_rows_XW).to(window_SCW.dtype))
    # The K passes over a tile stay in the L2 cache.
    for first, last, begin, end in layout.tiles:
        count = end - begin - width
        y = scratch.take("causal_conv.y", (count, channels), torch.float32)
        torch.mul(padded[begin : begin + count], weight_KC[0], out=y)
        for k in range(1, width + 1):
            y.addcmul_(padded[begin + k : begin + k + count], weight_KC[k])
        activated = _finish(y, bias_C, activation)
        # Rows where a window meets the run before it are computed too, and left out here. They are finite.
        out_TC[first:last] = activated.index_select(0, layout.token_rows[first:last] - (begin + width))


def _windows(padded: torch.Tensor, rows_XW: torch.Tensor) -> torch.Tensor:
    """Return [X, C, W]: the chosen rows of each window, oldest first."""
    return padded[rows_XW].transpose(1, 2)


def _lay_out(runs: Runs, width: int, tile_rows: int) -> _Padded:
    device = runs.slots_R.device
    steps_W = torch.arange(width, device=device)
    begins: dict[int, int] = {}
    token_rows: list[int] = []
    ends = []
    row = 0
    for run in range(runs.decode_count, runs.run_count):
        begins[run] = row
        row += width + runs.lengths[run]
        token_rows.extend(range(begins[run] + width, row))
        ends.append(row)
    taps = [tap for tap in runs.taps if tap.slot != PAD and tap.run in begins]
    tap_begins = torch.tensor([begins[tap.run] + tap.offset for tap in taps], dtype=torch.int64, device=device)
    tiles = tuple(
        (first, last, token_rows[first] - width, token_rows[last - 1] + 1)
        for first in range(0, len(token_rows), tile_rows)
        for last in (min(first + tile_rows, len(token_rows)),)
    )
    return _Padded(
        rows=row,
        token_rows=torch.tensor(token_rows, device=device),
        window_rows_RW=torch.tensor(list(begins.values()), device=device)[:, None] + steps_W,
        last_rows_RW=torch.tensor(ends, device=device)[:, None] - width + steps_W,
        tap_rows_XW=tap_begins[:, None] + steps_W,
        tap_slots_X=torch.tensor([tap.slot for tap in taps], dtype=torch.int64, device=device),
        tiles=tiles,
    )


@op("weft.tensor.kernels.causal_conv")
def short_conv(
    projected_TJ: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> torch.Tensor:
    """Return ``C * conv(B * x)`` [T, C] of ``projected_TJ`` [T, 3 C], columns B, C, x: LFM2's layer between its two
    projections.

    Weights, window and runs as in ``causal_conv``; the window holds B * x. Values between the steps are
    rounded to the dtype of ``projected_TJ``.

    Source: transformers ``Lfm2ShortConv``.
    """
    b, c, x = projected_TJ.chunk(3, dim=-1)
    return c * causal_conv(b * x, weight_CK, bias_C, None, window_SCW, runs)


def centred_short_conv(
    projected_TJ: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None, runs: Runs
) -> torch.Tensor:
    """Return ``short_conv`` of runs that are complete texts: the convolution of a token reads ``K // 2`` tokens before
    it, and the rest of K after it. There are zeros before a run and after it.

    Source: transformers ``Lfm2BidirectionalShortConv``.
    """
    b, c, x = projected_TJ.chunk(3, dim=-1)
    mixed_TC, out_TC = b * x, torch.zeros_like(c)
    channels, kernel = weight_CK.shape
    for run in range(runs.run_count):
        rows = slice(runs.offsets[run], runs.offsets[run] + runs.lengths[run])
        if runs.starts[run] == PAD or not runs.lengths[run]:
            continue
        padded_1CL = F.pad(mixed_TC[rows].T[None].float(), (kernel // 2, kernel - 1 - kernel // 2))
        bias = None if bias_C is None else bias_C.float()
        convolved_1CL = F.conv1d(padded_1CL, weight_CK.float()[:, None], bias, groups=channels)
        out_TC[rows] = convolved_1CL[0].T.to(out_TC.dtype)
    return c * out_TC


@short_conv.in_cpp
def _short_conv(
    projected_TJ: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    window_SCW: torch.Tensor,
    runs: Runs,
) -> torch.Tensor | Unfit:
    if not in_cpp_takes(projected_TJ, weight_CK, window_SCW):
        return UNFIT
    tokens, channels = projected_TJ.shape[0], weight_CK.shape[0]
    y_TC = torch.empty((tokens, channels), dtype=projected_TJ.dtype)
    # A verify run logs only B and x: C gates the output and reaches no state.
    if runs.log is not None:
        rows = projected_TJ[runs.log.first : runs.log.first + runs.log.rows]
        room = runs.log.room(_replay(weight_CK, bias_C, window_SCW), 2 * channels, projected_TJ.dtype)
        torch.cat((rows[:, :channels], rows[:, 2 * channels :]), dim=1, out=room)
    address, stride, element_stride, dtype = native.plain_rows_of(projected_TJ)
    b, c, x = ((address + i * channels * projected_TJ.itemsize, stride, element_stride, dtype) for i in range(3))
    native.extension().conv(
        native.runs_of(runs),
        x,
        b,
        c,
        weights_of(weight_CK, bias_C),
        False,
        y_TC.data_ptr(),
        native.slots_of(window_SCW),
        channels,
    )
    return y_TC


def _replay(weight_CK: torch.Tensor, bias_C: torch.Tensor | None, window_SCW: torch.Tensor) -> Replay:
    def replay(logged_TJ: torch.Tensor, again: Runs) -> None:
        channels = weight_CK.shape[0]
        dropped_TC = torch.empty((logged_TJ.shape[0], channels), dtype=logged_TJ.dtype)
        b, x = (native.plain_rows_of(logged_TJ[:, first : first + channels]) for first in (0, channels))
        native.extension().conv(
            native.runs_of(again),
            x,
            b,
            _NO_GATE,
            weights_of(weight_CK, bias_C),
            False,
            dropped_TC.data_ptr(),
            native.slots_of(window_SCW),
            channels,
        )

    return replay


def staged(
    fused: FusedBlock,
    x_TD: torch.Tensor,
    weight_CK: torch.Tensor,
    bias_C: torch.Tensor | None,
    window_SCW: torch.Tensor,
) -> FusedLayer | None:
    """Return the same layer for the fused decoder (``weft.models.fused_decoder``)."""
    if fused.bound(x_TD) is None or not in_cpp_takes(x_TD, weight_CK, window_SCW):
        return None
    return FusedLayer(fused, 1, conv=weights_of(weight_CK, bias_C), first=native.slots_of(window_SCW))
