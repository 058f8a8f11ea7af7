"""Tokens lost to a salt: what another namespace of the prefix tree has of a prompt.

A prompt never uses what another salt computed (law L10), so each tenant computes the same tokens once. The
operator needs to know the cost of that. A tenant must not: for a prompt that a tenant composed, the number
says whether another tenant sent it. So it is counted only with ``debug.count_salt``, never reported to a
request, and ``--operator-key`` restricts the metrics.

A match looks at no more than NAMESPACES_MAX namespaces, the oldest first (law L11). With more of them the
count is a lower bound.

Rejected: an index of first pages over all namespaces (unsalted lookups would pay for the count).
"""

from __future__ import annotations

from dataclasses import replace
from itertools import islice

import numpy as np
import numpy.typing as npt

from weft.memory.prefix.cache import PrefixCache
from weft.memory.values import Match

NAMESPACES_MAX = 64


def with_lost_to_salt(cache: PrefixCache, tokens: npt.NDArray[np.int32], match: Match) -> Match:
    """``match`` of ``tokens``, with the loss to the salt: tokens that another namespace has, beyond those
    lost for other reasons."""
    others = (name for name in cache.tree.roots if name != match.salt)
    most = max((cache.match(tokens, name, match.version).cached_tokens
                for name in islice(others, NAMESPACES_MAX)), default=0)
    missed = most - match.cached_tokens - match.lost.total
    return match if missed <= 0 else replace(match, lost=replace(match.lost, salt=missed))
