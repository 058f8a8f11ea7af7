"""The layers of RWKV-7, as pure data.

    layer n of a release      2n   time mixing       shift [C, 1], S [heads, D, D]
                              2n+1 channel mixing    shift [C, 1]

Each looks at a token and the one before it, whose input is the shift in the state slot. A rank has its heads
and its part of the inner width, and shifts the whole stream.

Source: Peng et al., "RWKV-7 Goose with expressive dynamic state evolution" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.families.mixers import Mixer
from weft.families.tensors import Table, Tensor, Units, layer_norm, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class TimeMix(Mixer):
    """WKV7 over six mixes of a token and the one before. The ranks are those of the products that make
    decays, rates, gates, and the share of the first layer's values that a later one takes; ``value_rank`` is 0 in
    the first layer itself. ``hidden``: width of the stream."""

    reader = "weft.models.blocks.rwkv:read_time_mix"

    heads: int
    head_dim: int
    hidden: int
    decay_rank: int
    rate_rank: int
    gate_rank: int
    value_rank: int

    @property
    def carried(self) -> int:
        """Numbers that the stream carries for this layer: values of the first layer."""
        return self.heads * self.head_dim

    def layer_spec(self) -> LayerSpec:
        return spec.together("wkv7", spec.wkv7(self.heads, self.head_dim), spec.shifts(self.hidden, 0, 1))

    def table(self, hidden: int, *, joined: bool = False) -> Table:
        """Return the tensors. ``joined``: the six mixes are one tensor. A low-rank product is two matrices: the first
        is on every device, the second is divided."""
        width = Units(self.heads, self.head_dim)
        table = product("out", width, ("o_proj", hidden)) | layer_norm("norm", width, "g_norm")
        for part in ("r", "k", "v"):
            table |= product(part, hidden, (f"{part}_proj", width))
        for part, rank in (
            ("w", self.decay_rank),
            ("a", self.rate_rank),
            ("g", self.gate_rank),
            ("v", self.value_rank),
        ):
            if rank:
                table |= product(f"{part}.0", hidden, (f"{part}_lora.lora.0", rank))
                table |= product(f"{part}.1", rank, (f"{part}_lora.lora.2", width), bias=part != "g")
        for part in "rwkvag":
            table[f"x_{part}"] = (Tensor(f"x_{part}", (1, 1, hidden), "plain"),)
        if joined:
            table = {role: parts for role, parts in table.items() if not role.startswith("x_")}
            table["x_x"] = (Tensor("x_x", (6, hidden), "plain"),)
        return table | {
            "k_k": (Tensor("k_k", (width,), "plain"),),
            "k_a": (Tensor("k_a", (width,), "plain"),),
            "r_k": (Tensor("r_k", (Units(self.heads), self.head_dim), "plain"),),
        }


@dataclass(frozen=True, slots=True)
class ChannelMix(Mixer):
    """down(relu(up(x')) ^ 2), where x' is a mix of a token and the one before."""

    reader = "weft.models.blocks.rwkv:read_channel_mix"

    hidden: int
    width: int

    def layer_spec(self) -> LayerSpec:
        return spec.shifts(self.hidden, 0, 1)

    def table(self, hidden: int) -> Table:
        width = Units(self.width)
        return (
            product("into", hidden, ("key", width))
            | product("down", width, ("value", hidden))
            | {"x_k": (Tensor("x_k", (hidden,), "plain"),)}
        )
