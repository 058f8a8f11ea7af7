"""How many tokens of a text end before some places in it, without the offsets of all tokens.

    text    ...text of a turn<|end|>\\n<|start|>user\\nWhat is ...
                                     ^cut          ^place
            '------- piece ---------''------ piece ------...      each encoded alone, the ids joined
                                      '- header -'                encoded alone too, and compared

The library writes an offset for each token, which costs a fifth of its time. Boundaries and marks of a chat
(``weft.text.chat_request``) need a few of them, and lie at markers or a few characters behind one.

*Cuts.* The library cuts a text at each added token before it does anything else. So the ids of a text are
those of its pieces, joined, if each piece but the first begins with such a token. Tokens that are matched
after the normalizer, or that take white space before them, are no cuts. Neither is a token whose first
character is inside another added token: the longer one might begin earlier. If a token takes white space
behind it, the vocabulary has no cuts: ids do not show where this token ends.

*Headers.* If the ids of a piece begin with those of its header, the header's tokens end at the place. Else a
token reaches over the place, and the caller asks the library for offsets.

Rejected: the encoding of everything before a place, compared with the whole (twice the time).
"""

from __future__ import annotations

import re
from collections.abc import Sequence

import tokenizers

HEADER_CHARS_MAX = 64
"""A place that is farther behind a cut than this needs offsets."""


class TokenPlaces:
    """Of one tokenizer."""

    def __init__(self, backend: tokenizers.Tokenizer) -> None:
        self._backend = backend
        added = backend.get_added_tokens_decoder().values()
        inner = {character for token in added for character in token.content[1:]}
        has_reach = any(token.rstrip for token in added)
        cuts = [token.content for token in added
                if token.content and token.content[0] not in inner and not has_reach
                and not (token.normalized or token.lstrip or token.single_word)]
        self._cuts = re.compile("|".join(map(re.escape, cuts)) if cuts else "(?!)")
        self._first_characters = frozenset(content[0] for content in cuts)

    def encode(self, text: str, places: Sequence[int]) -> tuple[list[int], list[int]] | None:
        """The ids of ``text`` without special tokens around it, and for each of ``places`` how many of them
        end at or before it. None where that takes offsets."""
        ids: list[int] = []
        piece, at, headers = 0, {}, []
        for place in sorted(set(places)):
            if place >= len(text):
                break
            cut = self._cut_before(text, place, piece)
            if cut is None:
                return None
            if cut > piece:
                ids += self._ids(text[piece:cut])
                piece = cut
            header = self._ids(text[cut:place]) if cut < place else []
            at[place] = len(ids) + len(header)
            headers.append((len(ids), header))
        ids += self._ids(text[piece:])
        if any(ids[first:first + len(header)] != header for first, header in headers):
            return None
        return ids, [at.get(place, len(ids)) for place in places]

    def _cut_before(self, text: str, place: int, first: int) -> int | None:
        """The last cut up to ``place``, and not before ``first``, where a piece begins already."""
        lowest = max(first, place - HEADER_CHARS_MAX)
        for at in range(place, lowest - 1, -1):
            if text[at] in self._first_characters and self._cuts.match(text, at):
                return at
        return first if lowest == first else None

    def _ids(self, text: str) -> list[int]:
        [encoding] = self._backend.encode_batch_fast([text], add_special_tokens=False)
        ids: list[int] = encoding.ids
        return ids
