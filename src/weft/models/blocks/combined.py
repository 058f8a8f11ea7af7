"""Attention and Mamba in one layer: in parallel, or with a transformer block that layers share.

    y = attention(x * attention_in) * attention_out + mamba(x * mamba_in) * mamba_out          (Falcon-H1)

    [x | embedding] --norm--> attention (q, k, v + adapters) --norm--> feed-forward (+ adapter) --out--> y
                                                                  (Zamba2; Zamba without adapters)

A layer of the first kind has KV pages and a state: each branch finds its own part in the layer's cache.

The weights of ``attention`` and ``feed_forward`` of a shared block are the same tensors in every use;
adapters, ``out`` and the KV pages are the use's own.

Sources: transformers ``FalconH1DecoderLayer``; Zamba2 (Glorioso et al., 2024), transformers
``Zamba2AttentionDecoderLayer``, ``Zamba2HybridLayer``, ``ZambaHybridLayer``.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field, replace
from functools import partial

import torch

from weft.families.mixers import Mixer
from weft.families.mixers.combined import Parallel, SharedBlock
from weft.families.mixers.feed_forward import FeedForward
from weft.families.mixers.mamba import Mamba2
from weft.models.block_reader import BlockReader
from weft.models.blocks.attention import AttentionBlock
from weft.models.blocks.feed_forward import DenseBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.recurrent import RecurrentBlock
from weft.models.layer import (
    Carried,
    DecoderLayer,
    LayerStep,
    ReadLayer,
    ResidualBlock,
    ResidualStream,
    StreamBlock,
    normed,
)
from weft.models.table_reader import TableReader
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin


@dataclass(slots=True)
class ParallelBlock:
    shape: Parallel
    attention: AttentionBlock
    mamba: RecurrentBlock

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None
    ) -> torch.Tensor:
        shape = self.shape
        attended = self.attention(_times(x_TD, shape.attention_in), inputs, cache, cos_sin)
        scanned = self.mamba(_times(x_TD, shape.mamba_in), inputs, cache, cos_sin)
        return _times(attended, shape.attention_out) + _times(scanned, shape.mamba_out)


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor


@dataclass(slots=True)
class Adapted:
    """A shared projection plus the additions of one use: low-rank products up(down(x)), one for each part of the
    projection's rows, in the order of the rows.
    """

    shared: Linear
    adapters: tuple[tuple[Linear, Linear], ...]

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        # Not added into the shared matrix: that would make each use a full copy of the block.
        return self.shared(x) + torch.cat([up(down(x)) for down, up in self.adapters], dim=-1)


@dataclass(slots=True)
class SharedUse:
    """One use of a shared block: the norms and the weights inside are the block's, the rest is the use's."""

    norm: Norm
    attention: Callable[..., torch.Tensor]
    feed_norm: Norm
    feed_forward: Callable[..., torch.Tensor]
    out: Linear

    def __call__(
        self,
        x_TD: torch.Tensor,
        embedded_TD: torch.Tensor,
        inputs: StepInputs,
        cache: LayerCache,
        cos_sin: CosSin | None,
    ) -> torch.Tensor:
        seen = self.norm(torch.cat((x_TD, embedded_TD), dim=-1))
        attended = self.attention(seen, inputs, cache, cos_sin)
        # No residual inside: the result is only added to the input of the layer's Mamba mixer.
        return self.out(self.feed_forward(self.feed_norm(attended)))


_GATED_NORM_EPS = 1e-5
"""Epsilon of Zamba2's Mamba layers."""


EMBEDDED = "embedded"
"""Name of the embedded tokens among the rows of the stream."""


@dataclass(slots=True)
class BesideBlock(ResidualBlock):
    """A mixer whose input has the output of a ``use`` of a shared block added."""

    use: SharedUse = field(kw_only=True)

    def enter(self, stream: ResidualStream, step: LayerStep) -> tuple[torch.Tensor, Carried]:
        x_TD = stream.summed()
        seen_TD = x_TD + self.use(x_TD, stream.rows[EMBEDDED], step.whole, step.cache, step.cos_sin)
        return normed(self.norm, seen_TD.to(stream.dtype)), ()


def keep_embedded(stream: ResidualStream, step: LayerStep) -> None:
    """Hand the embedded tokens on to shared blocks."""
    stream.rows[EMBEDDED] = stream.summed()


def ends_reader(read: BlockReader) -> tuple[list[StreamBlock], list[StreamBlock]]:
    return [keep_embedded], []


class _Block:
    """The tensors of one shared block, read once."""

    def __init__(self, reader: BlockReader, shape: SharedBlock, name: str) -> None:
        self.reader, self.name = reader, name
        attended, dense = shape.block_tables(reader.hidden)
        attention = reader.table(attended, f"{name}.self_attn")
        feed = reader.table(dense, f"{name}.feed_forward")
        both = reader.source.tensor(f"{name}.input_layernorm.weight", 2 * reader.hidden)
        self.norm = Norm(both, reader.eps)
        self.qkv, self.out = attention.linear("qkv"), attention.linear("out")
        self.feed_norm = reader.norm(f"{name}.pre_ff_layernorm")
        self.into, self.down = feed.linear("into"), feed.linear("down")

    def use(self, shape: SharedBlock, layer: str, name: str) -> SharedUse:
        """Return the use by the layer named ``layer``, in which the block is called ``name``."""
        reader, source = self.reader, self.reader.source
        adapters = shape.use_table(reader.hidden) if shape.adapter_rank else {}
        own = reader.table(adapters, self.name)

        def adapter(role: str) -> tuple[Linear, Linear]:
            """Return two matrices whose product is added to the shared one."""
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
        """Note the adapters of all uses. Each layer stores all of them and computes with one."""
        targets = self.reader.source.targets
        uses = sum(isinstance(mixer, SharedBlock) for mixer in self.reader.architecture.mixers)
        for [tensor] in own.table.values():
            stored = tensor.name.removesuffix(".weight")
            noted = targets.pop(f"{self.name}.{stored}")
            for other in range(uses):
                spelled = stored.replace(f"_list.{use}.", f"_list.{other}.")
                targets[f"{self.name}.{spelled}"] = targets.get(f"{self.name}.{spelled}", replace(noted, product=None))
                targets[f"{name}.{spelled}"] = replace(noted, product=None)
            targets[f"{name}.{stored}"] = noted


def zamba_layers(read: BlockReader) -> ReadLayer:
    return _layers(read, "shared_transf")


def zamba2_layers(read: BlockReader) -> ReadLayer:
    return _layers(read, "shared_transformer")


def _layers(read: BlockReader, block: str) -> ReadLayer:
    """Read Mamba in every layer; some layers also have a use of a shared transformer block (``SharedUse``). ``block``:
    name of that block.

        layers.N.mamba, layers.N.input_layernorm                           a Mamba layer
        layers.N.mamba_decoder.{mamba, input_layernorm}, layers.N.linear   a layer that also has a shared block
        layers.N.shared_transformer                                        the block: in the first layer that
                                                                           uses it, with all uses' adapters

    A checkpoint may hold the block again in each layer that uses it; such a copy is compared with the first block (see
    ``stored_values``) and not read.
    """
    blocks: dict[int, _Block] = {}

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        use = None
        if isinstance(mixer, SharedBlock):
            block_name = f"{name}.{block}"
            if mixer.block in blocks:
                read.source.leave_copy(block_name, blocks[mixer.block].name)
            else:
                blocks[mixer.block] = _Block(read, mixer, block_name)
            use = blocks[mixer.block].use(mixer, name, block_name)
            name, mixer = f"{name}.mamba_decoder", mixer.mamba
        assert mixer is not None
        spelled = {"eps": _GATED_NORM_EPS} if isinstance(mixer, Mamba2) else {}
        scanned = read.source.summed(read.block(mixer, f"{name}.mamba", **spelled))
        norm = read.norm(f"{name}.input_layernorm")
        return DecoderLayer([ResidualBlock(norm, scanned) if use is None else BesideBlock(norm, scanned, use=use)])

    return layer


def read_parallel(
    read: BlockReader, shape: Parallel, name: str, *, attention: str = "self_attn", mamba: str = "mamba"
) -> ParallelBlock:
    """Return both branches. ``attention`` and ``mamba``: their names in the layer ``name``."""
    attended = read.block(shape.attention, f"{name}.{attention}")
    return ParallelBlock(shape, attended, read.block(shape.mamba, f"{name}.{mamba}"))
