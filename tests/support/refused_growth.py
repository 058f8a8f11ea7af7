"""An arena that seems full, once, each time the first sequence grows by a page: another one has to give way.

    growth      1    2    3    4          of sequence 0; with nothing else running, none is refused
    first call  no   no   no   no         the plan without it, and perhaps with a preemption
    second      yes  yes  yes  yes
"""

from __future__ import annotations

from collections.abc import Callable

import pytest

from weft.memory.transaction import Transaction
from weft.units import PageId, SeqId

FIRST = SeqId(0)


def refuse_growth(monkeypatch: pytest.MonkeyPatch, running: Callable[[], int]) -> list[int]:
    """``running``: how many sequences run now. The list grows by that number with each refusal."""
    extend_by_page = Transaction.extend_by_page
    refused: list[int] = []
    again = [False]

    def refuse_once(transaction: Transaction, seqs: list[SeqId]) -> list[PageId]:
        if FIRST not in seqs:
            return extend_by_page(transaction, seqs)
        again[0] = not again[0] and running() > 1
        if not again[0]:
            return extend_by_page(transaction, seqs)
        refused.append(running())
        return extend_by_page(transaction, seqs[:seqs.index(FIRST)])

    monkeypatch.setattr(Transaction, "extend_by_page", refuse_once)
    return refused
