"""Pictures in a prompt: positions with rows of a vision encoder, and the keys that represent these rows.

    prompt   ... look  at  <img>  <im> <im> <im>  ...  <im>  </img>  and       <im>: the model's image token
    rows                            0    1    2         255                    of the encoder, by index
    keys     ...  k7  ...   k1     -r0  -r1  -r2       -r255  </img>  and      what the prefix cache compares

A row of a picture is not a token: its embedding comes from the pixels. So the prompt has the image token at its
position, and everything that compares prompts (prefix tree, store, router, suffix index, recordings) compares *keys*
instead. A key is a negative number, and no token is negative. The keys of a picture are a stream of SHAKE-256 over its
digest, 31 bits for each row. A few tokens before the first row get keys too, so that every cached prefix that ends in a
picture, even directly after the first row, has compared 248 bits of the digest (law L10: a short hash never
proves equality). In a prompt that begins with a picture it is 31 bits less for each missing token before it.

Text after a picture has its own ids. It can match only if everything before it matches.

Some models use other positions for rotary embeddings than the prompt's (M-RoPE). All rows of a picture have the same
time, and each has a row and a column. Text continues after the longer side of the grid. ``Turns`` computes the
positions from the places of a prompt's pictures: never from cached or computed data.

    prompt   0  1  2   3   4   5   6   7   8   9
             a  b <im><im><im><im><im><im>  c  d        a grid of 2 rows, 3 columns
    time     0  1  2   2   2   2   2   2   5  6
    row      0  1  2   2   2   3   3   3   5  6         delta: -3
    column   0  1  2   3   4   2   3   4   5  6
"""

from __future__ import annotations

import hashlib
from collections.abc import Sequence

import numpy as np
import numpy.typing as npt

from weft.errors import RequestError
from weft.request import PlacedPicture, Request

Int32s = npt.NDArray[np.int32]
Int64s = npt.NDArray[np.int64]

DIGEST_BYTES = 32
LEAD_TOKENS = 7
"""Tokens before the first row of a picture that get keys: eight times 31 bits together with the row."""
_SIGN = np.int32(-(1 << 31))


def check_pictures(pictures: Sequence[PlacedPicture], tokens: Int32s, picture_tokens: Sequence[int]) -> None:
    """Check pictures against the prompt. ``picture_tokens``: ids allowed at the rows of pictures; empty if the model
    has no encoder. Raise RequestError."""
    if not pictures:
        return
    if not picture_tokens:
        raise RequestError(
            "this model reads text only: its checkpoint has no vision encoder",
            param="messages",
            code="unsupported_parameter",
        )
    end = 0
    for number, picture in enumerate(pictures):
        if len(picture.digest) != DIGEST_BYTES or not picture.places:
            raise RequestError(
                f"picture {number} has a digest of {len(picture.digest)} bytes and "
                f"{len(picture.places)} places; it needs {DIGEST_BYTES} and one",
                param="pictures",
            )
        for first, count in picture.places:
            if first < end or count < 1 or first + count > len(tokens):
                raise RequestError(
                    f"picture {number} has {count} rows from position {first} on; the prompt "
                    f"has {len(tokens)} tokens, and the rows before end at {end}",
                    param="pictures",
                )
            if tokens[first] not in picture_tokens or (tokens[first : first + count] != tokens[first]).any():
                raise RequestError(
                    f"picture {number}: the positions {first} to {first + count - 1} are not "
                    f"all one of the tokens {', '.join(map(str, picture_tokens))}",
                    param="pictures",
                )
            end = first + count


def prompt_keys(tokens: Int32s, pictures: Sequence[PlacedPicture]) -> Int32s:
    """Return the keys of a prompt for comparisons of prompts: int32 [n], the tokens themselves without
    pictures."""
    if not pictures:
        return tokens
    keys, end = tokens.copy(), 0
    for picture in pictures:
        first = picture.places[0][0]
        lead = slice(max(end, first - LEAD_TOKENS), first)
        keys[lead] = _stream(picture.digest + tokens[lead].tobytes(), first - lead.start)
        rows = _stream(picture.digest, picture.row_count)
        for first, count in picture.places:
            keys[first : first + count], rows = rows[:count], rows[count:]
            end = first + count
    return keys


def request_keys(request: Request) -> list[int]:
    """Return the keys of the prompt of ``request``."""
    if not request.pictures:
        return request.prompt_tokens
    tokens = np.asarray(request.prompt_tokens, dtype=np.int32)
    keys: list[int] = prompt_keys(tokens, request.pictures).tolist()
    return keys


def _stream(seed: bytes, count: int) -> Int32s:
    """Return ``count`` negative numbers derived from ``seed``."""
    return np.frombuffer(hashlib.shake_256(seed).digest(4 * count), dtype="<i4").astype(np.int32) | _SIGN


class Turns:
    """Positions for rotary embeddings with pictures. ``spans``: (first position, rows, columns) of each picture's
    places, ascending. ``delta``: the offset of text after the last picture.

    Source: ``get_rope_index`` of transformers' ``qwen3_5``."""

    __slots__ = ("_known_3P", "delta")

    def __init__(self, spans: Sequence[tuple[int, int, int]]) -> None:
        index = position = 0
        parts = [np.empty((3, 0), np.int64)]
        for first, rows, columns in spans:
            text = np.arange(position, position + first - index)
            position += len(text)
            row, column = np.divmod(np.arange(rows * columns), columns)
            parts += [np.stack((text, text, text)), position + np.stack((np.zeros_like(row), row, column))]
            index, position = first + rows * columns, position + max(rows, columns)
        self._known_3P: Int64s = np.concatenate(parts, 1, dtype=np.int64)
        self.delta = position - index

    def plain(self, start: int) -> bool:
        """Return whether time, row and column are the same from ``start`` on."""
        known: int = self._known_3P.shape[1]
        return start >= known

    def at(self, start: int, end: int) -> Int64s:
        """Return [3, end - start]: time, row and column of the positions from ``start`` on."""
        known_3N = self._known_3P[:, start:end]
        behind = np.arange(start + known_3N.shape[1], end, dtype=np.int64) + self.delta
        return np.concatenate((known_3N, np.broadcast_to(behind, (3, len(behind)))), 1)


def token_count(keys: Sequence[int]) -> int:
    """Return how many of ``keys`` come before the first row of a picture."""
    return next((index for index, key in enumerate(keys) if key < 0), len(keys))
