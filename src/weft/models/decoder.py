"""The frame every family fits into: embedding, layers of (mixer, feed-forward), final norm, head.

    x = embed(tokens) * embedding_multiplier
    for each layer:   x += residual_multiplier * mixer(norm(x))
                      x += residual_multiplier * feed_forward(norm(x))
    hidden = norm(x)        logits = head(hidden) / logits_divisor      (only for rows that are sampled)

A family is a function that fills a ``CausalModel`` (see ``registry``), not a subclass of it: what differs
between families is which tensors make which block, and that is over once loading is. Rejected: a module
tree with parameters and hooks, which inference has no use for.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Protocol

import torch

from weft.architecture import Architecture, Attention, Rope
from weft.models.blocks.attention import CosSin
from weft.models.blocks.linear import Linear, Norm
from weft.models.rotary import RotaryTable
from weft.spec import ModelSpec
from weft.tensor.inputs import LayerCache, StepInputs


class Mixer(Protocol):
    """Moves information between the tokens of a sequence."""

    def __call__(self, x_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache,
                 cos_sin: CosSin | None) -> torch.Tensor: ...


@dataclass(slots=True)
class DecoderLayer:
    """Pre-norm residual pair."""

    mixer_norm: Norm
    mixer: Mixer
    feed_norm: Norm
    feed_forward: Callable[[torch.Tensor], torch.Tensor]


class CausalModel:
    """A loaded model: ``forward`` and ``logits`` are all a runner calls; ``spec`` is all memory needs.

    ``embedding``: [vocab, D]; ``head``: [vocab, D], the same tensor when tied. Runs under inference mode, on
    whatever dtype the weights have; logits are float32.
    """

    def __init__(self, architecture: Architecture, *, embedding: torch.Tensor, layers: list[DecoderLayer],
                 final_norm: Norm, head: Linear) -> None:
        assert len(layers) == architecture.layer_count
        self.architecture = architecture
        self.spec: ModelSpec = architecture.spec()
        self.embedding = embedding
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        rope = _rope_of(architecture)
        self._rotary = RotaryTable(rope) if rope is not None else None

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        """One step: -> hidden [T, D] after the final norm. Writes the pages and states of ``inputs.runs``.
        ``caches`` has one entry per layer. Rows of PAD runs are finite and mean nothing."""
        scale = self.architecture.residual_multiplier
        cos_sin = self._rotary.at(inputs.positions_T) if self._rotary is not None else None
        x_TD = torch.nn.functional.embedding(inputs.tokens_T, self.embedding)
        if self.architecture.embedding_multiplier != 1.0:
            x_TD = x_TD * self.architecture.embedding_multiplier
        for layer, cache in zip(self.layers, caches, strict=True):
            y_TD = layer.mixer(layer.mixer_norm(x_TD), inputs, cache, cos_sin)
            x_TD = x_TD + (y_TD if scale == 1.0 else y_TD * scale)
            y_TD = layer.feed_forward(layer.feed_norm(x_TD))
            x_TD = x_TD + (y_TD if scale == 1.0 else y_TD * scale)
        return self.final_norm(x_TD)

    def logits(self, hidden_XD: torch.Tensor) -> torch.Tensor:
        """Any rows of ``forward``'s result -> float32 [X, vocab]."""
        logits_XV = self.head(hidden_XD).float()
        if self.architecture.logits_divisor != 1.0:
            logits_XV = logits_XV / self.architecture.logits_divisor
        return logits_XV


def _rope_of(architecture: Architecture) -> Rope | None:
    """One rotary table serves all layers: a model whose layers differ would need a table per kind."""
    ropes = {mixer.rope for mixer in architecture.mixers if isinstance(mixer, Attention)} - {None}
    assert len(ropes) <= 1, "attention layers with different rotary settings"
    return next(iter(ropes), None)
