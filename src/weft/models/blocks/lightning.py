"""Lightning attention: a state for each head, which decays at the head's rate.

    x_TD --in--> [ q | k | v | g ];  silu over q k v, or norm and rotary of q k (Ling 2.5)
                   S <- e^-slope S + v k^T,  y = S q (recurrent state)
                   norm over (groups of) heads, times sigmoid(g) --out--> y_TD

Paper: Lightning Attention-2 (Qin et al., 2024). In transformers: ``MiniMaxLightningAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from typing import Any

import torch
import torch.nn.functional as F

from weft.errors import CheckpointError
from weft.families.mixers.lightning import Lightning
from weft.families.tensors import Units
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, Norm, Projection, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.elementwise import each, rotary
from weft.tensor.ops.mamba2 import mamba2

RMS_EPS = 1e-6
"""Epsilon of the norm inside lightning attention, independent of the epsilon of other norms in config.json."""


@dataclass(slots=True)
class LightningBlock:
    """Lightning attention. ``project``: rows q, k, v, gate; ``slopes``: float32 [heads]; ``norm``: over all heads, or
    groups of them; ``q_norm``, ``k_norm``: over a head, if ``shape.qk_norm``.

    The recurrence is that of Mamba-2 with every step 1, so Mamba-2's kernels compute it, with values for x, keys for B
    and queries for C.
    """

    shape: Lightning
    project: Linear
    slopes: torch.Tensor
    norm: Projection
    out: Linear
    q_norm: Norm | None = None
    k_norm: Norm | None = None

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape, heads, width = self.shape, self.shape.heads, self.shape.heads * self.shape.head_dim
        qkv_TC, gate_TC = torch.split(self.project(x_TD), [3 * width, width], dim=-1)
        qkv_TC = F.silu(qkv_TC) if shape.silu else qkv_TC
        q, k, v = (by_head(part, heads) for part in qkv_TC.chunk(3, dim=-1))
        if self.q_norm is not None and self.k_norm is not None:
            q, k = self.q_norm(q), self.k_norm(k)
        if cos_sin is not None:
            q, k = rotary(q, k, *cos_sin)
        if shape.scale != 1.0:
            q = q * shape.scale
        nothing_H = torch.zeros_like(self.slopes)
        y_THP = mamba2(
            v,
            v.new_zeros(v.shape[:2]),
            -self.slopes,
            k,
            q,
            nothing_H,
            nothing_H,
            cache.state["recurrent"],
            inputs.runs,
            dt_limit=(1.0, 1.0),
            layer=cache.layer,
        )
        y_TC = self.norm(inputs.asked_of(y_THP.flatten(1)))
        return self.out(each(torch.sigmoid, inputs.asked_of(gate_TC)) * y_TC)


def ungroup_qkv(weight: torch.Tensor, heads: int) -> torch.Tensor:
    """Return all q, all k, all v of rows that are stored head by head as [q | k | v]. ``weight``: [3 heads * D, ...]
    -> the same shape.
    """
    return weight.reshape(heads, 3, -1, *weight.shape[1:]).transpose(0, 1).reshape(weight.shape)


def read_lightning(
    read: BlockReader, shape: Lightning, name: str, *, eps: float | None = RMS_EPS, **names: Any
) -> LightningBlock:
    """Read lightning attention. ``eps``: of the norms inside, None for that of other norms. ``names``: as
    ``tensors.lightning`` takes them.
    """
    eps = read.eps if eps is None else eps
    source, table = read.source, read.table(shape.table(read.hidden, **names), name)
    heads = Units(shape.heads).span(source.place)
    all_slopes = torch.exp2(-8.0 * torch.arange(1, heads.total + 1) / heads.total) * shape.factor
    slopes = all_slopes[heads.begin : heads.begin + heads.count].to(source.device)
    norm = table.norm("norm", eps)
    source.leave(f"{name}.slope_rate", all_slopes, "num_attention_heads, num_hidden_layers")
    for derived in ("query_decay", "key_decay", "diagonal_decay"):  # derived from the slopes, for blocks of some size
        source.leave(f"{name}.{derived}")
    project = table.linear("project", orders={"qkv_proj.weight": lambda rows: ungroup_qkv(rows, shape.heads)})
    groups, ranks = shape.norm_groups, source.place.size
    of_groups: Projection = replace(norm, group_size=len(norm.weight) * ranks // groups)
    if source.share is not None and groups % ranks:
        if ranks % groups:
            raise CheckpointError(
                f"--tp is {ranks}, and the norm of lightning attention has {groups} groups: one must divide the other",
                param="--tp",
            )
        of_groups = source.share.norm_of_group(groups, norm)
    return LightningBlock(shape, project, slopes, of_groups, table.linear("out"), *table.qk_norms(eps))
