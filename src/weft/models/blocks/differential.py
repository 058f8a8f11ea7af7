"""Differential attention as attention of heads of twice the width (``families.mixers.differential``).

    x_TD --qkv--> q [G, 2, R, D]   k [G, 2, D]   v [G, 2, D]      G pairs of KV heads, R pairs of heads that share one
    rotary, head by head
    q -> [G, 2, R, 2 D]: the first of a pair has zeros after it, the second before it
    paged_attention --> o [G, 2, R, 2 D] --> norm(o1 - factor o2) (1 - first) --out--> y_TD

Source: transformers ``DiffLlamaAttention``.
"""

from __future__ import annotations

from dataclasses import dataclass, field
from functools import partial

import torch

from weft.families.mixers.differential import PARTS, DifferentialAttention
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear, by_head
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import AttentionCore, CosSin, attend
from weft.tensor.ops.elementwise import rotary
from weft.tensor.ops.norm import rms_norm


@dataclass(slots=True)
class DifferentialAttentionBlock:
    """Differential attention. ``qkv``: rows of queries, keys and values, each by pair of KV heads. ``factor``: of the
    second part, a number in the model's dtype. ``scale`` [2 head_dim]: of the normed output, of a norm with ``eps``."""

    shape: DifferentialAttention
    qkv: Linear
    out: Linear
    factor: torch.Tensor
    scale: torch.Tensor
    eps: float
    core: AttentionCore = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self.core = AttentionCore(self.shape.attention, None, None, 0.0, False)

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        of, pairs, dim = self.shape, self.shape.kv_heads, self.shape.head_dim
        q_TC, k_TC, v_TC = torch.split(self.qkv(x_TD), [2 * of.heads * dim, 2 * pairs * dim, 2 * pairs * dim], -1)
        q_THD, k_THD = by_head(q_TC, 2 * of.heads), by_head(k_TC, 2 * pairs)
        if of.rope is not None:
            assert cos_sin is not None, "a rotary layer in a model without rotary tables"
            q_THD, k_THD = rotary(q_THD, k_THD, *cos_sin)
        q_TG2RD = torch.unflatten(q_THD, 1, (pairs, 2, -1))
        wide = q_THD.new_zeros((*q_TG2RD.shape[:-1], 2, dim))
        for half in range(2):
            wide[:, :, half, :, half] = q_TG2RD[:, :, half]
        o_THE = attend(
            wide.view(-1, 2 * of.heads, 2 * dim),
            k_THD.reshape(-1, pairs, 2 * dim),
            by_head(v_TC, pairs),
            self.core,
            inputs,
            cache,
            None,
        ).to(x_TD.dtype)
        first, second = torch.unflatten(o_THE, 1, (pairs, 2, -1)).unbind(2)
        y_TGRE = rms_norm((first - self.factor * second).flatten(1, 2), self.scale, self.eps)
        return self.out(inputs.asked_of(y_TGRE.flatten(1)))


def by_pair(rows: torch.Tensor, *, pairs: int) -> torch.Tensor:
    """Return ``rows`` [2 x pairs x n, ...] with both halves of each pair next to each other."""
    return rows.view(2, pairs, -1, *rows.shape[1:]).transpose(0, 1).flatten(0, 2)


def read_differential(read: BlockReader, shape: DifferentialAttention, name: str) -> DifferentialAttentionBlock:
    """Return the block, whose learned factor is computed once."""
    source, table, order = (
        read.source,
        read.table(shape.table(read.hidden), name),
        partial(by_pair, pairs=shape.kv_heads),
    )
    bias = table.get("qkv.bias")
    if bias is not None:
        rows = [2 * count * shape.head_dim for count in (shape.heads, shape.kv_heads, shape.kv_heads)]
        bias = torch.cat([order(part) for part in torch.split(bias, rows)])
    q1, k1, q2, k2 = (table.tensor(f"lambda_{part}") for part in PARTS)
    # Torch's Python form of arithmetic on meta tensors would import its compiler.
    factor = q1[0] if q1.is_meta else (q1 @ k1).exp() - (q2 @ k2).exp() + shape.first
    scale = torch.full((2 * shape.head_dim,), 1.0 - shape.first, dtype=source.dtype, device=source.device)
    orders = {f"{part}_proj.weight": order for part in "qkv"}
    return DifferentialAttentionBlock(
        shape,
        table.linear("qkv", orders=orders, bias=bias),
        table.linear("out"),
        factor.to(source.dtype),
        scale,
        read.eps,
    )
