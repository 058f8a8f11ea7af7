"""Where the blocks of each family lie in a checkpoint: a row of names, over the readers of blocks.

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

from weft.families.architecture import Architecture, Streams
from weft.families.mixers import Block, Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.combined import Parallel
from weft.families.mixers.delta import GatedDelta, KimiDelta
from weft.families.mixers.feed_forward import GATED, Dense, Experts, FeedForward
from weft.families.mixers.latent_attention import LatentAttention
from weft.families.mixers.lightning import Lightning
from weft.families.mixers.mamba import Mamba1, Mamba2
from weft.families.mixers.mixing import TimeMix
from weft.families.mixers.ngrams import WithNgrams
from weft.families.mixers.short_conv import ShortConv
from weft.families.more.jet_nemotron import DynamicDelta
from weft.families.more.recurrent_gemma import RgLru
from weft.families.more.xlstm import MatrixLstm
from weft.families.tensors import vocabulary
from weft.models.adapter_targets import Target, Targets
from weft.models.block_reader import BlockReader
from weft.models.blocks.combined import zamba_layers
from weft.models.blocks.feed_forward import read_dense, read_experts, read_experts_apart, read_swiglu
from weft.models.blocks.linear import Norm
from weft.models.blocks.ngrams import read_ngrams
from weft.models.blocks.per_layer import read_behind, read_per_layer
from weft.models.blocks.rwkv import rwkv_layers
from weft.models.blocks.streams import read_streams
from weft.models.decoder import CausalModel, Collapse
from weft.models.layer import DecoderLayer, FeedForwardBlock, ReadLayer
from weft.models.more.inkling import inkling_layers
from weft.models.more.zaya import zaya_layers
from weft.models.sharded_model import RankedModel
from weft.models.weights import TensorSource


@dataclass(frozen=True, slots=True)
class Names:
    """``mixers``: where each kind of mixer lies. ``spelled``: what the reader of a kind is called with, of
    mixers, ``Dense`` and ``Experts``. ``stack``: what the layers are
    called. ``shared``: where the expert that every token passes lies, if it has a
    width. ``swiglu``: dense feed-forwards are of the usual form. ``plus_one``: norms are stored as the
    distance from 1. ``embeddings``: the first of them that the files have. ``out_norms``: of a model with
    sandwich norms. ``mixes``: where what mixes several streams lies, around mixer and feed-forward.
    ``feed_of`` and ``layers``: in place of the row's own way."""

    mixers: Mapping[type[Mixer], str] = field(default_factory=dict)
    feed: str = "mlp"
    mixer_norm: str = "input_layernorm"
    feed_norm: str = "post_attention_layernorm"
    final_norm: str = "norm"
    stack: str = "layers"
    embeddings: tuple[str, ...] = ("embed_tokens",)
    spelled: Mapping[type[Block], Mapping[str, Any]] = field(default_factory=dict)
    shared: str | None = None
    swiglu: bool = True
    plus_one: bool = False
    out_norms: tuple[str, str] = ("post_operator_norm", "post_ffn_norm")
    mixes: tuple[str, str] = ("", "")
    feed_of: Callable[[Names, BlockReader, FeedForward, str], FeedForwardBlock] | None = None
    layers: Callable[[BlockReader], ReadLayer] | None = None

    def layer(self, read: BlockReader, name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        """The layer called ``name``, which may lack one of both."""
        layer = DecoderLayer(None, None, None, None)
        streams = read.architecture.streams
        normed = streams is None or streams.kind != "gated"  # gates have norms of their own
        if streams is not None:
            first, second = self.mixes
            layer.mixes = (
                read_streams(read, streams, f"{name}.{first}"),
                read_streams(read, streams, f"{name}.{second}"),
            )
        if isinstance(mixer, WithNgrams):
            layer.before, mixer = read_ngrams(read, mixer.ngrams, f"{name}.ple"), mixer.mixer
        if mixer is not None:
            layer.mixer_norm = read.norm(f"{name}.{self.mixer_norm}") if normed else None
            at = self.mixers[type(mixer)]
            own = read.block(mixer, f"{name}.{at}" if at else name, **self.spelled.get(type(mixer), {}))
            layer.mixer = read.source.summed(own)
        if feed is not None:
            if normed and not (isinstance(feed, Experts) and feed.normed_apart):
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
            layer.behind = read_behind(read, name)
        return layer

    def feed_forward(self, read: BlockReader, shape: FeedForward, name: str) -> FeedForwardBlock:
        dense, spelled = read_swiglu if self.swiglu else read_dense, self.spelled.get(type(shape), {})
        if isinstance(shape, Dense):
            return read.source.summed(dense(read, shape, name, **spelled))
        block = read_experts(read, shape, name, **spelled)
        if self.shared is not None and shape.shared_width:
            block.shared = dense(read, shape.shared, f"{name}.{self.shared}")
        return read.source.summed(block)


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    names = NAMES[architecture.family]
    read = reader_of(architecture, source)
    layer = layers_of(read)
    embedding = next((one for one in names.embeddings if source.has(f"{one}.weight")), names.embeddings[-1])
    return read_model(read, layer, final_norm=names.final_norm, embedding=embedding, stack=names.stack)


def read_model(
    read: BlockReader, read_layer: ReadLayer, *, final_norm: str, embedding: str, stack: str = "layers"
) -> CausalModel:
    """Embedding, layers, final norm and head. ``read_layer``: of "layers.3", its mixer and its
    feed-forward. ``stack``: what the layers are called."""
    architecture, source = read.architecture, read.source
    layers = [
        read_layer(f"{stack}.{index}", mixer, feed)
        for index, (mixer, feed) in enumerate(zip(architecture.mixers, architecture.feed_forwards, strict=True))
    ]
    tokens = vocabulary(architecture.vocab_size, read.hidden)
    tied = architecture.tied_embeddings
    table = source.table(f"{embedding}.weight", tokens, is_head=tied)
    head = source.head(tokens, tied=table if tied else None)
    shape = architecture.streams
    within = architecture.layer_norms or (shape is not None and shape.kind == "gated")  # ``collapse``
    norm = None if within else read.norm(final_norm)
    parts: dict[str, Any] = {
        "embedding": table,
        "layers": layers,
        "final_norm": norm,
        "head": head,
        "collapse": _collapse(read, shape, final_norm),
    }
    model = (
        CausalModel(architecture, **parts) if source.share is None else RankedModel(architecture, source.share, **parts)
    )
    # Each rank has all of an adapter's embedding: what it adds comes behind the sum of the looked up
    # rows. In front of a norm it would be something else: such adapters are refused as unknown.
    if not architecture.embedding_norm:
        source.targets[embedding] = Target(model, architecture.vocab_size, read.hidden, kind="table")
    model.expand = _expand(read, shape)
    if architecture.per_layer_width:
        model.per_layer = read_per_layer(read, architecture.per_layer_width)
    model.targets = Targets(source.targets)
    return model


def _expand(read: BlockReader, shape: Streams | None) -> Collapse | None:
    if shape is not None:
        return lambda x_TD: x_TD.repeat(1, shape.count)
    first = read.architecture.mixers[0]
    if isinstance(first, TimeMix):
        norm, width = read.layer_norm("layers.0.pre_norm"), first.carried
        return lambda x_TD: torch.nn.functional.pad(norm(x_TD), (0, width))
    if read.architecture.embedding_norm:
        return read.norm("embed_tokens.embed_norm")
    if not read.architecture.scaled_residual:
        return None
    bias, scale = (read.source.tensor(f"input_hidden_states_{part}", read.hidden) for part in ("bias", "scale"))
    feed = read.architecture.feed_forwards[0]
    assert isinstance(feed, Experts)
    return lambda x_TD: torch.nn.functional.pad((x_TD + bias) * scale, (0, feed.router_width))


def _collapse(read: BlockReader, shape: Streams | None, final_norm: str) -> Collapse | None:
    if read.architecture.layer_norms:
        norm = read.layer_norm(final_norm)
        return lambda x_TN: norm(x_TN[:, : read.hidden])
    if read.architecture.scaled_residual:
        return lambda x_TN: x_TN[:, : read.hidden]
    if shape is None:
        return None
    if shape.kind == "mixed":
        return lambda x_TN: torch.unflatten(x_TN, 1, (shape.count, -1)).mean(1)
    mix = read_streams(read, shape, "hyper_connection_mixer", last=True)
    return lambda x_TN: mix.enter(x_TN)[0]


def reader_of(architecture: Architecture, source: TensorSource) -> BlockReader:
    return BlockReader(architecture, source, plus_one=NAMES[architecture.family].plus_one)


def layers_of(read: BlockReader) -> ReadLayer:
    """What reads a layer of the family, also that of a head for multi-token prediction (``models.mtp``)."""
    names = NAMES[read.architecture.family]
    return partial(names.layer, read) if names.layers is None else names.layers(read)


def _granite_feed(names: Names, read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    """Experts are stored as ``input_linear`` / ``output_linear`` / ``router.layer`` in hub releases and may
    be saved as ``experts.gate_up_proj`` / ``experts.down_proj`` / ``router``. The shared feed-forward has
    gate and up fused, but for GGUF files."""
    shared, sparse = f"{layer}.shared_mlp", f"{layer}.block_sparse_moe"
    fused = read.source.has(f"{shared}.input_linear.weight")
    parts = ("input_linear", "output_linear") if fused else GATED
    if isinstance(shape, Dense):
        return read.source.summed(read_swiglu(read, shape, shared, parts))
    if read.source.has(f"{sparse}.experts.gate_up_proj"):
        block = read_experts(read, shape, sparse, router="router.weight")
    else:
        block = read_experts(
            read, shape, sparse, router="router.layer.weight", stacks=("input_linear.weight", "output_linear.weight")
        )
    block.shared = read_swiglu(read, shape.shared, shared, parts)
    return read.source.summed(block)


def _gemma_feed(names: Names, read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    if isinstance(shape, Dense):
        return read.source.summed(read_dense(read, shape, f"{layer}.mlp"))
    return read_experts_apart(
        read,
        shape,
        layer,
        ((names.feed_norm, f"{names.feed_norm}_2"), (f"{names.out_norms[1]}_1", f"{names.out_norms[1]}_2")),
    )


def _minimax_feed(names: Names, read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    assert isinstance(shape, Experts)
    on_hub = read.source.has(f"{layer}.block_sparse_moe.gate.weight")
    own_names = read.source.has(f"{layer}.block_sparse_moe.experts.0.w1.weight")
    name = f"{layer}.{'block_sparse_moe' if on_hub else 'mlp'}"
    return read.source.summed(read_experts(read, shape, name, names=_W_NAMES if own_names else GATED))


def _kimi_feed(names: Names, read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    saved, source = f"{layer}.block_sparse_moe", read.source
    if isinstance(shape, Dense):  # transformers' save takes dense layers for sparse ones
        name = saved if source.has(f"{saved}.gate_proj.weight") else f"{layer}.mlp"
        return source.summed(read_swiglu(read, shape, name))
    inside = saved if source.has(f"{saved}.gate.weight") else f"{layer}.mlp"
    own_names = source.has(f"{inside}.experts.0.w1.weight")
    bias = "expert_bias" if source.has(f"{inside}.gate.expert_bias") else "e_score_correction_bias"
    block = read_experts(
        read,
        shape,
        inside,
        names=_W_NAMES if own_names else GATED,
        choice_bias=f"gate.{bias}",
        router_dtype=torch.float32,
    )
    block.shared = read_swiglu(read, shape.shared, f"{inside}.shared_experts")
    return read.source.summed(block)


def _kimi_layers(read: BlockReader) -> ReadLayer:
    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        on_hub = any(read.source.has(f"{name}.attention.{one}.weight") for one in ("q_proj", "dense"))
        inside = "attention" if on_hub else "self_attn"
        names = Names(
            dict.fromkeys((KimiDelta, LatentAttention, Lightning), inside),
            feed_of=_kimi_feed,
            spelled={
                Lightning: {
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

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert isinstance(feed, Dense)
        feed_forward = read.source.summed(read_swiglu(read, feed, f"{name}.mlp"))
        after = norm(name, "post_attention_layernorm", "feedforward_layer_norm")
        if isinstance(mixer, GatedDelta):
            delta = read.block(
                mixer, f"{name}.linear_attn", names="each", norm="o_norm", out="o_proj", eps=DELTA_NORM_EPS
            )
            before = norm(name, "input_layernorm", "attention_layer_norm")
            return DecoderLayer(before, read.source.summed(delta), after, feed_forward)
        assert mixer is not None
        return DecoderLayer(
            None,
            read.source.summed(read.block(mixer, f"{name}.self_attn")),
            None,
            feed_forward,
            mixer_out_norm=after,
            feed_out_norm=norm(name, "post_feedforward_layernorm"),
        )

    return layer


_MAMBA = {Attention: "self_attn", Mamba1: "mamba", Mamba2: "mamba", Parallel: ""}


_W_NAMES = ("w1", "w3", "w2")
"""Of gate, up and down."""
_QWEN_HYBRID = Names({Attention: "self_attn", GatedDelta: "linear_attn"}, shared="shared_expert", plus_one=True)
_LFM = Names(
    {Attention: "self_attn", ShortConv: "conv"},
    feed="feed_forward",
    mixer_norm="operator_norm",
    feed_norm="ffn_norm",
    final_norm="embedding_norm",
    spelled={Dense: {"names": _W_NAMES}, Experts: {"names": _W_NAMES, "choice_bias": "expert_bias"}},
)
"""``embedding_norm`` is the final norm: it comes after the last layer, not the embedding."""
_BAMBA = Names(
    _MAMBA,
    feed="feed_forward",
    feed_norm="pre_ff_layernorm",
    final_norm="final_layernorm",
    swiglu=False,
    spelled={Experts: {"router": "router.weight"}},
)
_ONLY_MAMBA = Names(
    {Mamba1: "mixer", Mamba2: "mixer"}, mixer_norm="norm", final_norm="norm_f", embeddings=("embeddings",)
)
"""Names of the original code."""
_KIMI = Names(layers=_kimi_layers, embeddings=("word_embeddings", "embed_tokens"))
_GEMMA = Names(
    {Attention: "self_attn"},
    feed_norm="pre_feedforward_layernorm",
    feed_of=_gemma_feed,
    out_norms=("post_attention_layernorm", "post_feedforward_layernorm"),
)
NAMES: dict[str, Names] = {
    "llama": Names(_MAMBA), "qwen3": Names(_MAMBA),
    "qwen3_5": _QWEN_HYBRID,
    "qwen4_exp": replace(_QWEN_HYBRID, mixes=("attn_hyper_connection", "mlp_hyper_connection")),
    # Two tensors for the projection of a delta layer in place of four, with rows grouped by key head.
    "qwen3_next": replace(_QWEN_HYBRID, spelled={GatedDelta: {"names": "by_key_head"}}),
    "lfm2": replace(_LFM, spelled={**_LFM.spelled, Attention: {
        "out": "out_proj", "norms": ("q_layernorm", "k_layernorm")}}),
    "lfm3": _LFM,
    "gpt_oss": Names(_MAMBA, spelled={Experts: {"router": "router.weight", "paired": True}}),
    "gemma3": replace(_GEMMA, plus_one=True), "gemma4": _GEMMA,
    "minimax": Names({Attention: "self_attn", Lightning: "self_attn"}, feed_of=_minimax_feed),
    "minicpm_sala": Names(
        {Attention: "self_attn", Lightning: "self_attn"}, spelled={
            Attention: {"gate": "o_gate"},
            Lightning: {"names": (("q_proj", "k_proj", "v_proj"), "z_proj", "o_norm", "o_proj"),
                               "norms": ("q_norm", "k_norm"), "eps": None}}),
    "recurrent_gemma": Names(
        {Attention: "temporal_block", RgLru: "temporal_block"}, feed="mlp_block", swiglu=False,
        mixer_norm="temporal_pre_norm", feed_norm="channel_pre_norm", final_norm="final_norm", plus_one=True),
    "zaya": Names(layers=zaya_layers), "inkling": Names(layers=inkling_layers),
    "olmo3": Names(layers=_olmo_layers), "olmo_hybrid": Names(layers=_olmo_layers),
    "glm5_next": Names(
        {KimiDelta: "self_attn", LatentAttention: "self_attn"}, mixes=("attn", "ffn"),
        swiglu=False, shared="shared_experts", spelled={
            KimiDelta: {"flat": True}, Experts: {"router_dtype": torch.float32}}),
    "jet_nemotron": Names({Attention: "self_attn", DynamicDelta: "self_attn"}),
    "gigachat3_5": Names(
        {GatedDelta: "self_attn", LatentAttention: "self_attn"}, swiglu=False, plus_one=True,
        shared="shared_experts", out_norms=("post_self_attn_layernorm", "post_feedforward_layernorm"),
        spelled={GatedDelta: {"names": "by_key_head"},
                 Experts: {"router_dtype": torch.float32}}),
    "kimi_linear": _KIMI, "ling": _KIMI,
    "granite_hybrid": Names(_MAMBA, feed_of=_granite_feed),
    "bamba": _BAMBA, "falcon_h1": _BAMBA, "jamba": _BAMBA,
    # Each layer is one thing. Hub releases keep each expert by itself; transformers saves two tensors.
    "nemotron_h": Names({Attention: "mixer", Mamba2: "mixer"}, feed="mixer", mixer_norm="norm",
                        feed_norm="norm", final_norm="norm_f", embeddings=("embeddings",), swiglu=False,
                        shared="shared_experts", spelled={Experts: {"router_dtype": torch.float32}}),
    "zamba": Names(layers=partial(zamba_layers, block="shared_transf"), final_norm="final_layernorm"),
    "zamba2": Names(layers=partial(zamba_layers, block="shared_transformer"), final_norm="final_layernorm"),
    "xlstm": Names({MatrixLstm: "mlstm_layer"}, feed="ffn", mixer_norm="norm_mlstm",
                   feed_norm="norm_ffn", final_norm="out_norm", stack="blocks", embeddings=("embeddings",),
                   spelled={Dense: {"names": ("proj_up_gate", "proj_up", "proj_down")}}),
    "rwkv7": Names(layers=rwkv_layers, embeddings=("embeddings",)),
    "mamba": _ONLY_MAMBA, "mamba2": _ONLY_MAMBA, "falcon_mamba": _ONLY_MAMBA,
}  # fmt: skip
"""By the name of the family in ``weft.families``."""
