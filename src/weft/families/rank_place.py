"""Spans of a dim that ranks hold. Pure arithmetic."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class ShardSpan:
    """Span of ``count`` entries from ``begin`` on, of ``total``."""

    total: int
    begin: int
    count: int


@dataclass(frozen=True, slots=True)
class RankPlace:
    """Rank ``rank`` of ``size``. ``by_expert``: experts are divided by their number, not by their width."""

    rank: int = 0
    size: int = 1
    by_expert: bool = False

    def of_units(self, own: int, width: int = 1, copies: int = 1) -> ShardSpan:
        """Return the span of a dim of units of ``width`` entries, ``own`` a rank; ``copies`` neighbours hold the
        same."""
        # Queries of neighbours need the same KV head. Choosing it by `rank % heads` gives numbers that look
        # right and are not (SGLang issue 30997); a test keeps that as its control.
        return ShardSpan(own * self.size // copies * width, self.rank // copies * own * width, own * width)

    def of_tokens(self, count: int) -> ShardSpan:
        """Return the span of the vocabulary: all have equal length, except shorter ones at the end."""
        own = -(-count // self.size)
        begin = min(self.rank * own, count)
        return ShardSpan(count, begin, min(own, count - begin))

    def of_experts(self, count: int) -> ShardSpan:
        """Return the span of experts: lengths differ by one at most, and no span is empty unless experts are fewer
        than ranks."""
        begin = self.rank * count // self.size
        return ShardSpan(count, begin, (self.rank + 1) * count // self.size - begin)
