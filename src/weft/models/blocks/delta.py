"""Delta nets: a projection, a convolution, the delta rule, a projection.

    gated delta net   x_TD --in--> [ q | k | v | z | b | a ]           rows of one matrix, in this order
                                     causal conv + silu over q k v (window state)
                                     beta = sigmoid(b) (times 2 in OLMo)
                                     g = -exp(A_log) * softplus(a + dt_bias)
                                     delta rule over (q, k, v, g, beta) (recurrent state, fp32)
                                     norm per head, times silu(z) --out--> y_TD

    Kimi delta        x_TD --in--> [ q | k | v | b | f | g ]           f and g: bottlenecks as wide as a head
                                     decay = -exp(A_log) * softplus(F f + dt_bias), per head and channel
                                     norm per head, times sigmoid(G g) --out--> y_TD

Papers: Gated Delta Networks (Yang et al., 2024); Kimi Linear (Kimi Team, 2025). In transformers:
``Qwen3NextGatedDeltaNet``, ``KimiLinearDeltaAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import torch

from weft.families.mixers.delta import GatedDelta, KimiDelta
from weft.families.tensors import Dim, Units
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, Projection, by_head
from weft.models.blocks.recurrent import RecurrentBlock
from weft.models.weights import Order
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.delta_rule import delta_gates, delta_rule
from weft.tensor.ops.elementwise import each
from weft.tensor.ops.norm import rms_norm
from weft.tensor.ops.recurrent_layers import GATED_DELTA, GatedDeltaWeights


def ungroup_qkvz(weight: torch.Tensor, shape: GatedDelta) -> torch.Tensor:
    """Return all q, all k, all v, all z of Qwen3-Next's projection, which is stored by key head, each group [q | k |
    its v heads | their z]. ``weight``: [2 key_width + 2 value_width, ...] -> the same shape.
    """
    value = shape.v_heads // shape.k_heads * shape.v_dim
    grouped = weight.reshape(shape.k_heads, 2 * shape.k_dim + 2 * value, *weight.shape[1:])
    return torch.cat(
        [part.flatten(0, 1) for part in torch.split(grouped, [shape.k_dim, shape.k_dim, value, value], dim=1)]
    )


def ungroup_ba(weight: torch.Tensor, shape: GatedDelta) -> torch.Tensor:
    """Return the rows of beta and decay in order, as ``ungroup_qkvz``: [2 v_heads, ...], all b and then all a."""
    grouped = weight.reshape(shape.k_heads, 2, shape.v_heads // shape.k_heads, *weight.shape[1:])
    return grouped.transpose(0, 1).reshape(weight.shape)


@dataclass(slots=True)
class KimiDeltaBlock:
    """Kimi delta attention. ``conv``: [3 width, kernel]; ``decay``: -exp(A_log), float32 [heads]; ``dt_bias``: float32
    [width]; ``forget`` and ``gate``: from their bottleneck to the width, None for wide ones, which are rows of
    ``project``; ``norm``: [head_dim], shared by the heads.
    """

    shape: KimiDelta
    project: Projection
    conv: torch.Tensor
    decay: torch.Tensor
    dt_bias: torch.Tensor
    forget: Linear | None
    gate: Linear | None
    norm: torch.Tensor
    norm_eps: float
    out: Linear

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape, runs = self.shape, inputs.runs
        heads, width = shape.heads, shape.width
        inner = [width if wide else shape.head_dim for wide in (shape.wide_forget, shape.wide_gate)]
        qkv_TC, b_TH, forget, gate = torch.split(self.project(x_TD), [3 * width, heads, *inner], dim=-1)
        forget_TC = forget if self.forget is None else self.forget(forget)
        gate_TC = gate if self.gate is None else self.gate(gate)
        qkv_TC = causal_conv(qkv_TC, self.conv, None, "silu", cache.state["conv"], runs)
        q, k, v = (by_head(part, heads) for part in qkv_TC.chunk(3, dim=-1))
        g_TC, beta_TH = delta_gates(forget_TC, self.dt_bias, self.decay, b_TH, floor=shape.decay_floor)
        o_THV = delta_rule(
            q,
            k,
            v,
            by_head(g_TC, heads),
            beta_TH,
            cache.state["recurrent"],
            runs,
            scale=shape.head_dim**-0.5,
            layer=cache.layer,
        )
        # float32 until the one rounding: a norm in the model's dtype, as elsewhere, would round twice.
        gate_THV = each(torch.sigmoid, by_head(gate_TC, heads).float())
        o_THV = rms_norm(o_THV, self.norm, self.norm_eps).float() * gate_THV
        return self.out(inputs.asked_of(o_THV.flatten(1)).to(x_TD.dtype))


def read_gated_delta(
    read: BlockReader, shape: GatedDelta, name: str, *, eps: float | None = None, **names: Any
) -> RecurrentBlock:
    """Read a gated delta net. ``eps``: of the gated norm, if it differs. ``names``: as ``tensors.gated_delta`` takes
    them. Rows that are grouped by key head are put in the order of the others.
    """
    if read.source.has(f"{name}.gate_proj.weight"):  # GigaChat's, in GGUF files
        names = {"names": "fused", "gate": "gate_proj"}
    if names.get("names") == "joined" and not read.source.has(f"{name}.in_proj.weight"):
        names = {}  # transformers' own names
    table = read.table(shape.table(read.hidden, **names), name)
    conv = table.qkv_conv() if names.get("names") == "each" else table.conv()
    project = table.linear(
        "project",
        orders={
            "in_proj_qkvz.weight": lambda rows: ungroup_qkvz(rows, shape),
            "in_proj_ba.weight": lambda rows: ungroup_ba(rows, shape),
        },
    )
    _note_other_rows(read, shape, name, project, names.get("names", "fused"))
    weights = GatedDeltaWeights(
        conv, table.decay(), table.tensor("dt_bias"), table.tensor("norm"), read.eps if eps is None else eps, shape
    )
    return RecurrentBlock(GATED_DELTA, weights, project, table.linear("out"))


def _note_other_rows(read: BlockReader, shape: GatedDelta, name: str, project: Linear, stored: str) -> None:
    """Note the rows for adapters, which may name the projection as Qwen3.5 or as Qwen3-Next stores it, independent of
    this file.
    """
    orders: dict[str, Order] = {
        "in_proj_qkvz.weight": lambda rows: ungroup_qkvz(rows, shape),
        "in_proj_ba.weight": lambda rows: ungroup_ba(rows, shape),
    }
    for spelled in ("fused", "by_key_head"):
        first = 0
        for tensor in shape.table(read.hidden, names=spelled)["project"]:
            rows, columns = tensor.shape(read.source.place)
            if stored != "each" and spelled != stored:
                read.source.note(
                    f"{name}.{tensor.name}",
                    project,
                    rows,
                    columns,
                    first=first,
                    order=orders.get(tensor.name),
                    tensor=tensor,
                )
            first += rows


def read_kimi_delta(read: BlockReader, shape: KimiDelta, name: str, *, flat: bool = False) -> KimiDeltaBlock:
    """Read Kimi delta attention. ``flat``: decays are stored as a row of heads, which may have rows after them (Kimi
    K3's has as many as a head has channels).
    """
    forget = "forget_gate." if read.source.has(f"{name}.forget_gate.A_log") else ""
    heads = Units(shape.heads)
    own, stored = heads.span(read.source.place), read.source.stored_rows(f"{name}.{forget}A_log")
    longer = flat and stored > own.total
    decays: tuple[Dim, ...] = ((stored,) if longer else (heads,)) if flat else ()
    table = read.table(shape.table(read.hidden, forget=forget, out=read.out_name(name), decays=decays), name)
    decay_H = table.decay().flatten()
    return KimiDeltaBlock(
        shape,
        table.linear("project"),
        conv=table.qkv_conv(),
        decay=read.source.cut(decay_H, own.begin, own.count) if longer else decay_H,
        dt_bias=table.tensor("dt_bias"),
        forget=None if shape.wide_forget else table.linear("forget"),
        gate=None if shape.wide_gate else table.linear("gate"),
        norm=table.tensor("norm"),
        norm_eps=read.eps,
        out=table.linear("out"),
    )
