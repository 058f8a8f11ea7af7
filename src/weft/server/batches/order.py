"""The order of a batch: requests that begin alike run one after the other, which suits the prefix cache.

    body --JSON of what shapes the prompt, in the order of the prompt--> text
         --a hash for each block of it--> key      equal beginnings, equal first hashes

    system A, question 3        A1 A2 q3
    system A, question 7        A1 A2 q7      sorted by key: neighbours
    system B, question 1        B1 q1

Sorting by the key groups all requests that share their first block. Within a group it groups those that share
the second, and so on: the order in which a depth-first walk visits the tree of prefixes. A prefix is then
computed once and used while it is warm, whatever the size of the cache.

The text is that of the request and not of the template: rendering costs more, and equal messages at the front
become equal tokens there. The key of a prompt has at most KEY_BLOCKS_MAX hashes (law L11).

Rejected: sorting by the text itself (the whole input would stay in memory).
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterable
from typing import Any

import msgspec

BLOCK_CHARS = 256
KEY_BLOCKS_MAX = 512
_HASH_BYTES = 6
_FIELDS = ("model", "cache_salt", "tools", "instructions", "system", "messages", "prompt", "input")
"""Of a body, in the order in which templates write them."""


def prefix_key(body: bytes) -> bytes:
    """Sorts a request beside those with the same beginning. Any JSON has one."""
    try:
        fields = msgspec.json.decode(body)
        text = b"".join(_parts(fields)) if isinstance(fields, dict) else body
    except (msgspec.DecodeError, ValueError, RecursionError):
        text = body
    blocks = range(0, min(len(text), BLOCK_CHARS * KEY_BLOCKS_MAX), BLOCK_CHARS)
    return b"".join(hashlib.blake2b(text[at:at + BLOCK_CHARS], digest_size=_HASH_BYTES).digest()
                    for at in blocks)


def _parts(fields: dict[str, Any]) -> Iterable[bytes]:
    for name in _FIELDS:
        value = fields.get(name)
        if value is None:
            continue
        yield name.encode()
        yield from (msgspec.json.encode(item) for item in (value if isinstance(value, list) else [value]))
