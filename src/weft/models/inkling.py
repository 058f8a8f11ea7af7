"""How the layers of Inkling are read: its blocks are its own, and files have two spellings.

    saved       mlp.gate_proj  mlp.up_proj     experts.gate_up_proj    shared_experts.{gate,up}_proj
    released    mlp.w13_dn                     experts.w13_weight      shared_experts.shared_w13_weight

Rows of gate and up take turns in what is released. Other names differ by patterns (``families.inkling``).
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import torch

from weft.families import architecture as shapes
from weft.families import tensors
from weft.families.tensors import GATED
from weft.models.block_readers import BlockReader, gate_first
from weft.models.blocks.feed_forward import ExpertsBlock, SwiGlu
from weft.models.blocks.inkling import OutputConv, RelativeAttentionBlock, SharingExperts, of_parts, with_input
from weft.models.blocks.linear import Norm
from weft.models.layer import DecoderLayer
from weft.models.weights import Order
from weft.tensor.ops.moe import ExpertWeights

ReadLayer = Callable[[str, shapes.Mixer | None, shapes.FeedForward | None], DecoderLayer]


def inkling_layers(read: BlockReader) -> ReadLayer:
    def layer(name: str, mixer: shapes.Mixer | None, feed: shapes.FeedForward | None) -> DecoderLayer:
        assert isinstance(mixer, shapes.RelativeAttention)
        assert feed is not None
        sparse = isinstance(feed, shapes.Experts)
        around = read.table(
            tensors.around_relative(mixer, read.hidden, f"mlp.{'gate.' if sparse else ''}global_scale"), name
        )
        out_conv, feed_conv = (
            OutputConv(with_input(around.tensor(part).squeeze(1)), f"conv.{part}") for part in ("mixer", "feed")
        )
        feed_conv.taps = feed_conv.taps * around.tensor("scale")
        block: SwiGlu | SharingExperts
        if isinstance(feed, shapes.Experts):
            block = _sharing_experts(read, feed, f"{name}.mlp")
        elif read.source.has(f"{name}.mlp.w13_dn.weight"):
            block = read.swiglu(feed, f"{name}.mlp", ("w13_dn", "down_proj"), paired=True)
        else:
            block = read.swiglu(feed, f"{name}.mlp")
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"),
            _relative_attention(read, mixer, name, out_conv),
            read.norm(f"{name}.post_attention_layernorm"),
            block,
            feed_conv=feed_conv,
        )

    return layer


def _relative_attention(
    read: BlockReader, shape: shapes.RelativeAttention, name: str, out_conv: OutputConv
) -> RelativeAttentionBlock:
    table = read.table(tensors.relative_attention(shape, read.hidden), f"{name}.self_attn")
    q_norm, k_norm = (Norm(table.tensor(f"{part}_norm"), read.eps) for part in "qk")
    taps = torch.cat([table.tensor(f"{part}_conv").squeeze(1) for part in "kv"])
    return RelativeAttentionBlock(
        shape,
        table.linear("qkv"),
        OutputConv(with_input(taps), "conv.kv"),
        q_norm,
        k_norm,
        table.tensor("rel_logits_proj.proj"),
        read.source.summed(table.linear("out")),
        out_conv,
    )


def _sharing_experts(read: BlockReader, shape: shapes.Experts, name: str) -> SharingExperts:
    paired = read.source.has(f"{name}.experts.w13_weight")
    table = read.table(
        tensors.experts(
            shape, read.hidden, paired=paired, stacks=("experts.w13_weight", "experts.w2_weight") if paired else None
        ),
        name,
    )
    order = gate_first if paired else None
    router = table.plain("router", torch.float32)
    into, down = read.routed(shape, table, GATED, False, order)
    experts = ExpertsBlock(shape, router, into, down)
    read.note_experts(shape, table, experts, GATED)
    # ``weft quantize`` takes the routed experts apart and leaves these.
    shared_paired = read.source.has(f"{name}.shared_experts.shared_w13_weight")
    both = read.table(tensors.shared_experts(shape, read.hidden, paired=shared_paired), name)
    one = replace(shape, count=shape.shared_count, width=shape.shared_width, own_count=0)

    def stack(role: str, order: Order | None) -> ExpertWeights:
        parts = [both.declared(tensor) for tensor in both.table[role]]
        count, rows, columns = parts[0][1]
        return read.source.all_experts([full for full, _ in parts], count, rows, columns, order=order)

    shared = ExpertsBlock(one, router, stack("into", gate_first if shared_paired else None), stack("down", None))
    return SharingExperts(
        experts, shared, router, table.tensor("choice_bias"), read.source.summed(of_parts(experts, shared))
    )
