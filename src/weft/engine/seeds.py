"""Seeds without a generator: a request's seed is split per sequence by a hash, never drawn.

    sequence seed = split(request seed, index)        the same whatever n is and whatever else runs
    request seed  = the request's, or split(engine seed, number of the request since the start)

So index 0 of n = 3 has the text of n = 1. A run of the engine on the same requests in the same order is the
same run: the pure half has no hidden state, no clock and no randomness.

The mix is the finaliser of SplitMix64 (Steele, Lea, Flood: Fast Splittable Pseudorandom Number
Generators, OOPSLA 2014), applied to the seed plus a multiple of its golden gamma.
"""

from __future__ import annotations

_MASK = 2**64 - 1
_GOLDEN_GAMMA = 0x9E3779B97F4A7C15


def split(seed: int, branch: int) -> int:
    """64-bit seed number ``branch`` (from 0) of ``seed``; any integers."""
    mixed = (seed + (branch + 1) * _GOLDEN_GAMMA) & _MASK
    mixed = ((mixed ^ (mixed >> 30)) * 0xBF58476D1CE4E5B9) & _MASK
    mixed = ((mixed ^ (mixed >> 27)) * 0x94D049BB133111EB) & _MASK
    return mixed ^ (mixed >> 31)
