"""Tokens lost to a salt: what another namespace of the prefix tree has of a prompt.

A prompt never uses what another salt computed (law L10), so the same tokens are computed once per tenant.
What that costs in all is for the operator to know. It is also what no tenant may learn: asked for a prompt of
his own making, the number says whether somebody else sent it. So it is counted only where ``--count-salt``
asks for it, never told to a request, and ``--operator-key`` keeps the metrics to those it is meant for.

At most NAMESPACES_MAX namespaces are looked at for each match, the oldest first (law L11): the count is a
lower bound then.

Rejected: an index of first pages over all namespaces (it would make unsalted lookups pay for the count).
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
    """``match`` of ``tokens``, with those counted as lost that some other namespace could have given, beyond
    what was lost for other reasons."""
    others = (name for name in cache.tree.roots if name != match.salt)
    most = max((cache.match(tokens, name, match.version).cached_tokens
                for name in islice(others, NAMESPACES_MAX)), default=0)
    missed = most - match.cached_tokens - match.lost.total
    return match if missed <= 0 else replace(match, lost=replace(match.lost, salt=missed))
