"""A vocabulary of PLaMo as the content of a tokenizer.json, and the rule that cuts a text.

    tokenizer.jsonl         ["東京", -9.8132, "NORMAL"]     a piece, its score, its kind; the line is its id
    text                    the pieces with the highest sum of scores; of equal sums the longest first piece
    a character in none     the bytes of its UTF-8, "<0xE6>" ...

Unigram of the ``tokenizers`` library has the same sums, and of equal ones takes the longest last piece: runs of spaces
differ. So a text is cut here, from its end to its beginning, and the library's model finds the id of each piece, or of
each byte. Scores are whole numbers of 1/10,000, as in PFN's code, so equal sums are equal.

PLaMo 3 also cuts around control tokens, and around runs of spaces or of one character from a length on.

Source: ``tokenization_plamo.py`` of the releases, for the format and the rule.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import tokenizers

from weft.added_tokens import with_flags
from weft.errors import CheckpointError
from weft.files import read_json

PLAMO_FILE = "tokenizer.jsonl"
COSTS = "weft_costs"
"""Key of the costs of pieces in the model, which the ``tokenizers`` library does not read."""
BREAKS = "weft_breaks"
"""Key of the expressions around whose matches a text is cut, one after the other."""
_UNKNOWN_COST = 10_000_000
"""Cost of a character that is no piece."""
_UNREACHED = 1 << 60
_SCALE = 10_000
_CONTROL = r"<\|plamo:[^|\s]{,64}\|>"
_NAMED = {f"{name}_token": f"<|plamo:{name}|>" for name in ("unk", "bos", "eos", "pad")}
"""Special tokens where tokenizer_config.json names none."""
_SPAN_PIECES = 256
"""Pieces that are cut out of the library's text together, since it counts characters from the beginning of a text."""
Row = tuple[str, float, str]


def plamo_content(path: Path, text: str, letters: Mapping[int, str]) -> dict[str, Any]:
    """Return the content of a tokenizer.json. ``path``: of the vocabulary, next to its tokenizer_config.json; ``text``:
    its lines. Raise CheckpointError."""
    config_path = path.parent / "tokenizer_config.json"
    config = read_json(config_path) if config_path.is_file() else {}
    rows = [_row(path, number, line) for number, line in enumerate(text.split("\n"), 1) if line.strip()]
    vocab = {piece: index for index, (piece, _, _) in enumerate(rows)}
    if missing := [f"<0x{byte:02X}>" for byte in range(256) if f"<0x{byte:02X}>" not in vocab]:
        raise CheckpointError(f"{path}: {missing[0]} is missing, so some texts have no tokens", param="model")
    named = {name: _text_of(config.get(name, usual)) for name, usual in _NAMED.items()}
    control = re.compile(_CONTROL)
    return {
        "version": "1.0",
        "truncation": None,
        "padding": None,
        "added_tokens": [
            {"id": vocab[piece]} | with_flags(piece, special=piece in named.values())
            for piece, _, kind in dict.fromkeys(rows)
            if kind in ("CONTROL", "UNKNOWN") or control.fullmatch(piece)
        ],
        "normalizer": None,
        "pre_tokenizer": None,
        "post_processor": _frame(config, named, vocab),
        "decoder": {"type": "Sequence", "decoders": [{"type": "ByteFallback"}, {"type": "Fuse"}]},
        "model": {
            "type": "BPE",
            "vocab": vocab,
            "merges": [],
            "byte_fallback": True,
            "ignore_merges": True,
            COSTS: {
                piece: -round(score * _SCALE) for piece, score, kind in rows if kind != "BYTE" and math.isfinite(score)
            },
            BREAKS: _breaks(config),
        },
    }


def _row(path: Path, number: int, line: str) -> Row:
    """Return the piece, the score and the kind of a line. Raise CheckpointError."""
    try:
        row = json.loads(line)
        piece, score, kind = row[0], float(row[1]), row[2] if len(row) > 2 else "NORMAL"
        if isinstance(piece, str) and piece and isinstance(kind, str):
            return piece, score, kind
    except (ValueError, TypeError, LookupError, RecursionError):
        pass
    raise CheckpointError(
        f"{path}: line {number} is {line[:60]!r}; a line is a piece, its score and its kind, as JSON", param="model"
    )


def _text_of(token: Any) -> str:
    return str(token.get("content", "") if isinstance(token, Mapping) else token)


def _frame(config: Mapping[str, Any], named: Mapping[str, str], vocab: Mapping[str, int]) -> dict[str, Any] | None:
    """Return the post-processor, which adds the tokens that the file next to the vocabulary wants around a text."""
    added = {name: named[f"{name}_token"] for name in ("bos", "eos") if config.get(f"add_{name}_token")}
    known = {name: token for name, token in added.items() if token in vocab}
    if not known:
        return None

    def around(sequence: str, kind: int) -> list[dict[str, Any]]:
        parts = {name: [{"SpecialToken": {"id": token, "type_id": kind}}] for name, token in known.items()}
        return [*parts.get("bos", []), {"Sequence": {"id": sequence, "type_id": kind}}, *parts.get("eos", [])]

    specials = {token: {"id": token, "ids": [vocab[token]], "tokens": [token]} for token in known.values()}
    first = around("A", 0)
    return {
        "type": "TemplateProcessing", "single": first, "pair": first + around("B", 1), "special_tokens": specials
    }  # fmt: skip


def _breaks(config: Mapping[str, Any]) -> list[str]:
    """Return the expressions of PLaMo 3, whose class or settings identify it."""
    spaces, repeated = (
        config.get(f"break_around_{what}_threshold") for what in ("consecutive_spaces", "repeated_chars")
    )
    runs = [rf"(.)\1{{{repeated - 1},}}"] if isinstance(repeated, int) and repeated > 0 else []
    runs += [f" {{{spaces},}}"] if isinstance(spaces, int) and spaces > 0 else []
    newer = bool(runs) or str(config.get("tokenizer_class", "")).startswith("Plamo3")
    return ([_CONTROL] if newer else []) + (["|".join(runs)] if runs else [])


class PlamoPieces:
    """The cutter of texts, as a pre-tokenizer of the ``tokenizers`` library. ``costs``: of each piece; ``breaks``:
    expressions around whose matches a text is cut."""

    def __init__(self, costs: Mapping[str, int], breaks: list[str]) -> None:
        self._costs = costs
        self._breaks = [re.compile(expression) for expression in breaks]
        lengths: dict[str, set[int]] = {}
        for piece in costs:
            lengths.setdefault(piece[0], set()).add(len(piece))
        self._lengths = {first: sorted(known, reverse=True) for first, known in lengths.items()}

    def pre_tokenize(self, text: tokenizers.PreTokenizedString) -> None:
        text.split(lambda _, part: list(self._parts(part)))

    def ends(self, text: str) -> list[int]:
        """Return the end of each piece of ``text``, characters."""
        ends: list[int] = []
        for begin, end in self._spans(text, 0, len(text), 0):
            steps, place = self._steps(text[begin:end]), 0
            while place < end - begin:
                place += steps[place]
                ends.append(begin + place)
        return ends

    def _parts(self, text: Any) -> Iterator[Any]:
        ends = self.ends(str(text))
        for first in range(0, len(ends), _SPAN_PIECES):
            group, begin = ends[first : first + _SPAN_PIECES], ends[first - 1] if first else 0
            span, start = text[begin : group[-1]], 0
            for end in group:
                yield span[start : end - begin]
                start = end - begin

    def _spans(self, text: str, begin: int, end: int, number: int) -> Iterator[tuple[int, int]]:
        """Yield the parts of text[begin:end] between the cuts of the expressions from ``number`` on."""
        if number == len(self._breaks):
            if begin < end:
                yield begin, end
            return
        for match in self._breaks[number].finditer(text, begin, end):
            for span in ((begin, match.start()), match.span()):
                yield from self._spans(text, *span, number + 1)
            begin = match.end()
        yield from self._spans(text, begin, end, number + 1)

    def _steps(self, text: str) -> list[int]:
        """Return the length of the piece that the best cut of text[i:] begins with, for each i."""
        count, costs, lengths = len(text), self._costs, self._lengths
        best, steps = [0] * (count + 1), [1] * count
        for place in range(count - 1, -1, -1):
            least = _UNREACHED
            for length in lengths.get(text[place], ()):
                cost = costs.get(text[place : place + length]) if place + length <= count else None
                if cost is not None and best[place + length] + cost < least:
                    least, steps[place] = best[place + length] + cost, length
            if best[place + 1] + _UNKNOWN_COST < least:
                least, steps[place] = best[place + 1] + _UNKNOWN_COST, 1
            best[place] = least
        return steps


def cut_as_plamo(backend: tokenizers.Tokenizer, content: Mapping[str, Any]) -> bool:
    """Let ``backend`` cut texts by the costs in ``content``; return whether there are any."""
    model = content.get("model")
    if not isinstance(model, Mapping) or COSTS not in model:
        return False
    pieces = PlamoPieces(model[COSTS], model[BREAKS])
    backend.pre_tokenizer = tokenizers.pre_tokenizers.PreTokenizer.custom(pieces)
    return True
