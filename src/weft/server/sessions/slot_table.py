"""The tokens of each slot. llama-server's slots hold the conversation of a client (``slots``)."""

from __future__ import annotations

from collections import OrderedDict
from dataclasses import dataclass

TOKENS_MAX = 4_000_000
"""Most tokens of all slots together; the least recently used slots are forgotten first (law L11)."""


@dataclass(frozen=True, slots=True)
class SlotContent:
    """The content of a slot. ``model``: the name in the request; ``prompt`` and ``answer``: the computed tokens."""

    model: str
    salt: str
    prompt: list[int]
    answer: list[int]

    @property
    def count(self) -> int:
        return len(self.prompt) + len(self.answer)


class SlotTable:
    """Contents by owner and number of the slot, the most recently used last."""

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
        """Empty the slot, and return the number of tokens that it had."""
        content = self._slots.pop((owner, number), None)
        count = 0 if content is None else content.count
        self._tokens -= count
        return count

    def of(self, owner: str) -> dict[int, SlotContent]:
        return {number: content for (slot_owner, number), content in sorted(self._slots.items()) if slot_owner == owner}
