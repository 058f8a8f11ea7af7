"""Layers of several parts: attention and Mamba on the same input, or with a transformer block that layers share; and
layers that run several times. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.families.mixers import Mixer
from weft.families.mixers.attention import Attention
from weft.families.mixers.feed_forward import GATED, Dense
from weft.families.mixers.mamba import Mamba1, Mamba2
from weft.families.tensors import Dim, Table, Units, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class Parallel(Mixer):
    """Attention and Mamba-2 on the same normed input, their outputs added (Falcon-H1). Each branch has a factor on its
    input and one on its output."""

    reader = "weft.models.blocks.combined:read_parallel"

    attention: Attention
    mamba: Mamba2
    attention_in: float = 1.0
    attention_out: float = 1.0
    mamba_in: float = 1.0
    mamba_out: float = 1.0

    def layer_spec(self) -> LayerSpec:
        return spec.together("parallel", self.attention.layer_spec(), self.mamba.layer_spec())

    def table(self, hidden: int) -> Table:
        return self.mamba.table(hidden)

    def tables(self, hidden: int) -> list[Table]:
        return [*self.attention.tables(hidden), *self.mamba.tables(hidden)]


@dataclass(frozen=True, slots=True)
class Again(Mixer):
    """A further run of layer ``layer`` of the files, mixer and feed-forward, with memory of its own (Inkling 2)."""

    reader = ""  # the layer is read once

    mixer: Mixer
    layer: int

    @property
    def attention(self) -> object:
        return getattr(self.mixer, "attention", self.mixer)

    def layer_spec(self) -> LayerSpec:
        return self.mixer.layer_spec()

    def table(self, hidden: int) -> Table:
        return {}


@dataclass(frozen=True, slots=True)
class SharedBlock(Mixer):
    """A Mamba layer with a transformer block whose weights several layers share (Zamba, Zamba2): the block reads [x,
    embedding], and its output is added to the Mamba layer's input, not to the stream.

    ``block``: number of the shared block; ``use``: number of this use, counted in depth order over all blocks.
    ``adapter_rank``: rank of the adapters of this use; 0: it has none. ``adapted_attention``: q, k and v have
    adapters too, not only the feed-forward. Each use has its own KV."""

    reader = ""  # its parts are read one by one

    attention: Attention
    mamba: Mamba1 | Mamba2
    feed_forward: Dense
    block: int
    use: int
    adapter_rank: int = 0
    adapted_attention: bool = False

    def layer_spec(self) -> LayerSpec:
        return spec.together("shared_block", self.attention.layer_spec(), self.mamba.layer_spec())

    def table(self, hidden: int) -> Table:
        return self.mamba.table(hidden)

    def tables(self, hidden: int) -> list[Table]:
        own = [self.use_table(hidden)] * bool(self.adapter_rank)
        return [self.table(hidden), *own, product("linear", hidden, ("linear", hidden))]

    def block_tables(self, hidden: int) -> tuple[Table, Table]:
        """Return the tensors that all uses of a block share: its attention over [x, embedding], and its
        feed-forward."""
        names = ("gate_up_proj", "down_proj") if self.adapter_rank else GATED
        return (self.attention.table(hidden, inputs=2 * hidden), self.feed_forward.table(hidden, names=names))

    def use_table(self, hidden: int) -> Table:
        """Return the tensors of one use of a shared block. An adapter is two matrices: every rank has all of the
        first, and the second is divided as the rows that it adds to."""
        attended, both = self.attention, (Units(self.feed_forward.width),) * 2
        keys = Units(attended.kv_heads, attended.head_dim, attended.kv_copies)
        queries = Units(attended.heads, attended.head_dim)
        added: dict[str, tuple[str, int, Dim]] = {"into": ("feed_forward.gate_up_proj", hidden, both)}
        if self.adapted_attention:
            added |= {
                part: (f"self_attn.linear_{part}", 2 * hidden, queries if part == "q" else keys) for part in "qkv"
            }
        table: Table = {}
        for role, (name, read, rows) in added.items():
            adapter = f"{name}_adapter_list.{self.use}"
            table |= product(f"{role}.0", read, (f"{adapter}.0", self.adapter_rank))
            table |= product(f"{role}.1", self.adapter_rank, (f"{adapter}.1", rows))
        return table
