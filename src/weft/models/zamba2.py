"""Zamba2: Mamba-2 in every layer; some have a use of a shared transformer block beside (``SharedUse``).

    layers.N.mamba, layers.N.input_layernorm                           a Mamba layer
    layers.N.mamba_decoder.{mamba, input_layernorm}, layers.N.linear   one with a shared block beside
    layers.N.shared_transformer                                        the block: in the first layer that uses
                                                                       it, with the adapters of all uses

A checkpoint may hold the block again in each layer that uses it; such a copy is compared with the first
block (see ``stored_values``) and not read. The gated norm's epsilon is 1e-5 whatever the configuration's is.
Source: transformers ``zamba2``.
"""

from __future__ import annotations

from weft.families.architecture import Architecture, Mamba2, SharedBlock
from weft.models import block_readers as parts
from weft.models import state_space
from weft.models.blocks.attention import AttentionBlock
from weft.models.blocks.dense import DenseBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.shared_block import Adapted, SharedUse
from weft.models.decoder import CausalModel
from weft.models.layer import DecoderLayer
from weft.models.weights import TensorSource

_GATED_NORM_EPS = 1e-5


def build(architecture: Architecture, source: TensorSource) -> CausalModel:
    """Read every tensor of the model from ``source``."""
    blocks: dict[int, _Block] = {}
    layers = [_layer(architecture, source, index, blocks) for index in range(architecture.layer_count)]
    return parts.model(architecture, source, layers, final_norm="final_layernorm.weight")


def _layer(architecture: Architecture, source: TensorSource, index: int,
           blocks: dict[int, _Block]) -> DecoderLayer:
    name, hidden, eps = f"layers.{index}", architecture.hidden_size, architecture.norm_eps
    shape, beside = architecture.mixers[index], None
    if isinstance(shape, SharedBlock):
        block_name = f"{name}.shared_transformer"
        if shape.block not in blocks:
            blocks[shape.block] = _Block(source, shape, block_name, hidden, eps)
        else:
            source.leave_copy(block_name, blocks[shape.block].name)
        beside = blocks[shape.block].use(source, shape, source.linear([(f"{name}.linear.weight", hidden)],
                                                                      hidden))
        name, shape = f"{name}.mamba_decoder", shape.mamba
    assert isinstance(shape, Mamba2)
    return DecoderLayer(
        mixer_norm=Norm(source.tensor(f"{name}.input_layernorm.weight", hidden), eps),
        mixer=state_space.mamba2(source, shape, f"{name}.mamba", hidden, _GATED_NORM_EPS),
        feed_norm=None, feed_forward=None, beside=beside)


class _Block:
    """The tensors of one shared block, read once."""

    def __init__(self, source: TensorSource, shape: SharedBlock, name: str, hidden: int, eps: float) -> None:
        attention, dense = shape.attention, shape.feed_forward
        self.name, self.hidden, self.wide = name, hidden, 2 * hidden
        self.widths = (("q", attention.heads * attention.head_dim),
                       *((part, attention.kv_heads * attention.head_dim) for part in "kv"))
        self.norm = Norm(source.tensor(f"{name}.input_layernorm.weight", self.wide), eps)
        self.qkv = source.linear([(f"{name}.self_attn.{part}_proj.weight", rows)
                                       for part, rows in self.widths], self.wide)
        self.out = source.linear([(f"{name}.self_attn.o_proj.weight", hidden)], self.widths[0][1])
        self.feed_norm = Norm(source.tensor(f"{name}.pre_ff_layernorm.weight", hidden), eps)
        into, down = f"{name}.feed_forward.gate_up_proj", f"{name}.feed_forward.down_proj"
        self.into = source.linear([(f"{into}.weight", 2 * dense.width)], hidden,
                                  source.tensor(f"{into}.bias", 2 * dense.width) if dense.bias else None)
        self.down = source.linear([(f"{down}.weight", hidden)], dense.width,
                                  source.tensor(f"{down}.bias", hidden) if dense.bias else None)

    def use(self, source: TensorSource, shape: SharedBlock, out: Linear) -> SharedUse:
        def adapter(of: str, seen: int, rows: int) -> tuple[Linear, Linear]:
            """Two matrices, whose product is added to the shared one's."""
            name, rank = f"{self.name}.{of}_adapter_list.{shape.use}", shape.adapter_rank
            return (source.linear([(f"{name}.0.weight", rank)], seen),
                    source.linear([(f"{name}.1.weight", rows)], rank))

        qkv: Linear | Adapted = self.qkv
        if shape.adapted_attention:
            qkv = Adapted(self.qkv, tuple(adapter(f"self_attn.linear_{part}", self.wide, rows)
                                          for part, rows in self.widths))
        into = Adapted(self.into, (adapter("feed_forward.gate_up_proj", self.hidden,
                                           2 * shape.feed_forward.width),))
        attention, feed = AttentionBlock(shape.attention, qkv, self.out), DenseBlock(shape.feed_forward, into,
                                                                                     self.down)
        return SharedUse(self.norm, source.summed(attention), self.feed_norm, source.summed(feed), out)
