"""Builds a model: the layers by the row of names of its family (``families.names``), embedding, norm and head.

Hub releases and what transformers saves may spell a name differently: both are read. A family that is more than names
says which function reads its layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

import torch

from weft.families.architecture import Architecture, Streams
from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import Dense, Experts, FeedForward
from weft.families.mixers.mixing import TimeMix
from weft.families.mixers.ngrams import WithNgrams
from weft.families.names import Names
from weft.families.tensors import vocabulary
from weft.models.adapter_targets import Target, Targets
from weft.models.block_reader import BlockReader, function
from weft.models.blocks.feed_forward import read_dense, read_experts, read_swiglu
from weft.models.blocks.ngrams import read_ngrams
from weft.models.blocks.per_layer import read_behind, read_per_layer
from weft.models.blocks.streams import read_streams
from weft.models.decoder import CausalModel, Collapse
from weft.models.layer import DecoderLayer, FeedForwardBlock, ReadLayer
from weft.models.sharded_model import RankedModel
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    names, read = architecture.names, BlockReader(architecture, source)
    embedding = next((one for one in names.embeddings if source.has(f"{one}.weight")), names.embeddings[-1])
    return read_model(read, layers_of(read), final_norm=names.final_norm, embedding=embedding, stack=names.stack)


def layers_of(read: BlockReader) -> ReadLayer:
    """What reads a layer of the family, also that of a head for multi-token prediction (``models.mtp``)."""
    reader = read.architecture.names.layer_reader
    return function(reader)(read) if reader else partial(plain_layer, read)


def plain_layer(
    read: BlockReader, name: str, mixer: Mixer | None, feed: FeedForward | None, names: Names | None = None
) -> DecoderLayer:
    """Return the layer ``name``, which may lack one of both. ``names``: in place of those of the architecture."""
    names = names or read.architecture.names
    layer = DecoderLayer(None, None, None, None)
    streams = read.architecture.streams
    normed = streams is None or streams.kind != "gated"  # gates have norms of their own
    if streams is not None:
        first, second = names.mixes
        layer.mixes = (read_streams(read, streams, f"{name}.{first}"), read_streams(read, streams, f"{name}.{second}"))
    if isinstance(mixer, WithNgrams):
        layer.before, mixer = read_ngrams(read, mixer.ngrams, f"{name}.ple"), mixer.mixer
    if mixer is not None:
        layer.mixer_norm = read.norm(f"{name}.{names.mixer_norm}") if normed else None
        at = names.mixers[type(mixer)]
        own = read.block(mixer, f"{name}.{at}" if at else name, **names.spelled.get(type(mixer), {}))
        layer.mixer = read.source.summed(own)
    if feed is not None:
        if normed and not (isinstance(feed, Experts) and feed.normed_apart):
            layer.feed_norm = read.norm(f"{name}.{names.feed_norm}")
        layer.feed_forward = (
            function(names.feed_reader)(read, feed, name) if names.feed_reader else plain_feed(read, feed, name, names)
        )
    if read.architecture.sandwich_norms:
        layer.mixer_out_norm, layer.feed_out_norm = (read.norm(f"{name}.{norm}") for norm in names.out_norms)
    if read.architecture.normed_stream:
        layer.factors = read.architecture.normed_stream[int(name.rpartition(".")[2])]
    if read.architecture.layer_scalars:
        layer.behind = read_behind(read, name)
    return layer


def plain_feed(read: BlockReader, shape: FeedForward, layer: str, names: Names) -> FeedForwardBlock:
    """Return the feed-forward of ``layer`` by ``names``."""
    name = f"{layer}.{names.feed}"
    dense, spelled = read_swiglu if names.swiglu else read_dense, names.spelled.get(type(shape), {})
    if isinstance(shape, Dense):
        return read.source.summed(dense(read, shape, name, **spelled))
    block = read_experts(read, shape, name, **spelled)
    if names.shared is not None and shape.shared_width:
        block.shared = dense(read, shape.shared, f"{name}.{names.shared}")
    return read.source.summed(block)


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
