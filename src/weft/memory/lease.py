"""A lease: everything one running sequence holds, and its receipt for giving it back.

``pages[i]`` has the KV of tokens [16 i, 16 i + 16). The list is written by commits only; others read
it. ``slot`` is PAD in a model without recurrent layers.
"""

from __future__ import annotations

from dataclasses import dataclass

from weft.units import PAD, PageId, SeqId, SlotId

NO_SLOT = SlotId(PAD)


@dataclass(slots=True)
class Lease:
    seq: SeqId
    pages: list[PageId]
    slot: SlotId
    epoch: int
    cached_tokens: int
    """Tokens whose KV and state were there when the lease was opened."""
