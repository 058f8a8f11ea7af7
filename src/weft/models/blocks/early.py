"""Pairs of layers: experts of the first are added to the stream after the second (a shortcut around its attention).

    first    x += attend(norm(x));  seen = norm(x);  early = experts(seen);  x += dense(seen)
    second   x += attend(norm(x));  x += dense(norm(x)) + early

Source: transformers ``LongcatFlashDecoderLayer``, whose layer is such a pair.
"""

from __future__ import annotations

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import Dense, FeedForward
from weft.models.block_reader import BlockReader
from weft.models.blocks.feed_forward import read_experts, read_swiglu
from weft.models.blocks.plain import plain_feed, plain_layer
from weft.models.layer import DecoderLayer, Early, JoinedByEarly, ReadLayer


def paired_layers(read: BlockReader) -> ReadLayer:
    names, summed = read.architecture.names, read.source.summed

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        assert feed is not None
        blocks = plain_layer(read, name, mixer, None).blocks
        norm = read.norm(f"{name}.{names.feed_norm}")
        if isinstance(feed, Dense):
            return DecoderLayer([*blocks, JoinedByEarly(norm, plain_feed(read, feed, name), mixes=False)])
        inside = f"{name}.{names.feed}"
        experts = summed(read_experts(read, feed, inside, **names.spelled.get(type(feed), {})))
        now = summed(read_swiglu(read, feed.shared, f"{inside}.{names.shared}"))
        return DecoderLayer([*blocks, Early(norm, experts, mixes=False, now=now)])

    return layer
