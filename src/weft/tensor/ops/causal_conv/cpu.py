"""causal_conv in torch.

Decode: windows [n, C, W] gathered, shifted, written back; one fused row of arithmetic for all runs.

Prefill: all prefill runs lie one after the other, each behind its own window, so that one sliding sum of K
shifted products serves all runs. Rows where a run's window meets the end of the previous run are computed too
and discarded; they are as finite as the inputs. Tokens go in tiles, so that the K passes of the sum stay in
cache.

    padded rows   [ w0 w0 w0 | x0 x0 x0 x0 x0 | w1 w1 w1 | x1 x1 ]      W = K-1 = 3
    y row i       = sum_k weight[k] * padded[i + k]                     belongs to the token at row i + W
    new window    = the last W rows of the run; of a tap, the W rows up to it
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

import torch
import torch.nn.functional as F

from weft.tensor.inputs import Runs
from weft.tensor.scratch import scratch
from weft.tensor.state_rows import decode_blocks, prefill_rows
from weft.units import PAD

TILE_BYTES = 1 << 20
"""Bytes of output per tile: the K passes over a tile then stay in the L2 cache."""


@dataclass(frozen=True, slots=True)
class PaddedLayout:
    """Rows of the padded buffer: of each token's own input, of each run's window, of each tap's window.
    ``tiles``: spans of tokens [a, b) with the padded rows [begin, end) that hold all their inputs."""

    rows: int
    token_rows: torch.Tensor
    window_rows_RW: torch.Tensor
    last_rows_RW: torch.Tensor
    tap_rows_XW: torch.Tensor
    tap_slots_X: torch.Tensor
    tiles: tuple[tuple[int, int, int, int], ...]


def causal_conv(x_TC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
                activation: Literal["silu"] | None, window_SCW: torch.Tensor, runs: Runs) -> torch.Tensor:
    y_TC = torch.empty(x_TC.shape, dtype=x_TC.dtype, device=x_TC.device)
    weight = weight_CK.float()
    bias = None if bias_C is None else bias_C.float()
    n = runs.decode_count
    if n:
        _decode(x_TC[:n], weight, bias, activation, window_SCW, runs, y_TC[:n])
    if n < runs.run_count:
        _prefill(x_TC[n:], weight.t().contiguous(), bias, activation, window_SCW, runs, y_TC[n:])
    return y_TC


def _finish(y_TC: torch.Tensor, bias_C: torch.Tensor | None,
            activation: Literal["silu"] | None) -> torch.Tensor:
    if bias_C is not None:
        y_TC.add_(bias_C)
    return F.silu(y_TC, inplace=True) if activation == "silu" else y_TC


def _decode(x_RC: torch.Tensor, weight_CK: torch.Tensor, bias_C: torch.Tensor | None,
            activation: Literal["silu"] | None, window_SCW: torch.Tensor, runs: Runs,
            out_RC: torch.Tensor) -> None:
    for rows in decode_blocks(runs, window_SCW):
        x = x_RC[rows.span]
        window_RCW = rows.read(window_SCW, "causal_conv.window")
        y = torch.addcmul((window_RCW.float() * weight_CK[:, :-1]).sum(-1), x.float(), weight_CK[:, -1])
        out_RC[rows.span] = _finish(y, bias_C, activation)
        shifted = torch.cat((window_RCW[:, :, 1:], x[:, :, None].to(window_SCW.dtype)), dim=2)
        rows.write_back(window_SCW, shifted)


def _prefill(x_TC: torch.Tensor, weight_KC: torch.Tensor, bias_C: torch.Tensor | None,
             activation: Literal["silu"] | None, window_SCW: torch.Tensor, runs: Runs,
             out_TC: torch.Tensor) -> None:
    width, channels = window_SCW.shape[2], x_TC.shape[1]
    tile_rows = max(16, TILE_BYTES // (4 * channels))
    key = f"causal_conv.{width}.{tile_rows}"
    if key not in runs.memo:
        runs.memo[key] = lay_out(runs, width, tile_rows)
    layout: PaddedLayout = runs.memo[key]
    rows = prefill_rows(runs, range(runs.decode_count, runs.run_count), "state_rows.prefill")
    padded = scratch.take("causal_conv.padded", (layout.rows, channels), torch.float32)
    padded.index_copy_(0, layout.token_rows, x_TC.float())
    window_RWC = rows.read(window_SCW, "causal_conv.window").transpose(1, 2).float()
    padded.index_copy_(0, layout.window_rows_RW.flatten(), window_RWC.reshape(-1, channels))
    rows.write_back(window_SCW, _windows(padded, layout.last_rows_RW))
    if layout.tap_slots_X.numel():
        window_SCW.index_copy_(0, layout.tap_slots_X,
                               _windows(padded, layout.tap_rows_XW).to(window_SCW.dtype))
    for first, last, begin, end in layout.tiles:
        count = end - begin - width
        y = scratch.take("causal_conv.y", (count, channels), torch.float32)
        torch.mul(padded[begin : begin + count], weight_KC[0], out=y)
        for k in range(1, width + 1):
            y.addcmul_(padded[begin + k : begin + k + count], weight_KC[k])
        activated = _finish(y, bias_C, activation)
        out_TC[first:last] = activated.index_select(0, layout.token_rows[first:last] - (begin + width))


def _windows(padded: torch.Tensor, rows_XW: torch.Tensor) -> torch.Tensor:
    """[X, C, W]: the chosen rows of each window, oldest first."""
    return padded[rows_XW].transpose(1, 2)


def lay_out(runs: Runs, width: int, tile_rows: int) -> PaddedLayout:
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
    tap_begins = torch.tensor([begins[tap.run] + tap.offset for tap in taps], dtype=torch.int64,
                              device=device)
    tiles = tuple((first, last, token_rows[first] - width, token_rows[last - 1] + 1)
                  for first in range(0, len(token_rows), tile_rows)
                  for last in (min(first + tile_rows, len(token_rows)),))
    return PaddedLayout(rows=row, token_rows=torch.tensor(token_rows, device=device),
                  window_rows_RW=torch.tensor(list(begins.values()), device=device)[:, None] + steps_W,
                  last_rows_RW=torch.tensor(ends, device=device)[:, None] - width + steps_W,
                  tap_rows_XW=tap_begins[:, None] + steps_W,
                  tap_slots_X=torch.tensor([tap.slot for tap in taps], dtype=torch.int64, device=device),
                  tiles=tiles)
