"""The requests of a benchmark: prompts and their output lengths, from a seed or from a file.

    random              random tokens after a prefix that all requests share     --random-prefix-len
    prefix_repetition   some prefixes, each shared by an equal part of the requests
    sharegpt            JSON: the first turn is the prompt, the second gives the output length
    custom              JSON lines: "prompt", and "output_tokens" where it differs

The same seed gives the same requests to every server. Token ids come from the upper part of the vocabulary,
because most vocabularies have special tokens and bytes below.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from weft.errors import ConfigError

ORDINARY_ID_MIN = 300
"""Least id of drawn tokens: ids below are special tokens and bytes in most vocabularies."""


@dataclass(frozen=True, slots=True)
class SampleRequest:
    """A request of a load. ``prompt``: token ids, or text. ``answer``: a text with the wanted number of output tokens,
    if that is not counted yet; ``output_tokens`` is then 0."""

    prompt: list[int] | str
    output_tokens: int
    answer: str = ""


def random_requests(
    count: int,
    *,
    input_len: int,
    output_len: int,
    range_ratio: float = 0.0,
    prefix_len: int = 0,
    vocab_size: int,
    seed: int,
) -> list[SampleRequest]:
    """Return prompts of ``prefix_len`` shared tokens and ``input_len`` of their own. A ``range_ratio`` of r, below 1,
    draws both lengths from (1 - r) to (1 + r) times the given ones, at least 1."""
    dice = random.Random(seed)
    shared = _tokens(dice, prefix_len, vocab_size)

    def length(about: int) -> int:
        return max(1, dice.randint(round(about * (1 - range_ratio)), round(about * (1 + range_ratio))))

    return [
        SampleRequest(shared + _tokens(dice, length(input_len), vocab_size), length(output_len)) for _ in range(count)
    ]


def prefix_repetition_requests(
    count: int, *, prefix_len: int, suffix_len: int, prefixes: int, output_len: int, vocab_size: int, seed: int
) -> list[SampleRequest]:
    """Return requests in random order; each of ``prefixes`` prefixes is used by the same number of requests, or one
    more."""
    dice = random.Random(seed)
    shared = [_tokens(dice, prefix_len, vocab_size) for _ in range(prefixes)]
    requests = [
        SampleRequest(shared[index % prefixes] + _tokens(dice, suffix_len, vocab_size), output_len)
        for index in range(count)
    ]
    dice.shuffle(requests)
    return requests


def file_requests(kind: str, path: Path, count: int, *, output_len: int | None, seed: int) -> list[SampleRequest]:
    """Return at most ``count`` requests from ``path`` ("sharegpt" or "custom"), shuffled by the seed. ``output_len``
    None: the length in the file, or of its answer. Raise ConfigError naming file and line."""
    try:
        text = path.read_text(encoding="utf-8")
    except (OSError, UnicodeDecodeError) as error:
        raise ConfigError(f"--dataset-path {path} cannot be read: {error}", param="--dataset-path") from None
    rows = list(_turns(path, text) if kind == "sharegpt" else _lines(path, text))
    if not rows:
        raise ConfigError(f"--dataset-path {path} has nothing to ask", param="--dataset-path")
    random.Random(seed).shuffle(rows)
    requests = []
    for prompt, wanted in rows[:count]:
        if output_len is not None or isinstance(wanted, int):
            requests.append(SampleRequest(prompt, output_len or int(wanted)))
        elif wanted:
            requests.append(SampleRequest(prompt, 0, wanted))
        else:
            raise ConfigError(
                f"--dataset-path {path}: the number of output tokens for {prompt[:40]!r} is not known. "
                'Give "output_tokens" in its line, or --custom-output-len',
                param="--dataset-path",
            )
    return requests


def _turns(path: Path, text: str) -> Iterator[tuple[str, int | str]]:
    try:
        rows = json.loads(text)
    except ValueError as error:
        raise ConfigError(f"--dataset-path {path} is not JSON: {error}", param="--dataset-path") from None
    if not isinstance(rows, list):
        raise ConfigError(f"--dataset-path {path}: a list of conversations is needed", param="--dataset-path")
    for row in rows:
        turns = row.get("conversations") if isinstance(row, dict) else None
        values = [turn.get("value") for turn in turns or () if isinstance(turn, dict)]
        match values:
            case [str(question), str(answered), *_] if question and answered:
                yield question, answered


def _lines(path: Path, text: str) -> Iterator[tuple[str, int | str]]:
    for number, line in enumerate(text.splitlines(), 1):
        if not line.strip():
            continue
        row = _object(line)
        if row is None or not isinstance(row.get("prompt"), str):
            raise ConfigError(
                f'--dataset-path {path}, line {number}: a JSON object with a "prompt" is needed', param="--dataset-path"
            )
        wanted = row.get("output_tokens", row.get("completion", ""))
        if isinstance(wanted, bool) or not isinstance(wanted, int | str) or (isinstance(wanted, int) and wanted < 1):
            raise ConfigError(
                f"--dataset-path {path}, line {number}: output_tokens is {wanted!r}; it must be a number from 1 on",
                param="--dataset-path",
            )
        yield row["prompt"], wanted


def _object(line: str) -> dict[str, Any] | None:
    try:
        row = json.loads(line)
    except ValueError:
        return None
    return row if isinstance(row, dict) else None


def _tokens(dice: random.Random, count: int, vocab_size: int) -> list[int]:
    low = min(ORDINARY_ID_MIN, vocab_size // 2)
    return [dice.randrange(low, vocab_size) for _ in range(count)]


def warm_up_of(request: SampleRequest, number: int) -> SampleRequest:
    """Return a request of the length of ``request`` that caches no prefix of it; a text prompt is returned
    unchanged."""
    if isinstance(request.prompt, str):
        return request
    backwards, start = request.prompt[::-1], number % len(request.prompt)
    return SampleRequest(backwards[start:] + backwards[:start], request.output_tokens)
