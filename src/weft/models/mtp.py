"""The head for multi-token prediction: one layer that drafts the token after the next.

    hidden of t (after the trunk's last norm)  -> norm \\
    embedding of token t + 1                   -> norm -> join -> fc -> layer -> norm -> head -> token t + 2
                                                                  |
                                            KV at position t, in the pages of the sequence

Further drafts read the head's own hidden state in place of the trunk's. Embedding and output matrix are the
trunk's. A draft is a guess: no bit of an answer depends on this file.

Of several ranks, each holds its share of the layer, divided as a layer of the trunk. Each rank finds its best
token, and all choose the best of these by the same numbers. So drafts are equal on all ranks.

``write`` computes keys and values alone, for tokens that draft nothing: those of prompts. ``draft`` computes
the whole layer. A step of few rows goes through the fused decoder, in one call.

A wide vocabulary costs more than the layer. Byte-pair tokenizers number tokens by frequency, so drafts are
drawn from the first VOCAB_MAX tokens alone. A draft that would be another token is wrong, not the answer.

Layout and names: the public checkpoints of Qwen3.5 and Qwen3-Next, ``mtp.*``. Nemotron 3 has the same head
under other names: ``layers.0`` joins and attends, ``layers.1`` has the experts and the last norm.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace

import numpy as np
import torch

from weft.errors import CheckpointError
from weft.families.architecture import Architecture, Attention
from weft.models.block_readers import BlockReader
from weft.models.blocks.attention import AttentionBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.checkpoint_files import DraftWeights
from weft.models.decoder import CausalModel
from weft.models.embedding import Embedding, Lookup
from weft.models.families import NAMES
from weft.models.fused_decoder import FusedDecoder
from weft.models.layer import DecoderLayer
from weft.models.reader import TensorCheck, TensorReader
from weft.models.rotary import RotaryTable
from weft.models.runtime_form import RuntimeForm
from weft.models.sharded_model import RankedModel, RankShare, RankVocabulary, Summed
from weft.models.weights import TensorSource
from weft.tensor.inputs import LayerCache, Runs, StepInputs
from weft.tensor.ops.attention_layer import write_projected
from weft.tensor.weights.tiles import TILE_ROWS, TiledWeight, TwelveBitWeight

VOCAB_MAX = 1 << 15
"""Tokens that a draft may be."""
_FEW_TOKENS = 4096
"""Up to so many numpy takes less time than the calls of torch."""


@dataclass(slots=True)
class MtpHead:
    """``join``: [D, 2 D], of the embedding and the hidden state. ``head``: the first tokens' rows of the
    trunk's output matrix."""

    attention: Attention
    embedding: Lookup
    embedding_multiplier: float
    embedding_norm: Norm
    hidden_norm: Norm
    join: Linear
    layer: DecoderLayer
    norm: Norm
    head: Linear
    rotary: RotaryTable | None
    vocabulary: RankVocabulary | None = None
    """Of several ranks: which tokens ``head`` has here."""
    _fused: FusedDecoder = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._fused = FusedDecoder([self.layer], [self.attention.rope], self.norm, 1.0)

    def joined(self, hidden_TD: torch.Tensor, following_T: torch.Tensor) -> torch.Tensor:
        """The layer's input. ``hidden_TD``: of the trunk or of this head; ``following_T``: int64 [T], the
        token after each."""
        embedded_TD = self.embedding.rows_at(following_T)
        if self.embedding_multiplier != 1.0:
            embedded_TD = embedded_TD * self.embedding_multiplier
        return self.join(torch.cat((self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TD)), -1))

    def write(self, joined_TD: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> None:
        """Keys and values of ``inputs`` into their pages."""
        block = self.layer.mixer.block if isinstance(self.layer.mixer, Summed) else self.layer.mixer
        assert isinstance(block, AttentionBlock)
        assert self.layer.mixer_norm is not None
        cos_sin = None if self.rotary is None else self.rotary.at(inputs.turned)
        write_projected(block.qkv(self.layer.mixer_norm(joined_TD)), block.core, inputs, cache, cos_sin)

    def draft(self, joined_TD: torch.Tensor, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        """The whole layer: -> hidden [T, D]. Writes keys and values. ``caches``: of this layer alone, the
        same list in each step. Valid until the next call."""
        rope, layer, cache = self.attention.rope, self.layer, caches[0]
        cos_sin = None if self.rotary is None else self.rotary.at(inputs.turned)
        hidden_TD = self._fused.run(joined_TD, inputs, caches, {rope: cos_sin})
        if hidden_TD is not None:
            return hidden_TD
        assert layer.mixer is not None
        assert layer.feed_forward is not None
        assert layer.mixer_norm is not None
        assert layer.feed_norm is not None
        x_TD = joined_TD + layer.mixer(layer.mixer_norm(joined_TD), inputs, cache, cos_sin)
        return self.norm(x_TD + layer.feed_forward(layer.feed_norm(x_TD)))

    def best(self, hidden_XD: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """The most likely token of each row (int64 [X]), and its probability."""
        if self.vocabulary is not None:
            own_XV = self.head(hidden_XD).float() if self.vocabulary.count else hidden_XD[:, :0].float()
            return self.vocabulary.best(own_XV)
        logits_XV = self.head(hidden_XD).float()
        if logits_XV.device.type == "cpu" and logits_XV.shape[1] <= _FEW_TOKENS:
            host_XV = logits_XV.numpy()
            tokens_X, highest_X = host_XV.argmax(axis=1), host_XV.max(axis=1, keepdims=True)
            return torch.from_numpy(tokens_X), torch.from_numpy(1 / np.exp(host_XV - highest_X).sum(axis=1))
        best = logits_XV.softmax(-1).max(-1)
        return best.indices, best.values


def build_mtp(architecture: Architecture, source: TensorSource, trunk: CausalModel) -> MtpHead:
    """Read the head from ``source``, whose names have no ``mtp.`` before them."""
    shape = architecture.mtp
    assert shape is not None
    hidden, rope = architecture.hidden_size, shape.attention.rope

    trunk_names = NAMES[architecture.family]
    read = BlockReader(architecture, source, plus_one=trunk_names.plus_one)
    if architecture.family == "nemotron_h":
        names = ["layers.0.enorm", "layers.0.hnorm", "layers.0.eh_proj.weight", "layers.1.final_layernorm"]
        layer = trunk_names.layer(read, "layers.0", shape.attention, None)
        after = trunk_names.layer(read, "layers.1", None, shape.feed_forward)
        layer.feed_norm, layer.feed_forward = after.feed_norm, after.feed_forward
    else:
        names = ["pre_fc_norm_embedding", "pre_fc_norm_hidden", "fc.weight", "norm"]
        layer = trunk_names.layer(read, "layers.0", shape.attention, shape.feed_forward)
    embedding: Lookup = Embedding(trunk.embedding)
    vocabulary = None
    if source.share is not None:
        assert isinstance(trunk, RankedModel)
        embedding, vocabulary = trunk.lookup, trunk.draft_vocabulary(VOCAB_MAX)
        [layer] = source.share.joined([layer])
    return MtpHead(
        shape.attention, embedding, architecture.embedding_multiplier,
        read.norm(names[0]), read.norm(names[1]), source.linear([(names[2], hidden)], 2 * hidden), layer,
        read.norm(names[3]), _first_tokens(trunk.head),
        None if rope is None else RotaryTable(rope, trunk.embedding.device, architecture.turn_sections),
        vocabulary)


def load_mtp(architecture: Architecture, weights: DraftWeights, trunk: CausalModel,
             runtime: RuntimeForm, device: torch.device | None,
             share: RankShare | None = None) -> tuple[MtpHead, int]:
    """The head and its bytes; with ``share`` the part of one rank. Raises CheckpointError as ``load_model``
    does, and for a family whose head weft does not know."""
    if architecture.mtp is None:
        raise CheckpointError(f"weft knows no such head of {architecture.family} with these settings",
                              param="model")
    with torch.inference_mode():
        check = TensorCheck(weights.checkpoint, weights.dtype, runtime, share)
        build_mtp(architecture, check, trunk)
        check.raise_problems()
        with TensorReader(check, device=device) as reader:
            return build_mtp(architecture, reader, trunk), reader.held_bytes


def _first_tokens(head: Linear) -> Linear:
    """The rows of VOCAB_MAX tokens, in the memory of the whole matrix. Other forms keep all rows."""
    weight, rows, tiles = head.weight, VOCAB_MAX, VOCAB_MAX // TILE_ROWS
    if isinstance(weight, torch.Tensor):
        return Linear(weight[:rows], None if head.bias is None else head.bias[:rows])
    if head.bias is None and isinstance(weight, TiledWeight) and weight.rows > rows:
        return Linear(replace(weight, tiles=weight.tiles[:tiles], rows=rows))
    if head.bias is None and isinstance(weight, TwelveBitWeight) and weight.rows > rows:
        return Linear(replace(weight, units=weight.units[: tiles // 2], highs=weight.highs[:tiles],
                              rows=rows))
    return head


def only_decodes(starts: list[int], starts_R: torch.Tensor, table_RP: torch.Tensor,
                 turns: torch.Tensor | None) -> StepInputs:
    """One token at each of ``starts``, of sequences with the pages of ``table_RP``. ``starts_R``: the same on
    the device; ``turns``: as in ``StepInputs``."""
    count, device = len(starts), table_RP.device
    runs = Runs(offsets=list(range(count)), starts=starts, lengths=[1] * count, slots=[-1] * count,
                fresh=[False] * count, decode_count=count, starts_R=starts_R,
                slots_R=torch.full((count,), -1, dtype=torch.int64, device=device), context_R=starts_R + 1,
                page_table_RP=table_RP)
    return StepInputs(starts_R, starts_R, runs, turns=turns)
