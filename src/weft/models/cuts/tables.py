"""Cuts as data: for each kind of mixer and feed-forward, the part of every stored tensor that a rank holds.

    in_proj_qkv.weight   rows     | q q q q | k k k k | v v v v v v v v |     all ranks
                         rank 1   |     q q |     k k |         v v v v |     of 2: a span of each part
    o_proj.weight        columns  the same spans, of the heads that the rank has
    conv1d.weight        channels the same spans as the rows that make them

A name says where a tensor lies, the table says how it is cut. Fused projections are cut by part: one span of
the whole matrix would give rank 0 all queries and rank 1 all values.

    rows       the outputs of a projection; its bias with them
    columns    its inputs: the product is a part of a sum over ranks, and the first rank alone adds the bias
    channels   dimension 0 of a convolution
    whole      norms of the stream, routers, bottlenecks: each rank holds all of it

KV heads and groups of Mamba-2 are divided while there are enough. Beyond that ``rank // factor`` holds a
copy, where ``factor`` ranks share one: queries of neighbours need the same KV head. Choosing it by ``rank %
heads`` gives numbers that look right and are not (SGLang issue 30997); a test keeps that as its control.

A tensor without an entry is an error: a missing entry never means "whole".

Rejected: cuts in the family files (thirteen places that say the same); cuts by shape (a square matrix does
not say which side is cut).
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any, Literal

from weft.families.architecture import (
    Attention,
    Dense,
    Experts,
    GatedDelta,
    KimiDelta,
    LatentAttention,
    Mamba1,
    Mamba2,
    Parallel,
    SharedBlock,
    ShortConv,
)

Axis = Literal["rows", "columns", "channels", "experts", "whole"]


@dataclass(frozen=True, slots=True)
class Part:
    """``count`` entries from ``begin`` on, of a part with ``total`` entries."""

    total: int
    begin: int
    count: int


@dataclass(frozen=True, slots=True)
class Cut:
    """The dimension of a tensor that ``axis`` names is ``parts`` one behind the other."""

    axis: Axis
    parts: tuple[Part, ...] = ()


Table = Mapping[str, Cut]
"""The last one or two names of a tensor's path, without ``weight`` and ``bias`` -> its cut."""

WHOLE = Cut("whole")


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank ``rank`` of ``size``. ``by_expert``: experts are divided by their number, not by their width."""

    rank: int
    size: int
    by_expert: bool = False

    def even(self, units: int, width: int = 1) -> Part:
        """``units`` divided evenly, ``width`` entries each."""
        own = units // self.size
        return Part(units * width, self.rank * own * width, own * width)

    def copied(self, units: int, width: int = 1) -> Part:
        """As ``even`` while there are enough units; else the one that this rank shares with neighbours."""
        if units >= self.size:
            return self.even(units, width)
        return Part(units * width, self.rank // (self.size // units) * width, width)

    def uneven(self, units: int) -> Part:
        """Spans of equal length, the last ones shorter."""
        own = -(-units // self.size)
        begin = min(self.rank * own, units)
        return Part(units, begin, min(own, units - begin))

    def balanced(self, units: int) -> Part:
        """Spans whose lengths differ by one at most: none is empty while there are as many units as ranks."""
        begin = self.rank * units // self.size
        return Part(units, begin, (self.rank + 1) * units // self.size - begin)


NORMS: Table = dict.fromkeys((
    "norm", "norm_f", "final_layernorm", "embedding_norm", "input_layernorm", "post_attention_layernorm",
    "pre_ff_layernorm", "post_feedforward_layernorm", "operator_norm", "ffn_norm", "post_operator_norm",
    "post_ffn_norm", "attention_layer_norm", "feedforward_layer_norm"), WHOLE)
"""Of the stream."""


HEAD: Table = dict.fromkeys((
    "fc", "eh_proj", "enorm", "hnorm", "pre_fc_norm_embedding", "pre_fc_norm_hidden"), WHOLE)
"""Of a head for multi-token prediction: what joins its two inputs."""


def vocabulary(rows: int, place: RankPlace) -> Table:
    part = Cut("rows", (place.uneven(rows),))
    return dict.fromkeys(("embed_tokens", "embeddings", "lm_head"), part)


def mixer_table(mixer: object, place: RankPlace) -> Table:
    return {} if mixer is None else _MIXERS[type(mixer)](mixer, place)


def feed_table(feed: object, place: RankPlace) -> Table:
    return {} if feed is None else _FEEDS[type(feed)](feed, place)


def _attention(shape: Attention, place: RankPlace) -> Table:
    queries = place.even(shape.heads, shape.head_dim)
    stored = place.even(shape.heads, shape.head_dim * (2 if shape.gated else 1))
    kv = Cut("rows", (place.copied(shape.kv_heads, shape.head_dim),))
    out, gates = Cut("columns", (queries,)), Cut("rows", (place.even(shape.heads),))
    q_norm, k_norm = (Cut("rows", (queries,)), kv) if shape.norm_whole else (WHOLE, WHOLE)
    return {"q_proj": Cut("rows", (stored,)), "k_proj": kv, "v_proj": kv, "o_proj": out, "out_proj": out,
            "self_attn.g_proj": gates, "self_attn.gate_proj": gates, "q_norm": q_norm, "k_norm": k_norm,
            "q_layernorm": q_norm, "k_layernorm": k_norm}


def _latent_attention(shape: LatentAttention, place: RankPlace) -> Table:
    queries = Cut("rows", (place.even(shape.heads, shape.key_dim),))
    return {"q_proj": queries, "q_b_proj": queries, "q_a_proj": WHOLE, "kv_a_proj_with_mqa": WHOLE,
            "q_a_layernorm": WHOLE, "kv_a_layernorm": WHOLE,
            "kv_b_proj": Cut("rows", (place.even(shape.heads, shape.own_dim + shape.value_dim),)),
            "o_proj": Cut("columns", (place.even(shape.heads, shape.value_dim),))}


def _gated_delta(shape: GatedDelta, place: RankPlace) -> Table:
    """Convolutions in three tensors are read whole and cut in memory: see ``block_readers.qkv_conv``."""
    key, value = place.even(shape.k_heads, shape.k_dim), place.even(shape.v_heads, shape.v_dim)
    heads, ratio = place.even(shape.v_heads), shape.v_heads // shape.k_heads
    qkvz = place.even(shape.k_heads, 2 * (shape.k_dim + ratio * shape.v_dim))
    rows = {"in_proj_qkv": (key, key, value), "in_proj_z": (value,), "in_proj_qkvz": (qkvz,),
            "in_proj_b": (heads,), "in_proj_a": (heads,),
            "in_proj_ba": (place.even(shape.k_heads, 2 * ratio),),
            "q_proj": (key,), "k_proj": (key,), "v_proj": (value,), "g_proj": (value,), "b_proj": (heads,),
            "a_proj": (heads,), "A_log": (heads,), "dt_bias": (heads,)}
    out = Cut("columns", (value,))
    return {**{name: Cut("rows", parts) for name, parts in rows.items()},
            "conv1d": Cut("channels", (key, key, value)), **_WHOLE_CONVS, "o_norm": WHOLE,
            "out_proj": out, "o_proj": out}


def _kimi_delta(shape: KimiDelta, place: RankPlace) -> Table:
    width, heads = place.even(shape.heads, shape.head_dim), place.even(shape.heads)
    rows = {**dict.fromkeys(("q_proj", "k_proj", "v_proj", "f_b_proj", "g_b_proj", "dt_bias"), width),
            "b_proj": heads, "A_log": heads}
    return {**{name: Cut("rows", (part,)) for name, part in rows.items()},
            "f_a_proj": WHOLE, "g_a_proj": WHOLE, "o_norm": WHOLE, **_WHOLE_CONVS,
            "conv1d": Cut("channels", (width, width, width)), "o_proj": Cut("columns", (width,))}


_WHOLE_CONVS: Table = dict.fromkeys(("q_conv1d", "k_conv1d", "v_conv1d"), WHOLE)


def _mamba2(shape: Mamba2, place: RankPlace) -> Table:
    inner, heads = place.even(shape.heads, shape.head_dim), place.even(shape.heads)
    group = place.copied(shape.groups, shape.state_dim)
    per_head, norm = Cut("rows", (heads,)), Cut("rows", (inner,))
    return {"in_proj": Cut("rows", (inner, inner, group, group, heads)),
            "conv1d": Cut("channels", (inner, group, group)),
            "A_log": per_head, "D": per_head, "dt_bias": per_head,
            "mixer.norm": norm, "mamba.norm": norm, "out_proj": Cut("columns", (inner,))}


def _mamba1(shape: Mamba1, place: RankPlace) -> Table:
    channels = place.even(shape.channels)
    rows = Cut("rows", (channels,))
    return {"in_proj": Cut("rows", (channels, channels)), "conv1d": Cut("channels", (channels,)),
            "x_proj": Cut("columns", (channels,)), "dt_proj": rows, "A_log": rows, "D": rows,
            "dt_layernorm": WHOLE, "b_layernorm": WHOLE, "c_layernorm": WHOLE,
            "out_proj": Cut("columns", (channels,))}


def _short_conv(shape: ShortConv, place: RankPlace) -> Table:
    channels = place.even(shape.channels)
    return {"in_proj": Cut("rows", (channels,) * 3), "conv": Cut("channels", (channels,)),
            "out_proj": Cut("columns", (channels,))}


def _parallel(shape: Parallel, place: RankPlace) -> Table:
    return {**_inside("self_attn", _attention(shape.attention, place)),
            **_inside("mamba", _mamba2(shape.mamba, place))}


def _shared_block(shape: SharedBlock, place: RankPlace) -> Table:
    """Adapters are two matrices: the first is whole, the second cut as the rows that it adds to."""
    attention, width = shape.attention, place.even(shape.feed_forward.width)
    kv = place.copied(attention.kv_heads, attention.head_dim)
    added = {"self_attn.linear_q": (place.even(attention.heads, attention.head_dim),),
             "self_attn.linear_k": (kv,), "self_attn.linear_v": (kv,),
             "feed_forward.gate_up_proj": (width, width)}
    adapters = {}
    for name, parts in added.items():
        key = f"{name.partition('.')[2]}_adapter_list"
        adapters[f"{key}.0"], adapters[f"{key}.1"] = WHOLE, Cut("rows", parts)
    return {**_inside("self_attn", _attention(attention, place)),
            **_inside("mamba", _mamba2(shape.mamba, place)), **adapters, "linear": WHOLE,
            "feed_forward.gate_up_proj": Cut("rows", (width, width)),
            "feed_forward.down_proj": Cut("columns", (width,))}


def _inside(container: str, table: Table) -> Table:
    return {name if "." in name else f"{container}.{name}": cut for name, cut in table.items()}


def _dense(shape: Dense, place: RankPlace) -> Table:
    return _width(place.even(shape.width), "")


def _experts(shape: Experts, place: RankPlace) -> Table:
    whole = dict.fromkeys(("gate", "router", "layer", "expert_bias", "e_score_correction_bias",
                           "shared_expert_gate", "fc1_latent_proj", "fc2_latent_proj"), WHOLE)
    table = dict(whole)
    for container in ("shared_expert", "shared_experts", "shared_mlp"):
        table |= _width(place.even(shape.shared_width), f"{container}.")
    stacked = ("block_sparse_moe.input_linear", "block_sparse_moe.output_linear")
    if place.by_expert:
        own = Cut("experts", (place.balanced(shape.count),))
        names = [f"experts.{name}" for name in (*_INTO, *_DOWN, "gate_up_proj")]
        return table | dict.fromkeys((*names, *stacked), own)
    part = place.even(shape.width)
    table |= _width(part, "experts.")
    both = (part, part) if shape.gated else (part,)
    return table | {stacked[0]: Cut("rows", both), stacked[1]: Cut("columns", (part,))}


_INTO, _DOWN = ("gate_proj", "up_proj", "w1", "w3"), ("down_proj", "w2")


def _width(part: Part, container: str) -> dict[str, Cut]:
    """The tensors of a feed-forward whose inner width is ``part``."""
    into = {f"{container}{name}": Cut("rows", (part,)) for name in _INTO}
    down = {f"{container}{name}": Cut("columns", (part,)) for name in _DOWN}
    fused = {f"{container}gate_up_proj": Cut("rows", (part, part))}
    shared = {"shared_mlp.input_linear": Cut("rows", (part, part)),
              "shared_mlp.output_linear": Cut("columns", (part,))} if container in ("", "shared_mlp.") else {}
    return into | down | fused | shared


_MIXERS: dict[type, Callable[[Any, RankPlace], Table]] = {
    Attention: _attention, LatentAttention: _latent_attention, GatedDelta: _gated_delta,
    KimiDelta: _kimi_delta, Mamba2: _mamba2, Mamba1: _mamba1, ShortConv: _short_conv, Parallel: _parallel,
    SharedBlock: _shared_block}
_FEEDS: dict[type, Callable[[Any, RankPlace], Table]] = {Dense: _dense, Experts: _experts}
