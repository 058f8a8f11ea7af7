"""Zamba2: Mamba-2 in every layer; some have a use of a shared transformer block beside (``SharedUse``).

    layers.N.mamba, layers.N.input_layernorm                           a Mamba layer
    layers.N.mamba_decoder.{mamba, input_layernorm}, layers.N.linear   one with a shared block beside
    layers.N.shared_transformer                                        the block: in the first layer that uses
                                                                       it, with the adapters of all uses

A checkpoint may hold the block again in each layer that uses it; such a copy is compared with the first block
(see ``stored_values``) and not read. Source: transformers ``zamba2``.
"""

from __future__ import annotations

from weft.families import tensors
from weft.families.architecture import Architecture, FeedForward, Mamba2, Mixer, SharedBlock
from weft.models.block_readers import BlockReader
from weft.models.blocks.attention import AttentionBlock
from weft.models.blocks.combined import Adapted, SharedUse
from weft.models.blocks.feed_forward import DenseBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource

_GATED_NORM_EPS = 1e-5


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    read = BlockReader(architecture, source)
    blocks: dict[int, _Block] = {}

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        beside = None
        if isinstance(mixer, SharedBlock):
            block_name = f"{name}.shared_transformer"
            if mixer.block in blocks:
                source.leave_copy(block_name, blocks[mixer.block].name)
            else:
                blocks[mixer.block] = _Block(read, mixer, block_name)
            beside = blocks[mixer.block].use(mixer, name)
            name, mixer = f"{name}.mamba_decoder", mixer.mamba
        assert isinstance(mixer, Mamba2)
        return DecoderLayer(
            read.norm(f"{name}.input_layernorm"), read.mamba2(mixer, f"{name}.mamba", eps=_GATED_NORM_EPS),
            None, None, beside=beside)

    return read.model(layer, final_norm="final_layernorm")


class _Block:
    """The tensors of one shared block, read once."""

    def __init__(self, reader: BlockReader, shape: SharedBlock, name: str) -> None:
        self.reader, self.name = reader, name
        attended, dense = tensors.shared_block(shape, reader.hidden)
        attention = reader.table(attended, f"{name}.self_attn")
        feed = reader.table(dense, f"{name}.feed_forward")
        both = reader.source.tensor(f"{name}.input_layernorm.weight", 2 * reader.hidden)
        self.norm = Norm(both, reader.eps)
        self.qkv, self.out = attention.linear("qkv"), attention.linear("out")
        self.feed_norm = reader.norm(f"{name}.pre_ff_layernorm")
        self.into, self.down = feed.linear("into"), feed.linear("down")

    def use(self, shape: SharedBlock, layer: str) -> SharedUse:
        """Of the layer named ``layer``."""
        reader, source = self.reader, self.reader.source
        own = reader.table(tensors.shared_use(shape, reader.hidden), self.name)

        def adapter(role: str) -> tuple[Linear, Linear]:
            """Two matrices, whose product is added to the shared one's."""
            return own.linear(f"{role}.0"), own.linear(f"{role}.1")

        qkv: Linear | Adapted = self.qkv
        if shape.adapted_attention:
            qkv = Adapted(self.qkv, tuple(map(adapter, "qkv")))
        attention = AttentionBlock(shape.attention, qkv, self.out)
        feed = DenseBlock(shape.feed_forward, Adapted(self.into, (adapter("into"),)), self.down)
        out = source.linear([(f"{layer}.linear.weight", reader.hidden)], reader.hidden)
        return SharedUse(self.norm, source.summed(attention), self.feed_norm, source.summed(feed), out)
