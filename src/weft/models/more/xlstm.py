"""The matrix memory of xLSTM: values are added under their keys, weighted by an exponential gate.

    x_TD --in--> [ q | k | v | o ],  [ i | f ]     i and f: soft caps of one number for each head
    C <- sigmoid(f) C + e^i v k^T                  the memory, a matrix for each head
    n <- sigmoid(f) n + e^i k                      its normaliser
    m <- max(m + log sigmoid(f), i)                the largest input gate, forgotten likewise
    h = C q / (max(|n q|, 1) + floor e^m)          q is divided by sqrt(K)
    norm of each head (mean and variance), times sigmoid(o) --out--> y_TD

``recurrent`` [S, H, V + 1, K] has C, and n as its last line; ``max`` [S, 1, H] has m.

The paper keeps C and n divided by e^m, so that no exponential overflows. Caps bound the gates here, and
float32 holds the sums themselves. So m is only in the floor, and rounding it to few bits does no harm.

The recurrence of C and n is Mamba-2's with a step of log(1 + e^-f) and a rate of -1, so Mamba-2's kernels compute it,
with values followed by a 1 as x. The kernels push step times x, which is undone here.

Source: Beck et al., "xLSTM: Extended Long Short-Term Memory" (2024), section 2.3, and "xLSTM 7B" (2025); transformers
``xLSTMLayer``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.families.more.xlstm import MatrixLstm
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Projection, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.elementwise import each
from weft.tensor.ops.mamba2 import mamba2
from weft.tensor.ops.running_max import running_max


@dataclass(slots=True)
class MatrixLstmBlock:
    """Matrix memory. ``project``: rows q, k, v, o; ``gates``: rows i, f; ``norm``: [heads * V]."""

    shape: MatrixLstm
    project: Projection
    gates: Projection
    norm: torch.Tensor
    out: Projection

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape, runs = self.shape, inputs.runs
        keys, values = shape.heads * shape.key_dim, shape.heads * shape.value_dim
        q, k, v, gate_TC = torch.split(self.project(x_TD), [keys, keys, values, values], dim=-1)
        enter_TH, keep_TH = (shape.gate_cap * each(torch.tanh, self.gates(x_TD).float() / shape.gate_cap)).chunk(
            2, dim=-1
        )
        largest_TH = running_max(each(F.logsigmoid, keep_TH), enter_TH, cache.state["max"], runs, layer=cache.layer)
        pushed_TH1 = (each(torch.exp, enter_TH) / each(F.softplus, -keep_TH))[..., None]
        lines_THP = torch.cat((by_head(v, shape.heads).float() * pushed_TH1, pushed_TH1), dim=-1)
        nothing_H = keep_TH.new_zeros(shape.heads)
        read_THP = mamba2(
            lines_THP,
            -keep_TH,
            nothing_H - 1,
            by_head(k, shape.heads).float(),
            by_head(q, shape.heads).float() * shape.key_dim**-0.5,
            nothing_H,
            nothing_H,
            cache.state["recurrent"],
            runs,
            layer=cache.layer,
        )
        output_rows = inputs.asked_of
        h_THV, norm_TH1 = torch.split(output_rows(read_THP), [shape.value_dim, 1], dim=-1)
        h_THV = h_THV / (
            norm_TH1.abs().clamp_min(1.0) + shape.floor * each(torch.exp, output_rows(largest_TH))[..., None]
        )
        h_THV = F.layer_norm(h_THV, (shape.value_dim,), eps=shape.norm_eps)
        return self.out(h_THV.flatten(1).to(x_TD.dtype) * self.norm * each(torch.sigmoid, output_rows(gate_TC)))


def read_matrix_lstm(read: BlockReader, shape: MatrixLstm, name: str) -> MatrixLstmBlock:
    table = read.table(shape.table(read.hidden), name)
    return MatrixLstmBlock(
        shape, table.linear("project"), table.linear("gates"), table.tensor("norm"), table.linear("out")
    )
