"""Blocks out of a checkpoint: the tables of ``families.tensors``, read under the names of a family.

``models.families`` says which block lies under which name and puts the layers together. All of it runs twice:
against the check, then for real.

    read = BlockReader(architecture, source)
    read.mixer(shape, {Attention: "layers.3.self_attn", Mamba2: "layers.3.mamba"})
    read.swiglu(feed, "layers.3.mlp")
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from functools import partial
from typing import Any

import torch

from weft.errors import CheckpointError
from weft.families import architecture as shapes
from weft.families import stream_tensors, tensors
from weft.families.architecture import Architecture, Attention, Dense, Experts, GatedDelta, Mamba1, Mamba2
from weft.families.mixing import TimeMix
from weft.families.tensors import GATED, Names, Table
from weft.models import layer
from weft.models.adapter_targets import Target, Targets
from weft.models.blocks import recurrent
from weft.models.blocks.attention import AttentionBlock, LatentAttentionBlock, halves, separate_gate
from weft.models.blocks.chosen import IndexBlock, LearnedIndex, MeanIndex
from weft.models.blocks.combined import ParallelBlock
from weft.models.blocks.dynamic_delta import DynamicDeltaBlock, by_place
from weft.models.blocks.feed_forward import DenseBlock, ExpertsApart, ExpertsBlock, SwiGlu
from weft.models.blocks.linear import HeadLinear, Linear, Norm, Projection
from weft.models.blocks.matrix_lstm import MatrixLstmBlock
from weft.models.blocks.per_layer import BehindLayer, PerLayerInputs
from weft.models.blocks.recurrent import RecurrentBlock
from weft.models.blocks.streams import GatedStreams, MixedStreams, StreamMix
from weft.models.blocks.zaya import ContinuedExperts
from weft.models.decoder import CausalModel, Collapse
from weft.models.embedding import Embedding, Lookup
from weft.models.layer import DecoderLayer
from weft.models.rotary import RotaryTable
from weft.models.sharded_model import RankedModel
from weft.models.table_reader import TableReader
from weft.models.vision.encoder import LayerNorm
from weft.models.weights import Order, TensorSource
from weft.tensor.ops.moe import ExpertBiases, ExpertWeights
from weft.tensor.ops.recurrent_layers import GATED_DELTA, MAMBA2, GatedDeltaWeights, Mamba2Weights

RMS_EPS = 1e-6
"""Of the norm inside lightning attention, whatever config.json says for the others."""


class BlockReader:
    """``plus_one``: norms of the stream and of attention are stored as the distance from 1."""

    def __init__(self, architecture: Architecture, source: TensorSource, *, plus_one: bool = False) -> None:
        self.architecture = architecture
        self.source = source
        self.plus_one = plus_one
        self.hidden, self.eps = architecture.hidden_size, architecture.norm_eps

    def table(self, table: Table, name: str) -> TableReader:
        return TableReader(self.source, table, name)

    def model(
        self,
        read_layer: Callable[[str, shapes.Mixer | None, shapes.FeedForward | None], DecoderLayer],
        *,
        final_norm: str,
        embedding: str,
        stack: str = "layers",
    ) -> CausalModel:
        """Embedding, layers, final norm and head. ``read_layer``: of "layers.3", its mixer and its
        feed-forward. ``stack``: what the layers are called."""
        architecture, source = self.architecture, self.source
        layers = [
            read_layer(f"{stack}.{index}", mixer, feed)
            for index, (mixer, feed) in enumerate(zip(architecture.mixers, architecture.feed_forwards, strict=True))
        ]
        tokens = tensors.vocabulary(architecture.vocab_size, self.hidden)
        tied = architecture.tied_embeddings
        table = source.table(f"{embedding}.weight", tokens, is_head=tied)
        head = source.head(tokens, tied=table if tied else None)
        shape = architecture.streams
        within = architecture.layer_norms or (shape is not None and shape.kind == "gated")  # ``collapse``
        norm = None if within else self.norm(final_norm)
        parts: dict[str, Any] = {
            "embedding": table,
            "layers": layers,
            "final_norm": norm,
            "head": head,
            "collapse": self._collapse(shape, final_norm),
        }
        model = (
            CausalModel(architecture, **parts)
            if source.share is None
            else RankedModel(architecture, source.share, **parts)
        )
        # Each rank has all of an adapter's embedding: what it adds comes behind the sum of the looked up
        # rows. In front of a norm it would be something else: such adapters are refused as unknown.
        if not architecture.embedding_norm:
            source.targets[embedding] = Target(model, architecture.vocab_size, self.hidden, kind="table")
        model.expand = self._expand(shape)
        if architecture.per_layer_width:
            model.per_layer = self._per_layer(architecture.per_layer_width)
        model.targets = Targets(source.targets)
        return model

    def _expand(self, shape: shapes.Streams | None) -> Collapse | None:
        if shape is not None:
            return lambda x_TD: x_TD.repeat(1, shape.count)
        first = self.architecture.mixers[0]
        if isinstance(first, TimeMix):
            norm, width = self.layer_norm("layers.0.pre_norm"), first.carried
            return lambda x_TD: torch.nn.functional.pad(norm(x_TD), (0, width))
        if self.architecture.embedding_norm:
            return self.norm("embed_tokens.embed_norm")
        if not self.architecture.scaled_residual:
            return None
        bias, scale = (self.source.tensor(f"input_hidden_states_{part}", self.hidden) for part in ("bias", "scale"))
        feed = self.architecture.feed_forwards[0]
        assert isinstance(feed, Experts)
        return lambda x_TD: torch.nn.functional.pad((x_TD + bias) * scale, (0, feed.router_width))

    def _collapse(self, shape: shapes.Streams | None, final_norm: str) -> Collapse | None:
        if self.architecture.layer_norms:
            norm = self.layer_norm(final_norm)
            return lambda x_TN: norm(x_TN[:, : self.hidden])
        if self.architecture.scaled_residual:
            return lambda x_TN: x_TN[:, : self.hidden]
        if shape is None:
            return None
        if shape.kind == "mixed":
            return lambda x_TN: torch.unflatten(x_TN, 1, (shape.count, -1)).mean(1)
        mix = self.streams(shape, "hyper_connection_mixer", last=True)
        return lambda x_TN: mix.enter(x_TN)[0]

    def streams(self, shape: shapes.Streams, name: str, *, last: bool = False) -> StreamMix:
        """Around the block whose streams lie under ``name``; ``last``: behind all layers."""
        if shape.kind == "mixed":  # layers.3.hc_attn_fn, or layers.3.attn_hc.fn
            layer, _, block = name.rpartition(".")
            on_hub = self.source.has(f"{layer}.hc_{block}_fn")
            read = self.table(
                stream_tensors.stream_mix(shape, self.hidden, joint=f"hc_{block}_" if on_hub else f"{block}_hc."), layer
            )
            return MixedStreams(shape, read.tensor("fn"), read.tensor("base"), read.tensor("scale"), self.eps)
        read = self.table(stream_tensors.stream_mix(shape, self.hidden, last=last), name)
        return GatedStreams(
            shape,
            read.norm("norm", self.eps, plus_one=self.plus_one),
            read.linear("down"),
            read.linear("up"),
            None if last else read.linear("inject"),
        )

    def continued_experts(self, shape: Experts, name: str, norm: str) -> ContinuedExperts:
        """``norm``: in front of it."""
        read = self.table(tensors.experts(shape, self.hidden), name)
        into, down = self.routed(shape, read, GATED, False, None)
        router = read.plain("router")
        experts = ExpertsBlock(shape, router, into, down)
        self.note_experts(shape, read, experts, GATED)
        return ContinuedExperts(
            self.source.summed(experts.of_choices),
            self.norm(norm),
            router,
            read.get("continued"),
            read.norm("router_norm", self.eps),
            (read.plain("fc1"), read.plain("fc2")),
            read.plain("choice"),
            read.tensor("choice_bias"),
            experts,
        )

    def index(self, shape: shapes.Index, name: str, rope: shapes.Rope | None, rank: int = 0) -> IndexBlock:
        apart = self.source.has(f"{name}.indexer.index_q_proj.weight")  # of GGUF files
        read = self.table(tensors.index(shape, self.hidden, rank, apart=apart), f"{name}.indexer")
        if shape.learned:
            return LearnedIndex(
                shape,
                read.linear("project"),
                read.linear("query"),
                read.tensor("norm"),
                read.tensor("norm.bias"),
                read.tensor("places"),
            )
        assert rope is not None
        q_norm, k_norm = (read.norm(role, self.eps, plus_one=self.plus_one) for role in ("q_norm", "k_norm"))
        return MeanIndex(shape, read.linear("project"), q_norm, k_norm, RotaryTable(rope, self.source.device))

    def _per_layer(self, width: int) -> PerLayerInputs:
        """Gemma 4's second embedding."""
        source, layers = self.source, self.architecture.layer_count
        table = stream_tensors.per_layer(width, layers, self.architecture.vocab_size, self.hidden)
        read = self.table(table, "")
        rows, share = read.tensor("table"), source.share
        second: Lookup = Embedding(rows) if share is None else share.lookup(rows, self.architecture.vocab_size)
        return PerLayerInputs(second, read.linear("project"), read.norm("norm", self.eps), width)

    def behind(self, name: str) -> BehindLayer:
        """What follows the layer ``name`` of Gemma 4."""
        width = self.architecture.per_layer_width
        read = self.table(stream_tensors.behind_layer(width, self.hidden), name)
        scalar = read.tensor("scalar")
        if not width:
            return BehindLayer(scalar)
        return BehindLayer(scalar, read.linear("gate"), read.linear("out"), read.norm("norm", self.eps))

    def experts_apart(
        self, shape: Experts, name: str, norms: tuple[tuple[str, str], tuple[str, str]], **names: Any
    ) -> ExpertsApart:
        """``norms``: in front of the dense one and the routed ones, and behind both, in the layer
        ``name``."""
        block = self.experts(shape, name, router="router.proj.weight", **names)
        own = self.table(tensors.experts_apart(shape, self.hidden), f"{name}.router")
        # The router sees x / rms(x) / sqrt(D), times its own factors.
        router_norm = Norm(own.tensor("scale") * self.hidden**-0.5, self.eps)
        (before, after), summed = norms, self.source.summed
        return ExpertsApart(
            block,
            summed(block.of_choices),
            summed(self.dense(shape.shared, f"{name}.mlp")),
            (self.norm(f"{name}.{before[0]}"), self.norm(f"{name}.{before[1]}")),
            (self.norm(f"{name}.{after[0]}"), self.norm(f"{name}.{after[1]}")),
            router_norm,
            own.tensor("factors"),
        )

    def norm(self, name: str, width: int | None = None) -> Norm:
        """Of the stream; ``width``: of several beside each other."""
        shape, width = self.architecture.norm_gate, width or self.hidden
        gate = self.table(tensors.norm_gate("norm", shape, width, name), "").gate("norm", shape)
        return Norm(self.source.tensor(f"{name}.weight", width), self.eps, self.plus_one, gate=gate)

    def layer_norm(self, name: str) -> LayerNorm:
        weight, bias = (self.source.tensor(f"{name}.{part}", self.hidden) for part in ("weight", "bias"))
        return LayerNorm(weight, bias, self.eps)

    def mixer(self, shape: shapes.Mixer | None, names: Mapping[type, str], /, **spelled: Any) -> layer.Mixer:
        """``names``: where each kind of mixer lies. ``spelled``: as the reader of its kind takes it."""
        if isinstance(shape, shapes.Parallel):
            return ParallelBlock(
                shape, self.attention(shape.attention, names[Attention]), self.mamba2(shape.mamba, names[Mamba2])
            )
        readers: dict[type, Callable[..., layer.Mixer]] = {
            Attention: self.attention,
            shapes.LatentAttention: self.latent_attention,
            Mamba2: self.mamba2,
            Mamba1: self.mamba1,
            GatedDelta: self.gated_delta,
            shapes.KimiDelta: self.kimi_delta,
            shapes.ShortConv: self.short_conv,
            shapes.RgLru: self.rg_lru,
            shapes.Lightning: self.lightning,
            shapes.MatrixLstm: self.matrix_lstm,
        }
        return readers[type(shape)](shape, names[type(shape)], **spelled)

    def attention(
        self,
        shape: Attention,
        name: str,
        *,
        out: str = "o_proj",
        norms: tuple[str, str] = ("q_norm", "k_norm"),
        gate: str | None = None,
    ) -> AttentionBlock:
        """One projection, with the gate's rows moved behind the query's (``gate``: they are stored by
        themselves), and head gates (``g_proj``, ``gate_proj`` on the hub) at the end."""
        source = self.source
        if shape.kv_of is not None:  # releases of Gemma 4 have keys and values of such layers; nothing uses them
            for part in ("k_proj", "v_proj", "k_norm", "v_norm"):
                source.leave_all(f"{name}.{part}.")
        gates = "gate_proj" if source.has(f"{name}.gate_proj.weight") else "g_proj"
        read = self.table(tensors.attention(shape, self.hidden, out=out, norms=norms, gates=gates, gate=gate), name)
        bias = read.get("qkv.bias")
        if bias is not None and shape.head_gated:
            bias = torch.nn.functional.pad(bias, (0, shape.heads))
        orders: dict[str, Order] = {}
        if shape.gated and gate is None:
            orders["q_proj.weight"] = lambda rows: separate_gate(rows, shape.heads, shape.head_dim)
            if bias is not None:
                asked = 2 * shape.heads * shape.head_dim
                bias[:asked] = separate_gate(bias[:asked], shape.heads, shape.head_dim)
        qkv: Projection = read.linear("qkv", orders=orders, bias=bias)
        q_norm, k_norm = read.qk_norms(self.eps, plus_one=self.plus_one)
        if source.share is not None and shape.norm_whole and q_norm is not None and k_norm is not None:
            qkv = source.share.normed_heads(qkv, shape, q_norm, k_norm)
            shape, q_norm, k_norm = replace(shape, qk_norm=False, norm_whole=False), None, None
        v_norm = None
        if shape.values_normed and shape.kv_of is None:
            v_norm = torch.ones(shape.head_dim, dtype=source.dtype, device=source.device)
        index = None
        if isinstance(shape.index, shapes.Index):
            index = self.index(shape.index, name, shape.rope)
        return AttentionBlock(shape, qkv, read.linear("out"), q_norm, k_norm, read.get("sinks"), v_norm, index)

    def latent_attention(self, shape: shapes.LatentAttention, name: str) -> LatentAttentionBlock:
        read = self.table(tensors.latent_attention(shape, self.hidden, out=self._out(name)), name)
        keys, values = self._expansion(shape, read)
        latent_norm = read.norm(
            "latent_norm",
            shape.norm_eps,
            plus_one=self.plus_one,
            gate=read.gate("latent_norm", shape.norm_gate, shape.latent_factor),
        )
        query_norm = (
            None
            if shape.query_rank is None
            else read.norm(
                "query_norm",
                shape.norm_eps,
                plus_one=self.plus_one,
                gate=read.gate("query_norm", shape.norm_gate, shape.query_factor),
            )
        )
        bias = read.get("latent.bias")
        orders: dict[str, Order] = {}
        if shape.rope is not None:
            # DeepSeek pairs neighbours. Queries and keys move alike, so their products stay.
            queries = partial(halves, heads=shape.heads, own=shape.own_dim)
            orders = {
                "q_proj.weight": queries,
                "q_b_proj.weight": queries,
                "kv_a_proj_with_mqa.weight": partial(halves, heads=1, own=shape.latent_dim),
            }
            if bias is not None:
                before = (shape.query_rank or 0) + shape.latent_dim
                bias = halves(bias[:, None], heads=1, own=before)[:, 0]
        if bias is not None:
            bias = torch.nn.functional.pad(bias, (0, shape.heads * shape.gate_width))
        block = LatentAttentionBlock(
            shape,
            query=read.linear("query", orders=orders),
            latent=read.linear("latent", orders=orders, bias=bias),
            latent_norm=latent_norm,
            keys_HOC=keys.contiguous(),
            values_HVC=values.contiguous(),
            out=read.linear("out"),
            query_norm=query_norm,
            index=None if shape.index is None else self.index(shape.index, name, shape.rope, shape.query_rank or 0),
        )
        full, (rows, columns) = read.declared(read.table["expansion"][0])
        self.source.note(full, block, rows, columns, kind="expansion")
        return block

    def _expansion(self, shape: shapes.LatentAttention, read: TableReader) -> tuple[torch.Tensor, torch.Tensor]:
        """[H, own, latent] and [H, value, latent], what makes keys and values of latents."""
        if not self.source.has(f"{read.name}.k_b_proj.weight"):
            both = read.tensor("expansion").view(shape.heads, -1, shape.latent_dim)
            keys, values = torch.split(both, [shape.own_dim, shape.value_dim], dim=1)
            return keys, values
        # In GGUF files, which ranks do not read: apart, and the keys with their rows as columns.
        tensor, latent = self.source.tensor, shape.latent_dim
        keys = tensor(f"{read.name}.k_b_proj.weight", shape.heads, latent, shape.own_dim).transpose(1, 2)
        return keys, tensor(f"{read.name}.v_b_proj.weight", shape.heads, shape.value_dim, latent)

    def _out(self, name: str) -> str:
        """Of a Kimi or Ling layer."""
        return "dense" if self.source.has(f"{name}.dense.weight") else "o_proj"

    def gated_delta(
        self, shape: GatedDelta, name: str, *, eps: float | None = None, **names: Any
    ) -> RecurrentBlock | DynamicDeltaBlock:
        """``eps``: of the gated norm, where it is another one. ``names``: as ``tensors.gated_delta`` takes
        them. Rows that are grouped by key head are put in the order of the others."""
        if self.source.has(f"{name}.gate_proj.weight"):  # GigaChat's, in GGUF files
            names = {"names": "fused", "gate": "gate_proj"}
        read = self.table(tensors.gated_delta(shape, self.hidden, **names), name)
        if shape.kernel_rank:
            return self._dynamic_delta(shape, read)
        conv = read.qkv_conv() if names.get("names") == "each" else read.conv()
        project = read.linear(
            "project",
            orders={
                "in_proj_qkvz.weight": lambda rows: recurrent.ungroup_qkvz(rows, shape),
                "in_proj_ba.weight": lambda rows: recurrent.ungroup_ba(rows, shape),
            },
        )
        self._note_other_rows(shape, name, project, names.get("names", "fused"))
        weights = GatedDeltaWeights(
            conv,
            read.decay(),
            read.tensor("dt_bias"),
            read.tensor("norm"),
            self.eps if eps is None else eps,
            shape.k_heads,
            shape.v_heads,
            shape.k_dim,
            shape.v_dim,
            shape.beta_scale,
            shape.sigmoid_gate,
            shape.gate_scale,
            shape.norm_plus_one,
        )
        return RecurrentBlock(GATED_DELTA, weights, project, read.linear("out"))

    def _dynamic_delta(self, shape: GatedDelta, read: TableReader) -> DynamicDeltaBlock:
        order, [stored] = partial(by_place, kernel=shape.conv_kernel), read.table["kernels"]
        bias = read.tensor("kernels.bias")
        kernels = read.linear("kernels", orders={stored.name: order}, bias=bias if bias.is_meta else order(bias))
        return DynamicDeltaBlock(
            shape,
            read.linear("project"),
            kernels,
            read.decay(),
            read.tensor("dt_bias"),
            read.tensor("norm"),
            self.eps if shape.norm_eps is None else shape.norm_eps,
            read.linear("out"),
        )

    def _note_other_rows(self, shape: GatedDelta, name: str, project: Linear, stored: str) -> None:
        """An adapter may know the projection as Qwen3.5 or as Qwen3-Next stores it, whatever this file
        does."""
        orders: dict[str, Order] = {
            "in_proj_qkvz.weight": lambda rows: recurrent.ungroup_qkvz(rows, shape),
            "in_proj_ba.weight": lambda rows: recurrent.ungroup_ba(rows, shape),
        }
        for spelled in ("fused", "by_key_head"):
            first = 0
            for tensor in tensors.gated_delta(shape, self.hidden, names=spelled)["project"]:
                rows, columns = tensor.shape(self.source.place)
                if stored != "each" and spelled != stored:
                    self.source.note(
                        f"{name}.{tensor.name}",
                        project,
                        rows,
                        columns,
                        first=first,
                        order=orders.get(tensor.name),
                        tensor=tensor,
                    )
                first += rows

    def kimi_delta(self, shape: shapes.KimiDelta, name: str, *, flat: bool = False) -> recurrent.KimiDeltaBlock:
        forget = "forget_gate." if self.source.has(f"{name}.forget_gate.A_log") else ""
        read = self.table(tensors.kimi_delta(shape, self.hidden, forget=forget, out=self._out(name), flat=flat), name)
        return recurrent.KimiDeltaBlock(
            shape,
            read.linear("project"),
            conv=read.qkv_conv(),
            decay=read.decay().flatten(),
            dt_bias=read.tensor("dt_bias"),
            forget=None if shape.wide_gates else read.linear("forget"),
            gate=None if shape.wide_gates else read.linear("gate"),
            norm=read.tensor("norm"),
            norm_eps=self.eps,
            out=read.linear("out"),
        )

    def short_conv(self, shape: shapes.ShortConv, name: str) -> recurrent.ShortConvBlock:
        read = self.table(tensors.short_conv(shape, self.hidden), name)
        return recurrent.ShortConvBlock(
            shape, read.linear("project"), conv=read.conv(), conv_bias=read.get("conv.bias"), out=read.linear("out")
        )

    def lightning(
        self, shape: shapes.Lightning, name: str, *, eps: float | None = RMS_EPS, **names: Any
    ) -> recurrent.LightningBlock:
        """``eps``: of the norms inside, None for that of the others. ``names``: as ``tensors.lightning``
        takes them."""
        eps = self.eps if eps is None else eps
        source, read = self.source, self.table(tensors.lightning(shape, self.hidden, **names), name)
        heads = tensors.Units(shape.heads).span(source.place)
        all_slopes = torch.exp2(-8.0 * torch.arange(1, heads.total + 1) / heads.total) * shape.factor
        slopes = all_slopes[heads.begin : heads.begin + heads.count].to(source.device)
        norm = read.norm("norm", eps)
        source.leave(f"{name}.slope_rate", all_slopes, "num_attention_heads, num_hidden_layers")
        for derived in ("query_decay", "key_decay", "diagonal_decay"):  # of the slopes, for blocks of some size
            source.leave(f"{name}.{derived}")
        project = read.linear(
            "project", orders={"qkv_proj.weight": lambda rows: recurrent.ungroup_qkv(rows, shape.heads)}
        )
        groups, ranks = shape.norm_groups, source.place.size
        of_groups: Projection = replace(norm, group_size=len(norm.weight) * ranks // groups)
        if source.share is not None and groups % ranks:
            if ranks % groups:
                raise CheckpointError(
                    f"--tp is {ranks}, and the norm of lightning attention has {groups} "
                    f"groups: one must divide the other",
                    param="--tp",
                )
            of_groups = source.share.norm_of_group(groups, norm)
        return recurrent.LightningBlock(shape, project, slopes, of_groups, read.linear("out"), *read.qk_norms(eps))

    def matrix_lstm(self, shape: shapes.MatrixLstm, name: str) -> MatrixLstmBlock:
        read = self.table(tensors.matrix_lstm(shape, self.hidden), name)
        return MatrixLstmBlock(
            shape, read.linear("project"), read.linear("gates"), read.tensor("norm"), read.linear("out")
        )

    def rg_lru(self, shape: shapes.RgLru, name: str) -> recurrent.RgLruBlock:
        read = self.table(tensors.rg_lru(shape, self.hidden), name)
        gates = ("input", "recurrent")
        return recurrent.RgLruBlock(
            shape,
            read.linear("project"),
            conv=read.conv(),
            conv_bias=read.get("conv.bias"),
            gates=HeadLinear.of(torch.cat([read.tensor(gate) for gate in gates], dim=-1)),
            gate_biases_HJ=torch.cat([read.tensor(f"{gate}.bias") for gate in gates], dim=-1),
            rates=read.tensor("rg_lru.recurrent_param"),
            out=read.linear("out"),
        )

    def mamba2(self, shape: Mamba2, name: str, *, eps: float | None = None) -> RecurrentBlock:
        """``eps``: of the gated norm, where it is another one."""
        source, eps = self.source, self.eps if eps is None else eps
        read = self.table(tensors.mamba2(shape, self.hidden), name)
        norm = read.get("norm")
        out: Projection = read.linear("out")
        groups = shape.groups * source.place.size // shape.group_copies
        if source.share is not None and norm is not None and groups < source.place.size:
            if shape.norm == "gate_last":
                raise CheckpointError(
                    f"--tp is {source.place.size}, and the Mamba-2 layers of this model, "
                    f"which are normed before their gate, have {groups} groups; use --tp "
                    f"{groups} or less",
                    param="--tp",
                )
            out, norm = source.share.normed_group(groups, Norm(norm, eps), out), None
        weights = Mamba2Weights(
            read.conv(),
            read.get("conv.bias"),
            read.decay(),
            read.tensor("D"),
            read.tensor("dt_bias"),
            norm,
            eps,
            shape.norm == "gate_first",
            shape.heads,
            shape.groups,
            shape.head_dim,
            shape.state_dim,
            shape.dt_limit,
        )
        return RecurrentBlock(MAMBA2, weights, read.linear("project"), out, self._factors(shape))

    def _factors(self, shape: Mamba2) -> torch.Tensor | None:
        """On each row of the input projection."""
        if not shape.multipliers or set(shape.multipliers) == {1.0}:
            return None
        widths = (shape.inner_width, shape.inner_width, shape.group_width, shape.group_width, shape.heads)
        return torch.cat(
            [
                torch.full((width,), factor, dtype=self.source.dtype, device=self.source.device)
                for width, factor in zip(widths, shape.multipliers, strict=True)
            ]
        )

    def mamba1(self, shape: Mamba1, name: str) -> recurrent.Mamba1Block:
        source = self.source
        read = self.table(tensors.mamba1(shape, self.hidden), name)
        if shape.heads:
            return self._mamba1_by_head(shape, read)

        def norm(part: str, width: int) -> Norm:
            if shape.inner_norms == "weighted":
                return Norm(read.tensor(f"{part}_layernorm"), shape.inner_eps)
            return Norm(torch.ones(width, dtype=source.dtype, device=source.device), shape.inner_eps)

        norms = None
        if shape.inner_norms != "none":
            norms = norm("dt", shape.dt_rank), norm("b", shape.state_dim), norm("c", shape.state_dim)
        scan = recurrent.SelectiveScan(
            shape,
            select=source.summed(read.linear("select", finer=True)),
            step=read.linear("step", finer=True),
            a=read.decay(),
            d=read.tensor("D"),
            dt_bias=read.tensor("dt_bias"),
            norms=norms,
        )
        return recurrent.Mamba1Block(
            read.linear("project"),
            conv=read.conv(),
            conv_bias=read.get("conv.bias"),
            scans=(scan,),
            out=read.linear("out"),
        )

    def _mamba1_by_head(self, shape: Mamba1, read: TableReader) -> recurrent.Mamba1Block:
        bias = read.get("project.bias")
        exact = self.source.runtime.of_exact
        scans = tuple(
            recurrent.SelectiveScan(shape, Linear(exact(select)), Linear(exact(step)), a, d, dt_bias)
            for select, step, a, d, dt_bias in zip(
                read.tensor("select"),
                read.tensor("step"),
                read.decay(),
                read.tensor("D"),
                read.tensor("dt_bias"),
                strict=True,
            )
        )
        return recurrent.Mamba1Block(
            read.linear(
                "project",
                orders={"in_proj.weight": recurrent.by_turns},
                bias=None if bias is None else recurrent.by_turns(bias),
            ),
            conv=read.conv(),
            conv_bias=read.get("conv.bias"),
            scans=scans,
            out=read.linear("out"),
        )

    def swiglu(self, shape: Dense, name: str, names: Names = GATED, *, paired: bool = False) -> SwiGlu:
        """The usual feed-forward; ``names`` and ``paired`` as in its table."""
        read = self.table(tensors.dense(shape, self.hidden, names=names, paired=paired), name)
        orders: dict[str, Order] = {f"{names[0]}.weight": recurrent.by_turns} if paired else {}
        return SwiGlu(read.linear("into", orders=orders), read.linear("down"))

    def dense(self, shape: Dense, name: str, names: Names = GATED) -> DenseBlock:
        """A feed-forward in any of the forms that ``Dense`` tells of."""
        read = self.table(tensors.dense(shape, self.hidden, names=names), name)
        return DenseBlock(shape, read.linear("into"), read.linear("down"))

    def experts(
        self, shape: Experts, name: str, *, router_dtype: torch.dtype | None = None, paired: bool = False, **names: Any
    ) -> ExpertsBlock:
        """Without the expert that every token passes. ``names`` and ``paired``: as ``tensors.experts`` takes
        them; experts in pairs are stored transposed, but in blocks of codes."""
        known_pairs = paired
        paired = paired and self.source.has(f"{name}.experts.gate_up_proj_bias")  # GGUF has them apart
        transposed = paired and self.source.stored_rows(f"{name}.experts.gate_up_proj") > 0
        read = self.table(tensors.experts(shape, self.hidden, paired=paired, transposed=transposed, **names), name)
        order = gate_first if paired else None
        into, down = self.routed(shape, read, names.get("names", GATED), transposed, order)
        block = ExpertsBlock(shape, read.plain("router", router_dtype), into, down, choice_bias=read.get("choice_bias"))
        if shape.bias:
            of_into = (
                torch.cat((read.tensor("gate.bias"), read.tensor("up.bias")), dim=1)
                if order is None
                else order(read.tensor("into.bias"))
            )
            block.biases = ExpertBiases(of_into, read.tensor("down.bias"))
        if not known_pairs:  # adapters of experts are not served here, and refused as unknown modules
            self.note_experts(shape, read, block, names.get("names", GATED))
        if shape.shared_gate:
            block.shared_gate = read.plain("shared_gate")
        if shape.latent_width:
            block.latent_in, block.latent_out = read.linear("latent_in"), read.linear("latent_out")
        return block

    def note_experts(self, shape: Experts, read: TableReader, block: ExpertsBlock, names: Names) -> None:
        """What adapters change: each expert's own matrices, and the stacks of all."""
        source, own = self.source, self.source.own_experts(shape.count)
        source.note(f"{read.name}.experts", block, 0, 0, kind="experts", experts=own)
        for role in ("into", "down"):
            [stack] = read.table[role]
            source.declare(source.checkpoint.prefix + f"{read.name}.{stack.name}", stack)
            *_, rows, columns = stack.shape(source.place)
            stacked = f"{read.name}.experts.{'down_proj' if role == 'down' else 'gate_up_proj'}"
            for spelled in {f"{read.name}.{stack.name}", stacked}:
                source.note(spelled, block, rows, columns, tensor=stack, kind="experts", experts=own, role=role)
            table, first = tensors.expert(shape, self.hidden, names=names)[role], 0
            for tensor in table:
                rows, columns = tensor.shape(source.place)
                for number in range(shape.count):  # of experts that other ranks hold, this one uses nothing
                    source.note(
                        f"{read.name}.experts.{number}.{tensor.name}",
                        block if number in own else None,
                        rows,
                        columns,
                        first=first,
                        tensor=tensor,
                        kind="experts",
                        experts=range(number, number + 1),
                        role=role,
                    )
                first += rows

    def routed(
        self, shape: Experts, read: TableReader, names: Names, transposed: bool, order: Order | None
    ) -> tuple[ExpertWeights, ExpertWeights]:
        """What goes into all experts, and what comes out."""
        # Hub releases store each expert by itself (experts.3.gate_proj.weight); transformers may save them
        # as two tensors of all experts (experts.gate_up_proj).
        source, weights = self.source, []
        for role in ("into", "down"):
            [stack] = read.table[role]
            table, parts = tensors.expert(shape, self.hidden, names=names)[role], []
            if source.has(f"{read.name}.{stack.name}"):
                full, (count, *sides) = read.declared(stack)
                rows, columns = reversed(sides) if transposed else sides
                weights.append(
                    source.all_experts(
                        [full],
                        count,
                        rows,
                        columns,
                        transposed=transposed,
                        order=order if role == "into" else None,
                        apart=[f"{read.name}.experts.{{}}.{one.name}" for one in table],
                    )
                )
                continue
            for expert in source.own_experts(shape.count):
                one = self.table({role: table}, f"{read.name}.experts.{expert}")
                parts.append([one.declared(tensor) for tensor in table])
            rows, columns = parts[0][0][1]
            weights.append(source.experts([[full for full, _ in part] for part in parts], rows, columns))
        into, down = weights
        return into, down


def gate_first(rows: torch.Tensor) -> torch.Tensor:
    """[experts, rows, ...] whose rows of gate and up take turns -> all rows of the gate, then all of up."""
    return torch.cat((rows[:, 0::2], rows[:, 1::2]), dim=1)
