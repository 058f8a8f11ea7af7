"""Preemption: which sequences give way when memory is short. Pure functions over numbers, tested as tables.

    best                                   worst       *short*: needs one more page, and there is none
    [ A ]  [ B short ]  [ C ]  [ D ]  [ E short ]
                                ^ victims are always a tail of this list; the best is never one

A victim loses its memory, not its tokens. What it frees serves from the next step on, and what it leaves in
the cache is evicted last (reuse.py). Two rules make progress certain (law L3). The best sequence is never a
victim, gets memory before any other, and fits alone: so it finishes. The worst sequence preempts none when it
is short: no sequence loses computed work for one that ranks below it.

Rejected: swapping state out to host memory (this belongs to checkpoint tiers); the victim with the least to
recompute (two victims can alternate for ever; rank cannot); a victim that reuses the slot it donated instead
of copying from it (possible once in 46 preemptions of the simulator).
"""

from __future__ import annotations

from collections.abc import Sequence as Seq

_DOUBLINGS_MAX = 2


def victim_count(pages_held: Seq[int], short: Seq[bool], pages_freed: int) -> int:
    """The number of running sequences, from the worst up, that must give their memory back.

    ``pages_held`` and ``short`` are by rank, best first. ``pages_freed``: pages of sequences that finished in
    this step. At most all but the best.
    """
    assert len(pages_held) == len(short)
    claims = sum(short[:-1])  # the worst claims nothing
    victims = 0
    freed = pages_freed
    while freed < claims:
        victims += 1
        assert victims < len(short), "the best sequence cannot run and no other sequence is left to give way"
        freed += pages_held[-victims]
        if victims > 1 and short[-victims]:
            claims -= 1
    return victims


def headroom_pages(running_count: int, preemption_count: int) -> int:
    """Pages that must stay free at an admission: one for each running sequence, doubled for each preemption
    of this one, up to 4-fold. 0 when no other sequence runs.

    One page each halves the recomputed tokens, and doubling saves another tenth. More only makes sequences
    wait longer (60 sequences in pools of 30 to 200 pages)."""
    return running_count << min(preemption_count, _DOUBLINGS_MAX)
