"""The JSON task: facts in the conversation, and answers that are JSON objects over these facts.

The conversations that `train/` learns from and that `weft eval json` asks. A scored question names a person. The answer
is an object: a schema gives its keys, and its values are in the facts.

    user       Bemo: age 34, city Tarlik              facts as lines, as sentences, or as a table
               Oshan: age 51, city Fuza
    assistant  Noted.
    user       Tell me about Oshan.
    assistant  {"name": "Oshan", "city": "Fuza"}

A model does not see the schema of `response_format`: the grammar holds the answer to it. Therefore many questions
name no keys, and a reply marks characters that only the schema decides as `free`: the opening brace, and the keys.
Training gives these characters little weight, and scoring leaves them to the grammar.
"""

from __future__ import annotations

import json
import random
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from weft_tools.eval.recall import NOTED, CountTokens, Episode, EpisodeTurn
from weft_tools.eval.tool_calls import REAL_NAMES
from weft_tools.eval.words import PEOPLE, Split, filler_sentence, make_name, make_number, make_word

JOBS = tuple(person.removeprefix("the ") for person in PEOPLE)
COLOURS = ("red", "blue", "green", "black", "white", "yellow", "grey", "brown")
COLUMNS = (
    "age",
    "age",
    "city",
    "city",
    "job",
    "code",
    "number",
    "year",
    "colour",
    "price",
    "team",
    "phone",
    "country",
    "room",
    "street",
    "points",
)
WHOLE_NUMBERS = {"age": (1, 99), "year": (1900, 2030), "price": (1, 5000), "room": (1, 400),
                 "points": (0, 100)}  # fmt: skip
QUESTIONS = ("{name}?", "And {name}?", "Tell me about {name}.", "Who is {name}?",
             "What do you know about {name}?",
             "Look up {name}.", "Now {name}, please.", "Give me {name}.", "Extract {name}.", "Find {name}.",
             "What is the {key} of {name}?", "What {key} does {name} have?")  # fmt: skip
JSON_QUESTIONS = (
    "{name} as JSON.",
    "Give me {name} as JSON.",
    "Tell me about {name} in JSON.",
    "Answer in JSON: who is {name}?",
    "{name} as JSON, please.",
    "Write {name} as JSON.",
)
ALONE = ("Who is this?", "Extract the person.", "Extract the data.", "Extract the information.", "", "",
         "What does the text say?", "Read the text.")  # fmt: skip
INTROS = ("", "", "Here are some people:", "Remember these people.", "These are the facts:", "Facts:",
          "Data:", "Here is a table:", "I will ask about this list.")  # fmt: skip


@dataclass(frozen=True)
class JsonReply:
    """JSON text with the ranges that are free, and its schema."""

    text: str
    free: tuple[tuple[int, int], ...]
    schema: dict[str, Any]


class _Writer:
    """A writer of JSON text that notes which characters of it are free."""

    def __init__(self) -> None:
        self.text = ""
        self.free: list[tuple[int, int]] = []

    def add(self, text: str, *, free: bool = False) -> None:
        if free and text:
            self.free.append((len(self.text), len(self.text) + len(text)))
        self.text += text


def schema_of(value: Any) -> dict[str, Any]:
    """Return a schema that `value` fits; every property is required, and no other is allowed."""
    if isinstance(value, dict):
        return {
            "type": "object",
            "properties": {key: schema_of(part) for key, part in value.items()},
            "required": list(value),
            "additionalProperties": False,
        }
    if isinstance(value, list):
        return {"type": "array", "items": schema_of(value[0])}
    kinds = {bool: "boolean", int: "integer", float: "number", str: "string"}
    return {"type": kinds[type(value)]}


def write_json(value: Any, *, keys_known: bool, opening_known: bool, values_known: bool = True) -> JsonReply:
    """Return `value` as JSON text, with characters that the conversation does not decide marked as free."""
    writer = _Writer()

    def write(part: Any) -> None:
        if isinstance(part, dict):
            writer.add("{", free=not writer.text and not opening_known)
            for index, (key, inner) in enumerate(part.items()):
                # Without keys in the question, the text does not determine whether another key follows.
                writer.add(", " if index else "", free=not keys_known)
                writer.add(f'"{key}": ', free=not keys_known)
                write(inner)
            writer.add("}", free=not keys_known)
        elif isinstance(part, list):
            writer.add("[")
            for index, inner in enumerate(part):
                writer.add(", " if index else "", free=not values_known)
                write(inner)
            writer.add("]")
        elif isinstance(part, str):
            writer.add('"')
            writer.add(json.dumps(part, ensure_ascii=False)[1:-1], free=not values_known)
            writer.add('"')
        else:
            writer.add(json.dumps(part), free=not values_known)

    write(value)
    return JsonReply(writer.text, tuple(writer.free), schema_of(value))


Record = dict[str, Any]


def _column_value(rng: random.Random, split: Split, key: str) -> Any:
    if key in WHOLE_NUMBERS:
        return rng.randint(*WHOLE_NUMBERS[key])
    if key in ("code", "number", "phone"):
        return int(make_number(rng))
    if key == "job":
        return rng.choice(JOBS)
    if key == "colour":
        return rng.choice(COLOURS)
    if split == "training" and rng.random() < 0.1:
        return rng.choice(REAL_NAMES)
    return make_name(rng, split)


def _columns(rng: random.Random, split: Split) -> list[str]:
    count = rng.choice((1, 1, 2, 2, 2, 3))
    columns = list(dict.fromkeys(rng.choice(COLUMNS) for _ in range(count)))
    if rng.random() < 0.1:
        columns[0] = make_word(rng, split).lower()
    return columns


def _sentence(rng: random.Random, record: Record) -> str:
    """Return a sentence about the record in plain language."""
    parts = []
    for key, value in record.items():
        if key == "name":
            continue
        parts.append({
            "age": f"is {value} years old", "city": f"lives in {value}", "country": f"comes from {value}",
            "job": f"works as a {value}", "team": f"plays for {value}", "colour": f"likes {value}",
        }.get(key) or rng.choice((f"has the {key} {value}", f"has {key} {value}")))  # fmt: skip
    return f"{record['name']} {', '.join(parts[:-1])}{' and ' if len(parts) > 1 else ''}{parts[-1]}."


def _facts_text(rng: random.Random, records: Sequence[Record], form: str) -> str:
    keys = [key for key in records[0] if key != "name"]
    if form == "sentences":
        return rng.choice(("\n", " ")).join(_sentence(rng, record) for record in records)
    if form == "pairs":
        return "\n".join(f"{record['name']}: {record[keys[0]]}" for record in records)
    if form == "table":
        rows = [["name", *keys], *([str(value) for value in record.values()] for record in records)]
        if rng.random() < 0.5:
            return "\n".join(f"| {' | '.join(row)} |" for row in rows)
        return "\n".join(", ".join(row) for row in rows)
    said = rng.choice((" ", " ", ": ", " = "))
    return "\n".join(f"{r['name']}: {', '.join(f'{key}{said}{r[key]}' for key in keys)}" for r in records)


def _asked(rng: random.Random, record: Record) -> Record:
    """Return the fields of a record for a question, with the name first."""
    keys = [key for key in record if key != "name"]
    chosen = rng.sample(keys, rng.randint(1, len(keys))) if rng.random() < 0.4 else keys
    name = {} if rng.random() < 0.1 else {"name": record["name"]}
    return name | {key: record[key] for key in chosen}


def _question(rng: random.Random, record: Record, fields: Record, *, alone: bool) -> tuple[str, bool, bool]:
    """Return the text, whether it names the keys, and whether it asks for JSON."""
    in_json, keys_known = rng.random() < 0.35, rng.random() < 0.35
    key = next(key for key in fields if key != "name")
    if alone:
        text = rng.choice(ALONE) or ("As JSON." if in_json else "")
        text = f"{text} Answer in JSON." if in_json and "JSON" not in text else text
    else:
        text = rng.choice(JSON_QUESTIONS if in_json else QUESTIONS).format(name=record["name"], key=key)
    if keys_known:
        form = rng.choice((" Keys: {0}.", " With {0}.", " The keys are {0}.", " Answer with {0}."))
        text += form.format(", ".join(fields))
    return text.strip(), keys_known, in_json


def _record_turn(rng: random.Random, record: Record, before: str = "") -> EpisodeTurn:
    fields = _asked(rng, record)
    question, keys_known, in_json = _question(rng, record, fields, alone=bool(before) and rng.random() < 0.7)
    if in_json and not keys_known and rng.random() < 0.7:  # "as JSON" without keys means the complete record
        fields, keys_known = record, True
    reply = write_json(fields, keys_known=keys_known, opening_known=in_json)
    text = f"{before}\n\n{question}".strip() if before else question
    return EpisodeTurn(text, reply.text, "json", reply.free, reply.schema)


def _all_turn(rng: random.Random, records: Sequence[Record]) -> EpisodeTurn:
    """Return every record, or every name, of a short list."""
    if rng.random() < 0.5:
        value: Record = {"names": [record["name"] for record in records]}
        text = rng.choice(("List the names as JSON.", "All names as JSON.", "Give me the names in JSON."))
    else:
        value = {"people": list(records)}
        text = rng.choice(("List the people as JSON.", "All people as JSON.", "Everything as JSON, please."))
    reply = write_json(value, keys_known=True, opening_known=True)
    return EpisodeTurn(text, reply.text, "json", reply.free, reply.schema)


def _make_records(rng: random.Random, split: Split, count: int, form: str) -> list[Record]:
    columns = _columns(rng, split)
    if form == "pairs":
        columns = [rng.choice(("number", "code", "age", "city"))]
    records: list[Record] = []
    while len(records) < count:
        name = make_name(rng, split, [record["name"] for record in records])
        if split == "training" and rng.random() < 0.06:
            name = rng.choice(REAL_NAMES)
        if name not in [record["name"] for record in records]:
            records.append({"name": name} | {key: _column_value(rng, split, key) for key in columns})
    return records


FORMS = ("keyed", "keyed", "sentences", "sentences", "table", "pairs")


def make_facts_episode(
    rng: random.Random,
    length_tokens: int,
    count_tokens: CountTokens,
    *,
    split: Split = "held_out",
    form: str | None = None,
) -> Episode:
    """Return one conversation of at most about `length_tokens`: facts, then questions until the length is full."""
    form = form or rng.choice(FORMS)
    most = max(1, min(24, length_tokens // 60))
    records = _make_records(rng, split, rng.randint(1, most), form)
    text = _facts_text(rng, records, form)
    intro = rng.choice(INTROS)
    text = f"{intro}\n{text}" if intro else text
    if rng.random() < 0.25:
        text += "\n" + " ".join(filler_sentence(rng) for _ in range(rng.randint(1, 4)))
    turns: list[EpisodeTurn] = []
    if len(records) == 1 or rng.random() < 0.25:
        turns.append(
            _record_turn(rng, rng.choice(records), text)
            if len(records) == 1
            else EpisodeTurn(*_first_question(rng, records, text))
        )
    else:
        turns.append(EpisodeTurn(text, NOTED, "told"))
    room = length_tokens - sum(turn.cost(count_tokens) for turn in turns)
    while True:
        turn = (
            _all_turn(rng, records)
            if len(records) <= 5 and rng.random() < 0.08
            else _record_turn(rng, rng.choice(records))
        )
        room -= turn.cost(count_tokens)
        if room < 0 and any(earlier.kind == "json" for earlier in turns):
            break
        turns.append(turn)
    return Episode(None, tuple(turns), length_tokens, tuple(record["name"] for record in records))


def _first_question(rng: random.Random, records: Sequence[Record], text: str) -> tuple[Any, ...]:
    """Return a question in the message of the facts."""
    turn = _record_turn(rng, rng.choice(records))
    return f"{text}\n\n{turn.user}", turn.reply, turn.kind, turn.free, turn.schema


def make_facts_episodes(
    seed: int,
    length_tokens: int,
    count: int,
    count_tokens: CountTokens,
    *,
    split: Split = "held_out",
    form: str | None = None,
) -> list[Episode]:
    """Return `count` conversations that depend only on the arguments."""
    rng = random.Random(f"facts {split} {seed} {length_tokens} {form}")
    return [make_facts_episode(rng, length_tokens, count_tokens, split=split, form=form) for _ in range(count)]
