"""Rendering of messages to a prompt text, with the checkpoint's chat template.

    messages (JSON) --ChatMessage--> checked roles and contents --template--> text --tokenizer--> ids

This module owns the Jinja environment and the variables that a template sees. A template comes with the weights and is
not trusted. It runs in Jinja's immutable sandbox: no attribute access to Python internals, no mutation of its
variables. Conversations that a template refuses or writes in part are first put into a form that it takes
(``weft.text.arrangement``). Any remaining exception of a template becomes an error of the *request*, with the
template's message.

Features that published templates rely on, provided here: trimmed and left-stripped blocks, ``{% break %}`` and ``{%
continue %}``, ``{% generation %}`` blocks (a training marker: the body is rendered), ``tojson`` that keeps non-ASCII
text, ``raise_exception``, ``strftime_now``, and the special tokens by name. A ``developer`` message is a ``system``
message where the template does not know the newer word.

*Continuing the last message.* The template is rendered with a mark after the last message's content, and the text is
cut at the mark: this needs no guess about the text that the template writes after a message.

*Boundaries.* Conversations share their beginning up to the end of the system prompt or of some message. ``boundaries``
renders only the first messages and compares. They are hints for the cache, and no answer depends on them. The
renderings of the last few leading messages are remembered: conversations share system prompts.
"""

from __future__ import annotations

import datetime
import json
from collections.abc import Callable, Mapping, Sequence
from pathlib import Path
from typing import Any

import jinja2
import jinja2.ext
import jinja2.meta
import jinja2.nodes
import jinja2.parser
import jinja2.sandbox
import msgspec

from weft.errors import ConfigError, RequestError
from weft.files import TEMPLATE_BYTES_MAX, read_json, read_text
from weft.request import PICTURE_KINDS
from weft.text.arrangement import STRICTEST, TemplateTakes, Turn, argument_object, arranged, with_spoken_calls
from weft.text.control_tokens import NO_CONTROL, ControlTexts, ControlTokens, ascii_json
from weft.text.tools.definitions import function_call
from weft.text.tools.formats import ToolFormat

ROLES = ("system", "developer", "user", "assistant", "tool", "function")
MARK = "\ue000weft-continues-here\ue001"
TEMPLATE_CHARS_MAX = 64_000_000
MESSAGE_ENDS_MAX = 8
"""Most messages, from the last one back, whose end is searched: each costs a rendering (law L11)."""


class ChatMessage(msgspec.Struct, kw_only=True):
    """A message as the client sent it. ``reasoning`` and ``reasoning_content`` are two names of one field."""

    role: str
    content: str | list[Any] | None = None
    name: str | None = None
    tool_call_id: str | None = None
    tool_calls: list[dict[str, Any]] | None = None
    reasoning: str | None = None
    reasoning_content: str | None = None
    cache_control: dict[str, Any] | None = None


class ChatTemplate:
    """A checkpoint's chat template, compiled. Raises ConfigError when ``source`` is not a template; ``origin`` names
    where it came from. ``calls``: how the model writes calls, if that is known."""

    def __init__(
        self,
        source: str,
        *,
        special_tokens: Mapping[str, str],
        origin: str = "chat template",
        environment: TemplateEnvironment | None = None,
        chars_max: int = TEMPLATE_CHARS_MAX,
        control: ControlTexts = NO_CONTROL,
        calls: ToolFormat | None = None,
    ) -> None:
        self.control = ControlTokens(control, source)
        self._calls = calls
        self._special_tokens = dict(special_tokens)
        self._chars_max = chars_max
        environment = environment or TemplateEnvironment()
        try:
            tree = environment.parse(source)
            self._template = environment.from_string(source)
            self._template.globals = dict(self._template.globals)  # read at each rendering, item by item
        except jinja2.TemplateSyntaxError as error:
            raise _syntax_error(origin, error) from error
        self.variables = frozenset(jinja2.meta.find_undeclared_variables(tree))
        self.source = source
        self.reads_tools = any(name.name == "tools" for name in tree.find_all(jinja2.nodes.Name))
        self._knows_developer = "developer" in source
        self._takes = TemplateTakes(
            lambda turns, tools: self._run(turns, {"tools": tools} if tools else {}, starts_answer=False)
        )

    def render(
        self,
        messages: list[ChatMessage],
        *,
        add_generation_prompt: bool | None = None,
        continue_final_message: bool = False,
        variables: Mapping[str, Any] | None = None,
    ) -> str:
        """Render ``messages``. ``add_generation_prompt`` None means "unless the last message is continued".

        Raise RequestError for an unknown role or part, a variable that the template never reads, or an error of the
        template.
        """
        if not messages:
            raise RequestError("messages is empty: at least one message is needed", param="messages")
        if continue_final_message and add_generation_prompt:
            raise RequestError(
                "add_generation_prompt and continue_final_message exclude each other: the "
                "first starts a new answer, the second continues the last message",
                param="continue_final_message",
            )
        turns = [self._turn(position, message) for position, message in enumerate(messages)]
        if continue_final_message:
            turns[-1]["content"] += MARK if isinstance(turns[-1]["content"], str) else [{"type": "text", "text": MARK}]
        values = dict(variables or {})
        for name in values:
            if name in ("messages", "add_generation_prompt", *self._special_tokens):
                raise RequestError(
                    f"chat_template_kwargs sets {name}, which has its own field", param="chat_template_kwargs"
                )
        starts_answer = not continue_final_message if add_generation_prompt is None else add_generation_prompt
        text = self._written(turns, values, starts_answer=starts_answer)
        if not continue_final_message:
            return text
        head, mark, _ = text.rpartition(MARK)
        if not mark:
            raise RequestError(
                "continue_final_message: this model's chat template does not render the content of the last message",
                param="continue_final_message",
            )
        return head

    def boundaries(
        self, messages: list[ChatMessage], text: str, *, variables: Mapping[str, Any] | None = None
    ) -> list[int]:
        """Return the positions (characters, ascending) in ``text`` after which another conversation may differ: the
        beginning of the first message after the system prompt and tools, and the ends of all messages but the last.
        ``render`` made ``text`` of ``messages``."""
        positions = set()
        leading = next(
            (index for index, message in enumerate(messages) if message.role not in ("system", "developer")),
            len(messages),
        )
        question = ChatMessage(role="user", content=MARK)  # a question that no client sends
        positions.add(common_length(self.beginning([*messages[:leading], question], variables), text))
        for count in range(max(leading + 1, len(messages) - MESSAGE_ENDS_MAX), len(messages)):
            beginning = self.beginning(messages[:count], variables)
            if text.startswith(beginning):
                positions.add(len(beginning))
        return sorted(positions - {0})

    def beginning(self, messages: list[ChatMessage], variables: Mapping[str, Any] | None) -> str:
        """Return the text of leading messages without the beginning of an answer; empty if the template refuses such a
        short conversation."""
        try:
            return self.render(messages, add_generation_prompt=False, variables=variables)
        except RequestError:
            return ""

    def _written(self, turns: list[Turn], values: dict[str, Any], *, starts_answer: bool) -> str:
        if any(turn.get("tool_calls") for turn in turns) and not self._takes.calls():
            turns = with_spoken_calls(turns, self._calls)
        shown = arranged(turns, self._takes)
        try:
            return self._run(shown, values, starts_answer=starts_answer)
        except RequestError:
            plainest = arranged(turns, STRICTEST)
            if plainest == shown:
                raise
            try:
                return self._run(plainest, values, starts_answer=starts_answer)
            except RequestError:
                pass  # the first refusal is about the client's own messages
            raise

    def _run(self, turns: list[Turn], values: Mapping[str, Any], *, starts_answer: bool) -> str:
        variables = {**self._special_tokens, **values, "messages": turns, "add_generation_prompt": starts_answer}
        try:
            parts, count = [], 0
            # ``generate`` would add a generator around this one, and a second form of each error.
            for part in self._template.root_render_func(self._template.new_context(variables)):
                count += len(part)
                if count > self._chars_max:
                    raise RequestError(
                        f"the chat template writes more than {self._chars_max} characters (limits.template_chars)",
                        param="messages",
                    )
                parts.append(part)
            return "".join(parts)
        except RequestError:
            raise
        except jinja2.TemplateError as error:
            raise RequestError(f"the chat template refused the messages: {error}", param="messages") from error
        except Exception as error:  # template expressions raise plain Python errors on odd input
            raise RequestError(
                f"the chat template failed on these messages: {type(error).__name__}: {error}", param="messages"
            ) from error

    def _turn(self, position: int, message: ChatMessage) -> dict[str, Any]:
        where = f"messages[{position}]"
        if message.role not in ROLES:
            raise RequestError(
                f"{where}.role is {message.role!r}; served roles are {', '.join(ROLES)}", param=f"{where}.role"
            )
        role = message.role
        if role == "developer" and not self._knows_developer:
            role = "system"
        if role == "function":  # the older name for the result of a tool
            role = "tool"
        turn: dict[str, Any] = {"role": role, "content": _content(where, message)}
        for name in ("name", "tool_call_id"):
            value = getattr(message, name)
            if value is not None:
                turn[name] = value
        if message.tool_calls:
            turn["tool_calls"] = [with_parsed_arguments(call) for call in message.tool_calls]
        reasoning = message.reasoning if message.reasoning is not None else message.reasoning_content
        if reasoning is None:
            reasoning = _thought(message)
        if reasoning is not None:
            turn["reasoning"] = turn["reasoning_content"] = reasoning
            # gpt-oss's template refuses ``thinking`` next to content, and LFM2.5's reads no other name.
            if not turn.get("content") or self._takes.thinking_with_content():
                turn["thinking"] = reasoning
        return turn


def common_length(left: Sequence[Any], right: Sequence[Any]) -> int:
    """Return the length of the common prefix of two texts or lists. Found by bisection, since comparing slices is fast
    C code."""
    low, high = 0, min(len(left), len(right))
    while low < high:
        middle = (low + high + 1) // 2
        if left[low:middle] == right[low:middle]:
            low = middle
        else:
            high = middle - 1
    return low


def load_chat_template(
    directory: Path,
    *,
    special_tokens: Mapping[str, str],
    override: str | None = None,
    control: Callable[[str], ControlTexts] = lambda source: NO_CONTROL,
    calls: Callable[[str], ToolFormat | None] = lambda source: None,
) -> ChatTemplate | None:
    """Return the template of ``read_chat_template``, compiled in this process, without limits on time and memory.
    ``control``, ``calls``: functions from the template's source to the model's control tokens and its format of
    calls."""
    text = read_chat_template(directory, override=override)
    if text is None:
        return None
    source, origin = text
    return ChatTemplate(
        source, special_tokens=special_tokens, origin=origin, control=control(source), calls=calls(source)
    )


def check_syntax(source: str, origin: str) -> None:
    """Raise ConfigError that names the line. Nothing is compiled, so no constant is folded."""
    try:
        TemplateEnvironment().parse(source)
    except jinja2.TemplateSyntaxError as error:
        raise _syntax_error(origin, error) from error
    except RecursionError:
        raise ConfigError(f"{origin}: nested too deeply", param="--chat-template") from None


def _syntax_error(origin: str, error: jinja2.TemplateSyntaxError) -> ConfigError:
    return ConfigError(f"{origin}, line {error.lineno}: {error.message}", param="--chat-template")


def read_chat_template(directory: Path, *, override: str | None = None) -> tuple[str, str] | None:
    """Return (source, origin) of ``override`` (a file), or chat_template.jinja, or tokenizer_config.json's
    ``chat_template``, in this order; None when the checkpoint has none (it then serves completions only)."""
    if override is not None:
        try:
            return Path(override).read_text(encoding="utf-8"), override
        except OSError as error:
            raise ConfigError(
                f"--chat-template {override} cannot be read: {error.strerror}", param="--chat-template"
            ) from error
        except UnicodeDecodeError as error:
            raise ConfigError(
                f"--chat-template {override} is not UTF-8 text: {error.reason}", param="--chat-template"
            ) from None
    path = directory / "chat_template.jinja"
    if path.is_file():
        return read_text(path, bytes_max=TEMPLATE_BYTES_MAX), str(path)
    path = directory / "tokenizer_config.json"
    if not path.is_file():
        return None
    source = read_json(path).get("chat_template")
    if isinstance(source, list):  # several named templates; "default" is for chat without tools
        source = {entry.get("name"): entry.get("template") for entry in source if isinstance(entry, dict)}.get(
            "default"
        )
    return (source, str(path)) if isinstance(source, str) else None


_THOUGHT_KINDS = ("thinking", "redacted_thinking", "reasoning")
"""Types of content parts that are reasoning."""


def _content(where: str, message: ChatMessage) -> str | list[dict[str, str]]:
    """Return a content as text, or as a list of parts if some are pictures (without their data, see
    ``weft.text.pictures``): templates of models that read pictures take lists."""
    content = message.content
    if isinstance(content, str):
        return content
    if content is None:
        return ""
    parts = [
        part
        if isinstance(part, dict) and part.get("type") in PICTURE_KINDS
        else {"type": "text", "text": _part_text(f"{where}.content[{index}]", part)}
        for index, part in enumerate(content)
        if not _is_thought(message, part)
    ]
    if any(part["type"] != "text" for part in parts):
        return [{key: part[key] for key in ("type", "text") if key in part} for part in parts]
    return "\n".join(part["text"] for part in parts)


def _is_thought(message: ChatMessage, part: Any) -> bool:
    return message.role == "assistant" and isinstance(part, dict) and part.get("type") in _THOUGHT_KINDS


def _thought(message: ChatMessage) -> str | None:
    """Return the reasoning that is a part of an answer's content, as Mistral's and Anthropic's APIs send it."""
    parts = message.content if isinstance(message.content, list) else []
    values = [part.get("thinking", part.get("text")) for part in parts if _is_thought(message, part)]
    nested = [value if isinstance(value, list) else [value] for value in values]
    texts = [inner.get("text") if isinstance(inner, dict) else inner for value in nested for inner in value]
    return "\n".join(text for text in texts if isinstance(text, str)) if values else None


def _part_text(here: str, part: Any) -> str:
    if isinstance(part, str):
        return part
    if not isinstance(part, dict):
        raise RequestError(f"{here}: expected an object with type and text, got {type(part).__name__}", param=here)
    kind = part.get("type", "text")
    if kind not in ("text", "input_text", "output_text", "refusal"):
        raise RequestError(
            f"{here} has type {kind!r}; text is read, and pictures and videos where the model sees", param=here
        )
    text = part.get("refusal" if kind == "refusal" else "text")
    if not isinstance(text, str):
        raise RequestError(f"{here}.text: expected str, got {type(text).__name__}", param=f"{here}.text")
    return text


def with_parsed_arguments(call: dict[str, Any]) -> dict[str, Any]:
    """Return ``call`` with its arguments as an object, which templates iterate over. The API sends a JSON string, or
    text for a custom tool."""
    if call.get("type") == "custom":
        return function_call(call)
    function = call.get("function")
    if not isinstance(function, dict):
        return call
    return {**call, "function": {**function, "arguments": argument_object(function.get("arguments"))}}


def _raise_exception(message: str) -> None:
    raise jinja2.TemplateError(message)


def _to_json(
    value: Any,
    ensure_ascii: bool = False,
    indent: int | None = None,
    separators: tuple[str, str] | None = None,
    sort_keys: bool = False,
) -> str:
    """Return ``value`` as JSON text. Jinja's own filter is not used, as it escapes for HTML."""
    text = json.dumps(value, ensure_ascii=ensure_ascii, indent=indent, separators=separators, sort_keys=sort_keys)
    return ascii_json(text) if ensure_ascii else text


class _GenerationBlock(jinja2.ext.Extension):
    """The block ``{% generation %}...{% endgeneration %}``, rendered as its body without the tags."""

    tags = {"generation"}

    def parse(self, parser: jinja2.parser.Parser) -> list[jinja2.nodes.Node]:
        next(parser.stream)
        return parser.parse_statements(("name:endgeneration",), drop_needle=True)


class TemplateEnvironment(jinja2.sandbox.ImmutableSandboxedEnvironment):
    """Jinja's sandbox with the features that published templates rely on."""

    def __init__(self, now: Callable[[], datetime.datetime] = datetime.datetime.now) -> None:
        super().__init__(trim_blocks=True, lstrip_blocks=True, extensions=[jinja2.ext.loopcontrols, _GenerationBlock])
        self.filters["tojson"] = _to_json
        self.globals["raise_exception"] = _raise_exception
        self.globals["strftime_now"] = lambda form: now().strftime(form)
