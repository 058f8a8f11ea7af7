"""Attention and Mamba in one layer: beside each other, or with a transformer block that layers share.

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
from dataclasses import dataclass

import torch

from weft.families.architecture import Parallel
from weft.models.blocks.attention import AttentionBlock, CosSin
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.recurrent import RecurrentBlock
from weft.tensor.inputs import LayerCache, StepInputs


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
    """A shared projection and what a use adds to it: low-rank products up(down(x)), one for each part of the
    projection's rows, in their order."""

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
        # No residual inside: the result is added to what the layer's Mamba mixer sees, and to nothing else.
        return self.out(self.feed_forward(self.feed_norm(attended)))
