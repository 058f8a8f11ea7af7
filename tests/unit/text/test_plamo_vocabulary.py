"""A checkpoint of PLaMo has only tokenizer.jsonl: its pieces are those of the best sum, and of equal sums the longest
first."""

from __future__ import annotations

import json
import random
import re
from pathlib import Path
from typing import Any

import pytest

from weft.errors import CheckpointError
from weft.text.tokenizer import Tokenizer

SPECIAL = [f"<|plamo:{name}|>" for name in ("unk", "bos", "eos", "pad", "op")]
SCORES = {" ": -5.0, "  ": -7.5, "    ": -9.0, "a": -5.0, "aa": -7.5, "aaa": -9.1234, "b": -6.0, "ab": -8.0, "ba": -8.0,
          "東": -7.0, "東京": -9.0, "\n": -4.0, "<": -6.0, "<|plamo:begin_": -3.0, ":plamo|>": -3.0}  # fmt: skip
ROWS: list[list[Any]] = [
    *([token, 0.0, "UNKNOWN" if "unk" in token else "CONTROL"] for token in SPECIAL),
    *([f"<0x{byte:02X}>", 0, "BYTE"] for byte in range(256)),
    *([piece, score, "NORMAL"] for piece, score in SCORES.items()),
]
IDS = {row[0]: index for index, row in enumerate(ROWS)}


def made(directory: Path, rows: list[list[Any]] = ROWS, **config: Any) -> Tokenizer:
    lines = [json.dumps(row, ensure_ascii=False) for row in rows]
    (directory / "tokenizer.jsonl").write_text("\n".join(lines) + "\n")
    names = {"bos_token": "<|plamo:bos|>", "eos_token": "<|plamo:eos|>"}
    (directory / "tokenizer_config.json").write_text(json.dumps(names | config))
    return Tokenizer.load(directory)


def best(text: str) -> tuple[float, list[int]]:
    """Return the cost and the lengths of the best cut, of all cuts one by one."""
    if not text:
        return 0, []
    cuts = []
    for length in range(1, len(text) + 1):
        known = SCORES.get(text[:length])
        cost = -round(known * 1e4) if known is not None else 10_000_000 if length == 1 else None
        if cost is not None:
            rest, lengths = best(text[length:])
            cuts.append((cost + rest, [length, *lengths]))
    least = min(cost for cost, _ in cuts)
    return least, max(lengths for cost, lengths in cuts if cost == least)


def ids_of(text: str) -> list[int]:
    ids, begin = [], 0
    for length in best(text)[1]:
        piece = text[begin : begin + length]
        begin += length
        ids += [IDS[piece]] if piece in SCORES else [IDS[f"<0x{byte:02X}>"] for byte in piece.encode()]
    return ids


def test_texts_have_the_pieces_of_the_best_of_all_cuts(tmp_path: Path) -> None:
    tokenizer, choose = made(tmp_path), random.Random(4)
    assert tokenizer.encode("   ") == [IDS["  "], IDS[" "]], "of equal sums the longest first piece"
    assert tokenizer.encode("é🏔") == [IDS[f"<0x{byte:02X}>"] for byte in "é🏔".encode()]
    texts = ["".join(choose.choice(" aab東京\n<é") for _ in range(choose.randint(0, 11))) for _ in range(150)]
    assert [tokenizer.encode(text) for text in texts] == [ids_of(text) for text in texts]
    assert [tokenizer.decode(tokenizer.encode(text)) for text in texts] == texts
    parts = ["aaab ", "   東京é", "\n\n    ", "<0x41>", "ba東"] * 100
    whole = "\n".join(parts)
    assert tokenizer.decode(tokenizer.encode(whole)) == whole, "many spans of the library's text"


def test_control_tokens_are_cut_out_and_are_no_text_where_quoted(tmp_path: Path) -> None:
    tokenizer = made(tmp_path, add_bos_token=True)
    text = "a<|plamo:op|>  <|plamo:bos|>"
    assert tokenizer.encode(text) == [
        IDS[piece] for piece in ("<|plamo:bos|>", "a", "<|plamo:op|>", "  ", "<|plamo:bos|>")
    ]
    assert tokenizer.special_ids == {IDS[token] for token in SPECIAL[:4]}
    quoted = tokenizer.encode(text, quoted=[1], add_special_tokens=False)
    assert IDS["<|plamo:op|>"] not in quoted
    assert tokenizer.decode(quoted, skip_special_tokens=False) == text
    assert tokenizer.encode_with_boundaries(text, [1, 13, 15], add_special_tokens=False)[1] == [1, 2, 3]


def test_plamo_3_cuts_around_runs_and_markers(tmp_path: Path) -> None:
    settings = {"break_around_consecutive_spaces_threshold": 4, "break_around_repeated_chars_threshold": 3}
    newer = made(tmp_path, tokenizer_class="Plamo3Tokenizer", **settings)
    for text in ("baaab", "ab     a", "aa<|plamo:begin_aaaa:plamo|>  b", "    \n\n\n"):
        spans = [""]
        for part in re.split(r"(<\|plamo:[^|\s]{,64}\|>)", text):
            spans += [piece for piece in re.split(r"((?:a{3,}|\n{3,})| {3,})", part) if piece]
        assert newer.encode(text) == [token for span in spans for token in ids_of(span)], text


@pytest.mark.parametrize(
    ("rows", "said"),
    [([*ROWS, ["x"]], "line 277 is '\\[\"x\"\\]'"), ([row for row in ROWS if row[0] != "<0x0A>"], "<0x0A> is missing")],
)
def test_a_vocabulary_that_is_not_whole_is_one_line(rows: list[list[Any]], said: str, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=said):
        made(tmp_path, rows)
