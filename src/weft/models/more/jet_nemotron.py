"""Jet-Nemotron's delta net: v passes a convolution whose kernel each token makes of the stream.

    x_TD --project--> [ q | k | v | z | b | a | r ]        silu over q and k, which no convolution sees
    K    = kernels silu(r)                                 by channel and place, the oldest first
    v_t  = silu(K_t0 v_(t-3) + K_t1 v_(t-2) + K_t2 v_(t-1) + K_t3 v_t)
    delta rule over (q, k, v, g, beta) (recurrent state), norm per head, times silu(z) --out--> y_TD

Values of the tokens before come one by one (``blocks.shifts``).

Source: Gu et al., "Jet-Nemotron" (2025), section 2.3, and the released ``jet_block.py``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch
import torch.nn.functional as F

from weft.families.more.jet_nemotron import DynamicDelta
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, by_head
from weft.models.blocks.shifts import Shifts
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.delta_rule import delta_gates, delta_rule
from weft.tensor.ops.norm import rms_norm


def by_place(rows: torch.Tensor, kernel: int) -> torch.Tensor:
    """Return rows place by place that are stored channel by channel, ``kernel`` places each. ``rows``: [channels *
    kernel, ...] -> the same shape.
    """
    return rows.reshape(-1, kernel, *rows.shape[1:]).transpose(0, 1).flatten(0, 1)


@dataclass(slots=True)
class DynamicDeltaBlock:
    """Jet-Nemotron's delta net. ``kernels``: from the bottleneck to [places x value_width], with its bias; ``decay``:
    -exp(A_log), float32 [heads]; ``dt_bias``: float32 [heads]; ``norm``: [V], shared by the heads.
    """

    shape: DynamicDelta
    project: Linear
    kernels: Linear
    decay: torch.Tensor
    dt_bias: torch.Tensor
    norm: torch.Tensor
    norm_eps: float
    out: Linear
    _shifts: Shifts = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._shifts = Shifts.of(self.shape.heads * self.shape.v_dim, self.shape.conv_kernel - 1, self.norm)

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape, heads = self.shape, self.shape.heads
        keys, values = heads * shape.k_dim, heads * shape.v_dim
        q_TC, k_TC, v_TC, z_TC, b_TH, a_TH, r_TR = torch.split(
            self.project(x_TD), [keys, keys, values, values, heads, heads, shape.kernel_rank], dim=-1
        )
        v_TC = self._convolved(v_TC, self.kernels(F.silu(r_TR)), inputs, cache)
        g_TH, beta_TH = delta_gates(a_TH, self.dt_bias, self.decay, b_TH)
        q, k, v = (by_head(part, heads) for part in (F.silu(q_TC), F.silu(k_TC), v_TC))
        o_THV = delta_rule(
            q, k, v, g_TH, beta_TH, cache.state["recurrent"], inputs.runs, scale=shape.k_dim**-0.5, layer=cache.layer
        )
        o_THV = rms_norm(o_THV, self.norm, self.norm_eps, gate=by_head(z_TC, heads))
        return self.out(inputs.asked_of(o_THV.flatten(1)))

    def _convolved(
        self, v_TC: torch.Tensor, kernels_TJ: torch.Tensor, inputs: StepInputs, cache: LayerCache
    ) -> torch.Tensor:
        *earlier, own = kernels_TJ.float().chunk(self.shape.conv_kernel, dim=-1)
        seen = self._shifts(v_TC, inputs, cache)
        y_TC = own * next(seen)
        for kernel_TC, seen_TC in zip(reversed(earlier), seen, strict=True):
            y_TC = torch.addcmul(y_TC, kernel_TC, seen_TC)
        return F.silu(y_TC).to(v_TC.dtype)


def read_dynamic_delta(read: BlockReader, shape: DynamicDelta, name: str) -> DynamicDeltaBlock:
    table = read.table(shape.table(read.hidden), name)
    order, [stored] = partial(by_place, kernel=shape.conv_kernel), table.table["kernels"]
    bias = table.tensor("kernels.bias")
    kernels = table.linear("kernels", orders={stored.name: order}, bias=bias if bias.is_meta else order(bias))
    return DynamicDeltaBlock(
        shape,
        table.linear("project"),
        kernels,
        table.decay(),
        table.tensor("dt_bias"),
        table.tensor("norm"),
        shape.norm_eps,
        table.linear("out"),
    )
