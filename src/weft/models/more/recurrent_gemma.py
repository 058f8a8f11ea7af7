"""The real-gated linear recurrent unit of RecurrentGemma.

    x_TD --in--> [ y | x ] ;  causal conv over x (window state)
                   read, forget = sigmoid of x by head;  d = 8 forget softplus(rate)
                   h <- e^-d h + sqrt(1 - e^-2d) read x, times gelu(y) --out--> y_TD

Paper: Griffin (De et al., 2024). In transformers: ``RecurrentGemmaRglru``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from weft.families.more.recurrent_gemma import RgLru
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import HeadLinear, Linear, Projection, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.conv import causal_conv
from weft.tensor.ops.elementwise import activate, each
from weft.tensor.ops.mamba1 import mamba1


@dataclass(slots=True)
class RgLruBlock:
    """The real-gated linear recurrent unit. ``project``: rows y, x; ``conv``: [C, kernel]; ``gates`` [heads, B, 2 B]
    and ``gate_biases_HJ``: of the read and the forget gate; ``rates``: float32 [C].

    The recurrence is that of Mamba-1 with a state of one number, A = -1 and B = C = 1, so Mamba-1's kernels compute
    it. The kernels take a step before its softplus and push step times x; both are undone here.
    """

    shape: RgLru
    project: Projection
    conv: torch.Tensor
    conv_bias: torch.Tensor | None
    gates: HeadLinear
    gate_biases_HJ: torch.Tensor
    rates: torch.Tensor
    out: Linear

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        y_TC, x_TC = self.project(x_TD).chunk(2, dim=-1)
        x_TC = causal_conv(x_TC, self.conv, self.conv_bias, None, cache.state["conv"], inputs.runs)
        gates_THJ = self.gates(by_head(x_TC, self.shape.heads))
        read_THB, forget_THB = each(torch.sigmoid, (gates_THJ + self.gate_biases_HJ).float()).chunk(2, dim=-1)
        step_TC = 8.0 * forget_THB.flatten(1) * F.softplus(self.rates)
        step_TC = step_TC.clamp_min(1e-30)
        # The first token has nothing to forget, and its input is not scaled.
        share_TC = torch.where(inputs.positions_T[:, None] == 0, 1.0, (-each(torch.expm1, -2 * step_TC)).sqrt())
        pushed_TC = x_TC.float() * read_THB.flatten(1) * share_TC / step_TC
        channels, ones_T1 = step_TC.shape[1], step_TC.new_ones((len(step_TC), 1))
        state_SC1 = cache.state["recurrent"].flatten(1)[..., None]  # a view: its rows are dense
        nothing_C = step_TC.new_zeros(channels)
        h_TC = mamba1(
            pushed_TC,
            step_TC + each(torch.log, -each(torch.expm1, -step_TC)),
            step_TC.new_full((channels, 1), -1.0),
            ones_T1,
            ones_T1,
            nothing_C,
            nothing_C,
            state_SC1,
            inputs.runs,
            layer=cache.layer,
        )
        return self.out(inputs.asked_of(h_TC).to(x_TD.dtype) * activate(inputs.asked_of(y_TC), "gelu_tanh"))


def read_rg_lru(read: BlockReader, shape: RgLru, name: str) -> RgLruBlock:
    table = read.table(shape.table(read.hidden), name)
    gates = ("input", "recurrent")
    return RgLruBlock(
        shape,
        table.linear("project"),
        conv=table.conv(),
        conv_bias=table.get("conv.bias"),
        gates=HeadLinear.of(torch.cat([table.tensor(gate) for gate in gates], dim=-1)),
        gate_biases_HJ=torch.cat([table.tensor(f"{gate}.bias") for gate in gates], dim=-1),
        rates=table.tensor("rg_lru.recurrent_param"),
        out=table.linear("out"),
    )
