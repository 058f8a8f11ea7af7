"""The tokens of each slot, as llama-server calls the place of a client's conversation (``slots``)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

TOKENS_MAX = 4_000_000
"""Tokens of all slots; the slots that were used the longest ago are forgotten (law L11)."""


@dataclass(frozen=True, slots=True)
class SlotContent:
    """``model``: the name that the request asked; ``prompt`` and ``answer`` are tokens that were computed."""

    model: str
    salt: str
    prompt: list[int]
    answer: list[int]

    @property
    def count(self) -> int:
        return len(self.prompt) + len(self.answer)


class SlotTable:
    """By owner and number of the slot, the most recently used last."""

    def __init__(self) -> None:
        self._slots: OrderedDict[tuple[str, int], SlotContent] = OrderedDict()
        self._tokens = 0

    def put(self, owner: str, number: int, content: SlotContent) -> None:
        self.pop(owner, number)
        self._slots[owner, number] = content
        self._tokens += content.count
        while self._tokens > TOKENS_MAX:
            self._tokens -= self._slots.popitem(last=False)[1].count

    def get(self, owner: str, number: int) -> SlotContent | None:
        return self._slots.get((owner, number))

    def pop(self, owner: str, number: int) -> int:
        """Return the tokens that the slot had."""
        content = self._slots.pop((owner, number), None)
        count = 0 if content is None else content.count
        self._tokens -= count
        return count

    def of(self, owner: str) -> dict[int, SlotContent]:
        return {number: content for (one, number), content in sorted(self._slots.items()) if one == owner}
