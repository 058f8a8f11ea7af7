"""Tools, calls and results as the embedded model's chat template writes them, and as the API has them.

    tool    get_weather(city: string, days?: integer): The weather of a city.
    call    <tool_call>\n{"name": "get_weather", "arguments": {"city": "Bemo"}}\n</tool_call>
    result  <tool_response>\nrain\n</tool_response>

A tool takes one line instead of its JSON schema: an embedded model has few tokens to spend. `tests/train`
compares the texts with the template's own.
"""

from __future__ import annotations

import json
from collections.abc import Sequence
from typing import Any

from weft.eval.recall import Episode

CALL_OPEN, CALL_CLOSE = "<tool_call>", "</tool_call>"
RESULT_OPEN, RESULT_CLOSE = "<tool_response>", "</tool_response>"


def written_call(name: str, arguments: dict[str, Any]) -> str:
    """One call in the form of the chat template."""
    call = json.dumps({"name": name, "arguments": arguments}, ensure_ascii=False)
    return f"{CALL_OPEN}\n{call}\n{CALL_CLOSE}"


def written_results(results: Sequence[str]) -> str:
    """The user turn that the chat template makes of tool messages."""
    return "\n".join(f"{RESULT_OPEN}\n{result}\n{RESULT_CLOSE}" for result in results)


def read_calls(text: str) -> list[dict[str, Any]]:
    """The calls of a written answer."""
    parts = [part.split(CALL_CLOSE)[0] for part in text.split(CALL_OPEN)[1:]]
    return [json.loads(part) for part in parts]


def tool_line(tool: dict[str, Any]) -> str:
    """A tool in the system prompt, as the chat template writes it."""
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
    """The system prompt of a conversation with tools."""
    head = f"{system}\n\n" if system else ""
    return head + "\n".join(["<tools>", *(tool_line(tool) for tool in tools), "</tools>"])


def chat_messages(episode: Episode, turn_index: int) -> list[dict[str, Any]]:
    """The messages of the API that end with what the user, or a tool, says in turn `turn_index`."""
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
                {"id": call_id, "type": "function",
                 "function": {"name": call["name"], "arguments": json.dumps(call["arguments"])}}
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
