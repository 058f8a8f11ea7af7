"""One rank's share of a model: sizes of its layers, and their exchanges with the other ranks.

    whole Architecture --rank_architecture--> own Architecture (heads, channels, widths of this rank)
          |                                          |
        Shard: bytes of each tensor           family file, unchanged: builds blocks of the own sizes
                                                     |
                              Summed(block): the block's output is a part of a sum over ranks

A mixer or feed-forward of a rank is an ordinary block with fewer heads. The inputs of its last product are divided, so
its output is one term of a sum, and ``Summed`` adds the terms. The embedding and the head are divided by rows of the
vocabulary. Logits are gathered, so every rank has all of them.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import dataclass
from typing import Any

import torch

from weft.errors import ConfigError
from weft.families.architecture import Architecture
from weft.families.mixers.attention import Attention
from weft.families.rank_place import RankPlace, ShardSpan
from weft.families.sharding import rank_architecture
from weft.models.blocks.linear import Norm, Projection
from weft.models.embedding import Embedding
from weft.tensor.collectives import Collectives
from weft.tensor.ops.linear import Matrix


@dataclass(frozen=True, slots=True)
class RankGroup:
    """One rank of an engine, before it knows a model. ``collectives``: over all ranks."""

    place: RankPlace
    collectives: Collectives

    def share(self, whole: Architecture) -> RankShare:
        """Return the share of this rank. Raises ConfigError for an architecture that does not divide."""
        if self.place.of_tokens(whole.vocab_size).count < 1:
            raise ConfigError(
                f"--tp is {self.place.size}, and the vocabulary of {whole.vocab_size} tokens "
                f"leaves rank {self.place.rank} none",
                param="--tp",
            )
        return RankShare(
            self.place, self.collectives, rank_architecture(whole, self.place.size, ep=self.place.by_expert)
        )


@dataclass(frozen=True, slots=True)
class RankShare:
    """One rank's share of a model. ``architecture``: of this rank."""

    place: RankPlace
    collectives: Collectives
    architecture: Architecture

    def experts(self, count: int) -> range:
        """Return the experts of this rank, if experts are divided by their number."""
        part = self.place.of_experts(count)
        return range(part.begin, part.begin + part.count)

    def lookup(self, table: Matrix, vocab: int) -> RankedEmbedding:
        """Return the embedding over the rows of a table, of which each rank has a span."""
        return RankedEmbedding(table, self.vocabulary(vocab), self.collectives)

    def vocabulary(self, rows: int) -> ShardSpan:
        return self.place.of_tokens(rows)

    def head_scales(self, scales: Mapping[int, torch.Tensor]) -> dict[int, torch.Tensor]:
        """Return the scales of this rank's heads of ``scales`` by layer, [K and V, kv_heads] of the undivided model."""
        own, layers = {}, self.architecture.spec().layers
        for layer, scale in scales.items():
            heads, of_rank = scale.shape[1], layers[layer].cached_heads
            if of_rank != heads:
                part = self.place.of_units(of_rank, copies=of_rank * self.place.size // heads)
                scale = scale[:, part.begin : part.begin + part.count]
            own[layer] = scale
        return own

    def normed_heads(self, qkv: Projection, own: Attention, q_norm: Norm, k_norm: Norm) -> NormedInside:
        """Return ``qkv`` with norms of q and k over all heads of the model."""
        # All KV heads have equally many copies: the mean over all ranks is that over all heads.
        q_width, k_width = own.heads * own.head_dim, own.kv_heads * own.head_dim
        k_begin = q_width * (2 if own.gated else 1)
        every = slice(0, self.place.size)
        return NormedInside(
            qkv,
            (
                (0, q_width, SharedNorm(q_norm, self.collectives, every)),
                (k_begin, k_begin + k_width, SharedNorm(k_norm, self.collectives, every)),
            ),
        )

    def norm_of_group(self, groups: int, norm: Norm) -> SharedNorm:
        """Return ``norm`` over a group of ``groups`` in all, of whose channels each of several ranks has a part."""
        factor = self.place.size // groups
        first = self.place.rank // factor * factor
        return SharedNorm(norm, self.collectives, slice(first, first + factor))

    def normed_group(self, groups: int, norm: Norm, project: Projection) -> NormedBefore:
        """Return ``project`` after a norm over a group of ``groups`` in all; a group spans several ranks."""
        return NormedBefore(self.norm_of_group(groups, norm), project)

    def summed(self, block: Callable[..., torch.Tensor]) -> Any:
        """Return a ``Summed`` instead of a mixer or a feed-forward."""
        return Summed(block, self.collectives)


@dataclass(slots=True)
class Summed:
    """Term of a sum over ranks, which ``block`` computes; the result is the sum."""

    block: Callable[..., torch.Tensor]
    collectives: Collectives

    def __call__(self, x_TD: torch.Tensor, *more: Any) -> torch.Tensor:
        return self.collectives.add(self.block(x_TD, *more))


@dataclass(frozen=True, slots=True)
class SharedNorm:
    """An RMS norm over channels that several ranks hold: sums of squares are exchanged, [T, 1] each.

    ``ranks``: the ranks that hold the channels, as a slice of all ranks. ``norm``: with the weights of this rank's
    channels.
    """

    norm: Norm
    collectives: Collectives
    ranks: slice

    def __call__(self, x_TC: torch.Tensor) -> torch.Tensor:
        wide = x_TC.float()
        squares = self.collectives.gather(wide.square().sum(-1, keepdim=True))[self.ranks]
        # In rank order, as every sum over ranks.
        total = squares[0].clone()
        for term in squares[1:]:
            total += term
        mean = total / (x_TC.shape[-1] * len(squares))
        weight = self.norm.weight.float()
        scaled = wide * torch.rsqrt(mean + self.norm.eps)
        return (scaled * (weight + 1.0 if self.norm.plus_one else weight)).to(x_TC.dtype)


@dataclass(slots=True)
class NormedInside:
    """Projection whose columns from ``begin`` on are normed by parts: queries and keys over all heads."""

    project: Projection
    norms: tuple[tuple[int, int, SharedNorm], ...]
    """(begin, end, norm) of each part."""

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        y = self.project(x)
        for begin, end, norm in self.norms:
            y[..., begin:end] = norm(y[..., begin:end])
        return y


@dataclass(slots=True)
class NormedBefore:
    """Projection after a norm over several ranks."""

    norm: SharedNorm
    project: Projection

    def __call__(self, x: torch.Tensor) -> torch.Tensor:
        return self.project(self.norm(x))


class RankedEmbedding:
    """Rows ``part`` of an embedding of the complete vocabulary."""

    def __init__(self, table: Matrix, part: ShardSpan, collectives: Collectives) -> None:
        self._own = Embedding(table)
        self._part = part
        self._collectives = collectives

    def rows_at(self, tokens_T: torch.Tensor) -> torch.Tensor:
        """Return rows [T, D] for int64 [T]."""
        local_T = tokens_T - self._part.begin
        outside_T = (local_T < 0) | (local_T >= self._part.count)
        rows_TD = self._own.rows_at(local_T.masked_fill(outside_T, 0))
        # A rank looks up the tokens that it has, and zeros for the rest: the sum is exact.
        return self._collectives.add(rows_TD.masked_fill(outside_T[:, None], 0.0))


@dataclass(frozen=True, slots=True)
class RankVocabulary:
    """Tokens that drafts of this rank may be: ``count`` from ``begin`` on, none if ``count`` is 0."""

    begin: int
    count: int
    collectives: Collectives

    def best(self, logits_XV: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        """Return the most likely token of all ranks (int64 [X]), and its probability, from float32 logits of this
        rank's tokens.
        """
        # Among equal logits the lowest rank's wins, so all ranks choose the same.
        own_X3 = torch.zeros((len(logits_XV), 3), dtype=torch.float64, device=logits_XV.device)
        own_X3[:, 0] = float("-inf")
        if self.count:
            highest = logits_XV[:, : self.count].max(dim=-1)
            own_X3[:, 0] = highest.values
            own_X3[:, 1] = highest.indices + self.begin
            own_X3[:, 2] = (logits_XV[:, : self.count] - highest.values[:, None]).exp().sum(-1)
        each_RX3 = torch.stack(self.collectives.gather(own_X3))
        best = each_RX3[:, :, 0].max(dim=0)
        tokens_X = each_RX3[:, :, 1].gather(0, best.indices[None])[0].to(torch.int64)
        sums_X = (each_RX3[:, :, 2] * (each_RX3[:, :, 0] - best.values).exp()).sum(dim=0)
        return tokens_X, 1 / sums_X
