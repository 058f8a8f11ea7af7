"""The tensors of each mixer and feed-forward, as data: one table says what is stored.

    role     the tensors that are read as one, one below the other

    "qkv"    Tensor("q_proj.weight", (Units(heads, head_dim), hidden))      dims: rows, columns
             Tensor("k_proj.weight", (Units(kv_heads, head_dim), hidden))
             Tensor("v_proj.weight", (Units(kv_heads, head_dim), hidden))
    "out"    Tensor("o_proj.weight", (hidden, Units(heads, head_dim)))

Three read it: ``planning.weights`` counts bytes, ``models.block_readers`` asks for the tensors,
``models.sharding`` finds the part of a rank: the dim that is no plain number is divided.

    in_proj_qkv   | q q q q | k k k k | v v v v v v v v |     all ranks
    rank 1 of 2   |     q q |     k k |         v v v v |     a span of each of its units

Numbers are those of the architecture at hand, a whole one or a rank's. Families that spell a name otherwise
pass their own.
"""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import dataclass, replace
from typing import Any, Literal

from weft.families import architecture as shapes
from weft.families.mixing import ChannelMix, TimeMix
from weft.families.sharding import RankPlace, ShardSpan

Form = Literal["matrix", "plain", "float32"]
"""A product of the stream, in the model's dtype or quantised; norms, convolutions, routers and biases, which
files never quantise; decay rates and steps of recurrent layers, kept exact."""


@dataclass(frozen=True, slots=True)
class Units:
    """``own`` units of a rank, of ``width`` entries each; ``copies`` ranks hold the same."""

    own: int
    width: int = 1
    copies: int = 1

    def most(self, size: int) -> int:
        """Entries on the one of ``size`` ranks that has the most."""
        return self.own * self.width

    def span(self, place: RankPlace) -> ShardSpan:
        return place.of_units(self.own, self.width, self.copies)


@dataclass(frozen=True, slots=True)
class Numbered:
    """``count`` experts or tokens, divided by their number."""

    of: Literal["experts", "tokens"]
    count: int

    def most(self, size: int) -> int:
        return -(-self.count // size)

    def span(self, place: RankPlace) -> ShardSpan:
        return place.of_experts(self.count) if self.of == "experts" else place.of_tokens(self.count)


Dim = int | Units | Numbered | tuple[Units, ...]


@dataclass(frozen=True, slots=True)
class Tensor:
    """``name``: behind that of the mixer. ``of_first``: other ranks than the first hold zeros."""

    name: str
    dims: tuple[Dim, ...]
    form: Form = "matrix"
    of_first: bool = False

    def elements(self, size: int) -> int:
        """On the one of ``size`` ranks that has the most."""
        return math.prod(
            dim if isinstance(dim, int) else sum(unit.most(size) for unit in _units(dim)) for dim in self.dims
        )

    def shape(self, place: RankPlace) -> tuple[int, ...]:
        """On one rank."""
        return tuple(
            dim if isinstance(dim, int) else sum(unit.span(place).count for unit in _units(dim)) for dim in self.dims
        )

    def spans(self, place: RankPlace) -> tuple[int, tuple[ShardSpan, ...]] | None:
        """The dim that is divided, and this rank's spans of it; None for a tensor that each rank holds."""
        for index, dim in enumerate(self.dims):
            if not isinstance(dim, int):
                return index, tuple(unit.span(place) for unit in _units(dim))
        return None


def _units(dim: Dim) -> tuple[Units | Numbered, ...]:
    assert not isinstance(dim, int)
    return dim if isinstance(dim, tuple) else (dim,)


Table = dict[str, tuple[Tensor, ...]]
"""Role -> its tensors. The bias of a role is under ``role.bias``."""
Names = tuple[str, ...]


def vocabulary(count: int, hidden: int) -> Tensor:
    """The embedding, and the head."""
    return Tensor("embed_tokens.weight", (Numbered("tokens", count), hidden), "plain")


def product(role: str, columns: Dim, *parts: tuple[str, Dim], bias: bool = False) -> Table:
    """(name, rows) of each tensor; with ``bias`` each has one."""
    table: Table = {role: tuple(Tensor(f"{name}.weight", (rows, columns)) for name, rows in parts)}
    if bias:
        # Where columns are divided, a product is a part of a sum over ranks: its bias is the first rank's.
        of_first = not isinstance(columns, int)
        table[f"{role}.bias"] = tuple(Tensor(f"{name}.bias", (rows,), "plain", of_first) for name, rows in parts)
    return table


def _conv(channels: Dim, kernel: int, name: str = "conv1d", *, bias: bool = False) -> Table:
    table: Table = {"conv": (Tensor(f"{name}.weight", (channels, 1, kernel), "plain"),)}
    return table | {"conv.bias": (Tensor(f"{name}.bias", (channels,), "plain"),)} if bias else table


def _exact(*names: str, dims: tuple[Dim, ...]) -> Table:
    return {name: (Tensor(name, dims, "float32"),) for name in names}


def norm_weight(role: str, width: Dim, name: str | None = None) -> Table:
    return {role: (Tensor(f"{name or role}.weight", (width,), "plain"),)}


def norm_gate(role: str, shape: shapes.NormGate | None, width: int, name: str) -> Table:
    """Of the norm under ``name``; whole on each rank. Files never quantise it."""
    return (
        {}
        if shape is None
        else all_plain(
            product(f"{role}.into", width, (f"{name}.gate_up_projection", shape.rank))
            | product(f"{role}.out", shape.rank, (f"{name}.gate_down_projection", width))
        )
    )


def layer_norm(role: str, width: Dim, name: str) -> Table:
    return {
        part: (Tensor(f"{name}.{end}", (width,), "plain"),)
        for part, end in ((role, "weight"), (f"{role}.bias", "bias"))
    }


def all_plain(table: Table) -> Table:
    return {role: tuple(replace(tensor, form="plain") for tensor in stored) for role, stored in table.items()}


def attention(
    shape: shapes.Attention,
    hidden: int,
    *,
    inputs: int | None = None,
    out: str = "o_proj",
    norms: tuple[str, str] = ("q_norm", "k_norm"),
    gates: str = "g_proj",
    gate: str | None = None,
) -> Table:
    """``inputs``: width of what it reads, where that is not the stream. Head gates have no bias. ``gate``: of
    a gate that is stored by itself; else the query projection has its rows."""
    queries = Units(shape.heads, shape.head_dim)
    keys = Units(shape.kv_heads, shape.head_dim, shape.kv_copies)
    apart = ((gate, queries),) if shape.gated and gate else ()
    asked = Units(shape.heads, shape.head_dim * 2) if shape.gated and not gate else queries
    read = inputs or hidden
    own = (("k_proj", keys), ("v_proj", keys))[: 0 if shape.kv_of is not None else 2 - shape.values_are_keys]
    table = product("qkv", read, ("q_proj", asked), *apart, *own, bias=shape.bias)
    if shape.head_gated:
        table["qkv"] += (Tensor(f"{gates}.weight", (Units(shape.heads), read)),)
    if shape.qk_norm:
        table |= norm_weight("q_norm", queries if shape.norm_whole else shape.head_dim, norms[0])
        if shape.kv_of is None:
            table |= norm_weight("k_norm", keys if shape.norm_whole else shape.head_dim, norms[1])
    if shape.sinks:
        table |= _exact("sinks", dims=(Units(shape.heads),))
    out_bias = shape.bias if shape.out_bias is None else shape.out_bias
    return table | product("out", queries, (out, hidden), bias=out_bias)


def convolved_attention(shape: shapes.ConvolvedAttention, hidden: int) -> Table:
    of, dim, inside, delayed = shape.attention, shape.attention.head_dim, "qkv_proj.", shape.delayed
    queries, keys = Units(of.heads, dim), Units(of.kv_heads, dim)
    table = product(
        "project",
        hidden,
        (f"{inside}q_proj", queries),
        (f"{inside}k_proj", keys),
        (f"{inside}v_proj_current", delayed),
        (f"{inside}v_proj_delayed", delayed),
    )
    for role, name, width, kernel in (
        ("first", "depthwise", 1, shape.first_kernel),
        ("second", "grouped", dim, shape.second_kernel),
    ):
        name, channels = f"{inside}conv_qk_{name}", (queries, keys)
        table[role] = (Tensor(f"{name}.weight", (channels, width, kernel), "plain"),)
        table[f"{role}.bias"] = (Tensor(f"{name}.bias", (channels,), "plain"),)
    table["factors"] = (Tensor("qk_norm.temp", (Units(of.kv_heads),), "plain"),)
    return table | product("out", queries, ("o_proj", hidden))


def relative_attention(shape: shapes.RelativeAttention, hidden: int) -> Table:
    of = shape.attention
    table = attention(of, hidden)
    table["qkv"] += (Tensor("r_proj.weight", (Units(of.heads, shape.states), hidden)),)
    keys = Units(of.kv_heads, of.head_dim, of.kv_copies)
    for part in "kv":
        name, dims = f"{part}_sconv.conv1d.weight", (keys, 1, shape.conv_kernel)
        table[f"{part}_conv"] = (Tensor(name, dims, "float32"),)
    return table | _exact("rel_logits_proj.proj", dims=(shape.states, shape.extent))


def around_relative(shape: shapes.RelativeAttention, hidden: int, scale: str = "mlp.global_scale") -> Table:
    """The convolutions of what the two blocks of its layer give; ``scale``: a factor on the feed-forward."""
    table: Table = {
        part: (Tensor(f"{name}_sconv.conv1d.weight", (hidden, 1, shape.conv_kernel), "float32"),)
        for part, name in (("mixer", "attn"), ("feed", "mlp"))
    }
    return table | {"scale": (Tensor(scale, (1,), "float32"),)}


def latent_attention(shape: shapes.LatentAttention, hidden: int, *, out: str = "o_proj") -> Table:
    """Gates have no bias."""
    rank, latent = shape.query_rank, shape.latent_dim
    into: tuple[tuple[str, Dim], ...] = (("kv_a_proj_with_mqa", latent + shape.shared_dim),)
    queries = Units(shape.heads, shape.key_dim)
    if rank is None:
        table = product("query", hidden, ("q_proj", queries))
    else:
        table = (
            product("query", rank, ("q_b_proj", queries))
            | norm_weight("query_norm", rank, "q_a_layernorm")
            | norm_gate("query_norm", shape.norm_gate, rank, "q_a_layernorm")
        )
        into = (("q_a_proj", rank), *into)
    table |= product("latent", hidden, *into, bias=shape.bias)
    if shape.gate_width:
        gates = f"{'gate' if shape.gated else 'g'}_proj.weight"
        table["latent"] += (Tensor(gates, (Units(shape.heads, shape.gate_width), hidden)),)
    return (
        table
        | norm_weight("latent_norm", latent, "kv_a_layernorm")
        | norm_gate("latent_norm", shape.norm_gate, latent, "kv_a_layernorm")
        | product("expansion", latent, ("kv_b_proj", Units(shape.heads, shape.own_dim + shape.value_dim)))
        | product("out", Units(shape.heads, shape.value_dim), (out, hidden), bias=shape.bias)
    )


DeltaNames = Literal["fused", "by_key_head", "each"]
"""How the input projection of a gated delta net is stored: Qwen3.5, Qwen3-Next, OLMo hybrid."""
KERNELS = "dynamic_conv1d.kernel_generator"
"""Of Jet-Nemotron: what makes the kernels of v."""


def gated_delta(
    shape: shapes.GatedDelta,
    hidden: int,
    *,
    names: DeltaNames = "fused",
    norm: str = "norm",
    out: str = "out_proj",
    gate: str = "in_proj_z",
) -> Table:
    """The rows of beta and decay are never quantised in files. ``gate``: what "fused" calls z."""
    key, value = Units(shape.k_heads, shape.k_dim), Units(shape.v_heads, shape.v_dim)
    heads, ratio = Units(shape.v_heads), shape.v_heads // shape.k_heads
    matrices: dict[DeltaNames, dict[str, Dim]] = {
        # Unit by unit: one span of all of it would give rank 0 all queries and rank 1 all values.
        "fused": {"in_proj_qkv": (key, key, value), gate: value},
        "by_key_head": {"in_proj_qkvz": Units(shape.k_heads, 2 * (shape.k_dim + ratio * shape.v_dim))},
        "each": {"q_proj": key, "k_proj": key, "v_proj": value, "g_proj": value},
    }
    gates: dict[DeltaNames, dict[str, Dim]] = {
        "fused": {"in_proj_b": heads, "in_proj_a": heads},
        "by_key_head": {"in_proj_ba": Units(shape.k_heads, 2 * ratio)},
        "each": {"b_proj": heads, "a_proj": heads},
    }
    table = product("project", hidden, *matrices[names].items())
    table["project"] += tuple(Tensor(f"{name}.weight", (rows, hidden), "plain") for name, rows in gates[names].items())
    if shape.kernel_rank:  # the first product is whole, the second divided: rows by channel, place by place
        table["project"] += (Tensor(f"{KERNELS}.w1.weight", (shape.kernel_rank, hidden)),)
        rows = Units(shape.v_heads, shape.v_dim * shape.conv_kernel)
        table |= product("kernels", shape.kernel_rank, (f"{KERNELS}.w2", rows), bias=True)
    else:
        table |= _conv((key, key, value), shape.conv_kernel)
    return (
        table
        | _exact("A_log", "dt_bias", dims=(heads,))
        | norm_weight("norm", shape.v_dim, norm)
        | product("out", value, (out, hidden))
    )


def index(shape: shapes.Index, hidden: int, rank: int = 0, *, apart: bool = False) -> Table:
    """What lies under ``indexer``, whole on each rank. ``rank``: width of the query's bottleneck. ``apart``:
    queries and key are two tensors."""
    dim = shape.key_dim
    if not shape.learned:
        both = (
            (("index_q_proj", shape.queries * dim), ("index_k_proj", dim))
            if apart
            else (("index_qk_proj", (shape.queries + 1) * dim),)
        )
        return (
            product("project", hidden, *both)
            | norm_weight("q_norm", dim, "q_layernorm")
            | norm_weight("k_norm", dim, "k_layernorm")
        )
    table = product("project", hidden, ("wk", dim)) | product("query", rank, ("wq_b", shape.queries * dim))
    table["project"] += (
        Tensor("index_kpool_compress_gate", (dim, hidden)),
        Tensor("weights_proj.weight", (shape.queries, hidden)),
    )
    return (
        table
        | layer_norm("norm", dim, "k_norm")
        | {"places": (Tensor("index_kpool_compress_ape", (shape.block, dim), "plain"),)}
    )


def ngrams(shape: shapes.Ngrams, hidden: int, *, shards: int = 0) -> Table:
    """Ranks divide the columns of the tables. ``shards``: the tables are stored in so many parts."""
    name, width = "ple_embedding.ngram_embedding", Units(shape.width)
    parts = [f"{name}.shard_{number}.weight" for number in range(shards)] or [f"{name}.weight"]
    rows = shape.table_rows // len(parts)
    all_tables = (width,) * len(shape.rows)
    return {
        "table": tuple(Tensor(part, (rows, width), "plain") for part in parts),
        **product("project", all_tables, ("key_proj", shape.stream_width), ("value_proj", hidden)),
        **_conv(shape.stream_width, shape.conv_kernel),
        **{
            f"{norm}_norm": (Tensor(f"norm_{norm}.weight", (shape.stream_width,), "plain"),)
            for norm in ("key", "query", "conv")
        },
    }


def kimi_delta(
    shape: shapes.KimiDelta, hidden: int, *, forget: str = "", out: str = "o_proj", flat: bool = False
) -> Table:
    """``forget``: what stands before the names of the forget gate. ``flat``: decays are a row of heads."""
    width, heads, rank = Units(shape.heads, shape.head_dim), Units(shape.heads), shape.head_dim
    table = product("project", hidden, ("q_proj", width), ("k_proj", width), ("v_proj", width))
    wide, between = shape.wide_gates, width if shape.wide_gates else rank
    into = ("f_proj", "g_proj") if wide else ("f_a_proj", "g_a_proj")
    table["project"] += (
        Tensor("b_proj.weight", (heads, hidden), "plain"),
        Tensor(f"{forget}{into[0]}.weight", (between, hidden)),
        Tensor(f"{into[1]}.weight", (between, hidden)),
    )
    table["A_log"] = (Tensor(f"{forget}A_log", (heads,) if wide or flat else (1, 1, heads, 1), "float32"),)
    table["dt_bias"] = (Tensor(f"{forget}dt_bias", (width,), "float32"),)
    if not wide:
        table |= product("forget", rank, (f"{forget}f_b_proj", width))
        table |= product("gate", rank, ("g_b_proj", width))
    return (
        table
        | _conv((width, width, width), shape.conv_kernel)
        | norm_weight("norm", rank, "o_norm")
        | product("out", width, (out, hidden))
    )


def mamba2(shape: shapes.Mamba2, hidden: int) -> Table:
    inner, heads = Units(shape.heads, shape.head_dim), Units(shape.heads)
    group = Units(shape.groups, shape.state_dim, shape.group_copies)
    out_bias = shape.projection_bias if shape.output_bias is None else shape.output_bias
    table = (
        product("project", hidden, ("in_proj", (inner, inner, group, group, heads)), bias=shape.projection_bias)
        | _conv((inner, group, group), shape.conv_kernel, bias=shape.conv_bias)
        | _exact("A_log", "D", "dt_bias", dims=(heads,))
        | product("out", inner, ("out_proj", hidden), bias=out_bias)
    )
    return table if shape.norm == "none" else table | norm_weight("norm", inner)


def mamba1(shape: shapes.Mamba1, hidden: int) -> Table:
    channels, rank, width = Units(shape.channels), shape.dt_rank, shape.state_dim
    if shape.heads:
        return _mamba1_by_head(shape, hidden)
    table = (
        product("project", hidden, ("in_proj", (channels, channels)), bias=shape.projection_bias)
        | _conv(channels, shape.conv_kernel, bias=shape.conv_bias)
        | product("select", channels, ("x_proj", rank + 2 * width))
        | product("step", rank, ("dt_proj", channels))
        | _exact("A_log", dims=(channels, width))
        | _exact("D", dims=(channels,))
        | {"dt_bias": (Tensor("dt_proj.bias", (channels,), "float32"),)}
        | product("out", channels, ("out_proj", hidden), bias=shape.projection_bias)
    )
    if shape.inner_norms == "weighted":
        for name, size in (("dt", rank), ("b", width), ("c", width)):
            table |= norm_weight(f"{name}_layernorm", size)
    return table


def _mamba1_by_head(shape: shapes.Mamba1, hidden: int) -> Table:
    """Rows of x and gate take turns. What makes steps, B and C is a tensor of all heads."""
    rank, width, own = shape.dt_rank, shape.state_dim, shape.channels // shape.heads
    heads, channels, rows = Units(shape.heads), Units(shape.heads, own), Units(shape.heads, 2 * own)
    table: Table = {
        "select": (Tensor("x_proj_weight", (heads, rank + 2 * width, own), "plain"),),
        "step": (Tensor("dt_proj_weight", (heads, own, rank), "plain"),),
        "dt_bias": (Tensor("dt_proj_bias", (heads, own), "float32"),),
    }
    return (
        table
        | _exact("A_log", dims=(heads, own, width))
        | _exact("D", dims=(heads, own))
        | _conv(channels, shape.conv_kernel, bias=shape.conv_bias)
        | product("project", hidden, ("in_proj", rows), bias=shape.projection_bias)
        | product("out", channels, ("out_proj", hidden), bias=shape.projection_bias)
    )


def short_conv(shape: shapes.ShortConv, hidden: int) -> Table:
    channels = Units(shape.channels)
    return (
        product("project", hidden, ("in_proj", (channels, channels, channels)), bias=shape.bias)
        | _conv(channels, shape.conv_kernel, "conv", bias=shape.bias)
        | product("out", channels, ("out_proj", hidden), bias=shape.bias)
    )


LightningNames = tuple[str | tuple[str, str, str], str, str, str]
"""Of q, k and v, in one tensor or in three, of the gate, of the norm and of what comes out."""


def lightning(
    shape: shapes.Lightning,
    hidden: int,
    *,
    names: LightningNames = ("qkv_proj", "output_gate", "norm", "out_proj"),
    by_head: bool = True,
    norms: tuple[str, str] = ("query_layernorm", "key_layernorm"),
) -> Table:
    """``by_head``: rows of q, k and v in one tensor are head by head. What decays follow from may be stored
    too, and is not read."""
    qkv, gate, norm, out = names
    width = Units(shape.heads, shape.head_dim)
    rows: Dim = Units(shape.heads, 3 * shape.head_dim) if by_head else (width,) * 3
    asked = ((qkv, rows),) if isinstance(qkv, str) else tuple((name, width) for name in qkv)
    table = (
        product("project", hidden, *asked, (gate, width))
        | norm_weight("norm", width, norm)
        | product("out", width, (out, hidden))
    )
    if shape.qk_norm:
        for role, norm in zip(("q_norm", "k_norm"), norms, strict=True):
            table |= norm_weight(role, shape.head_dim, norm)
    return table


def matrix_lstm(shape: shapes.MatrixLstm, hidden: int) -> Table:
    """Gates are never quantised in files: they decide how long a memory lives."""
    heads, keys = Units(shape.heads), Units(shape.heads, shape.key_dim)
    values = Units(shape.heads, shape.value_dim)
    table = (
        product("project", hidden, ("q", keys), ("k", keys), ("v", values), ("ogate_preact", values))
        | norm_weight("norm", values, "multihead_norm")
        | product("out", values, ("out_proj", hidden))
    )
    gates = product("gates", hidden, ("igate_preact", heads), ("fgate_preact", heads), bias=True)
    return table | all_plain(gates)


def time_mix(shape: TimeMix, hidden: int, *, joined: bool = False) -> Table:
    """``joined``: the six mixes are one tensor. What is low in rank is two products: the first whole, the
    second divided."""
    width = Units(shape.heads, shape.head_dim)
    table = product("out", width, ("o_proj", hidden)) | layer_norm("norm", width, "g_norm")
    for part in ("r", "k", "v"):
        table |= product(part, hidden, (f"{part}_proj", width))
    for part, rank in (
        ("w", shape.decay_rank),
        ("a", shape.rate_rank),
        ("g", shape.gate_rank),
        ("v", shape.value_rank),
    ):
        if rank:
            table |= product(f"{part}.0", hidden, (f"{part}_lora.lora.0", rank))
            table |= product(f"{part}.1", rank, (f"{part}_lora.lora.2", width), bias=part != "g")
    for part in "rwkvag":
        table[f"x_{part}"] = (Tensor(f"x_{part}", (1, 1, hidden), "plain"),)
    if joined:
        table = {role: parts for role, parts in table.items() if not role.startswith("x_")}
        table["x_x"] = (Tensor("x_x", (6, hidden), "plain"),)
    return table | {
        "k_k": (Tensor("k_k", (width,), "plain"),),
        "k_a": (Tensor("k_a", (width,), "plain"),),
        "r_k": (Tensor("r_k", (Units(shape.heads), shape.head_dim), "plain"),),
    }


def channel_mix(shape: ChannelMix, hidden: int) -> Table:
    width = Units(shape.width)
    return (
        product("into", hidden, ("key", width))
        | product("down", width, ("value", hidden))
        | {"x_k": (Tensor("x_k", (hidden,), "plain"),)}
    )


def rg_lru(shape: shapes.RgLru, hidden: int) -> Table:
    """Gates are never quantised in files: they decide how long a state lives."""
    heads, channels, width = Units(shape.heads), Units(shape.heads, shape.head_dim), shape.head_dim
    table = (
        product("project", hidden, ("linear_y", channels), ("linear_x", channels), bias=True)
        | _conv(channels, shape.conv_kernel, "conv_1d", bias=True)
        | _exact("rg_lru.recurrent_param", dims=(channels,))
        | product("out", channels, ("linear_out", hidden), bias=True)
    )
    for gate in ("input", "recurrent"):
        table[gate] = (Tensor(f"rg_lru.{gate}_gate_weight", (heads, width, width), "plain"),)
        table[f"{gate}.bias"] = (Tensor(f"rg_lru.{gate}_gate_bias", (heads, width), "plain"),)
    return table


def shared_block(shape: shapes.SharedBlock, hidden: int) -> tuple[Table, Table]:
    """What all uses of a block share: its attention over [x, embedding], and its feed-forward."""
    names = ("gate_up_proj", "down_proj") if shape.adapter_rank else GATED
    return (attention(shape.attention, hidden, inputs=2 * hidden), dense(shape.feed_forward, hidden, names=names))


def shared_use(shape: shapes.SharedBlock, hidden: int) -> Table:
    """What a use of a shared block has of its own. An adapter is two matrices: the first is whole, the second
    divided as the rows that it adds to."""
    attended, both = shape.attention, (Units(shape.feed_forward.width),) * 2
    keys = Units(attended.kv_heads, attended.head_dim, attended.kv_copies)
    queries = Units(attended.heads, attended.head_dim)
    added: dict[str, tuple[str, int, Dim]] = {"into": ("feed_forward.gate_up_proj", hidden, both)}
    if shape.adapted_attention:
        added |= {part: (f"self_attn.linear_{part}", 2 * hidden, queries if part == "q" else keys) for part in "qkv"}
    table: Table = {}
    for role, (name, read, rows) in added.items():
        adapter = f"{name}_adapter_list.{shape.use}"
        table |= product(f"{role}.0", read, (f"{adapter}.0", shape.adapter_rank))
        table |= product(f"{role}.1", shape.adapter_rank, (f"{adapter}.1", rows))
    return table


GATED: Names = ("gate_proj", "up_proj", "down_proj")


def dense(
    shape: shapes.Dense, hidden: int, *, names: Names = GATED, whole: bool = False, paired: bool = False
) -> Table:
    """``names``: of what goes in, and of what comes out; one name of gate and up where they are one tensor.
    ``whole``: ranks do not divide it. ``paired``: rows of gate and up take turns in the one tensor."""
    *into, down = names if shape.gated else names[-2:]
    width: Dim = shape.width if whole else Units(shape.width)
    rows = width
    if shape.gated and len(into) == 1:
        rows = 2 * width if isinstance(width, int) else (Units(shape.width), Units(shape.width))
        rows = Units(shape.width, 2) if paired else rows
    return product("into", hidden, *((name, rows) for name in into), bias=shape.bias) | product(
        "down", width, (down, hidden), bias=shape.bias
    )


def experts(
    shape: shapes.Experts,
    hidden: int,
    *,
    names: Names = GATED,
    router: str = "gate.weight",
    choice_bias: str = "gate.e_score_correction_bias",
    stacks: tuple[str, str] | None = None,
    paired: bool = False,
    transposed: bool = False,
) -> Table:
    """The routed experts as one tensor each way, whatever they are stored as (``stacks``: what those are
    called), and what belongs to them beside the expert that every token passes. ``paired``: rows of gate and
    up take turns. ``transposed``: each matrix is stored as [columns, rows]."""
    count: Dim = Numbered("experts", shape.count) if shape.own_count else shape.count
    into, down = stacks or ("experts.gate_up_proj" if shape.gated else "experts.up_proj", "experts.down_proj")
    fused = expert(shape, hidden, names=("into", "down"))
    dims = {role: one.dims for role, [one] in fused.items()}
    if paired:
        dims["into"] = (2 * shape.width if shape.own_count else Units(shape.width, 2), dims["into"][1])
    table: Table = (
        _router_over_layers(shape, hidden)
        if shape.router_width
        else {"router": (Tensor(router, (shape.count + shape.shared_count, hidden), "plain"),)}
    )
    for role, name in (("into", into), ("down", down)):
        table[role] = (Tensor(name, (count, *(dims[role][::-1] if transposed else dims[role]))),)
        if shape.bias and (paired or role == "down"):
            of_first = role == "down" and not shape.own_count
            table[f"{role}.bias"] = (Tensor(f"{name}_bias", (count, dims[role][0]), "float32", of_first),)
        elif shape.bias:
            for part in ("gate", "up"):
                table[f"{part}.bias"] = (
                    Tensor(
                        f"experts.{part}_proj_bias",
                        (count, shape.width if shape.own_count else Units(shape.width)),
                        "float32",
                    ),
                )
    if shape.bias:
        table["router.bias"] = (Tensor(router.replace("weight", "bias"), (shape.count,), "plain"),)
    if shape.choice_bias and not shape.router_width:
        table["choice_bias"] = (Tensor(choice_bias, (shape.count,), "float32"),)
    if shape.shared_gate:
        table["shared_gate"] = (Tensor("shared_expert_gate.weight", (1, hidden), "plain"),)
    if shape.latent_width:
        table |= product("latent_in", hidden, ("fc1_latent_proj", shape.latent_width)) | product(
            "latent_out", shape.latent_width, ("fc2_latent_proj", hidden)
        )
    return table


def _router_over_layers(shape: shapes.Experts, hidden: int) -> Table:
    """It has one choice more than experts: none."""
    width, inner = shape.router_width, "gate.router_mlp"
    table = (
        product("router", hidden, ("gate.down_proj", width), bias=True)
        | product("fc1", width, (f"{inner}.fc1", width), bias=True)
        | product("fc2", width, (f"{inner}.fc2", width), bias=True)
        | product("choice", width, (f"{inner}.out_proj", shape.count + 1))
    )
    if shape.router_continues:
        table["continued"] = (Tensor("gate.router_states_scale", (width,)),)
    biases = Tensor("gate.balancing_biases", (shape.count + 1,), "float32")
    return all_plain(table) | norm_weight("router_norm", width, f"{inner}.norm") | {"choice_bias": (biases,)}


def shared_experts(shape: shapes.Experts, hidden: int, *, paired: bool = False) -> Table:
    """``shared_count`` experts, always divided by their width. ``paired``: as of ``experts``."""
    count, width = shape.shared_count, Units(shape.shared_width)
    into = tuple(Tensor(f"shared_experts.{part}_proj", (count, width, hidden)) for part in ("gate", "up"))
    if paired:
        into = (Tensor("shared_experts.shared_w13_weight", (count, Units(shape.shared_width, 2), hidden)),)
    down = f"shared_experts.{'shared_w2_weight' if paired else 'down_proj'}"
    return {"into": into, "down": (Tensor(down, (count, hidden, width)),)}


def experts_apart(shape: shapes.Experts, hidden: int) -> Table:
    """Of Gemma 4's router, besides its product."""
    return {
        "scale": (Tensor("scale", (hidden,), "plain"),),
        "factors": (Tensor("per_expert_scale", (shape.count,), "plain"),),
    }


def expert(shape: shapes.Experts, hidden: int, *, names: Names = GATED) -> Table:
    """One of them. Its width is divided, unless experts are divided by their number."""
    one = shapes.Dense(shape.width, shape.activation, shape.gated)
    return dense(one, shape.latent_width or hidden, names=names, whole=bool(shape.own_count))


def tables(record: shapes.Mixer | shapes.FeedForward, hidden: int) -> list[Table]:
    """Of one layer's mixer or feed-forward, all that is its own."""
    if isinstance(record, shapes.Parallel):
        return [*tables(record.attention, hidden), *tables(record.mamba, hidden)]
    if isinstance(record, shapes.SharedBlock):
        own = [shared_use(record, hidden)] * bool(record.adapter_rank)
        return [*tables(record.mamba, hidden), *own, product("linear", hidden, ("linear", hidden))]
    if isinstance(record, shapes.WithNgrams):
        return [gated_delta(record.mixer, hidden), ngrams(record.ngrams, hidden)]
    chosen = getattr(record, "index", None)
    if isinstance(chosen, shapes.Index):
        return [TABLES[type(record)](record, hidden), index(chosen, hidden, getattr(record, "query_rank", None) or 0)]
    if isinstance(record, shapes.RelativeAttention):
        return [relative_attention(record, hidden), around_relative(record, hidden)]
    if isinstance(record, shapes.Experts) and record.shared_count:
        return [experts(record, hidden), shared_experts(record, hidden)]
    if isinstance(record, shapes.Experts):
        shared = [dense(record.shared, hidden)] if record.shared_width else []
        apart = [experts_apart(record, hidden)] if record.normed_apart else []
        return [experts(record, hidden), *shared, *apart]
    return [TABLES[type(record)](record, hidden)]


TABLES: dict[type, Callable[[Any, int], Table]] = {
    shapes.Attention: attention,
    shapes.ConvolvedAttention: convolved_attention,
    shapes.LatentAttention: latent_attention,
    shapes.GatedDelta: gated_delta,
    shapes.KimiDelta: kimi_delta,
    shapes.Mamba2: mamba2,
    shapes.Mamba1: mamba1,
    shapes.ShortConv: short_conv,
    shapes.RgLru: rg_lru,
    shapes.Lightning: lightning,
    shapes.MatrixLstm: matrix_lstm,
    TimeMix: time_mix,
    ChannelMix: channel_mix,
    shapes.Dense: dense,
}
