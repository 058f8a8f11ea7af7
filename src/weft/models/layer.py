"""One layer of a decoder: what the loop over layers and the fused decoder both read."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.families.mixers import Mixer
from weft.families.mixers.feed_forward import FeedForward
from weft.models.blocks.linear import Norm
from weft.models.blocks.streams import StreamMix
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin


class MixerBlock(Protocol):
    """Moves information between the tokens of a sequence."""

    def __call__(
        self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, cos_sin: CosSin | None, /
    ) -> torch.Tensor: ...


class Beside(Protocol):
    """What reads the stream and the embedding, and is added to what a mixer sees."""

    def __call__(
        self,
        x_TD: torch.Tensor,
        embedded_TD: torch.Tensor,
        inputs: StepInputs,
        cache: LayerCache,
        cos_sin: CosSin | None,
    ) -> torch.Tensor: ...


class FeedForwardBlock(Protocol):
    """Works on each token alone. A mixture of experts reads no expert's weights for rows whose position is
    PAD; ``positions_T`` is None where no row is PAD. Others compute all rows."""

    def __call__(self, x_TD: torch.Tensor, positions_T: torch.Tensor | None = None, /) -> torch.Tensor: ...


class Behind(Protocol):
    """What makes a layer's output of the stream [T, D] and the layer's own numbers of each token [T, P]."""

    def __call__(self, x_TD: torch.Tensor, own_TP: torch.Tensor | None, /) -> torch.Tensor: ...


class Before(Protocol):
    """What is added to the stream in front of a layer, of the tokens and the layer's state."""

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, /) -> torch.Tensor: ...


class Convolved(Protocol):
    """What makes y [T, D] of a block's output and of those of the tokens before."""

    def __call__(self, y_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache, /) -> torch.Tensor: ...


@dataclass(slots=True)
class DecoderLayer:
    """Residual pair. Most families norm what goes in; OLMo's attention layers norm what comes out
    (``mixer_out_norm``, ``feed_out_norm``), LFM3 both. One of ``mixer`` and ``feed_forward`` may be None
    (Nemotron-H, Mamba). ``beside``: Zamba2's shared block; ``behind``: Gemma 4's per-layer inputs.
    ``factors``: MiniMax's; see ``Architecture.normed_stream``. ``before``: n-grams of Qwen4; ``mixes``: of
    several residual streams, around the mixer and around the feed-forward. ``feed_conv``: what the
    feed-forward gives passes it (Inkling)."""

    mixer_norm: Norm | None
    mixer: MixerBlock | None
    feed_norm: Norm | None
    feed_forward: FeedForwardBlock | None
    mixer_out_norm: Norm | None = None
    feed_out_norm: Norm | None = None
    beside: Beside | None = None
    factors: tuple[float, float, float, float] | None = None
    behind: Behind | None = None
    before: Before | None = None
    mixes: tuple[StreamMix | None, StreamMix | None] = (None, None)
    feed_conv: Convolved | None = None


ReadLayer = Callable[[str, Mixer | None, FeedForward | None], DecoderLayer]
"""Reads "layers.3" of its mixer and its feed-forward."""
