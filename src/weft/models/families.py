"""Construction of a model: the layers by the names of its family (``families.names``), embedding, norm and head.

Hub releases and saves of transformers may spell a name differently: both are read. A family that is more than names
says which function reads its layers.
"""

from __future__ import annotations

from functools import partial
from typing import Any

from weft.families import name_here
from weft.families.architecture import Architecture
from weft.families.tensors import head_bias, vocabulary
from weft.models.adapter_targets import Target, Targets
from weft.models.block_reader import BlockReader, function
from weft.models.blocks.plain import plain_layer
from weft.models.blocks.positions import read_positions
from weft.models.decoder import CausalModel
from weft.models.layer import OnStream, ReadLayer
from weft.models.sharded_model import RankedModel
from weft.models.weights import TensorSource


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    names, read = architecture.names, BlockReader(architecture, source)
    read_layer = layers_of(read)
    layers = [
        read_layer(f"{names.stack}.{stored}", mixer, feed)
        for stored, mixer, feed in zip(
            architecture.stored_layers, architecture.mixers, architecture.feed_forwards, strict=True
        )
    ]
    if architecture.residual.positions is not None:
        layers[0].blocks.insert(0, read_positions(read, architecture.residual.positions))
    if names.embedding_norm:
        layers[0].blocks.insert(0, OnStream(read.norm(names.embedding_norm)))
    if names.ends_reader:
        before, after = function(names.ends_reader)(read)
        layers[0].blocks[:0] = before
        layers[-1].blocks += after
    embedding = next((name for name in names.embeddings if source.has(f"{name}.weight")), names.embeddings[-1])
    tokens, tied = vocabulary(architecture.vocab_size, read.hidden), architecture.tied_embeddings
    table = source.table(f"{embedding}.weight", tokens, is_head=tied)
    bias = head_bias(architecture.vocab_size) if architecture.head_bias else None
    head = source.head(tokens, tied=table if tied else None, bias=bias, known=architecture.head_tokens)
    norm = read.norm(names.final_norm) if names.final_norm else None
    parts: dict[str, Any] = {"embedding": table, "layers": layers, "final_norm": norm, "head": head}
    model = (
        CausalModel(architecture, **parts) if source.share is None else RankedModel(architecture, source.share, **parts)
    )
    # Each rank has an adapter's complete embedding and adds its rows after the sum over ranks. Before a norm that sum
    # would differ, so such adapters are refused as unknown.
    if architecture.residual.adapts_embedding:
        source.targets[embedding] = Target(model, architecture.vocab_size, read.hidden, kind="table")
    model.targets = Targets(source.targets, name_here(source.checkpoint.config))
    return model


def layers_of(read: BlockReader) -> ReadLayer:
    """Return the reader of a family's layers, also of the layer of a head for multi-token prediction
    (``models.mtp``).
    """
    reader = read.architecture.names.layer_reader
    return function(reader)(read) if reader else partial(plain_layer, read)
