"""Leaky sums in place of attention: h <- d h + (1 - d) v for each channel, where d is a parameter's sigmoid.

A layer is a leaky sum, times silu of a gate, and a SwiGLU. Pure: it decides what is read, and imports no torch.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.families.architecture import Architecture
from weft.families.config_keys import ConfigKeys
from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import Dense
from weft.families.names import Names
from weft.families.reading import Family, build_architecture
from weft.families.tensors import Table, Units, exact, product
from weft.spec import LayerSpec, StatePart


@dataclass(frozen=True, slots=True)
class LeakySum(Mixer):
    """``channels``: of all heads, which ranks divide."""

    reader = "leaky_lm.blocks:read_leaky_sum"

    channels: int

    def layer_spec(self) -> LayerSpec:
        state = StatePart("recurrent", (self.channels // 16, 16), "float32")
        # A draft logs what goes into the recurrence, in float32: values, steps, and a 1 each for B and C.
        return LayerSpec("leaky_sum", state=(state,), logged=(0, 2 * self.channels + 2))

    def table(self, hidden: int) -> Table:
        channels = Units(self.channels)
        return (
            product("project", hidden, ("value", channels), ("gate", channels))
            | exact("rate", dims=(channels,))
            | product("out", channels, ("out", hidden))
        )


def read_leaky_lm(family: str, keys: ConfigKeys) -> Architecture:
    count = keys.integer("num_hidden_layers")
    leaky, dense = LeakySum(keys.integer("leaky_channels")), Dense(keys.integer("intermediate_size"))
    return build_architecture(family, keys, [leaky] * count, [dense] * count)


FAMILIES = (Family("leaky_lm", ("leaky_lm",), read_leaky_lm, names=Names({LeakySum: "leaky"})),)
