"""Head for multi-token prediction (MTP): one layer that drafts the token after the next.

    hidden of t (after the trunk's last norm)  -> norm \\
    embedding of token t + 1                   -> norm -> join -> fc -> layer -> norm -> head -> token t + 2
                                                                  |
                                            KV at position t, in the pages of the sequence

Further drafts read the head's own hidden state instead of the trunk's. Embedding and output matrix are the trunk's. A
draft is a guess: no bit of an answer depends on this file.

The layer is of any kind that the family has: softmax or latent attention, with an index or without, and its own
feed-forward. A head of several residual streams (Qwen4) reads those of the trunk before they become one:

    streams of t         -> norm over all -> fc_hidden of each \
    embedding of t + 1   -> norm -> fc_embedding                -> + -> layer -> streams -> mix -> head

With several ranks, each holds its share of the layer, divided as a layer of the trunk. Each rank finds its best token,
and all choose the best of these by the same numbers. So drafts are equal on all ranks.

``write`` computes only keys and values, for tokens that draft nothing: those of prompts. ``draft`` computes the
complete layer. A step of few rows goes through the fused decoder, in one call.

A wide vocabulary costs more than the layer. Byte-pair tokenizers number tokens by frequency, so drafts are drawn only
from the first VOCAB_MAX tokens. A draft that would be another token is wrong, not the answer.

Layout and names: the public checkpoints of Qwen3.5, Qwen3-Next and Qwen4, ``mtp.*``. Nemotron 3 has the same head
under other names: ``layers.0`` joins and attends, ``layers.1`` has the experts and the last norm. Ling and GLM 5 store
the head as the layer after the last (DeepSeek-V3, 2024, section 2.2). If there are several such layers, the first makes
all drafts: the next would need the first one's output for every token.
"""

from __future__ import annotations

from dataclasses import dataclass, field, replace
from typing import Protocol

import numpy as np
import torch

from weft.errors import CheckpointError
from weft.families.architecture import Architecture, MtpLayer
from weft.families.mixers.attention import Rope
from weft.families.residuals import Streams
from weft.models.block_reader import BlockReader
from weft.models.blocks.attention import AttentionBlock
from weft.models.blocks.latent_attention import LatentAttentionBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.blocks.streams import StreamMix, read_streams
from weft.models.checkpoint_files import DraftWeights
from weft.models.decoder import CausalModel
from weft.models.embedding import Embedding, Lookup
from weft.models.families import layers_of
from weft.models.fused_decoder import FusedDecoder
from weft.models.layer import DecoderLayer, LayerStep, ReadLayer, ResidualStream
from weft.models.rank_share import RankShare, RankVocabulary, Summed
from weft.models.reader import TensorCheck, TensorReader
from weft.models.rotary import RotaryTable
from weft.models.runtime_form import RuntimeForm
from weft.models.sharded_model import RankedModel
from weft.models.weights import TensorSource
from weft.tensor.inputs import LayerCache, Runs, StepInputs

VOCAB_MAX = 1 << 15
"""Number of tokens that drafts may be chosen from."""
_FEW_TOKENS = 4096
"""Most numbers for which numpy takes less time than the calls of torch."""


class Join(Protocol):
    """Function from normed embeddings [T, D] and hidden states [T, D or S D] to the layer's input."""

    def __call__(self, embedded_TD: torch.Tensor, hidden_TN: torch.Tensor, /) -> torch.Tensor: ...


@dataclass(frozen=True, slots=True)
class JoinedOnce:
    """Join by one product. ``both``: [D, 2 D]."""

    both: Linear

    def __call__(self, embedded_TD: torch.Tensor, hidden_TD: torch.Tensor) -> torch.Tensor:
        return self.both(torch.cat((embedded_TD, hidden_TD), -1))


@dataclass(frozen=True, slots=True)
class JoinedStreams:
    """Join of each stream separately: [D, D] of the embedding and of a stream."""

    embedding: Linear
    stream: Linear

    def __call__(self, embedded_TD: torch.Tensor, hidden_TN: torch.Tensor) -> torch.Tensor:
        tokens, width = embedded_TD.shape
        streams_TSD = self.stream(hidden_TN.reshape(-1, width)).view(tokens, -1, width)
        return (self.embedding(embedded_TD)[:, None] + streams_TSD).flatten(1)


@dataclass(slots=True)
class MtpHead:
    """Head for multi-token prediction. ``collapse``: makes one of several streams, instead of ``norm``. ``head``: the
    first tokens' rows of the trunk's output matrix.
    """

    rope: Rope | None
    embedding: Lookup
    embedding_multiplier: float
    embedding_norm: Norm
    hidden_norm: Norm
    join: Join
    layer: DecoderLayer
    norm: Norm | None
    collapse: StreamMix | None
    head: Linear
    rotary: RotaryTable | None
    vocabulary: RankVocabulary | None = None
    """Tokens that ``head`` has on this rank, of several ranks."""
    _fused: FusedDecoder | None = field(init=False, repr=False)

    def __post_init__(self) -> None:
        self._fused = None if self.norm is None else FusedDecoder([self.layer], [self.rope], self.norm, 1.0)

    @property
    def width(self) -> int:
        """Width of the hidden states that the head reads and makes: of all streams."""
        return self.hidden_norm.weight.shape[0]

    def joined(self, hidden_TN: torch.Tensor, following_T: torch.Tensor) -> torch.Tensor:
        """Return the layer's input. ``hidden_TN``: of the trunk or of this head; ``following_T``: int64 [T], the token
        after each.
        """
        embedded_TD = self.embedding.rows_at(following_T)
        if self.embedding_multiplier != 1.0:
            embedded_TD = embedded_TD * self.embedding_multiplier
        return self.join(self.embedding_norm(embedded_TD), self.hidden_norm(hidden_TN))

    def write(self, joined_TN: torch.Tensor, inputs: StepInputs, cache: LayerCache) -> None:
        """Write the keys and values of the tokens of ``inputs`` into their pages."""
        layer = self.layer
        block = layer.mixer.block if isinstance(layer.mixer, Summed) else layer.mixer
        assert isinstance(block, AttentionBlock | LatentAttentionBlock)
        step = self._step(inputs, cache)
        seen_TD, _ = layer.residuals[0].enter(ResidualStream(joined_TN, joined_TN.dtype), step)
        block.write(seen_TD, inputs, cache, step.cos_sin)

    def draft(self, joined_TN: torch.Tensor, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        """Return hidden [T, D or S D] of the complete layer. Writes keys and values. ``caches``: of only this layer,
        the same list in each step. Valid until the next call.
        """
        step = self._step(inputs, caches[0])
        if self._fused is not None:
            hidden_TD = self._fused.run(joined_TN, inputs, caches, step.rotated)
            if hidden_TD is not None:
                return hidden_TD
        stream = ResidualStream(joined_TN, joined_TN.dtype)
        for block in self.layer.blocks:
            block(stream, step)
        return stream.normed(self.norm)

    def _step(self, inputs: StepInputs, cache: LayerCache) -> LayerStep:
        cos_sin = None if self.rotary is None else self.rotary.at(inputs.turned)
        return LayerStep(inputs, inputs, {self.rope: cos_sin}, cache, rope=self.rope)

    def best(self, hidden_XN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely token of each row (int64 [X]), and its probability."""
        hidden_XD = hidden_XN if self.collapse is None else self.collapse.enter(hidden_XN)[0]
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


@dataclass(frozen=True, slots=True)
class _Names:
    """Names of the parts of a head. ``joins``: one product, or that of the embedding and that of a stream. ``last``:
    the head's norm, by any of these names, or the step that makes one of several streams. ``layer`` and ``feed``:
    names of the two halves of the layer.
    """

    embedding_norm: str
    hidden_norm: str
    joins: tuple[str, ...]
    last: tuple[str, ...]
    layer: str = "layers.0"
    feed: str | None = None


def _names_in(source: TensorSource, layers: int) -> _Names:
    """Return the names by the tensors of the files, not by the family: a view of a GGUF file has one spelling.
    ``layers``: of the trunk.
    """
    behind = f"layers.{layers}"
    qwen = _Names("pre_fc_norm_embedding", "pre_fc_norm_hidden", ("fc",), ("norm",))
    spellings = (
        _Names(
            "layers.0.enorm", "layers.0.hnorm", ("layers.0.eh_proj",), ("layers.1.final_layernorm",), feed="layers.1"
        ),
        _Names(
            f"{behind}.enorm",
            f"{behind}.hnorm",
            (f"{behind}.eh_proj",),
            (f"{behind}.final_layernorm", f"{behind}.shared_head.norm"),
            behind,
        ),
        replace(qwen, joins=("fc_embedding", "fc_hidden"), last=("hyper_connection_mixer",)),
    )
    return next((names for names in spellings if source.has(f"{names.joins[-1]}.weight")), qwen)


def build_mtp(architecture: Architecture, source: TensorSource, trunk: CausalModel) -> MtpHead:
    """Read the head from ``source``, whose names have no ``mtp.`` before them."""
    shape = architecture.mtp
    assert shape is not None
    hidden, rope, names = architecture.hidden_size, shape.attention.rope, _names_in(source, len(trunk.layers))
    streams = shape.residual if isinstance(shape.residual, Streams) else None
    width = hidden * (1 if streams is None else streams.count)
    read = BlockReader(replace(architecture, residual=shape.residual), source)
    layer = _layer(names, shape, layers_of(read))
    embedding: Lookup = Embedding(trunk.embedding)
    vocabulary = None
    if source.share is not None:
        assert isinstance(trunk, RankedModel)
        embedding, vocabulary = trunk.lookup, trunk.draft_vocabulary(VOCAB_MAX)
    joins = [source.linear([(f"{join}.weight", hidden)], 2 * hidden // len(names.joins)) for join in names.joins]
    last = next((name for name in names.last if source.has(f"{name}.weight")), names.last[0])
    return MtpHead(
        rope,
        embedding,
        architecture.embedding_multiplier,
        read.norm(names.embedding_norm),
        read.norm(names.hidden_norm, width),
        JoinedOnce(*joins) if streams is None else JoinedStreams(*joins),
        layer,
        read.norm(last) if streams is None else None,
        None if streams is None else read_streams(read, streams, last, last=True),
        _first_tokens(trunk.head),
        None if rope is None else RotaryTable(rope, trunk.embedding.device, architecture.turn_sections),
        vocabulary,
    )


def _layer(names: _Names, shape: MtpLayer, read: ReadLayer) -> DecoderLayer:
    if names.feed is None:
        return read(names.layer, shape.attention, shape.feed_forward)
    layer, after = read(names.layer, shape.attention, None), read(names.feed, None, shape.feed_forward)
    return DecoderLayer([*layer.blocks, *after.blocks])


def load_mtp(
    architecture: Architecture,
    weights: DraftWeights,
    trunk: CausalModel,
    runtime: RuntimeForm,
    device: torch.device | None,
    share: RankShare | None = None,
) -> tuple[MtpHead, int]:
    """Return the head and its bytes; with ``share`` the part of one rank. Raises CheckpointError as ``load_model``,
    and for a family whose head weft does not know.
    """
    if architecture.mtp is None:
        raise CheckpointError(f"weft knows no such head of {architecture.family} with these settings", param="model")
    with torch.inference_mode():
        check = TensorCheck(weights.checkpoint, weights.dtype, runtime, share)
        build_mtp(architecture, check, trunk)
        check.raise_problems()
        with TensorReader(check, device=device) as reader:
            return build_mtp(architecture, reader, trunk), reader.held_bytes


def _first_tokens(head: Linear) -> Linear:
    """Return the rows of VOCAB_MAX tokens, in the memory of the full matrix. Some forms keep all rows."""
    weight = head.weight
    first = weight[:VOCAB_MAX] if isinstance(weight, torch.Tensor) else weight.first_rows(VOCAB_MAX)
    return head if first is weight else Linear(first, None if head.bias is None else head.bias[: first.shape[0]])


def only_decodes(
    starts: list[int], starts_R: torch.Tensor, table_RP: torch.Tensor, turns: torch.Tensor | None
) -> StepInputs:
    """Return a step of one token at each of ``starts``, of sequences with the pages of ``table_RP``. ``starts_R``: the
    same on the device; ``turns``: as in ``StepInputs``.
    """
    count, device = len(starts), table_RP.device
    runs = Runs(
        offsets=list(range(count)),
        starts=starts,
        lengths=[1] * count,
        slots=[-1] * count,
        fresh=[False] * count,
        decode_count=count,
        starts_R=starts_R,
        slots_R=torch.full((count,), -1, dtype=torch.int64, device=device),
        context_R=starts_R + 1,
        page_table_RP=table_RP,
    )
    return StepInputs(starts_R, starts_R, runs, turns=turns)
