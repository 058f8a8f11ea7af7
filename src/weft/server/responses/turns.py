"""The Responses dialect: a body becomes a ``ChatTurn``, and an answer becomes a stored response.

    path of StoredResponse --read_history--> TurnHistory: items, and the tokens that the model knows
    response + answer's tokens --Keeper--> StoredResponse

The next turn begins where the answer ended. The tokenizer may split a text into other tokens than the model wrote. If
the next prompt were tokenized from text, it would then miss the cached prefix from the first such token on. So a
response stores the tokens of prompt and answer, with a digest of the text. If the next prompt begins with this text,
the stored tokens are used for it (``KnownPrefix``). Only tokens that the parent does not have are stored.
"""

from __future__ import annotations

import asyncio
import copy
import struct
from collections.abc import Callable, Mapping, Sequence
from typing import Any, NamedTuple, TypeVar

import msgspec

from weft.errors import ContextLengthError, RequestError
from weft.server.chat_turn import ChatTurn, PreparedTurn, prepare_turn
from weft.server.responses.items import LOGPROBS, Item, ReasoningOptions, ResponsesBody, messages_of
from weft.server.responses.store import StoredResponse
from weft.server.served_model import ServedModel
from weft.server.service import Service
from weft.text.chat import common_length
from weft.text.chat_request import ConversationFields
from weft.text.prompt import KnownPrefix, Prompt, text_digest

_NAMES = {"messages": "input", "max_tokens": "max_output_tokens"}
_FORMATS = ("text", "json_object", "json_schema")


def responses_turn(body: ResponsesBody, items: Sequence[Item], known: KnownPrefix | None = None) -> ChatTurn:
    """Return the turn of ``body``. ``items``: of the conversation, earlier turns included; ``known``: the tokens of the
    earlier turns. Raise RequestError that names the field."""
    response_format, fields = _response_format(body), body
    if response_format is not body.response_format:
        fields = msgspec.structs.replace(body, response_format=response_format)
    wants_logprobs = LOGPROBS in (body.include or ()) or body.top_logprobs
    return ChatTurn(
        conversation=conversation(body, items),
        fields=fields,
        max_tokens=body.max_output_tokens,
        logprobs=(body.top_logprobs or 0) if wants_logprobs else None,
        prompt_field="input",
        answer_field="max_output_tokens",
        known=known,
    )


_ITEMS_AT_ONCE = 500
"""Most items that are read on the event loop."""
Read = TypeVar("Read")


async def read_apart(count: int, read: Callable[..., Read], *arguments: Any) -> Read:
    """Return ``read(*arguments)``; call it in a thread if ``count``, the items that it reads, is large."""
    return read(*arguments) if count <= _ITEMS_AT_ONCE else await asyncio.to_thread(read, *arguments)


def conversation(body: ResponsesBody, items: Sequence[Item]) -> ConversationFields:
    """Return the fields that shape the prompt. Raise RequestError."""
    functions = flat_tools(body.tools)
    names = {
        (function.namespace, function.definition["name"]): function.name
        for function in functions
        if function.namespace and function.name
    }
    messages = messages_of(items, body.instructions, names)
    if not messages:
        raise RequestError("input is empty: it needs text or at least one item", param="input")
    reasoning = body.reasoning or ReasoningOptions()
    return ConversationFields(
        messages=messages,
        tools=[_tool(function) for function in functions],
        tool_choice=_choice(body.tool_choice, names),
        parallel_tool_calls=body.parallel_tool_calls,
        variables=body.chat_template_kwargs,
        reasoning_effort=reasoning.effort,
        effort_field="reasoning.effort",
        thinking_token_budget=reasoning.max_tokens,
        budget_field="reasoning.max_tokens",
    )


def format_of(body: ResponsesBody) -> dict[str, Any]:
    """Return ``text.format``, or its default."""
    text_format = None if body.text is None else body.text.format
    return text_format or {"type": "text"}


def _response_format(body: ResponsesBody) -> dict[str, Any] | None:
    text_format = format_of(body)
    kind = text_format.get("type")
    if kind not in _FORMATS:
        raise RequestError(f"text.format.type is {kind!r}; it is {', '.join(_FORMATS)}", param="text.format.type")
    if kind == "text":
        return body.response_format
    if body.response_format is not None:
        raise RequestError(
            "text.format and response_format both define the form of the answer; send only one", param="text.format"
        )
    if kind == "json_object":
        return {"type": "json_object"}
    if not isinstance(text_format.get("schema"), dict):
        raise RequestError("text.format.schema is missing: a JSON schema", param="text.format.schema")
    return {"type": "json_schema", "json_schema": {"name": text_format.get("name"), "schema": text_format["schema"]}}


class FlatTool(NamedTuple):
    """A tool of the request, or one inside a namespace. ``name``: the name that the model sees; with the namespace
    before it, if two namespaces have a function of the same name."""

    place: str
    definition: Any
    namespace: str
    name: str


def flat_tools(tools: Sequence[Any] | None) -> list[FlatTool]:
    """Return ``tools``, where the functions of a namespace replace the namespace. Raise RequestError for a namespace
    without a name or tools."""
    flattened: list[tuple[str, Any, str]] = []
    for index, tool in enumerate(tools or ()):
        place = f"tools[{index}]"
        if not isinstance(tool, dict) or tool.get("type") != "namespace":
            flattened.append((place, tool, ""))
            continue
        namespace, inner = tool.get("name"), tool.get("tools")
        if not isinstance(namespace, str) or not isinstance(inner, list):
            raise RequestError(f"{place}: a namespace has a name and a list of tools", param=place)
        flattened += [(f"{place}.tools[{number}]", inner_tool, namespace) for number, inner_tool in enumerate(inner)]
    tool_names = [_name_of(tool) for _, tool, _ in flattened]
    return [
        FlatTool(place, tool, namespace, name if not namespace or tool_names.count(name) < 2 else f"{namespace}.{name}")
        for (place, tool, namespace), name in zip(flattened, tool_names, strict=True)
    ]


def _name_of(tool: Any) -> str:
    name = tool.get("name") if isinstance(tool, dict) else None
    return name if isinstance(name, str) else ""


def namespaces_of(tools: Sequence[Any] | None) -> dict[str, tuple[str, str]]:
    """Return namespace and own name of each function in a namespace, by the name that the model sees."""
    return {
        function.name: (function.namespace, function.definition["name"])
        for function in flat_tools(tools)
        if function.namespace and function.name
    }


def _choice(choice: Any, names: Mapping[tuple[str, str], str]) -> Any:
    """Return ``tool_choice`` with the names that the model sees."""
    if not isinstance(choice, dict):
        return choice
    if isinstance(choice.get("tools"), list):
        return {**choice, "tools": [_choice(tool, names) for tool in choice["tools"]]}
    namespace, name = choice.get("namespace"), choice.get("name")
    if not isinstance(namespace, str) or not isinstance(name, str):
        return choice
    return {**choice, "name": names.get((namespace, name), name)}


def _tool(flat: FlatTool) -> Any:
    """Return a tool as chat completions have it: the function in an object of its own."""
    place, tool = flat.place, flat.definition
    kind = tool.get("type") if isinstance(tool, dict) else None
    if kind not in ("function", "custom"):
        return tool
    if not isinstance(tool.get("name"), str):
        raise RequestError(f"{place}.name is missing", param=f"{place}.name")
    if kind == "custom":
        return {
            "type": "custom",
            "custom": {name: tool[name] for name in ("name", "description", "format") if tool.get(name) is not None},
        }
    tool = {**tool, "name": flat.name}
    function = {
        name: tool[name] for name in ("name", "description", "parameters", "strict") if tool.get(name) is not None
    }
    return {"type": "function", "function": function}


def in_own_words(error: RequestError) -> RequestError:
    """Return ``error`` of a turn with the names of this dialect."""
    param = _NAMES.get(error.param or "", error.param)
    message = error.message.replace("(max_tokens)", "(max_output_tokens)")
    if ".custom." in (param or ""):  # chat completions nest the function in an object
        param, message = str(param).replace(".custom.", "."), message.replace(".custom.", ".")
    changed = copy.copy(error)
    changed.args, changed.message, changed.param = (message,), message, param
    return changed


TURNS_STEP = 4
_ANSWER_SHARE = 8


async def prepare_response(
    service: Service, body: ResponsesBody, items: Sequence[Item], known: KnownPrefix | None
) -> PreparedTurn:
    """Return the turn; if ``truncation`` is auto, with only the items that the context has room for.

        items:   system | user ... | user ... | user ... | user ...
        shown:   system |                     | user ... | user ...

    A turn keeps everything after its user message, so no tool output loses its call. The oldest turns are dropped,
    TURNS_STEP at a time, so that several turns begin with the same prefix, which the cache has. Raise RequestError,
    UnknownModelError, EngineUnavailableError."""
    try:
        return await prepare_turn(service, await read_apart(len(items), responses_turn, body, items, known))
    except ContextLengthError:
        if body.truncation != "auto":
            raise
    leading = next(
        (index for index, item in enumerate(items) if item.get("role") not in ("system", "developer")), len(items)
    )
    starts = [index for index in range(leading + 1, len(items)) if items[index].get("role") == "user"]
    fitting = await _first_fitting(
        service, body, items, leading, starts[TURNS_STEP - 1 :: TURNS_STEP]
    ) or await _first_fitting(service, body, items, leading, starts)
    if fitting is not None:
        return fitting
    shortest = items if not starts else [*items[:leading], *items[starts[-1] :]]
    return await prepare_turn(service, await read_apart(len(shortest), responses_turn, body, shortest))


async def _first_fitting(
    service: Service, body: ResponsesBody, items: Sequence[Item], leading: int, starts: Sequence[int]
) -> PreparedTurn | None:
    """Return the longest conversation that begins at one of ``starts`` and fits, found by bisection."""
    best: PreparedTurn | None = None
    low, high = 0, len(starts)
    while low < high:
        middle = (low + high) // 2
        turn = await _fitting(service, body, [*items[:leading], *items[starts[middle] :]])
        if turn is None:
            low = middle + 1
        else:
            best, high = turn, middle
    return best


async def _fitting(service: Service, body: ResponsesBody, items: Sequence[Item]) -> PreparedTurn | None:
    try:
        turn = await prepare_turn(service, await read_apart(len(items), responses_turn, body, items))
    except ContextLengthError:
        return None
    context = turn.model.info.sizes.max_model_len
    answer = body.max_output_tokens or context // _ANSWER_SHARE
    return turn if len(turn.prompt.tokens) + answer <= context else None


class TurnHistory(msgspec.Struct, frozen=True):
    """The turns before a request. ``items``: of all earlier turns, input and output in order. ``tokens``: as the model
    read and wrote them."""

    items: list[Item] = []
    tokens: list[int] = []
    known: KnownPrefix | None = None


class _Answer(msgspec.Struct):
    """The part of a response object that a turn reads."""

    output: list[dict[str, Any]]


_decode_answer = msgspec.json.Decoder(_Answer).decode
_decode_items = msgspec.json.Decoder(list[dict[str, Any]]).decode


def read_history(path: Sequence[StoredResponse], vocabulary: bytes) -> TurnHistory:
    """Return the history of a conversation. ``vocabulary``: of the tokenizer; tokens of another tokenizer are left
    out."""
    items: list[Item] = []
    tokens: list[int] = []
    for stored in path:
        items += _decode_items(stored.items)
        items += _decode_answer(stored.body).output
        if stored.vocabulary == vocabulary and stored.shared <= len(tokens):
            tokens = [*tokens[: stored.shared], *_unpacked(stored.tokens)]
        else:
            tokens = []
    last = path[-1]
    usable = bool(tokens) and last.vocabulary == vocabulary and bool(last.digest)
    return TurnHistory(items, tokens, KnownPrefix(tokens, last.chars, last.digest) if usable else None)


class RawAnswer(NamedTuple):
    """All generated tokens, and their text with its markers."""

    tokens: list[int]
    text: str


class Keeper(msgspec.Struct, frozen=True):
    """The function that makes the stored record of a response. ``items``: of this request; ``before``: the parent's
    tokens."""

    model: ServedModel
    prompt: Prompt
    items: list[Item]
    before: list[int]

    def record(self, response_id: str, parent: str | None, body: bytes, answer: RawAnswer) -> StoredResponse:
        """Return the record. ``body``: the response as JSON."""
        tokenizer = self.model.renderer.tokenizer
        tokens = answer.tokens
        if tokens and tokens[-1] in tokenizer.special_ids:
            tokens = tokens[:-1]
        items = msgspec.json.encode(self.items)
        written = b"".join(map(tokenizer.token_bytes, tokens)).decode(errors="replace")
        if self.prompt.text is None or written != answer.text:
            return StoredResponse(response_id=response_id, parent=parent, body=body, items=items)
        tokens, text = [*self.prompt.tokens, *tokens], self.prompt.text + written
        shared = common_length(tokens, self.before) if self.before else 0
        return StoredResponse(
            response_id=response_id,
            parent=parent,
            body=body,
            items=items,
            vocabulary=self.model.vocabulary,
            shared=shared,
            tokens=_packed(tokens[shared:]),
            chars=len(text),
            digest=text_digest(text),
        )


def _packed(tokens: Sequence[int]) -> bytes:
    return struct.pack(f"<{len(tokens)}i", *tokens)


def _unpacked(raw: bytes) -> Sequence[int]:
    return struct.unpack(f"<{len(raw) // 4}i", raw)
