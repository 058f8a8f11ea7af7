"""The short convolution of LFM2. Pure."""

from __future__ import annotations

from dataclasses import dataclass

from weft import spec
from weft.families.mixers import Mixer
from weft.families.tensors import Table, Units, conv, product
from weft.spec import LayerSpec


@dataclass(frozen=True, slots=True)
class ShortConv(Mixer):
    """Double-gated short convolution of LFM2. ``centred``: a token's output reads equally far before and after it, and
    the layer keeps nothing (LFM2.5-Embedding)."""

    reader = "weft.models.blocks.recurrent:read_short_conv"

    channels: int
    conv_kernel: int
    bias: bool
    centred: bool = False

    def layer_spec(self) -> LayerSpec:
        return spec.stateless() if self.centred else spec.short_conv(self.channels, self.conv_kernel)

    def table(self, hidden: int) -> Table:
        channels = Units(self.channels)
        return (
            product("project", hidden, ("in_proj", (channels, channels, channels)), bias=self.bias)
            | conv(channels, self.conv_kernel, "conv", bias=self.bias)
            | product("out", channels, ("out_proj", hidden), bias=self.bias)
        )
