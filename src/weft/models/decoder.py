"""The structure of every family: embedding, layers of blocks, final norm, head.

    x = embed(tokens) * embedding_multiplier
    for each block of each layer:   block(stream, step)                     (``layer``)
    hidden = norm(x)        logits = head(hidden) / logits_divisor, capped  (only for rows that are sampled)

A family is a function that reads blocks, not a subclass of ``CausalModel``: families differ only in the tensors of each
block, and only while loading.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import torch

from weft.families.architecture import Architecture
from weft.families.mixers.attention import Rope
from weft.models.adapter_targets import Targets
from weft.models.blocks.adapted import AdaptedTable
from weft.models.blocks.linear import Linear, Norm
from weft.models.embedding import Embedding, Lookup
from weft.models.fused_decoder import FusedDecoder
from weft.models.layer import DecoderLayer, LayerStep, ResidualStream
from weft.models.rotary import RotaryTable
from weft.models.score_head import ScoreHead
from weft.models.vision.encoder import VisionEncoder
from weft.spec import ModelSpec
from weft.tensor import native
from weft.tensor.adapter_rows import ActiveAdapters
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.ops.attention_layer import CosSin
from weft.tensor.ops.linear import Matrix


class CausalModel:
    """A loaded model. A runner calls only ``forward`` and ``logits``; memory is planned from ``spec``.

    ``embedding``: [vocab, D]; ``head``: [vocab, D], the same weight when tied. Runs under inference mode.
    """

    def __init__(
        self,
        architecture: Architecture,
        *,
        embedding: Matrix,
        layers: list[DecoderLayer],
        final_norm: Norm | None,
        head: Linear,
    ) -> None:
        assert len(layers) == architecture.layer_count
        self.architecture = architecture
        self.spec: ModelSpec = architecture.spec()
        self.embedding = embedding
        self._embedded: Lookup = Embedding(embedding)
        self.layers = layers
        self.final_norm = final_norm
        self.head = head
        self.mtp: object = None
        """The ``MtpHead``, if it is loaded; its layers are the last of ``spec`` and of the caches."""
        self.streams_TN: torch.Tensor | None = None
        """Several residual streams of the last step, of a model whose head reads them (``keeps_streams``)."""
        self.keeps_streams = False
        self.adapters = ActiveAdapters()
        """Adapters of the present step, which ``AdaptedProduct``s read."""
        self.targets = Targets({})
        """Targets of adapters, by the names of the checkpoint."""
        self.adapted_table: AdaptedTable | None = None
        """The embedding of adapters, once one was loaded that has its own."""
        self.score_head: ScoreHead | None = None
        """Head of a model that was trained to score prompts."""
        self.vision: VisionEncoder | None = None
        """Encoder of a model that sees pictures."""
        self._headed_XV: torch.Tensor | None = None
        self._head_end = architecture.head_tokens or None
        self._cache_of = [
            number if layer.reads is None else layer.reads for number, layer in enumerate(self.spec.layers)
        ]
        writers = [
            (number, block)
            for number, layer in enumerate(layers)
            if self.spec.layers[number].reads is None
            for block in layer.residuals
            if block.mixes
        ]
        last_writer, block = writers[-1]
        block.last = True
        self._readers = any(layer.reads is not None for layer in self.spec.layers[last_writer + 1 :])
        self._ropes = [rope_of(mixer) for mixer in architecture.mixers]
        self._rotary = {
            rope: RotaryTable(rope, embedding.device, architecture.turn_sections)
            for rope in dict.fromkeys(self._ropes)
            if rope is not None
        }
        self._index_of = {layer: len(layers) + place for place, layer in enumerate(architecture.indexed)}
        self._fused = (
            None
            if architecture.residual.float32 or final_norm is None
            else FusedDecoder(layers, self._ropes, final_norm, architecture.residual.scale, self.adapters.unfused)
        )

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        """Return hidden [T, D] of one step after the final norm, [X, D] if ``inputs.output_rows`` names rows. Writes
        the pages and states of ``inputs.runs``. ``caches`` has one entry per layer of ``spec``.
        """
        whole = inputs if inputs.output_rows is None else replace(inputs, output_rows=None)
        rotated: dict[Rope | None, CosSin | None] = {None: None}
        rotated.update(self._turned(inputs))
        self.adapters.step = inputs.adapters
        x_TD = self._embed(inputs)
        dtype, residual = x_TD.dtype, self.architecture.residual
        if self._fused is not None:
            hidden_TD = self._fused.run(x_TD, inputs, caches, rotated)
            if hidden_TD is not None:
                return hidden_TD
        stream = ResidualStream(x_TD.float() if residual.float32 else x_TD, dtype, residual.scale)
        step = LayerStep(inputs, whole, rotated, caches[0], inputs.positions_T if inputs.runs.padded else None)
        step.readers = self._turned if self._readers else None
        for number, (layer, rope) in enumerate(zip(self.layers, self._ropes, strict=True)):
            step.cache, step.rope = caches[self._cache_of[number]], rope
            if number in self._index_of:
                step.cache = replace(step.cache, index=caches[self._index_of[number]])
            for block in layer.blocks:
                block(stream, step)
        self.streams_TN = step.streams_TN if self.keeps_streams else None
        stream.dtype = stream.x_TD.dtype
        return stream.normed(self.final_norm).to(dtype)

    def _embed(self, inputs: StepInputs) -> torch.Tensor:
        x_TD = self._embedded.rows_at(inputs.tokens_T)
        if self.adapted_table is not None:
            x_TD = self.adapted_table.added(inputs.tokens_T, x_TD)
        if inputs.embedded is not None:
            x_TD = inputs.embedded.put(x_TD)
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

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        """Return float32 [X, vocab] of rows of ``forward``'s result. Logits of another dtype are converted into
        ``out_XV`` if it is given.
        """
        if out_XV is None:
            logits_XV = self.head(hidden_XD).float()
        else:
            headed_XV = self._through_head(hidden_XD, out_XV)
            logits_XV = headed_XV if headed_XV.dtype == torch.float32 else out_XV.copy_(headed_XV)
        divisor, cap = self.architecture.logits_divisor, self.architecture.logits_cap
        if cap:
            logits_XV.div_(divisor * cap).tanh_().mul_(cap)
        elif divisor != 1.0:
            logits_XV.div_(divisor)
        if self._head_end is not None:  # after the cap, which would make a number of it
            logits_XV[:, self._head_end :] = float("-inf")
        return logits_XV

    def _through_head(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor) -> torch.Tensor:
        """Return [X, vocab] of the head's dtype."""
        # The memory is used again in the next step: new memory of that size costs page faults.
        if not native.fits(hidden_XD):
            return self.head(hidden_XD)
        if hidden_XD.dtype == torch.float32:
            return self.head(hidden_XD, out_XV)
        rows = out_XV.shape[0]
        if self._headed_XV is None or self._headed_XV.shape[0] < rows:
            self._headed_XV = torch.empty(out_XV.shape, dtype=hidden_XD.dtype)
        return self.head(hidden_XD, self._headed_XV[:rows])


def rope_of(mixer: object) -> Rope | None:
    """Return the rotary settings of a layer's mixer, None for one without positions; layers may differ."""
    rope = getattr(getattr(mixer, "attention", mixer), "rope", None)
    assert rope is None or isinstance(rope, Rope)
    return rope
