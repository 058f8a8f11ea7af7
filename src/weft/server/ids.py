"""Random names of requests, answers and items: 128 bits from the system, 32 hexadecimal digits.

    random_id()  <-- list of ready names <-- os.urandom, for BLOCK_COUNT of them at once

A stored response is read by its id, on a server without keys by any client that knows it. So ids come from
the system's generator. It is asked once for many, because a request needs up to five and each question is a
call of the kernel.

``list.pop`` is atomic, so threads need no lock: two that find the list empty fill it twice.

Rejected: ``uuid.uuid4`` (six bits say only that it is one, and it costs ten times as much); a generator
seeded once (its later names follow from earlier ones).
"""

from __future__ import annotations

import os

BLOCK_COUNT = 64
_BYTES = 16
_ready: list[str] = []


def random_id() -> str:
    """No two are equal."""
    while True:
        try:
            return _ready.pop()
        except IndexError:
            digits = os.urandom(_BYTES * BLOCK_COUNT).hex()
            _ready.extend(digits[at:at + 2 * _BYTES] for at in range(0, len(digits), 2 * _BYTES))
