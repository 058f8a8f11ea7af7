"""The layers of RWKV-7, as ``architecture`` has those of others: pure data.

    layer n of a release      2n   time mixing       shift [C, 1], S [heads, D, D]
                              2n+1 channel mixing    shift [C, 1]

Each looks at a token and the one before it, whose input is the shift in the state slot. A rank has its heads
and its part of the inner width, and shifts the whole stream.

Source: Peng et al., "RWKV-7 Goose with expressive dynamic state evolution" (2025).
"""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class TimeMix:
    """WKV7 over six mixes of a token and the one before. Ranks of the products that make decays, rates,
    gates, and how much of the first layer's values a later one takes; that one is 0 in the first layer
    itself. ``hidden``: of the stream."""

    heads: int
    head_dim: int
    hidden: int
    decay_rank: int
    rate_rank: int
    gate_rank: int
    value_rank: int

    @property
    def carried(self) -> int:
        """Numbers that the stream carries for it: values of the first layer."""
        return self.heads * self.head_dim

    def layer_spec(self) -> LayerSpec:
        return spec.together("wkv7", spec.wkv7(self.heads, self.head_dim), spec.shifts(self.hidden, 0, 1))


@dataclass(frozen=True, slots=True)
class ChannelMix:
    """down(relu(up(x')) ^ 2), where x' is a mix of a token and the one before."""

    hidden: int
    width: int

    def layer_spec(self) -> LayerSpec:
        return spec.shifts(self.hidden, 0, 1)
