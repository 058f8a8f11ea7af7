"""The block of a leaky sum.

    x_TD --in--> [ v | g ];   h <- d h + (1 - d) v (recurrent state);   h silu(g) --out--> y_TD

The recurrence is that of Mamba-1 with a state of one number, A = -1 and B = C = 1: so its kernels are used. They
decay by e^-step and push step times x, so the step is softplus(-rate) and v is divided by it.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
import torch.nn.functional as F

from leaky_lm import LeakySum
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.mamba1 import mamba1


@dataclass(slots=True)
class LeakySumBlock:
    """``project``: rows v, g; ``rate``: float32 [channels]."""

    project: Linear
    rate: torch.Tensor
    out: Linear

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        v_TC, gate_TC = self.project(x_TD).chunk(2, dim=-1)
        push_C = torch.sigmoid(-self.rate) / F.softplus(-self.rate)
        ones_T1, nothing_C = push_C.new_ones(len(x_TD), 1), torch.zeros_like(self.rate)
        h_TC = mamba1(
            v_TC.float() * push_C,
            nothing_C.expand(len(x_TD), -1).contiguous(),
            nothing_C[:, None] - 1,
            ones_T1,
            ones_T1,
            nothing_C,
            -self.rate,
            cache.state["recurrent"].flatten(1)[..., None],
            inputs.runs,
            layer=cache.layer,
        )
        return self.out(inputs.asked_of(h_TC).to(x_TD.dtype) * F.silu(inputs.asked_of(gate_TC)))


def read_leaky_sum(read: BlockReader, shape: LeakySum, name: str) -> LeakySumBlock:
    table = read.table(shape.table(read.hidden), name)
    return LeakySumBlock(table.linear("project"), table.tensor("rate"), table.linear("out"))
