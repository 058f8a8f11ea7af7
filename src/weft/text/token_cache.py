"""Token ids of the segments of texts, kept between requests.

    <|im_start|>system ... | <|im_start|>user ... | <|im_start|>assistant ... | <|im_start|>user ...
          known                   known                    known                     new

Each turn of a conversation sends all earlier turns again. A text of 200,000 characters takes a core 60 ms to tokenize,
and a millisecond if all but the last message is known.

A text is cut before added tokens. The tokenizer cuts it there too, before it normalizes or splits anything, so the ids
of the segments are the ids of the text. This holds for a token if

    - it is not ``normalized``: the tokenizer looks for it in the text as it came;
    - it does not take spaces to its left (``lstrip``) and need not be a word (``single_word``);
    - its first character is in added tokens only as the first: so no other token overlaps the beginning.

Segments belong to a cache salt, as prefixes do (law L10): otherwise the time of a request would tell what others have
sent. The cache is bounded in bytes (law L11), and drops the segments that were not used for the longest time.
"""

from __future__ import annotations

import threading
from array import array
from bisect import bisect_right
from collections import OrderedDict
from collections.abc import Callable, Collection, Iterable, Sequence
from itertools import pairwise
from typing import NamedTuple

import tokenizers

from weft.text.control_tokens import TokenFinder
from weft.text.text_parts import Frame

CACHE_BYTES = 64 << 20
"""Memory of a cache, unless the server has a setting of its own."""
_ENTRY_BYTES = 400
"""Memory of an entry besides its text and ids: objects of Python."""


class TextSegment(NamedTuple):
    """A part of a text. ``places``: positions in it, sorted, whose number of tokens is wanted; ``quoted``: positions of
    spelled added tokens; both in characters from the segment's start."""

    text: str
    places: tuple[int, ...] = ()
    quoted: tuple[int, ...] = ()


class SegmentTokens(NamedTuple):
    """Ids of a segment, and the number of tokens that end at or before each of its places."""

    ids: Sequence[int]
    counts: Sequence[int] = ()


def separators(added: Collection[tokenizers.AddedToken]) -> TokenFinder:
    """Return a finder of the added tokens before which a text may be cut."""
    inner = {character for token in added for character in token.content[1:]}
    return TokenFinder(
        [
            token.content
            for token in added
            if not (token.normalized or token.lstrip or token.single_word)
            and token.content[0] not in inner
            and not token.content[0].isspace()
        ]
    )


def segments(text: str, starts: Sequence[int], boundaries: Iterable[int], quoted: Iterable[int]) -> list[TextSegment]:
    """Return the segments of ``text`` that begin at ``starts``. ``boundaries``: positions in ``text`` that become
    places, except the start of a segment and the end of the text."""
    places: list[set[int]] = [set() for _ in starts]
    spelled: list[set[int]] = [set() for _ in starts]
    for positions, sets in ((boundaries, places), (quoted, spelled)):
        for position in positions:
            number = bisect_right(starts, position) - 1
            sets[number].add(position - starts[number])
    return [
        TextSegment(
            text[begin:end], tuple(sorted(place for place in own if 0 < place < end - begin)), tuple(sorted(own_quoted))
        )
        for (begin, end), own, own_quoted in zip(pairwise([*starts, len(text)]), places, spelled, strict=True)
    ]


def joined(
    starts: Sequence[int],
    parts: Sequence[TextSegment],
    tokens: Sequence[SegmentTokens],
    boundaries: Sequence[int],
    frame: Frame,
) -> tuple[list[int], list[int]]:
    """Return the ids of all segments within ``frame``, and the number of tokens that end at or before each of
    ``boundaries``."""
    before, after = frame
    chars = starts[-1] + len(parts[-1].text)
    ids, firsts = list(before), list[int]()
    for part in tokens:
        firsts.append(len(ids))
        ids += part.ids
    ids += after
    positions = []
    for boundary in boundaries:
        number = bisect_right(starts, boundary) - 1
        place, count = boundary - starts[number], firsts[number]
        if boundary >= chars:
            count = len(ids)
        elif place in parts[number].places:
            count += tokens[number].counts[parts[number].places.index(place)]
        positions.append(count)
    return ids, positions


class TokenCache:
    """A bounded cache of segments. Any thread may use it. ``bytes_max``: its memory at most, 0 for none; ``bytes``: its
    memory now."""

    def __init__(self, bytes_max: int = CACHE_BYTES) -> None:
        self.bytes_max = bytes_max
        self.bytes = 0
        self._entries: OrderedDict[tuple[str, TextSegment], tuple[SegmentTokens, int]] = OrderedDict()
        self._lock = threading.Lock()

    def encode(
        self,
        text: str,
        boundaries: Sequence[int],
        *,
        starts: Sequence[int],
        quoted: Collection[int],
        salt: str | None,
        frame: Frame,
        encode: Callable[[list[TextSegment]], Sequence[SegmentTokens]],
    ) -> tuple[list[int], list[int]]:
        """Return the ids of ``text`` within ``frame``, and the number of tokens that end at or before each of
        ``boundaries``. ``starts``: of the segments; ``quoted``: positions of spelled added tokens. ``salt``: None for a
        text that is not kept; ``encode``: the tokenizer of segments."""
        parts = segments(text, starts, boundaries, quoted)
        tokens = encode(parts) if salt is None else self.tokens_of(salt, parts, encode)
        return joined(starts, parts, tokens, boundaries, frame)

    def tokens_of(
        self, salt: str, segments: Sequence[TextSegment], encode: Callable[[list[TextSegment]], Sequence[SegmentTokens]]
    ) -> list[SegmentTokens]:
        """Return the tokens of each segment. ``encode`` is called once for all segments that are not known."""
        known: dict[TextSegment, SegmentTokens] = {}
        with self._lock:
            for segment in segments:
                entry = self._entries.get((salt, segment))
                if entry is not None:
                    self._entries.move_to_end((salt, segment))
                    known[segment] = entry[0]
        missing = [segment for segment in dict.fromkeys(segments) if segment not in known]
        if missing:
            known.update(zip(missing, encode(missing), strict=True))
            with self._lock:
                for segment in missing:
                    self._put((salt, segment), known[segment])
        return [known[segment] for segment in segments]

    def _put(self, key: tuple[str, TextSegment], tokens: SegmentTokens) -> None:
        entry = SegmentTokens(array("I", tokens.ids), tuple(tokens.counts))
        segment = key[1]
        size = segment.text.__sizeof__() + 4 * len(entry.ids) + _ENTRY_BYTES
        size += 40 * (len(segment.places) + len(segment.quoted) + len(entry.counts))
        _, old_bytes = self._entries.pop(key, (None, 0))
        self._entries[key] = entry, size
        self.bytes += size - old_bytes
        while self.bytes > self.bytes_max:
            _, (_, dropped_bytes) = self._entries.popitem(last=False)
            self.bytes -= dropped_bytes
