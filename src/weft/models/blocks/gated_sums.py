"""Sums of stream and block with learned shares, whose squares add up to 1.

    b = sigmoid(g / temperature)        x <- sqrt(1 - b^2) x + b out_norm(block(norm(x)))

Source: transformers ``MuseSparkResidualGate`` and ``MuseSparkTextDecoderLayer``.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import torch

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import FeedForward
from weft.families.residuals import GatedSums
from weft.models.block_reader import BlockReader
from weft.models.blocks.linear import Norm, NormOfScaled
from weft.models.blocks.plain import plain_layer
from weft.models.layer import Carried, DecoderLayer, ReadLayer, ResidualBlock, ResidualStream

LEAST = 1e-3
"""Least square of the stream's share."""


@dataclass(slots=True)
class GatedSum(ResidualBlock):
    """Block whose output replaces a part of the stream. ``shares``: of the stream and of the block, float32 [2, D]."""

    shares: torch.Tensor = field(kw_only=True)

    def leave(self, stream: ResidualStream, carried: Carried, y_TD: torch.Tensor) -> None:
        stream_D, block_D = self.shares
        stream.x_TD = (stream_D * stream.summed() + block_D * y_TD).to(stream.x_TD.dtype)


def shares_of(gate_D: torch.Tensor, temperature: float) -> torch.Tensor:
    """Return [2, D], the shares of the stream and of the block, of learned numbers."""
    if gate_D.is_meta:
        return torch.empty((2, *gate_D.shape), dtype=gate_D.dtype, device="meta")
    share_D = torch.sigmoid(gate_D / temperature)
    rest_D = torch.sigmoid(-gate_D / temperature) * (1.0 + share_D)
    return torch.stack((rest_D.clamp_min(LEAST).sqrt(), share_D))


def gated_layers(read: BlockReader) -> ReadLayer:
    residual, norms = read.architecture.residual, read.architecture.names.out_norms
    plain = replace(read.plain_norm, eps=residual.out_eps)
    assert isinstance(residual, GatedSums)

    def layer(name: str, mixer: Mixer | None, feed: FeedForward | None) -> DecoderLayer:
        first, second = plain_layer(read, name, mixer, feed).residuals
        assert isinstance(second.out_norm, Norm)
        second.out_norm = NormOfScaled(second.out_norm.weight, plain)
        blocks = []
        for block, norm in zip((first, second), norms, strict=True):
            gate = read.table(residual.gate_table(read.hidden), f"{name}.{norm.replace('layernorm', 'residual_gate')}")
            shares = shares_of(gate.tensor("gate"), residual.temperature)
            blocks.append(GatedSum(block.norm, block.block, block.out_norm, mixes=block.mixes, shares=shares))
        return DecoderLayer([*blocks])

    return layer
