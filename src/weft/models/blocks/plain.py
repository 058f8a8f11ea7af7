"""Layers of residual blocks from a table of names, which most families are made of."""

from __future__ import annotations

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import Dense, FeedForward
from weft.families.names import Names
from weft.models.block_reader import BlockReader, function
from weft.models.blocks.feed_forward import read_dense, read_experts, read_swiglu, summed_experts
from weft.models.blocks.linear import Norm
from weft.models.layer import (
    DecoderLayer,
    FeedForwardBlock,
    FirstOfTwo,
    OnStream,
    ResidualBlock,
    SecondOfTwo,
    StreamBlock,
)


def plain_layer(
    read: BlockReader, name: str, mixer: Mixer | None, feed: FeedForward | None, names: Names | None = None
) -> DecoderLayer:
    """Return the layer ``name``, which may lack either block. ``names``: used instead of those of the architecture."""
    names, residual = names or read.architecture.names, read.architecture.residual
    in_norms = (names.mixer_norm, names.feed_norm) if residual.in_norms else ("", "")
    out_norms = names.out_norms if residual.out_norms else ("", "")
    blocks: list[StreamBlock] = []
    if mixer is None and feed is None:  # it has nothing to do in a text
        read.source.leave_all(f"{name}.")

    def norm(of: str, eps: float = 0.0) -> Norm | None:
        return read.norm(f"{name}.{of}", eps=eps) if of else None

    if mixer is not None:
        mixer_name = names.mixers[type(mixer)]
        block = read.block(mixer, f"{name}.{mixer_name}" if mixer_name else name, **names.spelled.get(type(mixer), {}))
        whole = (norm(in_norms[0]), read.source.summed(block), norm(out_norms[0], residual.out_eps))
        blocks.append(
            FirstOfTwo(*whole, same=residual.parallel == "one") if residual.parallel else ResidualBlock(*whole)
        )
    if feed is not None:
        own = isinstance(feed, Dense) or not feed.normed_apart
        reader = function(names.feed_reader) if names.feed_reader else plain_feed
        before = norm(in_norms[1]) if own and residual.parallel != "one" else None
        kind = SecondOfTwo if residual.parallel else ResidualBlock
        blocks.append(kind(before, reader(read, feed, name), norm(out_norms[1], residual.out_eps), mixes=False))
    return DecoderLayer(blocks)


def plain_feed(read: BlockReader, shape: FeedForward, layer: str) -> FeedForwardBlock:
    """Return the feed-forward of ``layer``."""
    names = read.architecture.names
    name = f"{layer}.{names.feed}" if names.feed else layer
    dense, spelled = read_swiglu if names.swiglu else read_dense, names.spelled.get(type(shape), {})
    if isinstance(shape, Dense):
        return read.source.summed(dense(read, shape, name, **spelled))
    block = read_experts(read, shape, name, **spelled)
    if names.shared is not None and shape.shared_width:
        block.shared = dense(read, shape.shared, f"{name}.{names.shared}")
    return summed_experts(read, block)


def normed_embedding(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    return [OnStream(read.plain_norm)], []
