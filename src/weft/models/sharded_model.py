"""One rank's model of several: embedding and head by rows of the vocabulary, and blocks that sum over ranks."""

from __future__ import annotations

import torch

from weft.families.architecture import Architecture
from weft.models.blocks.feed_forward import ExpertsBlock
from weft.models.blocks.linear import Linear, Norm
from weft.models.decoder import CausalModel
from weft.models.embedding import Lookup
from weft.models.layer import DecoderLayer
from weft.models.rank_share import RankedEmbedding, RankShare, RankVocabulary, Summed
from weft.tensor.collectives import Collectives
from weft.tensor.ops.linear import Matrix


class RankedModel(CausalModel):
    """One rank's part of a model. Every rank calls ``forward`` and ``logits`` for the same rows."""

    def __init__(
        self,
        architecture: Architecture,
        share: RankShare,
        *,
        embedding: Matrix,
        layers: list[DecoderLayer],
        final_norm: Norm | None,
        head: Linear,
    ) -> None:
        super().__init__(architecture, embedding=embedding, layers=layers, final_norm=final_norm, head=head)
        self._share = share
        self._part = share.vocabulary(architecture.vocab_size)
        if self._head_end is not None:
            self._head_end = max(0, self._head_end - self._part.begin)
        self._embedded = RankedEmbedding(embedding, self._part, share.collectives)

    @property
    def collectives(self) -> Collectives:
        return self._share.collectives

    @property
    def lookup(self) -> Lookup:
        """Return the embedding of all tokens."""
        return self._embedded

    def draft_vocabulary(self, most: int) -> RankVocabulary:
        """Return this rank's tokens below ``most``."""
        count = max(0, min(most - self._part.begin, self._part.count))
        return RankVocabulary(self._part.begin, count, self._share.collectives)

    def expert_choices(self) -> list[int]:
        """Return the counts by the number of the expert, over all layers that count; empty if none does."""
        feeds = [layer.feed_forward for layer in self.layers]
        parts = [feed.block if isinstance(feed, Summed) else feed for feed in feeds]
        blocks = [getattr(part, "experts", part) for part in parts]
        of_blocks = {id(block): block.choices for block in blocks if isinstance(block, ExpertsBlock)}
        counts = [count for count in of_blocks.values() if count is not None]
        longest = max((len(count) for count in counts), default=0)
        total = torch.zeros(longest, dtype=torch.int64)
        for count in counts:
            total[: len(count)] += count.cpu()
        chosen: list[int] = total.tolist()
        return chosen

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        own_XV = super().logits(hidden_XD)
        each = self._share.place.of_tokens(self.architecture.vocab_size)
        width = -(-each.total // self._share.place.size)
        padded = torch.nn.functional.pad(own_XV, (0, width - own_XV.shape[1]))
        parts = self._share.collectives.gather(padded.contiguous())
        logits_XV = torch.cat(parts, dim=1)[:, : each.total]
        return logits_XV.contiguous() if out_XV is None else out_XV.copy_(logits_XV)
