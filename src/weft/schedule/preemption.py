"""Who gives way when memory is short: pure functions over numbers, tested as tables.

The running sequences are in rank order, best first. Some of them need one more page and there is none:
they are *short*, and do not run in this step.

    best                                   worst
    [ A ]  [ B short ]  [ C ]  [ D ]  [ E short ]
                                ^ victims are always a tail of this list; the best is never one

Victims are taken from the tail until what they free (with what finished sequences free in the same step)
gives a page to each of the short ones that remain. They lose their memory, not their tokens. What they
free serves from the next step on; what they leave in the cache goes last (reuse.py).

Two rules make progress certain (law L3):
* the best of all is never a victim, gets memory before any other, and fits when alone; so it finishes;
* the worst of all, when it is short, preempts nobody: it waits, keeping its state, and is the first to
  go as soon as another is short. Nobody loses computed work for the sake of a sequence that ranks below.

A sequence that comes back needs more room to spare each time it was preempted, or it would come back into
the very memory that its betters are about to grow into, and be computed over and over.

Rejected: swapping state out to host memory (it belongs to checkpoint tiers); choosing the victim that
has the least to recompute (two victims can alternate for ever; rank cannot); a victim that takes the slot it
donated back instead of copying from it (that could be done once in 46 preemptions of the simulator).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

_DOUBLINGS_MAX = 2


def victim_count(pages_held: Seq[int], short: Seq[bool], pages_freed: int) -> int:
    """How many of the running sequences, from the worst up, must give back their memory.

    ``pages_held`` and ``short`` are by rank, best first; ``pages_freed`` is what finished sequences give
    back in this step anyway. At most all but the best.
    """
    assert len(pages_held) == len(short)
    claims = sum(short[:-1])  # the worst claims nothing
    victims = 0
    freed = pages_freed
    while freed < claims:
        victims += 1
        assert victims < len(short), "the best sequence cannot run and there is nobody left to give way"
        freed += pages_held[-victims]
        if victims > 1 and short[-victims]:
            claims -= 1
    return victims


def headroom_pages(running_count: int, preemption_count: int) -> int:
    """Pages that must stay free when a sequence is admitted: one for each running one to grow into,
    doubled for each time this one was preempted, up to 4-fold. None when nothing else runs.

    One page each halves what is recomputed against none at all, doubling takes another tenth, and more than
    that changes nothing but how long a sequence waits (60 sequences in pools of 30 to 200 pages)."""
    return running_count << min(preemption_count, _DOUBLINGS_MAX)
