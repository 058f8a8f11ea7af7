"""Attention and Mamba-2 beside each other, on the same input (Falcon-H1).

    y = attention(x * attention_in) * attention_out + mamba(x * mamba_in) * mamba_out

A layer with KV pages and a state: each branch finds its own part in the layer's cache.
Source: transformers ``FalconH1DecoderLayer``.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch

from weft.families.architecture import Parallel
from weft.models.blocks.attention import AttentionBlock, CosSin
from weft.models.blocks.mamba2 import Mamba2Block
from weft.tensor.inputs import LayerCache, StepInputs


@dataclass(slots=True)
class ParallelBlock:
    shape: Parallel
    attention: AttentionBlock
    mamba: Mamba2Block

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor:
        shape = self.shape
        attended = self.attention(_times(x_TD, shape.attention_in), inputs, cache, cos_sin)
        scanned = self.mamba(_times(x_TD, shape.mamba_in), inputs, cache, cos_sin)
        return _times(attended, shape.attention_out) + _times(scanned, shape.mamba_out)


def _times(x: torch.Tensor, factor: float) -> torch.Tensor:
    return x if factor == 1.0 else x * factor
