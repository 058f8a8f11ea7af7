"""What a worker of bodies does: it looks through a large JSON body (``weft.text.workers``).

    body --cut strings--> "{}[]:," alone --count--> too many? --json.loads--> a key twice? too deep?

A regular expression and ``json.loads`` hold the interpreter's lock for as long as a body is long. In the
server's process they would hold up every client, also from a thread.
"""

from __future__ import annotations

import json
import re
from collections import Counter
from collections.abc import Callable
from typing import Any

import msgspec

LARGE_BODY_BYTES = 1 << 20
"""Bodies above this size come here."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)


class BodyVerdict(msgspec.Struct):
    """``message`` is empty for a body that may be parsed. ``is_too_large``: it has too many values."""

    message: str = ""
    param: str | None = None
    is_too_large: bool = False


class DuplicateKeyError(ValueError):
    """A key twice has two meanings, for this server and for a filter in front of it."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the body has the key {name!r} twice in one object")
        self.name = name


def refuse_duplicates(raw: bytes) -> None:
    """Raises DuplicateKeyError; ValueError and RecursionError for what is not JSON."""
    json.loads(raw, object_pairs_hook=_names_differ)


def _names_differ(pairs: list[tuple[str, Any]]) -> None:
    """Builds nothing."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise DuplicateKeyError(Counter(names).most_common(1)[0][0][:100])


def value_count(raw: bytes) -> int:
    """At least the objects, arrays and elements of a JSON text, without parsing it: a comma separates two
    values, and a bracket opens one."""
    bare = _STRING.sub(b"", raw)
    return bare.count(b",") + bare.count(b"{") + bare.count(b"[")


def verdict(raw: bytes, values_max: int) -> BodyVerdict:
    count = value_count(raw)
    if count > values_max:
        return BodyVerdict(f"the body has {count} JSON values; the limit is {values_max} "
                           "(limits.max_json_values)",
                       None, is_too_large=True)
    try:
        refuse_duplicates(raw)
    except DuplicateKeyError as error:
        return BodyVerdict(str(error), error.name)
    except (RecursionError, ValueError):
        pass  # the parser in the server says what is wrong, in its words
    return BodyVerdict()


def prepare(start: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    values_max = int.from_bytes(start, "little")
    return b"", lambda raw: msgspec.msgpack.encode(verdict(raw, values_max))
