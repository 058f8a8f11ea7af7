"""What the soak asks, and what an answer says: questions by number, and the parts of an answer that must
agree.

    request n --seed--> question (one of POOL, half of them from HOT) --number--> kind, tenant, path, body
                    '-> in a stream or whole; does its client leave in the middle
    answer of any API --said--> [[text, end, calls], ...]      one for streams, whole answers, any replica

A question fixes each thing that tokens depend on, its seed too. So it has one right answer, however often it
is asked, in whatever form and beside whatever else. Ids and times of an answer are left out.
"""

from __future__ import annotations

import json
import random
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache, lru_cache
from typing import Any

import msgspec

POOL = 20_000
HOT = 300
TENANTS = 4
KEYS = tuple(f"soak-key-{number}" for number in range(TENANTS))
WORDS_MAX = 500
_WORDS = ("river", "lantern", "copper", "orchard", "signal", "harbour", "meadow", "granite", "violet", "falcon")
_TOOL = {
    "type": "function",
    "function": {
        "name": "note",
        "parameters": {
            "type": "object",
            "required": ["word"],
            "additionalProperties": False,
            "properties": {"word": {"type": "string", "maxLength": 12}, "times": {"enum": [1, 2, 3]}},
        },
    },
}
_SCHEMA = {
    "type": "json_schema",
    "json_schema": {
        "name": "pair",
        "strict": True,
        "schema": {
            "type": "object",
            "required": ["word", "found"],
            "additionalProperties": False,
            "properties": {"word": {"enum": list(_WORDS)}, "found": {"type": "boolean"}},
        },
    },
}

Said = list[list[Any]]
"""Of each choice: its text, why it ended ("" while it has not), its calls."""


@dataclass(frozen=True, slots=True)
class Question:
    """``is_wrong``: the right answer is a 400."""

    number: int
    kind: str
    path: str
    body: dict[str, Any]
    is_wrong: bool = False

    def body_bytes(self, *, is_stream: bool) -> bytes:
        body = self.body if self.path == "/tokenize" else {**self.body, "stream": is_stream}
        return msgspec.json.encode(body)

    @property
    def key(self) -> str:
        return KEYS[self.number % TENANTS]


@dataclass(frozen=True, slots=True)
class Asking:
    """Request ``number`` of the soak. ``leaves_after``: pieces of its stream, None for a client that
    stays."""

    number: int
    question: Question
    is_stream: bool
    leaves_after: int | None


def asking(seed: int, number: int) -> Asking:
    rng = random.Random(f"{seed}/{number}")
    asked = question(rng.randrange(HOT) if rng.random() < 0.5 else rng.randrange(POOL))
    can_stream = asked.path not in ("/tokenize",) and not asked.is_wrong
    is_stream = can_stream and rng.random() < 0.7
    leaves = is_stream and rng.random() < 0.08
    return Asking(number, asked, is_stream, rng.randrange(1, 12) if leaves else None)


@lru_cache(2 * HOT)
def question(number: int) -> Question:
    rng = random.Random(number * 7919 + 1)
    kinds = list(_KINDS)
    kind = rng.choices(kinds, [_KINDS[name][0] for name in kinds])[0]
    path, body = _KINDS[kind][1](rng, number)
    if path.startswith("/v1/"):
        body = {"model": "default", **body}
    return Question(number, kind, path, body, is_wrong=kind == "wrong")


def _text(rng: random.Random, words: int) -> str:
    """Beginnings are shared, as those of conversations are: one of twelve, up to a length of its own."""
    topic = rng.randrange(12)
    start = _beginning(topic)[:words]
    own = [f"{rng.choice(_WORDS)} {rng.randrange(1000)}" for _ in range(rng.randrange(1, 6))]
    return f"List {topic}: {', '.join(start)}. And {', '.join(own)}:"


@cache
def _beginning(topic: int) -> list[str]:
    shared = random.Random(topic)
    return [f"{shared.choice(_WORDS)} {shared.randrange(100)}" for _ in range(WORDS_MAX)]


def _length(rng: random.Random) -> int:
    """Pairs of words of a prompt: mostly few, one in a hundred a thousand tokens or two."""
    return min(350, int(rng.paretovariate(1.2) * 2))


def _completion(**fields: Any) -> Any:
    def body(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
        return "/v1/completions", {
            "prompt": _text(rng, _length(rng)),
            "seed": number,
            "ignore_eos": True,
            "max_tokens": rng.choice((1, 4, 8, 16, 32)),
            **fields,
        }

    return body


def _messages(rng: random.Random) -> list[dict[str, str]]:
    said = [{"role": "user", "content": _text(rng, _length(rng))}]
    for _ in range(rng.choice((0, 0, 1, 2))):
        said += [
            {"role": "assistant", "content": rng.choice(_WORDS)},
            {"role": "user", "content": f"And {rng.choice(_WORDS)}?"},
        ]
    return said


def _chat(**fields: Any) -> Any:
    def body(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
        return "/v1/chat/completions", {
            "messages": _messages(rng),
            "seed": number,
            "max_tokens": rng.choice((4, 12, 24)),
            **fields,
        }

    return body


def _predicted(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    guess = {"type": "content", "content": ", ".join(rng.choices(_WORDS, k=12))}
    return "/v1/chat/completions", {
        "messages": _messages(rng),
        "seed": number,
        "max_tokens": 24,
        "temperature": 0,
        "prediction": guess,
    }


def _anthropic(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/messages", {"messages": _messages(rng), "max_tokens": rng.choice((4, 12)), "temperature": 0}


def _ollama(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    return "/api/chat", {
        "model": "default",
        "messages": _messages(rng),
        "options": {"num_predict": 8, "temperature": 0.8, "seed": number},
    }


def _response(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/responses", {
        "input": _text(rng, _length(rng)),
        "max_output_tokens": 6,
        "temperature": 0,
        "seed": number,
    }


def _tokenize(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    return "/tokenize", {"prompt": _text(rng, _length(rng))}


def _wrong(rng: random.Random, number: int) -> tuple[str, dict[str, Any]]:
    return "/v1/completions", {
        "prompt": "a",
        **rng.choice(
            ({"max_tokens": -1}, {"temperature": "hot"}, {"guided_regex": "("}, {"max_tokens": "many"}, {"n": 0})
        ),
    }


_KINDS: dict[str, tuple[float, Any]] = {
    "greedy": (4, _completion(temperature=0)),
    "sampled": (4, _completion(temperature=0.9, top_p=0.95)),
    "two answers": (2, _completion(temperature=1.0, n=2)),
    "two prompts": (1, lambda rng, number: ("/v1/completions", {
        "prompt": [_text(rng, 3), _text(rng, 9)], "seed": number, "max_tokens": 6, "temperature": 0.7})),
    "long answer": (0.3, _completion(temperature=0.7, max_tokens=200)),
    "long prompt": (0.1, lambda rng, number: ("/v1/completions", {
        "prompt": _text(rng, 500), "seed": number, "max_tokens": 3, "temperature": 0})),
    "penalties and logprobs": (2, _completion(temperature=0.8, logprobs=2, presence_penalty=0.5,
                                              frequency_penalty=0.3)),
    "regex": (2, _completion(temperature=1.0, guided_regex="([0-9]{2}-){4}end", ignore_eos=False,
                             max_tokens=40)),
    "stop": (2, _completion(temperature=1.0, stop=["7", "zz", "a l"])),
    "chat": (3, _chat(temperature=0.7)),
    "tools": (2, _chat(temperature=0.7, tools=[_TOOL], tool_choice="required", max_tokens=64)),
    "schema": (2, _chat(temperature=0.7, response_format=_SCHEMA)),
    "prediction": (1, _predicted),
    "messages": (1.5, _anthropic), "ollama": (1, _ollama), "responses": (2, _response),
    "tokenize": (1, _tokenize), "wrong": (1, _wrong)}  # fmt: skip


# ---------------------------------------------------------------------- what an answer says


def said_whole(path: str, answer: dict[str, Any]) -> Said:
    if path == "/tokenize":
        return [[json.dumps(answer["tokens"]), "", []]]
    if path == "/v1/responses":
        return [
            [
                "".join(part["text"] for item in answer["output"] for part in item.get("content", ())),
                _end_of_response(answer),
                [],
            ]
        ]
    if path == "/v1/messages":
        return [["".join(part.get("text", "") for part in answer["content"]), answer["stop_reason"], []]]
    if path == "/api/chat":
        return [[answer["message"]["content"], answer["done_reason"], []]]
    return [
        [
            choice["text"] if "text" in choice else choice["message"]["content"] or "",
            choice["finish_reason"],
            [
                [call["function"]["name"], call["function"]["arguments"]]
                for call in choice.get("message", {}).get("tool_calls") or ()
            ],
        ]
        for choice in sorted(answer["choices"], key=lambda choice: choice["index"])
    ]


def _end_of_response(answer: dict[str, Any]) -> str:
    return (answer["incomplete_details"] or {}).get("reason", answer["status"])


class StreamFailed(Exception):
    """The server said so in the stream."""


class Stream:
    """The pieces of a streamed answer put together. ``is_done``: its end has come."""

    def __init__(self, path: str) -> None:
        self._path = path
        self._choices: dict[int, list[Any]] = {}
        self.pieces = 0
        self.is_done = False

    def said(self) -> Said:
        """A choice that has no piece yet says nothing."""
        return [self._choices.get(index, ["", "", []]) for index in range(max(self._choices, default=0) + 1)]

    def line(self, line: bytes) -> None:
        """Raises StreamFailed."""
        if self._path != "/api/chat":
            if not line.startswith(b"data: "):
                return
            line = line.removeprefix(b"data: ")
        if line.startswith(b"[DONE]"):
            self.is_done = True
        elif line:
            self._take(msgspec.json.decode(line))

    def _take(self, piece: dict[str, Any]) -> None:
        if piece.get("error") is not None or piece.get("type") in ("error", "response.failed"):
            raise StreamFailed(json.dumps(piece))
        self.pieces += 1
        for index, text, end, calls in _parts(self._path, piece):
            choice = self._choices.setdefault(index, ["", "", []])
            choice[0] += text
            choice[1] = end or choice[1]
            for at, name, arguments in calls:
                while len(choice[2]) <= at:
                    choice[2].append(["", ""])
                choice[2][at][0] += name
                choice[2][at][1] += arguments
        if piece.get("done") or piece.get("type") in ("message_stop", "response.completed", "response.incomplete"):
            self.is_done = True


def _parts(path: str, piece: dict[str, Any]) -> Iterator[tuple[int, str, str, list[tuple[int, str, str]]]]:
    if path == "/v1/messages":
        delta = piece.get("delta", {})
        yield 0, delta.get("text", ""), delta.get("stop_reason") or "", []
    elif path == "/v1/responses":
        ended = piece["type"] in ("response.completed", "response.incomplete")
        yield (
            0,
            piece["delta"] if piece["type"] == "response.output_text.delta" else "",
            _end_of_response(piece["response"]) if ended else "",
            [],
        )
    elif path == "/api/chat":
        yield 0, piece["message"]["content"], piece.get("done_reason", ""), []
    else:
        for choice in piece["choices"]:
            delta = choice.get("delta", {})
            calls = [
                (call["index"], call["function"].get("name") or "", call["function"].get("arguments") or "")
                for call in delta.get("tool_calls") or ()
            ]
            text = choice["text"] if "text" in choice else delta.get("content") or ""
            yield choice["index"], text, choice["finish_reason"] or "", calls


def begins(part: Said, whole: Said) -> bool:
    """Whether the part of an answer that a client got before it left is the beginning of the whole one."""
    for at, (text, _, calls) in enumerate(part):
        if at >= len(whole) or not whole[at][0].startswith(text) or len(calls) > len(whole[at][2]):
            return False
        for mine, other in zip(calls, whole[at][2], strict=False):
            if not (other[0].startswith(mine[0]) and other[1].startswith(mine[1])):
                return False
    return True
