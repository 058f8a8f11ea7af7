"""An arena that seems full, once, each time a sequence grows by a page: the worst one has to give way.

growth      1    2    3    4          of any but the worst one; alone it is the worst
first call  no   no   no   no         the plan without it; nothing that is cached can give way
second      yes  yes  yes  yes
"""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

import pytest

from weft.memory.transaction import Transaction
from weft.schedule.sequence import Sequence
from weft.units import PageId, SeqId


def refuse_growth(monkeypatch: pytest.MonkeyPatch, running: Callable[[], Iterable[Sequence]]) -> list[int]:
    """Refuse growth. ``running`` returns the sequences that run now, the best first. Their number is appended to the
    returned list at each refusal."""
    extend_by_page, reclaim = Transaction.extend_by_page, Transaction.reclaim
    refused: list[int] = []
    refusing: list[Transaction | None] = [None]

    def refuse_once(transaction: Transaction, seqs: list[SeqId]) -> list[PageId]:
        ranked = [seq.id for seq in running()]
        refusing[0] = transaction if refusing[0] is None and seqs[0] in ranked[:-1] else None
        if refusing[0] is None:
            return extend_by_page(transaction, seqs)
        refused.append(len(ranked))
        return []

    def unless_refused(transaction: Transaction, **asked: Any) -> bool:
        return transaction is not refusing[0] and reclaim(transaction, **asked)

    monkeypatch.setattr(Transaction, "extend_by_page", refuse_once)
    monkeypatch.setattr(Transaction, "reclaim", unless_refused)
    return refused
