"""Bodies of requests: JSON to checked Structs, and Structs to ``SamplingParams`` and a ``Grammar``.

    bytes --JSON--> dict --refuse_unserved--> dict --convert--> Struct --sampling_params--> SamplingParams

* a field that this server serves is checked for its type, and the error names field, expected, got;
* a known field that this server does not serve, and without which the answer would mean something else, is
  refused, unless its value asks for nothing: no answer may silently lack a feature of its request;
* a field without which the answer means the same (``NOT_NEEDED``) is ignored and reported: in X-Weft-Ignored of the
  answer and in the access log. So are tools that other servers run, a ``max_tokens`` beyond the context and an effort
  of reasoning that the template does not know;
* an unknown field is ignored and reported in the same way, with one warning in the log; with server.strict_fields it is
  a 400, and so are more than UNKNOWN_FIELDS_MAX unknown fields.

Without these rules a typo such as ``max_token`` would change an answer without an error. Clients of every API version
send fields that no server knows, so an unknown field is an error only if the operator wants that. The ignored fields of
a request are a context variable (``text.current_request``), because bodies are parsed far from the answer, large ones
in a thread. Only names that are plain words are reported, and only a few, because a client chose them.

``null`` always means "not given". Refusals are 400 and not 501: common clients retry a 5xx.

Regular expressions and ``json.loads`` hold the interpreter's lock for a time that grows with the body. In the server's
process they would block every client, so a large body goes through a worker first:

    body --cut strings--> "{}[]:," alone --count--> too many? --json.loads--> a key twice? too deep?
"""

from __future__ import annotations

import asyncio
import difflib
import functools
import itertools
import json
import logging
import re
import typing
from collections import Counter
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Annotated, Any, Literal, TypeVar

import msgspec

from weft.config import STREAM_INTERVAL_MAX
from weft.errors import RequestError
from weft.request import Grammar, SamplingParams
from weft.text.chat import ChatMessage
from weft.text.current_request import NAMES_MAX, ignored_fields, note_ignored, shown_name
from weft.text.grammar_fields import from_response_format, from_structured_outputs
from weft.text.grammars import KINDS, TokenOf, grammar_from
from weft.text.surrogates import whole_characters

COMPLETION_TOKENS_DEFAULT = 16
Int = Annotated[int, msgspec.Meta(ge=-(2**63), le=2**63 - 1)]
"""Integers of JSON, of at most 64 bits, as messages between the processes need."""
Priority = Annotated[int, msgspec.Meta(ge=-(2**31), le=2**31 - 1)]
Salt = Annotated[str, msgspec.Meta(max_length=1024)]
"""Cache salts. The length is bounded, since the cache keeps a salt as long as its prefixes (law L11)."""
AnswerId = Annotated[str, msgspec.Meta(max_length=256)]
SlotNumber = Annotated[int, msgspec.Meta(ge=-1, le=63)]
"""Numbers of slots; -1: none, as in llama-server."""
StreamInterval = Annotated[int, msgspec.Meta(ge=1, le=STREAM_INTERVAL_MAX)]
"""Tokens of a streamed event after the first, as in vLLM."""

LARGE_BODY_BYTES = 256 << 10
"""Bytes above which a worker checks a body before it is parsed, and a thread parses it: a megabyte of small objects
takes a seventh of a second."""
_STRING = re.compile(rb'"[^"\\]*+(?:\\.[^"\\]*+)*+"', re.DOTALL)

Body = TypeVar("Body", bound=msgspec.Struct)


class StreamOptions(msgspec.Struct, kw_only=True):
    include_usage: bool | None = None
    continuous_usage_stats: bool | None = None


class SamplingFields(msgspec.Struct, kw_only=True):
    """Fields of every dialect that generates: all of them serve a field that is added here."""

    model: str | None = None
    stream: bool | None = None
    stream_interval: StreamInterval | None = None
    temperature: float | None = None
    top_p: float | None = None
    top_k: Int | None = None
    min_p: float | None = None
    repetition_penalty: float | None = None
    presence_penalty: float | None = None
    frequency_penalty: float | None = None
    logit_bias: dict[Int, float] | None = None
    seed: int | None = None
    min_tokens: Int | None = None
    stop: str | list[str] | None = None
    stop_token_ids: list[Int] | None = None
    allowed_token_ids: list[Int] | None = None
    bad_words: list[str] | None = None
    truncate_prompt_tokens: Int | None = None
    truncation_side: Literal["left", "right"] | None = None
    include_stop_str_in_output: bool | None = None
    ignore_eos: bool | None = None
    skip_special_tokens: bool | None = None
    priority: Priority | None = None
    cache_salt: Salt | None = None
    cache_boundaries: list[Int] | None = None
    session: AnswerId | None = None
    id_slot: SlotNumber | None = None
    response_format: dict[str, Any] | None = None
    structured_outputs: dict[str, Any] | None = None
    guided_json: dict[str, Any] | str | bool | None = None
    guided_regex: str | None = None
    guided_choice: list[str] | None = None
    guided_grammar: str | None = None


class GenerateBody(SamplingFields, kw_only=True):
    """Fields that completions and chat share."""

    stream_options: StreamOptions | None = None
    n: Int | None = None
    max_tokens: Int | None = None
    prompt_logprobs: Int | None = None
    request_id: AnswerId | None = None
    return_token_ids: bool | None = None
    return_tokens_as_token_ids: bool | None = None
    add_special_tokens: bool | None = None


class CompletionBody(GenerateBody, kw_only=True):
    prompt: str | list[Any]
    echo: bool | None = None
    logprobs: Int | None = None


class ChatReasoning(msgspec.Struct, kw_only=True):
    """Options of reasoning, as OpenRouter's clients send them. ``exclude``: whether the reasoning is left out of the
    answer."""

    effort: str | None = None
    max_tokens: Int | None = None
    enabled: bool | None = None
    exclude: bool | None = None


class ChatBody(GenerateBody, kw_only=True):
    messages: list[ChatMessage]
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None
    chat_template_kwargs: dict[str, Any] | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None
    thinking_token_budget: Int | None = None
    reasoning: ChatReasoning | None = None
    enable_thinking: bool | None = None
    thinking: Any = None
    logprobs: bool | None = None
    top_logprobs: Int | None = None
    max_completion_tokens: Int | None = None
    tools: list[Any] | None = None
    tool_choice: str | dict[str, Any] | None = None
    parallel_tool_calls: bool | None = None
    include_reasoning: bool | None = None
    prediction: dict[str, Any] | None = None
    store: bool | None = None
    """Ignored, and reported in a header of the answer: clients send it by default."""


class TokenizePromptBody(msgspec.Struct, kw_only=True):
    prompt: str
    model: str | None = None
    add_special_tokens: bool | None = None
    return_token_strs: bool | None = None


class TokenizeChatBody(ChatBody, kw_only=True):
    """The body of a chat request; only the fields that shape its prompt have an effect."""

    return_token_strs: bool | None = None


class DetokenizeBody(msgspec.Struct, kw_only=True):
    tokens: list[Int]
    model: str | None = None


_CHAT_ONLY = "it belongs to /v1/chat/completions"
_TEXT_ONLY = "answers are text"
_OF_CHECKPOINT = (
    "the checkpoint's own processor settings decide how pictures are read; fps, min_frames and "
    "max_frames stand in the part that has a video"
)

Unserved = Mapping[str, tuple[str, tuple[Any, ...]]]

UNSERVED: Unserved = {
    "functions": ("use tools", ([],)),
    "function_call": ("use tool_choice", ("none", "auto")),
    "json_schema": ("use response_format or guided_json", ()),
    "grammar": ("use guided_grammar", ("",)),
    "modalities": (_TEXT_ONLY, (["text"],)),
    "audio": (_TEXT_ONLY, ()),
    "mm_processor_kwargs": (_OF_CHECKPOINT, ({},)),
    "media_io_kwargs": (_OF_CHECKPOINT, ({},)),
    "prompt_embeds": ("prompts are text or token ids", ()),
    "web_search_options": ("there is no web search here", ()),
    "best_of": ("ask for n answers and choose on your side", (1,)),
    "suffix": ("filling in the middle is not served", ("",)),
    "use_beam_search": ("beam search is not served", (False,)),
    "length_penalty": ("it belongs to beam search, which is not served", (1.0,)),
    "logprob_token_ids": ("use logprobs", ()),
    "verbosity": ("it is not served", ("medium",)),
    "store": ("this server stores no answers", (False,)),
    "background": ("this server stores no answers", (False,)),
    "chat_template": ("a template is chosen when the server starts, with --chat-template", ()),
    "spaces_between_special_tokens": ("it is not served", (True,)),
    "typical_p": ("this sampler is not served", (1.0,)),
    "repetition_detection": ("it is not served", ()),
    "watermarking": ("it is not served", (False,)),
    "kv_transfer_params": ("it is not served", ()),
    "ec_transfer_params": ("it is not served", ()),
    "vllm_xargs": ("it is not served", ({},)),
    "return_token_offsets": ("it is not served", (False,)),
    "return_prompt_text": ("it is not served", (False,)),
}
"""Reason and harmless values of each refused field: (why it is refused, values besides null that ask for nothing)."""

NOT_NEEDED = frozenset(
    {
        "store",
        "thinking_token_budget",
        "verbosity",
        "repetition_detection",
        "web_search_options",
        "kv_transfer_params",
        "ec_transfer_params",
        "context_management",
        "mcp_servers",
        "container",
    }
)
"""Fields of UNSERVED tables that are ignored and reported, not refused: hints about length, speed and bookkeeping, and
tools that another server would run."""

NO_EFFECT = frozenset(
    {
        "user",
        "client_metadata",
        "metadata",
        "service_tier",
        "safety_identifier",
        "prompt_cache_key",
        "prompt_cache_retention",
        "prompt_cache_options",
    }
)
"""Known fields without an effect on this server: there is one tier, and every prefix is cached."""

UNSERVED_IN_CHAT = {
    name: row
    for name, row in {**UNSERVED, "echo": ("it belongs to /v1/completions", (False,))}.items()
    if name != "store"
}
UNSERVED_IN_COMPLETIONS = {
    **UNSERVED,
    "prediction": (_CHAT_ONLY, ()),
    "tools": (_CHAT_ONLY, ([],)),
    "tool_choice": (_CHAT_ONLY, ("none", "auto")),
    "include_reasoning": (_CHAT_ONLY, (True,)),
    "thinking_token_budget": (_CHAT_ONLY, ()),
}


async def read_body(raw: bytes, body_type: type[Body], *, unserved: Unserved = UNSERVED) -> Body:
    """Parse a body with ``parse_body``, in a thread for a large body, which ``BodyChecker`` has bounded."""
    return await _beside_loop(raw, functools.partial(parse_body, body_type=body_type, unserved=unserved))


async def read_tokenize_body(raw: bytes) -> TokenizePromptBody | TokenizeChatBody:
    """Parse a body with ``parse_tokenize_body``, in a thread for a large body."""
    return await _beside_loop(raw, parse_tokenize_body)


async def _beside_loop(raw: bytes, parse: Callable[[bytes], Body]) -> Body:
    return parse(raw) if len(raw) <= LARGE_BODY_BYTES else await asyncio.to_thread(parse, raw)


def parse_body(raw: bytes, body_type: type[Body], *, unserved: Unserved = UNSERVED) -> Body:
    """Parse a body. Raise RequestError: not JSON, not an object, a key twice, a refused field, a wrong type, a missing
    field."""
    return _converted(_json_object(raw), body_type, unserved)


def parse_tokenize_body(raw: bytes) -> TokenizePromptBody | TokenizeChatBody:
    """Parse a body of /tokenize: ``messages`` in it choose the type. Raise RequestError."""
    value = _json_object(raw)
    if "messages" not in value:
        return _converted(value, TokenizePromptBody, UNSERVED)
    if "prompt" in value:
        raise RequestError("prompt and messages are both given; send one of them", param="messages")
    return _converted(value, TokenizeChatBody, UNSERVED)


def _json_object(raw: bytes) -> dict[str, Any]:
    try:
        value, raw = _decoded(raw)
        if len(raw) <= LARGE_BODY_BYTES:  # BodyChecker has checked larger bodies
            _refuse_duplicates(raw)
    except RecursionError:
        raise RequestError("the body is nested too deeply", code="invalid_json") from None
    except DuplicateKeyError as error:
        raise RequestError(str(error), param=error.name, code="invalid_json") from None
    except (msgspec.DecodeError, ValueError) as error:
        raise RequestError(f"the body is not JSON: {_json_fault(raw, str(error))}", code="invalid_json") from None
    if not isinstance(value, dict):
        raise RequestError(f"the body is {_kind(value)}; it must be an object", code="invalid_json")
    return value


def _decoded(raw: bytes) -> tuple[Any, bytes]:
    """Return the value of a JSON text, and the text of which it is the value. Half of a surrogate pair in a string is
    read as U+FFFD: agents cut texts in the middle of an emoji, and send them again with every later turn. Raise
    DecodeError, ValueError, RecursionError."""
    try:
        return msgspec.json.decode(raw), raw
    except msgspec.DecodeError:
        whole = whole_characters(raw)
        if whole == raw:
            raise
        return msgspec.json.decode(whole), whole


class BodyVerdict(msgspec.Struct):
    """The verdict on a body. ``message``: empty if the body may be parsed. ``is_too_large``: the body has too many
    values."""

    message: str = ""
    param: str | None = None
    is_too_large: bool = False


class DuplicateKeyError(ValueError):
    """A key occurs twice in an object: this server and a filter before it could read different values."""

    def __init__(self, name: str) -> None:
        super().__init__(f"the body has the key {name!r} twice in one object")
        self.name = name


def _refuse_duplicates(raw: bytes) -> None:
    """Raise DuplicateKeyError; ValueError and RecursionError for text that is not JSON."""
    _decode_names(raw.decode())


def _names_differ(pairs: list[tuple[str, Any]]) -> None:
    """Raise DuplicateKeyError for a key that comes twice. Build no object."""
    names = [name for name, _ in pairs]
    if len(set(names)) < len(names):
        raise DuplicateKeyError(Counter(names).most_common(1)[0][0][:100])


_decode_names = json.JSONDecoder(object_pairs_hook=_names_differ).decode


def value_count(raw: bytes) -> int:
    """Return a lower bound of the objects, arrays and elements of a JSON text, without parsing it: a comma separates
    two values, and a bracket opens one."""
    bare = _STRING.sub(b"", raw)
    return bare.count(b",") + bare.count(b"{") + bare.count(b"[")


def _verdict(raw: bytes, values_max: int) -> BodyVerdict:
    count = value_count(raw)
    if count > values_max:
        return BodyVerdict(
            f"the body has {count} JSON values; the limit is {values_max} (limits.max_json_values)",
            None,
            is_too_large=True,
        )
    try:
        _refuse_duplicates(raw)
    except DuplicateKeyError as error:
        return BodyVerdict(str(error), error.name)
    except (RecursionError, ValueError):
        pass  # the parser in the server reports the error
    return BodyVerdict()


def prepare_worker(start: bytes) -> tuple[bytes, Callable[[bytes], bytes]]:
    """Return the function of a worker of bodies (``weft.text.workers``)."""
    values_max = int.from_bytes(start, "little")
    return b"", lambda raw: msgspec.msgpack.encode(_verdict(raw, values_max))


def _json_fault(raw: bytes, fault: str) -> str:
    """Return the parser's message with the text at which it stopped. NaN and Infinity get a hint of their own: Python's
    ``json`` writes them."""
    place = re.search(r"\(byte (\d+)\)", fault)
    if place is None:
        return fault
    rest = raw[int(place[1]) :][:16].decode("utf-8", "replace").lstrip("-")
    hint = next(
        (f"; {name} is not JSON: send a number or null" for name in ("NaN", "Infinity") if rest.startswith(name)), ""
    )
    return f"{fault.removeprefix('JSON is malformed: ')} in {rest!r}{hint}"


def _converted(value: dict[str, Any], body_type: type[Body], unserved: Unserved) -> Body:
    refuse_unserved(value, unserved)
    check_known(
        [name for name in value if name not in unserved and name not in NO_EFFECT], body_type.__struct_encode_fields__
    )
    try:
        return msgspec.convert(value, body_type, str_keys=True)
    except msgspec.ValidationError as error:
        refusal = _explained(str(error))
        choices = _choices(body_type, (refusal.param or "").split("."))
        if not choices or "enum value" not in refusal.message:
            raise refusal from None
        raise RequestError(
            f"{refusal.message}; it may be {', '.join(map(repr, choices))}", param=refusal.param, code=refusal.code
        ) from None


def _choices(kind: Any, path: Sequence[str]) -> list[str]:
    """Return the texts that the field at ``path`` in the type ``kind`` may be; empty if it takes any text."""
    if not path:
        if typing.get_origin(kind) is Literal:
            return list(typing.get_args(kind))
        return [choice for arm in typing.get_args(kind) for choice in _choices(arm, ())]
    if isinstance(kind, type) and issubclass(kind, msgspec.Struct):
        fields = {field.encode_name: field.type for field in msgspec.structs.fields(kind)}
        return _choices(fields.get(path[0].removesuffix("[...]")), path[1:])
    return [choice for arm in typing.get_args(kind) for choice in _choices(arm, path)]


def refuse_unserved(value: Mapping[str, Any], unserved: Unserved) -> None:
    for name in value.keys() & unserved.keys():
        why, neutral = unserved[name]
        field_value = value[name]
        if field_value is not None and not any(field_value == allowed for allowed in neutral):
            if name in NOT_NEEDED:
                note_ignored(name)
                continue
            raise RequestError(f"{name} is not supported: {why}", param=name, code="unsupported_parameter")


def sampling_params(
    body: SamplingFields,
    defaults: Mapping[str, Any],
    *,
    max_tokens: int | None,
    grammar: Grammar | None,
    n: int | None = None,
    logprobs: int | None = None,
    prompt_logprobs: int | None = None,
    banned: tuple[tuple[int, ...], ...] = (),
) -> SamplingParams:
    """Return the values of the request; for missing fields the values of a created name or the checkpoint
    (``ServedModel``), then the defaults of SamplingParams. ``banned``: the sequences of ``bad_words``.

    Ranges are checked by ``SamplingParams.check`` where the vocabulary is known.
    """
    if body.seed is not None and not -(2**63) <= body.seed < 2**64:
        raise RequestError(f"seed must be at least {-(2**63)} and at most {2**64 - 1}", param="seed")
    if body.allowed_token_ids is not None and not body.allowed_token_ids:
        raise RequestError("allowed_token_ids is empty: no token is possible", param="allowed_token_ids")
    stop = (body.stop,) if isinstance(body.stop, str) else None if body.stop is None else tuple(body.stop)
    fields: dict[str, Any] = {
        "n": n,
        "stop": stop,
        "max_tokens": max_tokens,
        "temperature": body.temperature,
        "top_p": body.top_p,
        "top_k": body.top_k,
        "min_p": body.min_p,
        "repetition_penalty": body.repetition_penalty,
        "presence_penalty": body.presence_penalty,
        "frequency_penalty": body.frequency_penalty,
        "logit_bias": body.logit_bias,
        "seed": body.seed,
        "min_tokens": body.min_tokens,
        "stop_token_ids": tuple(body.stop_token_ids or ()),
        "ignore_eos": body.ignore_eos,
        "include_stop_str_in_output": body.include_stop_str_in_output,
        "skip_special_tokens": body.skip_special_tokens,
        "prompt_logprobs": prompt_logprobs,
        "allowed_token_ids": tuple(body.allowed_token_ids or ()),
        "banned_sequences": banned,
    }
    chosen = {**defaults, **{name: value for name, value in fields.items() if value is not None}}
    return SamplingParams(**chosen, logprobs=logprobs, grammar=grammar)


def refuse_stream_fields(body: GenerateBody) -> None:
    """Raise RequestError when stream_options is set and nothing is streamed."""
    if body.stream_options is not None and not body.stream:
        raise RequestError("stream_options needs stream to be true", param="stream_options")


class Streaming(msgspec.Struct, frozen=True):
    """Whether an answer is streamed; tokens of a part after the first, None for the server's setting."""

    wanted: bool = False
    interval_tokens: int | None = None


NOT_STREAMED = Streaming()


def stream_usage(body: GenerateBody) -> tuple[bool, bool]:
    """Return whether a stream has its usage in a last chunk, and in every one."""
    options = body.stream_options or StreamOptions()
    return bool(options.include_usage), bool(options.continuous_usage_stats)


def prompts_of(value: str | list[Any], *, field: str = "prompt") -> list[str | list[int]]:
    """Return one prompt or several, as text or as token ids; text and ids may be mixed in a list of prompts. ``field``:
    the request's field, for errors."""
    if isinstance(value, str):
        return [value]
    if not value:
        raise RequestError(f"{field} is an empty list: it needs text or token ids", param=field)
    if all(type(item) is int for item in value):
        return [value]
    prompts: list[str | list[int]] = []
    for position, item in enumerate(value):
        if isinstance(item, str) or (isinstance(item, list) and all(type(token) is int for token in item)):
            prompts.append(item)
        else:
            raise RequestError(
                f"{field}[{position}]: expected str or a list of token ids, got {_kind(item)}", param=field
            )
    return prompts


def _explained(message: str) -> RequestError:
    """Return msgspec's message as an error that begins with the field, which is also ``param``."""
    missing = re.fullmatch(r"Object missing required field `(\w+)`(?: - at `\$?\.?(.*)`)?", message)
    if missing:
        inside = missing.group(2)
        name = f"{inside}.{missing.group(1)}" if inside else missing.group(1)
        return RequestError(f"{name} is missing", param=name, code="missing_required_parameter")
    wrong = re.fullmatch(r"(.*?) - at `(?:key` in `)?\$\.?(.*)`", message)
    if not wrong:
        return RequestError(message)
    said, name = (
        wrong.group(1),
        wrong.group(2).removesuffix("[...]"),
    )  # a value in an object: msgspec does not name its key
    said = said.replace("`", "").replace(" | null", "")
    return RequestError(f"{name}: {said[0].lower()}{said[1:]}", param=name or None, code="invalid_type")


def _kind(value: Any) -> str:
    """Return the JSON word for a value's type."""
    if value is None:
        return "null"
    names = {bool: "bool", int: "int", float: "float", str: "str", list: "array", dict: "object"}
    return names.get(type(value), type(value).__name__)


def grammar_of(body: SamplingFields, token_of: TokenOf) -> Grammar | None:
    """Return the grammar of the body's fields. ``token_of`` maps a marker to its token. Raise RequestError that names
    the field. The engine checks the content of the grammar."""
    grammars: list[tuple[str, Grammar]] = []
    if body.response_format is not None and body.response_format.get("type") != "text":
        grammars.append(("response_format", from_response_format(body.response_format, token_of)))
    if body.structured_outputs:
        grammars.append(("structured_outputs", from_structured_outputs(body.structured_outputs, token_of)))
    for kind in KINDS:
        name, value = f"guided_{kind}", getattr(body, f"guided_{kind}")
        if value is not None:
            grammars.append((name, grammar_from(kind, value, name)))
    if len(grammars) > 1:
        raise RequestError(
            f"{grammars[0][0]} and {grammars[1][0]} both define the form of the answer; send only one",
            param=grammars[1][0],
        )
    return grammars[0][1] if grammars else None


HEADER = "x-weft-ignored"
UNKNOWN_FIELDS_MAX = 256
"""Most unknown fields of one request, and of its options; more are refused."""
_WARNED_MAX = 256
_COMPARED_MAX = 1024
"""Most names that a misspelled name is compared with."""
_log = logging.getLogger("weft.server")
_warned: set[str] = set()
"""Names that were warned of: a client sends a name with every request, so each is warned of once."""


def check_known(fields: Collection[str], known: Collection[str]) -> None:
    """Note the unknown fields. Raise RequestError for more than UNKNOWN_FIELDS_MAX of them, and for the first with
    server.strict_fields."""
    known = frozenset(known)
    unknown = [name for name in fields if name not in known]
    if len(unknown) > UNKNOWN_FIELDS_MAX:
        raise RequestError(
            f"the request has {len(unknown)} unknown fields; the limit is {UNKNOWN_FIELDS_MAX}", code="unknown_field"
        )
    ignored = ignored_fields()
    if ignored is None:
        return
    for name in dict.fromkeys(map(shown_name, unknown[:NAMES_MAX])):
        if ignored.strict:
            raise RequestError(
                f"{_unknown(name, known)}; this server refuses unknown fields (server.strict_fields)",
                param=name,
                code="unknown_field",
            )
        ignored.add(name)
        if name not in _warned and len(_warned) < _WARNED_MAX:
            _warned.add(name)
            _log.warning("%s and was ignored; further requests with it are not reported", _unknown(name, known))


def _unknown(name: str, known: Collection[str]) -> str:
    return f"the field {name} is unknown{did_you_mean(name, known)}"


def did_you_mean(name: str, known: Collection[str]) -> str:
    """Return `` (did you mean X?)`` if one of the first _COMPARED_MAX of ``known`` is close to ``name``, else
    nothing."""
    by_lower = {candidate.lower(): candidate for candidate in itertools.islice(known, _COMPARED_MAX)}
    close = difflib.get_close_matches(name.lower()[:200], by_lower, 1, 0.75)
    return f" (did you mean {by_lower[close[0]]}?)" if close else ""
