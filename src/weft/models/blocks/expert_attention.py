"""Attention whose queries and outputs are by experts (JetMoE).

    x_TD --router--> X experts of each token, their weights
    x_TD --kv--> [ k | v ]                           shared by all experts
    x_TD --query of each expert--> q_TXGD            one query for each KV head G
                 q by KV head, rotary, pages --> o_TXGD --output of each expert--> sum of weight_x y_x + bias

Source: transformers ``JetMoeAttention``, ``JetMoeMoA``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from weft.families.jetmoe import ExpertAttention
from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import FeedForward
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Linear
from weft.models.blocks.plain import plain_layer
from weft.models.layer import DecoderLayer, ReadLayer
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import AttentionCore, CosSin, attention_layer
from weft.tensor.ops.moe import ChoiceRule, ExpertWeights, choose_experts, expert_products

LAYER_NORM_EPS = 1e-6
"""Epsilon of the norms inside of layers, whatever config.json says of the last one."""


@dataclass(slots=True)
class ExpertAttentionBlock:
    """``router``: [experts, D]; ``query``: [experts, G * head_dim, D]; ``kv``: rows k, v [G * head_dim each]; ``out``:
    [experts, D, G * head_dim]; ``bias``: [D].
    """

    shape: ExpertAttention
    router: Linear
    query: ExpertWeights
    kv: Linear
    out: ExpertWeights
    bias: torch.Tensor
    core: AttentionCore = field(init=False)

    def __post_init__(self) -> None:
        self.core = AttentionCore(self.shape.attention, None, None, 0.0, False)

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape, positions_T = self.shape, inputs.positions_T if inputs.runs.padded else None
        rule = ChoiceRule(shape.per_token, normalized=True)
        weights_TX, ids_TX = choose_experts(self.router(x_TD), rule, None, positions_T, dtype=x_TD.dtype)
        q_TXC = expert_products(x_TD[:, None].expand(-1, shape.per_token, -1), ids_TX, self.query)
        q_TXGD = torch.unflatten(q_TXC, 2, (shape.heads, shape.head_dim))
        projected_TW = torch.cat((q_TXGD.transpose(1, 2).flatten(1), self.kv(x_TD)), dim=1)
        o_TC = inputs.asked_of(attention_layer(projected_TW, self.core, inputs, cache, cos_sin))
        weights_TX, ids_TX = inputs.asked_of(weights_TX), inputs.asked_of(ids_TX)
        o_TXC = torch.unflatten(o_TC, 1, (shape.heads, shape.per_token, shape.head_dim)).transpose(1, 2).flatten(2)
        y_TXD = expert_products(o_TXC, ids_TX, self.out)
        return (y_TXD.float() * weights_TX[..., None].float()).sum(1).to(x_TD.dtype) + self.bias


def read_expert_attention(read: BlockReader, shape: ExpertAttention, name: str) -> ExpertAttentionBlock:
    table, each = read.table(shape.table(read.hidden), name), shape.expert_table(read.hidden)

    def experts(role: str) -> ExpertWeights:
        [stack], [own] = table.table[role], each[role]
        apart = f"{name}.experts.{{}}.{own.name}"
        if read.source.has(f"{name}.{stack.name}"):
            full, (count, rows, columns) = table.declared(stack)
            return read.source.all_experts([full], count, rows, columns, apart=[apart])
        names = [read.table(each, f"{name}.experts.{number}").declared(own) for number in range(shape.count)]
        rows, columns = names[0][1]
        return read.source.experts([[full] for full, _ in names], rows, columns)

    return ExpertAttentionBlock(
        shape, table.plain("router"), experts("query"), table.linear("kv"), experts("out"), table.tensor("out.bias")
    )


def jetmoe_layers(read: BlockReader) -> ReadLayer:
    """Return the reader of layers whose norms have an epsilon of their own."""

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        decoder_layer = plain_layer(read, name, mixer, feed)
        for block in decoder_layer.residuals:
            block.norm = None if block.norm is None else replace(block.norm, eps=LAYER_NORM_EPS)
        return decoder_layer

    return layer
