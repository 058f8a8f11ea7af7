"""The frame every family fits into: embedding, layers of (mixer, feed-forward), final norm, head.

    x = embed(tokens) * embedding_multiplier
    for each layer:   x += residual_multiplier * norm(mixer(norm(x)))           (either norm may be absent)
                      x += residual_multiplier * norm(feed_forward(norm(x)))
                      (a layer may lack either line; a block beside the mixer may add to its input only)
                      (where the stream is normed: x = a norm(x) + b mixer(norm(x)), MiniMax)
                      x = behind(x)                                         (Gemma 4: per-layer inputs)
                      (of several streams a block sees a mix, and each gets a share: ``blocks.streams``)
                      (of a scaled residual: x = a x + b block(x), ``blocks.zaya``)
                      (what blocks give passes a short convolution first, ``blocks.inkling``)
    hidden = norm(x)        logits = head(hidden) / logits_divisor, capped  (only for rows that are sampled)

A family is a function that fills a ``CausalModel``, not a subclass of it: families differ in which tensors
make which block, and that is over once loading is.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Protocol

import torch

from weft.families.architecture import Architecture
from weft.families.mixers.attention import Rope
from weft.models.adapter_targets import Targets
from weft.models.blocks.adapted import AdaptedTable
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.streams import Carried, StreamMix
from weft.models.embedding import Embedding, Lookup, Table
from weft.models.fused_decoder import FusedDecoder
from weft.models.layer import DecoderLayer
from weft.models.rotary import RotaryTable
from weft.models.vision.encoder import VisionEncoder
from weft.spec import ModelSpec
from weft.tensor.adapter_rows import ActiveAdapters
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.linear import tiled_linear
from weft.tensor.ops.norm import add_norm
from weft.tensor.weights.tiles import InTiles


class PerLayer(Protocol):
    """int64 [T] and the embedded tokens [T, D] -> [T, layers, P]: numbers for each layer (Gemma 4)."""

    def __call__(self, tokens_T: torch.Tensor, embedded_TD: torch.Tensor, /) -> torch.Tensor: ...


class Collapse(Protocol):
    """Several residual streams [T, S D] -> one [T, D], behind the last layer; in front of the first one the
    other way round."""

    def __call__(self, x_TN: torch.Tensor, /) -> torch.Tensor: ...


class CausalModel:
    """A loaded model: ``forward`` and ``logits`` are all a runner calls; ``spec`` is all memory needs.

    ``embedding``: [vocab, D]; ``head``: [vocab, D], the same weight when tied. Runs under inference mode.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        embedding: Table,
        layers: list[DecoderLayer],
        final_norm: Norm | None,
        head: Linear,
        collapse: Collapse | None = None,
    ) -> None:
        assert len(layers) == architecture.layer_count
        self.architecture = architecture
        self.spec: ModelSpec = architecture.spec()
        self.embedding = embedding
        self._embedded: Lookup = Embedding(embedding)
        self.layers = layers
        self.final_norm, self.collapse = final_norm, collapse
        self.head = head
        self.mtp: object = None
        """The ``MtpHead``, if it is loaded; its layers are the last of ``spec`` and of the caches."""
        self.streams_TN: torch.Tensor | None = None
        """Several residual streams of the last step, of a model whose head reads them (``keeps_streams``)."""
        self.keeps_streams = False
        self.adapters = ActiveAdapters()
        """Of the step that is computed: what ``AdaptedProduct``s read."""
        self.targets = Targets({})
        """What adapters can change, by the names of the checkpoint."""
        self.adapted_table: AdaptedTable | None = None
        """The embedding of adapters, once one was loaded that has its own."""
        self.score_LD: torch.Tensor | None = None
        """float32 [labels, D]: the head of a model that was trained to score prompts."""
        self.vision: VisionEncoder | None = None
        """Of a model that sees pictures."""
        self._headed_XV: torch.Tensor | None = None
        self._head_end = architecture.head_tokens or None
        self.expand: Collapse | None = None
        """From the embedding to what layers carry."""
        self.per_layer: PerLayer | None = None
        """What gives each token numbers for each layer, of a model that has such."""
        self._cache_of = [
            number if layer.reads is None else layer.reads for number, layer in enumerate(self.spec.layers)
        ]
        self._last_writer = max(
            i for i, layer in enumerate(layers) if layer.mixer is not None and self.spec.layers[i].reads is None
        )
        self._readers = self._last_writer + 1 < len(layers) and any(
            layer.reads is not None for layer in self.spec.layers
        )
        self._ropes = [rope_of(mixer) for mixer in architecture.mixers]
        self._rotary = {
            rope: RotaryTable(rope, embedding.device, architecture.turn_sections)
            for rope in dict.fromkeys(self._ropes)
            if rope is not None
        }
        self._index_of = {layer: len(layers) + place for place, layer in enumerate(architecture.indexed)}
        self._fused = (
            None
            if architecture.residual_float32 or final_norm is None
            else FusedDecoder(layers, self._ropes, final_norm, architecture.residual_multiplier, self.adapters.unfused)
        )

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        """One step: -> hidden [T, D] after the final norm, [X, D] where ``inputs.asked`` names rows. Writes
        the pages and states of ``inputs.runs``. ``caches`` has one entry per layer of ``spec``."""
        whole = inputs if inputs.asked is None else replace(inputs, asked=None)
        rotated: dict[Rope | None, CosSin | None] = {None: None}
        rotated.update(self._turned(inputs))
        self.adapters.step = inputs.adapters
        embedded_TD = x_TD = self._embed(inputs)
        dtype = x_TD.dtype
        own_TLP = None if self.per_layer is None else self.per_layer(inputs.tokens_T, x_TD)
        if self.architecture.residual_float32:
            x_TD = x_TD.float()
        if self._fused is not None:
            hidden_TD = self._fused.run(x_TD, inputs, caches, rotated)
            if hidden_TD is not None:
                return hidden_TD
        if self.expand is not None:
            x_TD = self.expand(x_TD)
        positions_T = inputs.positions_T if inputs.runs.padded else None
        y_TD: torch.Tensor | None = None  # not yet added: a norm of the sum comes with it
        for number, (layer, rope) in enumerate(zip(self.layers, self._ropes, strict=True)):
            cache = caches[self._cache_of[number]]
            if number in self._index_of:
                cache = replace(cache, index=caches[self._index_of[number]])
            if layer.before is not None:
                x_TD, y_TD = self._add(x_TD, y_TD), None
                x_TD = x_TD + layer.before(x_TD, whole, cache)
            around, around_feed = layer.mixes
            carried: Carried = ()
            if layer.mixer is not None:
                if layer.beside is None:
                    x_TD, seen_TD, carried = self._entered(around, x_TD, y_TD, layer.mixer_norm, dtype)
                else:
                    x_TD = self._add(x_TD, y_TD)
                    seen_TD = x_TD + layer.beside(x_TD, embedded_TD, whole, cache, rotated[rope])
                    seen_TD = _normed(layer.mixer_norm, seen_TD.to(dtype))
                last = number == self._last_writer and layer.feed_conv is None
                y_TD = _normed(
                    layer.mixer_out_norm, layer.mixer(seen_TD, inputs if last else whole, cache, rotated[rope])
                )
                if layer.factors is not None:
                    x_TD, y_TD = seen_TD * layer.factors[0], y_TD * layer.factors[1]
                # The rows that nothing asks for end here: KV and states are written, and nothing reads
                # further values. Layers behind that read pages alone see the last token of each run.
                if last and inputs.asked is not None:
                    x_TD, *carried = map(inputs.asked_of, (x_TD, *carried))
                    own_TLP = None if own_TLP is None else inputs.asked_of(own_TLP)
                    positions_T = None if positions_T is None else inputs.asked_of(positions_T)
                    if self._readers:
                        whole = inputs = inputs.of_asked()
                        rotated.update(self._turned(inputs))
                if around is not None:
                    x_TD, y_TD = around.leave(x_TD, carried, y_TD), None
            if layer.feed_forward is not None:
                x_TD, seen_TD, carried = self._entered(around_feed, x_TD, y_TD, layer.feed_norm, dtype)
                y_TD = _normed(layer.feed_out_norm, layer.feed_forward(seen_TD, positions_T))
                if layer.feed_conv is not None:
                    y_TD = layer.feed_conv(y_TD, whole, cache)
                    if number == self._last_writer:
                        x_TD, y_TD = map(inputs.asked_of, (x_TD, y_TD))
                if layer.factors is not None:
                    x_TD, y_TD = seen_TD * layer.factors[2], y_TD * layer.factors[3]
                if around_feed is not None:
                    x_TD, y_TD = around_feed.leave(x_TD, carried, y_TD), None
            if layer.behind is not None:
                own_TP = None if own_TLP is None else own_TLP[:, number]
                x_TD, y_TD = layer.behind(self._add(x_TD, y_TD), own_TP), None
        if self.collapse is not None:
            x_TD, y_TD = self._collapsed(self._add(x_TD, y_TD), self.collapse), None
        return self._added(x_TD, y_TD, self.final_norm, x_TD.dtype)[1].to(dtype)

    def _collapsed(self, x_TN: torch.Tensor, collapse: Collapse) -> torch.Tensor:
        self.streams_TN = x_TN if self.keeps_streams else None
        return collapse(x_TN)

    def _entered(
        self,
        around: StreamMix | None,
        x_TD: torch.Tensor,
        y_TD: torch.Tensor | None,
        norm: Norm | None,
        dtype: torch.dtype,
    ) -> tuple[torch.Tensor, torch.Tensor, Carried]:
        """The stream with ``y_TD`` added, what a block sees of it, and what ``around`` carries past it."""
        if around is None:
            return *self._added(x_TD, y_TD, norm, dtype), ()
        x_TD = self._add(x_TD, y_TD)
        seen_TD, carried = around.enter(x_TD)
        return x_TD, _normed(norm, seen_TD), carried

    def _embed(self, inputs: StepInputs) -> torch.Tensor:
        x_TD = self._embedded.rows_at(inputs.tokens_T)
        if self.adapted_table is not None:
            x_TD = self.adapted_table.added(inputs.tokens_T, x_TD)
        if inputs.embedded is not None:
            x_TD = x_TD.index_copy(0, inputs.embedded.index_N, inputs.embedded.rows_ND)
        return self._multiplied(x_TD)

    def _turned(self, inputs: StepInputs) -> Iterator[tuple[Rope, CosSin]]:
        return ((rope, table.at(inputs.turned)) for rope, table in self._rotary.items())

    def _multiplied(self, x_TD: torch.Tensor) -> torch.Tensor:
        factor = self.architecture.embedding_multiplier
        if factor == 1.0:
            return x_TD
        if self.architecture.rounded_multiplier:
            return x_TD * torch.tensor(factor, dtype=x_TD.dtype).item()
        return x_TD * factor

    def _added(
        self, x_TD: torch.Tensor, y_TD: torch.Tensor | None, norm: Norm | None, dtype: torch.dtype
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """The stream with ``y_TD`` added, and its norm, taken in ``dtype``."""
        if y_TD is not None and norm is not None and x_TD.dtype == y_TD.dtype == dtype:
            x_TD, y_TD = add_norm(
                x_TD, y_TD, norm.weight, norm.eps, plus_one=norm.plus_one, scale=self.architecture.residual_multiplier
            )
            return x_TD, y_TD if norm.gate is None else norm.gate(y_TD)
        x_TD = self._add(x_TD, y_TD)
        return x_TD, _normed(norm, x_TD.to(dtype))

    def _add(self, x_TD: torch.Tensor, y_TD: torch.Tensor | None) -> torch.Tensor:
        scale = self.architecture.residual_multiplier
        return x_TD if y_TD is None else x_TD + (y_TD if scale == 1.0 else y_TD * scale)

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        """Any rows of ``forward``'s result -> float32 [X, vocab]: in ``out_XV`` where that is given and they
        are converted from another dtype."""
        if out_XV is None:
            logits_XV = self.head(hidden_XD).float()
        else:
            headed_XV = self._through_head(hidden_XD, out_XV)
            logits_XV = headed_XV if headed_XV.dtype == torch.float32 else out_XV.copy_(headed_XV)
        divisor, cap = self.architecture.logits_divisor, self.architecture.logits_cap
        if self._head_end is not None:
            logits_XV[:, self._head_end :] = float("-inf")
        if cap:
            return logits_XV.div_(cap).tanh_().mul_(cap)
        return logits_XV if divisor == 1.0 else logits_XV.div_(divisor)

    def _through_head(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor) -> torch.Tensor:
        """[X, vocab] of the head's dtype."""
        # In memory that is written again in the next step: new memory of that size costs page faults.
        weight, bias = self.head.weight, self.head.bias
        if not isinstance(weight, InTiles) or weight.dtype != hidden_XD.dtype or self.head.adapted.changes:
            return self.head(hidden_XD)
        if weight.dtype == torch.float32:
            return tiled_linear(hidden_XD, weight, bias, out_XV)
        rows = out_XV.shape[0]
        if self._headed_XV is None or self._headed_XV.shape[0] < rows:
            self._headed_XV = torch.empty(out_XV.shape, dtype=weight.dtype)
        return tiled_linear(hidden_XD, weight, bias, self._headed_XV[:rows])


def _normed(norm: Norm | None, x_TD: torch.Tensor) -> torch.Tensor:
    return x_TD if norm is None else norm(x_TD)


def rope_of(mixer: object) -> Rope | None:
    """The rotary settings of a layer's mixer, None for one that has no positions; layers may differ."""
    rope = getattr(getattr(mixer, "attention", mixer), "rope", None)
    assert rope is None or isinstance(rope, Rope)
    return rope
