"""The tools task: a chat with tools, requests that call one, and answers from its result.

The conversations that `train/` learns from and that `weft eval tools` asks. One generator serves both. Tools
of the two sides never meet: a checksum of a tool's name decides its side. The values of the arguments are
made-up words of that side (`words.py`).

    system     <tools> get_weather(city: string, days?: integer): The weather of a city. ... </tools>
    user       What is the weather in Bemo?
    assistant  <tool_call> {"name": "get_weather", "arguments": {"city": "Bemo"}} </tool_call>
    user       <tool_response> rain </tool_response>
    assistant  The weather in Bemo is rain.

A call and a result are texts in the form of the embedded model's chat template, so a turn is a pair of texts.
A tool takes one line instead of its JSON schema: such a model has few tokens to spend. `tests/train` compares
the texts with the template's own.

Scored are the call (name and arguments, as JSON values), the answer from the result (exact match), and the answer to a
request that no tool fits. With the tools of another conversation no call can be right: the control of `weft eval
tools`.
"""

from __future__ import annotations

import json
import random
from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from weft_tools.eval import recall
from weft_tools.eval.words import (
    ADJECTIVES,
    FOODS,
    THINGS,
    Split,
    filler_sentence,
    make_name,
    make_number,
    make_word,
    split_of,
)

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """Return one call in the form of the chat template."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}"


def written_results(results: Sequence[str]) -> str:
    """Return the user turn that the chat template makes of tool messages."""
    return "\n".join(f"{RESULT_OPEN}\n{result}\n{RESULT_CLOSE}" for result in results)


def read_calls(text: str) -> list[dict[str, Any]]:
    """Return the calls of a written answer."""
    parts = [part.split(CALL_CLOSE)[0] for part in text.split(CALL_OPEN)[1:]]
    return [json.loads(part) for part in parts]


def tool_line(tool: dict[str, Any]) -> str:
    """Return a tool in the system prompt, as the chat template writes it."""
    function = tool["function"]
    parameters = function.get("parameters") or {}
    required = parameters.get("required") or ()
    parts = []
    for key, schema in (parameters.get("properties") or {}).items():
        kind = schema.get("type") if isinstance(schema.get("type"), str) else "any"
        kind = "|".join(str(value) for value in schema["enum"]) if schema.get("enum") else kind
        parts.append(f"{key}{'' if key in required else '?'}: {kind}")
    description = f": {function['description']}" if function.get("description") else ""
    return f"{function['name']}({', '.join(parts)}){description}"


def system_text(system: str | None, tools: Sequence[dict[str, Any]]) -> str:
    """Return the system prompt of a conversation with tools."""
    head = f"{system}\n\n" if system else ""
    return head + "\n".join(["<tools>", *(tool_line(tool) for tool in tools), "</tools>"])


def chat_messages(episode: recall.Episode, turn_index: int) -> list[dict[str, Any]]:
    """Return the messages of the API that end with the text of the user, or of a tool, in turn `turn_index`."""
    messages: list[dict[str, Any]] = []
    if episode.system:
        messages.append({"role": "system", "content": episode.system})
    ids: list[str] = []
    for index, turn in enumerate(episode.turns[: turn_index + 1]):
        if turn.user.startswith(RESULT_OPEN):
            results = [part.split(RESULT_CLOSE)[0].strip("\n") for part in turn.user.split(RESULT_OPEN)[1:]]
            for call_id, result in zip(ids, results, strict=True):
                messages.append({"role": "tool", "tool_call_id": call_id, "content": result})
        else:
            messages.append({"role": "user", "content": turn.user})
        if index == turn_index:
            break
        calls = read_calls(turn.reply)
        ids = [f"call_{index}_{number}" for number in range(len(calls))]
        answer: dict[str, Any] = {"role": "assistant", "content": None if calls else turn.reply}
        if calls:
            answer["tool_calls"] = [
                {
                    "id": call_id,
                    "type": "function",
                    "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])},
                }
                for call_id, call in zip(ids, calls, strict=True)
            ]
        messages.append(answer)
    return messages


LEADS: dict[str, tuple[str, ...]] = {
    "get": ("What is the {noun}", "What is the {noun}", "What's the {noun}", "Get the {noun}",
            "Get me the {noun}", "Tell me the {noun}", "Show me the {noun}", "I need the {noun}",
            "Give me the {noun}", "Please get the {noun}", "Can you get the {noun}"),
    "find": ("Find the {noun}", "Where is the {noun}", "Look for the {noun}", "Find me a {noun}"),
    "search": ("Search the {noun}", "Search for a {noun}", "Search for the {noun}"),
    "send": ("Send the {noun}", "Send a {noun}", "Please send the {noun}"),
    "create": ("Create a {noun}", "Make a {noun}", "Create the {noun}", "I want a new {noun}"),
    "add": ("Add a {noun}", "Add the {noun}", "Please add a {noun}"),
    "delete": ("Delete the {noun}", "Remove the {noun}", "Please delete the {noun}"),
    "set": ("Set the {noun}", "Set a {noun}", "Change the {noun}"),
    "book": ("Book a {noun}", "Book the {noun}", "Please book a {noun}", "I want to book a {noun}"),
    "cancel": ("Cancel the {noun}", "Please cancel the {noun}", "Cancel my {noun}"),
    "check": ("Check the {noun}", "Is there a {noun}", "Please check the {noun}"),
    "open": ("Open the {noun}", "Please open the {noun}"),
    "start": ("Start the {noun}", "Start a {noun}", "Begin the {noun}"),
    "list": ("List the {noun}", "List every {noun}", "Show every {noun}"),
    "read": ("Read the {noun}", "Read me the {noun}"),
    "play": ("Play the {noun}", "Play a {noun}"),
    "order": ("Order a {noun}", "Order the {noun}", "I want to order a {noun}"),
    "lookup": ("Look up the {noun}", "Please look up the {noun}", "What is the {noun}"),
}  # fmt: skip
UMBRELLAS = ("Do I need an umbrella in {place}?", "Is it cold in {place}?", "Is it raining in {place}?",
             "Is it warm in {place}?", "How is the weather in {place}?", "Weather in {place}")  # fmt: skip
NOUNS = (
    "weather", "weather", "weather", "forecast", "temperature", "order", "ticket", "flight", "train",
    "hotel", "table", "user", "customer", "price", "stock", "invoice", "email", "message", "note",
    "task", "reminder", "alarm", "timer", "meeting", "event", "calendar", "light", "door", "song",
    "movie", "book", "recipe", "restaurant", "route", "map", "address", "population", "capital",
    "distance", "translation", "rate", "currency", "balance", "payment", "package", "parcel", "contact",
    "file", "folder", "report", "photo", "news", "score", "team", "player", "car", "taxi", "seat",
    "menu", "coffee", "pizza", "status", "server", "backup", "job", "build", "log", "document", "page",
    "definition", "word", "holiday", "birthday", "time", "date", "country", "language", "shop",
    "product", "item", "review", "comment", "post", "video", "playlist", "game", "garden", "lamp",
    "window", "heating", "bus", "station", "airport", "street", "house", "budget", "contract", "lesson",
    "course", "exam", "doctor", "appointment", "medicine", "animal", "plant", "colour", "size", "weight",
)  # fmt: skip
PREPOSITIONS = ("of", "of", "for", "for", "in", "in", "at", "from", "to", "on")
SUBJECT_KEYS = (
    "city", "city", "city", "name", "name", "person", "place", "title", "customer", "country", "query",
    "location", "id", "station", "user", "topic", "symbol", "street", "product", "to", "subject",
    "item", "company", "destination", "address",
)  # fmt: skip
NUMBER_KEYS = (
    "days", "days", "count", "amount", "number", "hours", "minutes", "year", "limit", "quantity",
    "price", "page", "seats", "level", "size", "people",
)  # fmt: skip
OTHER_KEYS = ("date", "owner", "from", "room", "group", "category", "author", "driver", "colour", "brand")
TEXT_KEYS = ("text", "message", "note", "body", "comment")
ENUMS: dict[str, tuple[str, ...]] = {
    "unit": ("celsius", "fahrenheit"), "size": ("small", "medium", "large"), "mode": ("fast", "slow"),
    "state": ("on", "off"), "format": ("short", "long"), "class": ("first", "second"),
    "priority": ("low", "normal", "high"), "when": ("today", "tomorrow"), "colour": ("red", "green", "blue"),
    "currency": ("euro", "dollar", "pound"), "language": ("english", "french", "german"),
}  # fmt: skip
REAL_NAMES = (
    "Paris", "London", "Berlin", "Oslo", "Rome", "Madrid", "Vienna", "Lisbon", "Tokyo", "Boston",
    "Chicago", "Prague", "Warsaw", "Dublin", "Athens", "Cairo", "Delhi", "Sydney", "Toronto", "Moscow",
    "Anna", "Peter", "Maria", "John", "Alice", "Bob", "Ada", "Alan", "Grace", "Linus", "Emma", "Tom",
    "Lisa", "Max", "France", "Spain", "Italy", "Germany", "Japan", "Norway", "Monday", "Friday",
)  # fmt: skip

NO_TOOL = "None of my tools can do that."
DONE = "Done."
TOOL_SYSTEMS = (
    "You are a helpful assistant.",
    "You can use tools.",
    "Use the tools to help the user.",
    "You are an assistant with tools.",
    "Answer with the help of your tools.",
)
LISTED = ("number", "code", "extension", "account")
RESULT_KEYS = (
    "status",
    "value",
    "temperature",
    "price",
    "name",
    "place",
    "count",
    "state",
    "total",
    "city",
    "wind",
    "date",
    "type",
    "owner",
)


@dataclass(frozen=True)
class ToolParameter:
    key: str
    schema: dict[str, Any]
    required: bool


@dataclass(frozen=True)
class CallableTool:
    """A tool, and phrases with which a user asks for it. `listed`: its second argument is in a list."""

    name: str
    verb: str
    noun: str
    parameters: tuple[ToolParameter, ...]
    description: str
    listed: bool = False

    def as_tool(self) -> dict[str, Any]:
        schema: dict[str, Any] = {
            "type": "object",
            "properties": {parameter.key: parameter.schema for parameter in self.parameters},
            "required": [parameter.key for parameter in self.parameters if parameter.required],
        }
        function: dict[str, Any] = {"name": self.name, "parameters": schema}
        if self.description:
            function["description"] = self.description
        return {"type": "function", "function": function}


def _lower_word(rng: random.Random, split: Split) -> str:
    return make_word(rng, split).lower()


def _value(rng: random.Random, split: Split, parameter: ToolParameter) -> tuple[Any, str]:
    """Return a value, and the text in which a user writes it."""
    schema = parameter.schema
    if "enum" in schema:
        value = rng.choice(schema["enum"])
        return value, value
    if schema["type"] == "integer":
        number = rng.randrange(1, 10 ** rng.choice((1, 1, 2, 2, 3, 4, 5)))
        return number, str(number)
    if schema["type"] == "number":
        amount = rng.randrange(1, 1000) + rng.randrange(1, 10) / 10
        return amount, str(amount)
    if parameter.key in TEXT_KEYS and rng.random() < 0.6:
        text = filler_sentence(rng).rstrip(".")
        return text, f'"{text}"'
    if split == "training" and rng.random() < 0.15:
        name = rng.choice(REAL_NAMES)
        return name, name
    if rng.random() < 0.08:
        word = rng.choice([*THINGS, *FOODS, *ADJECTIVES])
        return word, word
    name = make_name(rng, split)
    return name, name


def _make_noun(rng: random.Random, split: Split) -> str:
    chance = rng.random()
    if chance < 0.25:
        return _lower_word(rng, split)
    if chance < 0.4:
        return f"{rng.choice(NOUNS)} {rng.choice(NOUNS)}"
    return rng.choice(NOUNS)


def _function_name(rng: random.Random, verb: str, noun: str) -> str:
    words = [verb, *noun.split()]
    chance = rng.random()
    if chance < 0.8:
        return "_".join(words)
    if chance < 0.85:
        return words[0] + "".join(word.capitalize() for word in words[1:])
    return "_".join(words[1:])


def _make_parameters(rng: random.Random, split: Split) -> tuple[ToolParameter, ...]:
    key = rng.choice(SUBJECT_KEYS) if rng.random() < 0.85 else _lower_word(rng, split)
    parameters = [ToolParameter(key, {"type": "string" if rng.random() < 0.9 else "integer"}, True)]
    for _ in range(rng.choice((0, 0, 0, 1, 1, 1, 2))):
        required, chance = rng.random() < 0.5, rng.random()
        if chance < 0.5:
            schema: dict[str, Any] = {"type": "integer" if rng.random() < 0.85 else "number"}
            key = rng.choice(NUMBER_KEYS)
        elif chance < 0.7:
            key, values = rng.choice(list(ENUMS.items()))
            schema = {"type": "string", "enum": list(values)}
        else:
            key, schema = rng.choice([*OTHER_KEYS, *TEXT_KEYS]), {"type": "string"}
        if rng.random() < 0.12:
            key = _lower_word(rng, split)
        if key not in [parameter.key for parameter in parameters]:
            parameters.append(ToolParameter(key, schema, required))
    return tuple(parameters)


def make_function(rng: random.Random, split: Split, *, listed: str = "", noun: str = "") -> CallableTool:
    """Return a tool of this side. With `listed` it takes a name and the list's value for that name."""
    while True:
        verb, chosen = rng.choice(list(LEADS)), noun or _make_noun(rng, split)
        name = _function_name(rng, verb, chosen)
        if split_of(name) == split:
            break
    parameters = _make_parameters(rng, split)
    if listed:
        key = rng.choice(("name", "person", "to", "user"))
        number = ToolParameter(listed, {"type": "integer"}, True)
        parameters = (ToolParameter(key, {"type": "string"}, True), number)
    first = parameters[0].key
    described = (
        f"{verb.capitalize()} the {chosen} of a {first}.",
        f"The {chosen} for a {first}.",
        f"{verb.capitalize()} a {chosen}.",
        f"{verb} {chosen}",
        filler_sentence(rng),
    )
    description = rng.choice(described) if rng.random() < 0.5 else ""
    return CallableTool(name, verb, chosen, parameters, description, bool(listed))


@dataclass(frozen=True)
class ToolRequest:
    """A user's request: the text, the calls it takes, and how the answer names each subject."""

    text: str
    calls: tuple[str, ...]
    subjects: tuple[str, ...]


def _with_cue(rng: random.Random, parameter: ToolParameter, written: str) -> str:
    key = parameter.key
    forms = [f" with {key} {written}", f", {key} {written}", f" and {key} {written}", f", {key}: {written}"]
    if parameter.schema["type"] == "integer":
        forms += [f" for {written} {key}", f", {written} {key}"]
    if "enum" in parameter.schema:
        forms += [f" in {written}", f", {written}"]
    return rng.choice(forms)


def make_request(rng: random.Random, split: Split, function: CallableTool, listed: dict[str, str]) -> ToolRequest:
    """Return a request for `function`. `listed`: the numbers of a list, of which one is an argument."""
    first, rest = function.parameters[0], function.parameters[1:]
    lead = rng.choice(LEADS[function.verb]).format(noun=function.noun)
    if rng.random() < 0.06:
        lead = rng.choice(("Call {name}", "Use {name}")).format(name=function.name)
    if rng.random() < 0.15:
        lead = lead[0].lower() + lead[1:]
    preposition = rng.choice(PREPOSITIONS)
    if function.listed:
        name = rng.choice(list(listed))
        arguments = {first.key: name, rest[0].key: int(listed[name])}
        calls, subjects = [written_call(function.name, arguments)], [f"{preposition} {name}"]
        text = f"{lead} {preposition} {name}"
    else:
        value, written = _value(rng, split, first)
        subjects = [f"{preposition} {written}"]
        text = f"{lead} {preposition} {written}"
        if rng.random() < 0.15:
            text, subjects = f"{lead} with {first.key} {written}", [f"for {written}"]
        elif function.noun == "weather" and rng.random() < 0.5:
            text, subjects = rng.choice(UMBRELLAS).format(place=written), [f"in {written}"]
        arguments = {first.key: value}
        shown = [parameter for parameter in rest if parameter.required or rng.random() < 0.5]
        for parameter in shown:
            value, written = _value(rng, split, parameter)
            arguments[parameter.key] = value
            text += _with_cue(rng, parameter, written)
        calls = [written_call(function.name, arguments)]
        if not shown and first.schema["type"] == "string" and rng.random() < 0.15:
            other = make_name(rng, split)
            text += f" and {other}"
            calls.append(written_call(function.name, {first.key: other}))
            subjects.append(f"{subjects[0].split()[0]} {other}")
    end = (
        rng.choice(("?", "?", ""))
        if lead.startswith(("What", "Where", "Is", "Do"))
        else rng.choice((".", ".", "", ", please."))
    )
    end = "?" if text.startswith(("Do I", "Is it")) else end
    return ToolRequest(text.rstrip("?") + end, tuple(calls), tuple(subjects))


def _result(rng: random.Random, split: Split, noun: str, subject: str) -> tuple[str, str]:
    """Return the result of a tool, and the answer it gives."""
    chance = rng.random()
    if chance < 0.2:
        return rng.choice(("ok", "done", "true", '{"ok": true}', "success")), DONE
    if chance < 0.28:
        reason = rng.choice(("not found", "no access", "it is closed", "unknown name", "try again later"))
        return rng.choice(("error: {0}", '{{"error": "{0}"}}')).format(reason), f"That failed: {reason}."
    plain: tuple[Callable[[], str], ...] = (
        lambda: make_number(rng), lambda: str(rng.randrange(1, 1000)), lambda: make_name(rng, split),
        lambda: f"{rng.randrange(1, 100)} {rng.choice(('degrees', 'days', 'euros', 'minutes'))}",
        lambda: rng.choice(("rain", "sunny", "snow", "cloudy", "open", "closed", "late", "on time", "fine")),
    )  # fmt: skip
    if chance < 0.72:
        result = rng.choice(plain)()
        return result, f"The {noun} {subject} is {result}."
    values: dict[str, Any] = {}
    for key in rng.sample(RESULT_KEYS, rng.choice((1, 2, 2, 3))):
        value: Any = rng.choice(plain)()
        values[key] = int(value) if value.isdigit() else value
    said = ", ".join(f"{key} {value}" for key, value in values.items())
    return json.dumps(values), f"The {noun} {subject}: {said}."


@dataclass
class _Draft:
    rng: random.Random
    split: Split
    count_tokens: recall.CountTokens
    room_tokens: int
    turns: list[recall.EpisodeTurn]

    def add(self, *turns: recall.EpisodeTurn) -> bool:
        """Add turns, and return whether there was room; the first turns are always taken."""
        cost = sum(turn.cost(self.count_tokens) for turn in turns)
        if self.turns and cost > self.room_tokens:
            return False
        self.turns += turns
        self.room_tokens -= cost
        return True


def _make_functions(rng: random.Random, split: Split, listed: str) -> list[CallableTool]:
    functions = [make_function(rng, split, listed=listed)]
    for _ in range(rng.choice((0, 1, 1, 1, 2))):
        # The noun of another tool, so that only the verb distinguishes them.
        noun = functions[0].noun if rng.random() < 0.15 else ""
        other = make_function(rng, split, noun=noun)
        if all((other.name != f.name and (other.noun, other.verb) != (f.noun, f.verb)) for f in functions):
            functions.append(other)
    rng.shuffle(functions)
    return functions


def _next_turns(
    draft: _Draft,
    functions: Sequence[CallableTool],
    listed: dict[str, str],
    column: str,
    talk: Callable[[random.Random], recall.EpisodeTurn] | None,
) -> list[recall.EpisodeTurn]:
    rng, split = draft.rng, draft.split
    chance = rng.random()
    if chance < 0.06 and talk is not None:
        return [talk(rng)]
    if chance < 0.12:
        while True:
            stranger = make_function(rng, split)
            words = set(stranger.noun.split())
            if not any(words & set(function.noun.split()) for function in functions):
                break
        return [recall.EpisodeTurn(make_request(rng, split, stranger, {}).text, NO_TOOL, "no_tool")]
    if listed and chance < 0.25:
        name = rng.choice(list(listed))
        question = rng.choice(recall.QUESTIONS).format(name=name, noun=column)
        return [recall.EpisodeTurn(question, recall.answer_for(name, listed[name]), "recall")]
    function = rng.choice(functions)
    request = make_request(rng, split, function, listed)
    turns = [recall.EpisodeTurn(request.text, "\n".join(request.calls), "call")]
    if rng.random() < 0.85:
        results = [_result(rng, split, function.noun, subject) for subject in request.subjects]
        said = " ".join(dict.fromkeys(answer for _, answer in results))
        turns.append(recall.EpisodeTurn(written_results([result for result, _ in results]), said, "answer"))
    return turns


def make_tools_episode(
    rng: random.Random,
    length_tokens: int,
    count_tokens: recall.CountTokens,
    *,
    split: Split = "held_out",
    talk: Callable[[random.Random], recall.EpisodeTurn] | None = None,
) -> recall.Episode:
    """Return one conversation with tools, up to the length that `length_tokens` allows. `talk` makes other turns."""
    column = rng.choice(LISTED) if rng.random() < 0.25 else ""
    functions = _make_functions(rng, split, column)
    tools = tuple(function.as_tool() for function in functions)
    system = rng.choice(TOOL_SYSTEMS) if rng.random() < 0.4 else None
    room = length_tokens - count_tokens(system_text(system, tools)) - recall.TURN_OVERHEAD_TOKENS
    draft = _Draft(rng, split, count_tokens, room, [])
    listed: dict[str, str] = {}
    if column:
        while len(listed) < rng.choice((1, 2, 3, 4, 6, 8)):
            listed[make_name(rng, split, listed)] = make_number(rng)
        form = rng.choice(("{0}: {1}", "{0}: {1}", "- {0}: {1}", "{0} {1}"))
        lines = "\n".join(form.format(name, number) for name, number in listed.items())
        draft.add(recall.EpisodeTurn(f"Here are the {column}s:\n{lines}", recall.NOTED, "told"))
    while True:
        turns = _next_turns(draft, functions, listed, column, talk)
        if not draft.add(*turns) and any(turn.kind == "call" for turn in draft.turns):
            break
        if draft.room_tokens < 0 and any(turn.kind == "call" for turn in draft.turns):
            break
        if not any(turn.kind == "call" for turn in draft.turns):
            draft.room_tokens = max(draft.room_tokens, 100)
    return recall.Episode(system, tuple(draft.turns), length_tokens, tuple(listed), tools)


def make_tools_episodes(
    seed: int, length_tokens: int, count: int, count_tokens: recall.CountTokens, *, split: Split = "held_out"
) -> list[recall.Episode]:
    """Return `count` conversations that depend only on the arguments."""
    rng = random.Random(f"tools {split} {seed} {length_tokens}")
    return [make_tools_episode(rng, length_tokens, count_tokens, split=split) for _ in range(count)]
