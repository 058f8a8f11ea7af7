"""Where the blocks of each family lie in a checkpoint: a row of names, over the readers of ``block_readers``.

    layers.3.input_layernorm            Names.mixer_norm
    layers.3.self_attn                  Names.mixers[Attention]
    layers.3.post_attention_layernorm   Names.feed_norm
    layers.3.mlp                        Names.feed

Hub releases and what transformers saves may spell a name differently: both are read. A family that is more
than names has a function beside its row: OLMo norms what comes out of attention, Granite and Kimi choose
between spellings of a feed-forward, Zamba and Zamba2 share blocks between layers.

Sources: transformers ``llama``, ``mistral``, ``qwen3``, ``qwen3_moe``, ``qwen3_5``, ``qwen3_5_moe``,
``qwen3_next``, ``lfm2``, ``lfm2_moe``, ``lfm3``, ``olmo3``, ``olmo_hybrid``, ``kimi_linear``,
``bailing_hybrid``, ``zaya``, ``inkling``. With Mamba: ``granitemoehybrid``, ``bamba``, ``falcon_h1``,
``nemotron_h``, ``jamba``, ``zamba``, ``zamba2``, ``mamba``, ``mamba2``, ``falcon_mamba``.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass, field, replace
from functools import partial
from typing import Any

import torch

from weft.families import architecture as shapes
from weft.families import stream_tensors, tensors
from weft.families.architecture import Architecture
from weft.families.mixing import ChannelMix, TimeMix
from weft.models.block_readers import BlockReader
from weft.models.blocks.attention import AttentionBlock
from weft.models.blocks.combined import Adapted, SharedUse
from weft.models.blocks.feed_forward import DenseBlock, ExpertsApart, ExpertsBlock, SwiGlu
from weft.models.blocks.linear import HeadLinear, Linear, Norm
from weft.models.blocks.ngrams import NgramsBlock
from weft.models.blocks.rwkv import ChannelMixBlock, Shifted, TimeMixBlock
from weft.models.blocks.zaya import ConvolvedAttentionBlock, ScaledResidual
from weft.models.decoder import CausalModel
from weft.models.embedding import Embedding
from weft.models.inkling import inkling_layers
from weft.models.layer import DecoderLayer
from weft.models.table_reader import TableReader
from weft.models.weights import TensorSource

FeedBlock = SwiGlu | DenseBlock | ExpertsBlock | ExpertsApart
ReadLayer = Callable[[str, shapes.Mixer | None, shapes.FeedForward | None], DecoderLayer]
"""Of "layers.3", its mixer and its feed-forward."""


@dataclass(frozen=True, slots=True)
class Names:
    """``mixers``: where each kind of mixer lies. ``spelled``: what the reader of a kind is called with, of
    mixers, ``Dense`` and ``Experts``. ``stack``: what the layers are
    called. ``shared``: where the expert that every token passes lies, if it has a
    width. ``swiglu``: dense feed-forwards are of the usual form. ``plus_one``: norms are stored as the
    distance from 1. ``embeddings``: the first of them that the files have. ``out_norms``: of a model with
    sandwich norms. ``mixes``: where what mixes several streams lies, around mixer and feed-forward.
    ``feed_of`` and ``layers``: in place of the row's own way."""

    mixers: Mapping[type, str] = field(default_factory=dict)
    feed: str = "mlp"
    mixer_norm: str = "input_layernorm"
    feed_norm: str = "post_attention_layernorm"
    final_norm: str = "norm"
    stack: str = "layers"
    embeddings: tuple[str, ...] = ("embed_tokens",)
    spelled: Mapping[type, Mapping[str, Any]] = field(default_factory=dict)
    shared: str | None = None
    swiglu: bool = True
    plus_one: bool = False
    out_norms: tuple[str, str] = ("post_operator_norm", "post_ffn_norm")
    mixes: tuple[str, str] = ("", "")
    feed_of: Callable[[Names, BlockReader, shapes.FeedForward, str], FeedBlock] | None = None
    layers: Callable[[BlockReader], ReadLayer] | None = None

    def layer(
        self, read: BlockReader, name: str, mixer: shapes.Mixer | None, feed: shapes.FeedForward | None
    ) -> DecoderLayer:
        """The layer called ``name``, which may lack one of both."""
        layer = DecoderLayer(None, None, None, None)
        streams = read.architecture.streams
        normed = streams is None or streams.kind != "gated"  # gates have norms of their own
        if streams is not None:
            first, second = self.mixes
            layer.mixes = read.streams(streams, f"{name}.{first}"), read.streams(streams, f"{name}.{second}")
        if isinstance(mixer, shapes.WithNgrams):
            layer.before, mixer = _ngrams(read, mixer.ngrams, f"{name}.ple"), mixer.mixer
        if mixer is not None:
            layer.mixer_norm = read.norm(f"{name}.{self.mixer_norm}") if normed else None
            layer.mixer = read.mixer(
                mixer, {kind: f"{name}.{at}" for kind, at in self.mixers.items()}, **self.spelled.get(type(mixer), {})
            )
        if feed is not None:
            if normed and not (isinstance(feed, shapes.Experts) and feed.normed_apart):
                layer.feed_norm = read.norm(f"{name}.{self.feed_norm}")
            layer.feed_forward = (
                self.feed_forward(read, feed, f"{name}.{self.feed}")
                if self.feed_of is None
                else self.feed_of(self, read, feed, name)
            )
        if read.architecture.sandwich_norms:
            layer.mixer_out_norm, layer.feed_out_norm = (read.norm(f"{name}.{norm}") for norm in self.out_norms)
        if read.architecture.normed_stream:
            layer.factors = read.architecture.normed_stream[int(name.rpartition(".")[2])]
        if read.architecture.layer_scalars:
            layer.behind = read.behind(name)
        return layer

    def feed_forward(self, read: BlockReader, shape: shapes.FeedForward, name: str) -> FeedBlock:
        dense, spelled = read.swiglu if self.swiglu else read.dense, self.spelled.get(type(shape), {})
        if isinstance(shape, shapes.Dense):
            return dense(shape, name, **spelled)
        block = read.experts(shape, name, **spelled)
        if self.shared is not None and shape.shared_width:
            block.shared = dense(shape.shared, f"{name}.{self.shared}")
        return block


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    names = NAMES[architecture.family]
    read = reader_of(architecture, source)
    layer = layers_of(read)
    embedding = next((one for one in names.embeddings if source.has(f"{one}.weight")), names.embeddings[-1])
    return read.model(layer, final_norm=names.final_norm, embedding=embedding, stack=names.stack)


def reader_of(architecture: Architecture, source: TensorSource) -> BlockReader:
    return BlockReader(architecture, source, plus_one=NAMES[architecture.family].plus_one)


def layers_of(read: BlockReader) -> ReadLayer:
    """What reads a layer of the family, also that of a head for multi-token prediction (``models.mtp``)."""
    names = NAMES[read.architecture.family]
    return partial(names.layer, read) if names.layers is None else names.layers(read)


def _ngrams(read: BlockReader, shape: shapes.Ngrams, name: str) -> NgramsBlock:
    source, inner = read.source, f"{name}.ple_embedding"
    shards = 0
    while source.has(f"{inner}.ngram_embedding.shard_{shards}.weight"):
        shards += 1
    stored = read.table(tensors.ngrams(shape, read.hidden, shards=shards), name)
    rows_H = torch.tensor(shape.rows)
    source.leave(f"{inner}.layer_multipliers", torch.tensor(shape.multipliers), "seed, vocab_size, ple_layer_ids")
    source.leave(f"{inner}.ngram_heads_vocab_sizes", rows_H, "ngram_vocab_size_base")
    source.leave(f"{inner}.ngram_heads_offsets", rows_H.cumsum(0) - rows_H, "ngram_vocab_size_base")
    first = stored.table["table"][0]
    parts = [(full, rows) for full, (rows, _) in map(stored.declared, stored.table["table"])]
    table = (
        source.rows(parts, stored.declared(first)[1][1])
        if shards
        # codes of a GGUF file stay
        else source.table(parts[0][0], first, is_head=False)
    )
    streams = read.architecture.streams
    assert streams is not None
    key, query, conv = (
        Norm(stored.tensor(f"{norm}_norm"), read.eps, read.plus_one) for norm in ("key", "query", "conv")
    )
    return NgramsBlock(
        shape, Embedding(table), source.summed(stored.linear("project")), key, query, conv, stored.conv(), streams.count
    )


def _granite_feed(names: Names, read: BlockReader, shape: shapes.FeedForward, layer: str) -> FeedBlock:
    """Experts are stored as ``input_linear`` / ``output_linear`` / ``router.layer`` in hub releases and may
    be saved as ``experts.gate_up_proj`` / ``experts.down_proj`` / ``router``. The shared feed-forward has
    gate and up fused, but for GGUF files."""
    shared, sparse = f"{layer}.shared_mlp", f"{layer}.block_sparse_moe"
    fused = read.source.has(f"{shared}.input_linear.weight")
    parts = ("input_linear", "output_linear") if fused else tensors.GATED
    if isinstance(shape, shapes.Dense):
        return read.swiglu(shape, shared, parts)
    if read.source.has(f"{sparse}.experts.gate_up_proj"):
        block = read.experts(shape, sparse, router="router.weight")
    else:
        block = read.experts(
            shape, sparse, router="router.layer.weight", stacks=("input_linear.weight", "output_linear.weight")
        )
    block.shared = read.swiglu(shape.shared, shared, parts)
    return block


def _gemma_feed(names: Names, read: BlockReader, shape: shapes.FeedForward, layer: str) -> FeedBlock:
    if isinstance(shape, shapes.Dense):
        return read.dense(shape, f"{layer}.mlp")
    return read.experts_apart(
        shape,
        layer,
        ((names.feed_norm, f"{names.feed_norm}_2"), (f"{names.out_norms[1]}_1", f"{names.out_norms[1]}_2")),
    )


def _minimax_feed(names: Names, read: BlockReader, shape: shapes.FeedForward, layer: str) -> FeedBlock:
    assert isinstance(shape, shapes.Experts)
    on_hub = read.source.has(f"{layer}.block_sparse_moe.gate.weight")
    own_names = read.source.has(f"{layer}.block_sparse_moe.experts.0.w1.weight")
    return read.experts(
        shape, f"{layer}.{'block_sparse_moe' if on_hub else 'mlp'}", names=_W_NAMES if own_names else tensors.GATED
    )


def _kimi_feed(names: Names, read: BlockReader, shape: shapes.FeedForward, layer: str) -> FeedBlock:
    saved, source = f"{layer}.block_sparse_moe", read.source
    if isinstance(shape, shapes.Dense):  # transformers' save takes dense layers for sparse ones
        return read.swiglu(shape, saved if source.has(f"{saved}.gate_proj.weight") else f"{layer}.mlp")
    inside = saved if source.has(f"{saved}.gate.weight") else f"{layer}.mlp"
    own_names = source.has(f"{inside}.experts.0.w1.weight")
    bias = "expert_bias" if source.has(f"{inside}.gate.expert_bias") else "e_score_correction_bias"
    block = read.experts(
        shape,
        inside,
        names=_W_NAMES if own_names else tensors.GATED,
        choice_bias=f"gate.{bias}",
        router_dtype=torch.float32,
    )
    block.shared = read.swiglu(shape.shared, f"{inside}.shared_experts")
    return block


def _kimi_layers(read: BlockReader) -> ReadLayer:
    def layer(name: str, mixer: shapes.Mixer | None, feed: shapes.FeedForward | None) -> DecoderLayer:
        on_hub = any(read.source.has(f"{name}.attention.{one}.weight") for one in ("q_proj", "dense"))
        inside = "attention" if on_hub else "self_attn"
        names = Names(
            dict.fromkeys((shapes.KimiDelta, shapes.LatentAttention, shapes.Lightning), inside),
            feed_of=_kimi_feed,
            spelled={
                shapes.Lightning: {
                    "names": ("query_key_value", "g_proj", "g_norm", "dense"),
                    "by_head": False,
                    "eps": read.eps,
                }
            },
        )
        return names.layer(read, name, mixer, feed)

    return layer


DELTA_NORM_EPS = 1e-5
"""Of the gated norm in a delta layer of OLMo hybrid, whatever config.json says for the others."""


def _olmo_layers(read: BlockReader) -> ReadLayer:
    """A delta layer of the hybrid is an ordinary pre-norm layer. Transformers' save renames norms of
    attention layers on the way."""

    def norm(name: str, saved: str, on_the_hub: str = "") -> Norm:
        on_hub = read.source.has(f"{name}.{on_the_hub}.weight")
        return read.norm(f"{name}.{on_the_hub if on_hub else saved}")

    def layer(name: str, mixer: shapes.Mixer | None, feed: shapes.FeedForward | None) -> DecoderLayer:
        assert isinstance(feed, shapes.Dense)
        feed_forward = read.swiglu(feed, f"{name}.mlp")
        after = norm(name, "post_attention_layernorm", "feedforward_layer_norm")
        if isinstance(mixer, shapes.GatedDelta):
            delta = read.gated_delta(
                mixer, f"{name}.linear_attn", names="each", norm="o_norm", out="o_proj", eps=DELTA_NORM_EPS
            )
            return DecoderLayer(norm(name, "input_layernorm", "attention_layer_norm"), delta, after, feed_forward)
        return DecoderLayer(
            None,
            read.mixer(mixer, {shapes.Attention: f"{name}.self_attn"}),
            None,
            feed_forward,
            mixer_out_norm=after,
            feed_out_norm=norm(name, "post_feedforward_layernorm"),
        )

    return layer


_GATED_NORM_EPS = 1e-5
"""Of Zamba2's Mamba layers."""


def _zamba_layers(read: BlockReader, block: str) -> ReadLayer:
    """Mamba in every layer; some have a use of a shared transformer block beside (``SharedUse``). ``block``:
    what that is called.

        layers.N.mamba, layers.N.input_layernorm                           a Mamba layer
        layers.N.mamba_decoder.{mamba, input_layernorm}, layers.N.linear   one with a shared block beside
        layers.N.shared_transformer                                        the block: in the first layer that
                                                                           uses it, with all uses' adapters

    A checkpoint may hold the block again in each layer that uses it; such a copy is compared with the first
    block (see ``stored_values``) and not read."""
    blocks: dict[int, _Block] = {}

    def layer(name: str, mixer: shapes.Mixer | None, feed: shapes.FeedForward | None) -> DecoderLayer:
        beside = None
        if isinstance(mixer, shapes.SharedBlock):
            block_name = f"{name}.{block}"
            if mixer.block in blocks:
                read.source.leave_copy(block_name, blocks[mixer.block].name)
            else:
                blocks[mixer.block] = _Block(read, mixer, block_name)
            beside = blocks[mixer.block].use(mixer, name, block_name)
            name, mixer = f"{name}.mamba_decoder", mixer.mamba
        spelled = {"eps": _GATED_NORM_EPS} if isinstance(mixer, shapes.Mamba2) else {}
        scanned = read.mixer(mixer, {type(mixer): f"{name}.mamba"}, **spelled)
        return DecoderLayer(read.norm(f"{name}.input_layernorm"), scanned, None, None, beside=beside)

    return layer


class _Block:
    """The tensors of one shared block, read once."""

    def __init__(self, reader: BlockReader, shape: shapes.SharedBlock, name: str) -> None:
        self.reader, self.name = reader, name
        attended, dense = tensors.shared_block(shape, reader.hidden)
        attention = reader.table(attended, f"{name}.self_attn")
        feed = reader.table(dense, f"{name}.feed_forward")
        both = reader.source.tensor(f"{name}.input_layernorm.weight", 2 * reader.hidden)
        self.norm = Norm(both, reader.eps)
        self.qkv, self.out = attention.linear("qkv"), attention.linear("out")
        self.feed_norm = reader.norm(f"{name}.pre_ff_layernorm")
        self.into, self.down = feed.linear("into"), feed.linear("down")

    def use(self, shape: shapes.SharedBlock, layer: str, name: str) -> SharedUse:
        """Of the layer named ``layer``, which calls the block ``name``."""
        reader, source = self.reader, self.reader.source
        adapters = tensors.shared_use(shape, reader.hidden) if shape.adapter_rank else {}
        own = reader.table(adapters, self.name)

        def adapter(role: str) -> tuple[Linear, Linear]:
            """Two matrices, whose product is added to the shared one's."""
            return own.linear(f"{role}.0"), own.linear(f"{role}.1")

        # Transformers has a module for each use, over the same weights: LoRA adapters are of one use.
        again = partial(source.again, name=self.name, other=name)
        own_qkv = again(self.qkv)
        qkv: Linear | Adapted = own_qkv
        if shape.adapted_attention:
            qkv = Adapted(own_qkv, tuple(map(adapter, "qkv")))
        attention = AttentionBlock(shape.attention, qkv, again(self.out))
        into: Linear | Adapted = again(self.into)
        if shape.adapter_rank:
            into = Adapted(again(self.into), (adapter("into"),))
        feed = DenseBlock(shape.feed_forward, into, again(self.down))
        self._note_adapters(own, shape.use, name)
        out = source.linear([(f"{layer}.linear.weight", reader.hidden)], reader.hidden)
        return SharedUse(self.norm, source.summed(attention), self.feed_norm, source.summed(feed), out)

    def _note_adapters(self, own: TableReader, use: int, name: str) -> None:
        """Each layer has the adapters of all uses, and computes with its own."""
        targets = self.reader.source.targets
        uses = sum(isinstance(mixer, shapes.SharedBlock) for mixer in self.reader.architecture.mixers)
        for [tensor] in own.table.values():
            stored = tensor.name.removesuffix(".weight")
            noted = targets.pop(f"{self.name}.{stored}")
            for other in range(uses):
                spelled = stored.replace(f"_list.{use}.", f"_list.{other}.")
                targets[f"{self.name}.{spelled}"] = targets.get(f"{self.name}.{spelled}", replace(noted, product=None))
                targets[f"{name}.{spelled}"] = replace(noted, product=None)
            targets[f"{name}.{stored}"] = noted


_MAMBA = {shapes.Attention: "self_attn", shapes.Mamba1: "mamba", shapes.Mamba2: "mamba"}


def _zaya_layers(read: BlockReader) -> ReadLayer:
    def scaled(name: str, inside: bool) -> ScaledResidual:
        table = read.table(stream_tensors.residual_scale(read.hidden), name)
        residual, given = (
            (table.tensor(f"{part}_bias"), table.tensor(f"{part}_scale")) for part in ("residual", "hidden_states")
        )
        return ScaledResidual(residual, given, inside)

    def layer(name: str, mixer: shapes.Mixer | None, feed: shapes.FeedForward | None) -> DecoderLayer:
        assert isinstance(mixer, shapes.ConvolvedAttention)
        assert isinstance(feed, shapes.Experts)
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"),
            _convolved_attention(read, mixer, f"{name}.self_attn"),
            None,
            read.continued_experts(feed, f"{name}.mlp", f"{name}.post_attention_layernorm"),
            mixes=(
                scaled(f"{name}.post_attention_residual_scale", inside=False),
                scaled(f"{name}.post_mlp_residual_scale", inside=True),
            ),
        )

    return layer


def _convolved_attention(read: BlockReader, shape: shapes.ConvolvedAttention, name: str) -> ConvolvedAttentionBlock:
    of, table = shape.attention, read.table(tensors.convolved_attention(shape, read.hidden), name)
    second = torch.unflatten(table.tensor("second"), 0, (-1, of.head_dim))
    values = tensors.Units(of.kv_heads, of.head_dim, of.kv_copies).span(read.source.place)
    return ConvolvedAttentionBlock(
        shape,
        table.linear("project"),
        table.tensor("first").squeeze(1),
        table.tensor("first.bias"),
        HeadLinear.of(second.permute(0, 3, 2, 1).flatten(1, 2).contiguous()),
        table.tensor("second.bias"),
        table.tensor("factors"),
        values,
        table.linear("out"),
    )


def _rwkv_layers(read: BlockReader) -> ReadLayer:
    """Of layer n of the release, 2n is time mixing and 2n + 1 channel mixing."""
    first = read.architecture.mixers[0]
    assert isinstance(first, TimeMix)

    def layer(name: str, mixer: shapes.Mixer | None, feed: shapes.FeedForward | None) -> DecoderLayer:
        stored = f"layers.{int(name.rpartition('.')[2]) // 2}"
        block: TimeMixBlock | ChannelMixBlock
        if isinstance(mixer, TimeMix):
            block = _time_mix(read, mixer, f"{stored}.attn", Shifted(read.layer_norm(f"{stored}.attn_norm")))
        else:
            assert isinstance(mixer, ChannelMix)
            table = read.table(tensors.channel_mix(mixer, read.hidden), f"{stored}.ffn")
            block = ChannelMixBlock(
                Shifted(read.layer_norm(f"{stored}.ffn_norm")),
                table.tensor("x_k"),
                table.linear("into"),
                read.source.summed(table.linear("down")),
                first.carried,
            )
        return DecoderLayer(None, block, None, None)

    return layer


def _time_mix(read: BlockReader, shape: TimeMix, name: str, shifted: Shifted) -> TimeMixBlock:
    joined = read.source.has(f"{name}.x_x")  # of the library's first version
    table = read.table(tensors.time_mix(shape, read.hidden, joined=joined), name)
    mixes = table.tensor("x_x")[:, None] if joined else torch.cat([table.tensor(f"x_{part}") for part in "rwkvag"])

    if not shape.value_rank:  # of some files the first layer has them too, and nothing is made of them
        for end in ("0.weight", "2.weight", "2.bias"):
            read.source.leave(f"{name}.v_lora.lora.{end}")

    def low_rank(part: str) -> tuple[Linear, Linear]:
        return table.linear(f"{part}.0", finer=True), table.linear(f"{part}.1", finer=True)

    out_norm = table.tensor("norm"), table.tensor("norm.bias"), read.eps * shape.head_dim
    r, k, v = (table.linear(part) for part in "rkv")
    return TimeMixBlock(
        shape,
        shifted,
        mixes,
        r,
        k,
        v,
        decay=low_rank("w"),
        rate=low_rank("a"),
        gate=low_rank("g"),
        value=low_rank("v") if shape.value_rank else None,
        k_k=table.tensor("k_k"),
        k_a=table.tensor("k_a"),
        r_k=table.tensor("r_k"),
        out_norm=out_norm,
        out=read.source.summed(table.linear("out")),
    )


_W_NAMES = ("w1", "w3", "w2")
"""Of gate, up and down."""
_QWEN_HYBRID = Names(
    {shapes.Attention: "self_attn", shapes.GatedDelta: "linear_attn"}, shared="shared_expert", plus_one=True
)
_LFM = Names(
    {shapes.Attention: "self_attn", shapes.ShortConv: "conv"},
    feed="feed_forward",
    mixer_norm="operator_norm",
    feed_norm="ffn_norm",
    final_norm="embedding_norm",
    spelled={shapes.Dense: {"names": _W_NAMES}, shapes.Experts: {"names": _W_NAMES, "choice_bias": "expert_bias"}},
)
"""``embedding_norm`` is the final norm: it comes after the last layer, not the embedding."""
_BAMBA = Names(
    _MAMBA,
    feed="feed_forward",
    feed_norm="pre_ff_layernorm",
    final_norm="final_layernorm",
    swiglu=False,
    spelled={shapes.Experts: {"router": "router.weight"}},
)
_ONLY_MAMBA = Names(
    {shapes.Mamba1: "mixer", shapes.Mamba2: "mixer"}, mixer_norm="norm", final_norm="norm_f", embeddings=("embeddings",)
)
"""Names of the original code."""
_KIMI = Names(layers=_kimi_layers, embeddings=("word_embeddings", "embed_tokens"))
_GEMMA = Names(
    {shapes.Attention: "self_attn"},
    feed_norm="pre_feedforward_layernorm",
    feed_of=_gemma_feed,
    out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
NAMES: dict[str, Names] = {
    "llama": Names(_MAMBA), "qwen3": Names(_MAMBA),
    "qwen3_5": _QWEN_HYBRID,
    "qwen4_exp": replace(_QWEN_HYBRID, mixes=("attn_hyper_connection", "mlp_hyper_connection")),
    # Two tensors for the projection of a delta layer in place of four, with rows grouped by key head.
    "qwen3_next": replace(_QWEN_HYBRID, spelled={shapes.GatedDelta: {"names": "by_key_head"}}),
    "lfm2": replace(_LFM, spelled={**_LFM.spelled, shapes.Attention: {
        "out": "out_proj", "norms": ("q_layernorm", "k_layernorm")}}),
    "lfm3": _LFM,
    "gpt_oss": Names(_MAMBA, spelled={shapes.Experts: {"router": "router.weight", "paired": True}}),
    "gemma3": replace(_GEMMA, plus_one=True), "gemma4": _GEMMA,
    "minimax": Names({shapes.Attention: "self_attn", shapes.Lightning: "self_attn"}, feed_of=_minimax_feed),
    "minicpm_sala": Names(
        {shapes.Attention: "self_attn", shapes.Lightning: "self_attn"}, spelled={
            shapes.Attention: {"gate": "o_gate"},
            shapes.Lightning: {"names": (("q_proj", "k_proj", "v_proj"), "z_proj", "o_norm", "o_proj"),
                               "norms": ("q_norm", "k_norm"), "eps": None}}),
    "recurrent_gemma": Names(
        {shapes.Attention: "temporal_block", shapes.RgLru: "temporal_block"}, feed="mlp_block", swiglu=False,
        mixer_norm="temporal_pre_norm", feed_norm="channel_pre_norm", final_norm="final_norm", plus_one=True),
    "zaya": Names(layers=_zaya_layers), "inkling": Names(layers=inkling_layers),
    "olmo3": Names(layers=_olmo_layers), "olmo_hybrid": Names(layers=_olmo_layers),
    "glm5_next": Names(
        {shapes.KimiDelta: "self_attn", shapes.LatentAttention: "self_attn"}, mixes=("attn", "ffn"),
        swiglu=False, shared="shared_experts", spelled={
            shapes.KimiDelta: {"flat": True}, shapes.Experts: {"router_dtype": torch.float32}}),
    "jet_nemotron": Names({shapes.Attention: "self_attn", shapes.GatedDelta: "self_attn"}, spelled={
        shapes.GatedDelta: {"names": "each", "norm": "o_norm", "out": "o_proj"}}),
    "gigachat3_5": Names(
        {shapes.GatedDelta: "self_attn", shapes.LatentAttention: "self_attn"}, swiglu=False, plus_one=True,
        shared="shared_experts", out_norms=("post_self_attn_layernorm", "post_feedforward_layernorm"),
        spelled={shapes.GatedDelta: {"names": "by_key_head"},
                 shapes.Experts: {"router_dtype": torch.float32}}),
    "kimi_linear": _KIMI, "ling": _KIMI,
    "granite_hybrid": Names(_MAMBA, feed_of=_granite_feed),
    "bamba": _BAMBA, "falcon_h1": _BAMBA, "jamba": _BAMBA,
    # Each layer is one thing. Hub releases keep each expert by itself; transformers saves two tensors.
    "nemotron_h": Names({shapes.Attention: "mixer", shapes.Mamba2: "mixer"}, feed="mixer", mixer_norm="norm",
                        feed_norm="norm", final_norm="norm_f", embeddings=("embeddings",), swiglu=False,
                        shared="shared_experts", spelled={shapes.Experts: {"router_dtype": torch.float32}}),
    "zamba": Names(layers=partial(_zamba_layers, block="shared_transf"), final_norm="final_layernorm"),
    "zamba2": Names(layers=partial(_zamba_layers, block="shared_transformer"), final_norm="final_layernorm"),
    "xlstm": Names({shapes.MatrixLstm: "mlstm_layer"}, feed="ffn", mixer_norm="norm_mlstm",
                   feed_norm="norm_ffn", final_norm="out_norm", stack="blocks", embeddings=("embeddings",),
                   spelled={shapes.Dense: {"names": ("proj_up_gate", "proj_up", "proj_down")}}),
    "rwkv7": Names(layers=_rwkv_layers, embeddings=("embeddings",)),
    "mamba": _ONLY_MAMBA, "mamba2": _ONLY_MAMBA, "falcon_mamba": _ONLY_MAMBA,
}  # fmt: skip
"""By the name of the family in ``weft.families``."""
