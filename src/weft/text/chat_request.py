"""A request for a chat answer, checked once for the server and the Python API.

    ConversationFields --read_chat--> ChatRequest --template--> ChatPrompt --encode_prompt--> Prompt
                                          |
                                          '-- Dialect.plan(request, text, grammar) --> AnswerPlan: grammar, reader

``ChatRequest`` holds the checked fields: messages, tools, the choice of a tool, the variables of the
template. The server renders in a process with limits (``weft.text.template_sandbox``), the Python API in its own
(``weft.text.template_worker.chat_prompt``); ``weft.text.prompt`` makes tokens of the text for both.

Structs of msgspec, because a frozen dataclass takes ten times longer to construct.
"""

from __future__ import annotations

from collections.abc import Collection, Mapping, Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.request import PictureKind
from weft.text.chat import ChatMessage
from weft.text.grammars import BUDGET_FIELD
from weft.text.pictures import PicturePart, split_pictures, without_unread_results
from weft.text.template_worker import without_marks
from weft.text.tools.definitions import Tool, ToolChoice, hosted_types, read_choice, read_tools, unheld_formats

BUDGET_MAX = 1 << 30
"""Most tokens of reasoning that a request may allow; no context is as long."""
_PREDICTION = '{"type": "content", "content": text or a list of text parts}'


class ConversationFields(msgspec.Struct, frozen=True, kw_only=True):
    """The unchecked fields that shape the prompt of a chat, under the template's names instead of an API's.
    ``variables``: further variables of the template; ``effort_field``: the API's name of ``reasoning_effort``.
    ``thinking_token_budget``: most tokens of the reasoning; ``budget_field``: the API's name of that field."""

    messages: list[ChatMessage]
    tools: Sequence[Any] | None = None
    tool_choice: Any = None
    parallel_tool_calls: bool | None = None
    variables: Mapping[str, Any] | None = None
    documents: list[Any] | None = None
    reasoning_effort: str | None = None
    effort_field: str = "reasoning_effort"
    thinking_token_budget: int | None = None
    budget_field: str = BUDGET_FIELD
    add_generation_prompt: bool | None = None
    continue_final_message: bool | None = None


class ChatRequest(msgspec.Struct, frozen=True, kw_only=True):
    """A checked request for a chat answer. ``rendering``: arguments of ``chat_prompt`` besides the messages; its tools
    still have their ``cache_control``, which the template does not see. ``pictures``: contents of the parts of the
    messages that are pictures. ``several_calls``: whether an answer may have more than one call. ``continued``: the
    beginning of the answer, if the last message is one. ``left_out``: names of fields without an effect, which the
    answer reports."""

    messages: list[ChatMessage]
    pictures: list[PicturePart] = []
    tools: tuple[Tool, ...] = ()
    choice: ToolChoice = ToolChoice("none")
    several_calls: bool = True
    rendering: dict[str, Any]
    thinking_token_budget: int | None = None
    continued: str | None = None
    left_out: list[str] = []


def read_chat(
    conversation: ConversationFields, *, template_variables: Collection[str], reads: Collection[PictureKind] = ()
) -> ChatRequest:
    """Check a conversation. ``template_variables``: the names that the template reads. ``reads``: kinds of pictures
    that the model reads. Raise RequestError that names the field."""
    checked = read_tools(conversation.tools)
    choice = read_choice(conversation.tool_choice, checked)
    shown: dict[str, Any] = dict(conversation.variables or {})
    if checked and choice.mode != "none":
        shown["tools"] = without_marks([tool.definition for tool in checked])
    if conversation.reasoning_effort == "none":
        shown.setdefault("enable_thinking", False)
    if "enable_thinking" in shown:
        wanted = bool(shown["enable_thinking"])
        for name, value in (("thinking_mode", "enabled" if wanted else "disabled"), ("thinking", wanted)):
            if name in template_variables:  # MiniMax-M3; DeepSeek V3.1, Kimi K2.5 and Granite
                shown.setdefault(name, value)
    left_out = [f"tools.{kind}" for kind in hosted_types(conversation.tools)]
    left_out += [f"tools.{name}.format" for name in unheld_formats(conversation.tools)]
    for name in ("documents", "reasoning_effort"):
        value = getattr(conversation, name)
        if value is None:
            continue
        if name in template_variables:
            shown[name] = value
        elif name == "documents" and value:
            raise RequestError(
                f"{name} is not supported: this model's chat template does not use it",
                param=name,
                code="unsupported_parameter",
            )
        elif name == "reasoning_effort" and value != "none":
            left_out.append(conversation.effort_field)
    budget = conversation.thinking_token_budget
    if budget is not None and not 0 <= budget <= BUDGET_MAX:
        field = conversation.budget_field
        raise RequestError(f"{field} is {budget}; it may be 0 to {BUDGET_MAX}", param=field)
    messages = conversation.messages
    pictures: list[PicturePart] = []
    if any(isinstance(message.content, list) for message in messages):
        messages, unread = without_unread_results(messages, reads=reads)
        left_out += unread
        messages, pictures = split_pictures(messages, reads=reads)
    return ChatRequest(
        messages=messages,
        pictures=pictures,
        tools=checked,
        choice=choice,
        several_calls=conversation.parallel_tool_calls is not False,
        rendering={
            "add_generation_prompt": conversation.add_generation_prompt,
            "tools": [tool.definition for tool in checked] if "tools" in shown else [],
            "continue_final_message": bool(conversation.continue_final_message),
            "variables": shown,
        },
        thinking_token_budget=budget,
        continued=_content_text(messages[-1]) if conversation.continue_final_message else None,
        left_out=left_out,
    )


def _content_text(message: ChatMessage) -> str:
    if isinstance(message.content, str):
        return message.content
    parts = message.content or ()
    return "".join(str(part.get("text", "")) if isinstance(part, dict) else str(part) for part in parts)


def predicted_text(value: Any) -> str | None:
    """Return the text of the field ``prediction``, the client's guess of the answer: a source of drafts, which changes
    no token. None without a prediction. Raise RequestError that names the part."""
    if value is None:
        return None
    if not isinstance(value, dict):
        raise _wrong_prediction("prediction", f"it must be {_PREDICTION}")
    if value.get("type") != "content":
        raise _wrong_prediction("prediction.type", f"it is {value.get('type')!r}; it must be 'content'")
    content = value.get("content")
    if isinstance(content, str):
        return content
    if not isinstance(content, list):
        raise _wrong_prediction("prediction.content", "it must be text or a list of text parts")
    texts = []
    for index, part in enumerate(content):
        place = f"prediction.content[{index}]"
        if not isinstance(part, dict) or part.get("type") != "text":
            kind = part.get("type") if isinstance(part, dict) else part
            raise _wrong_prediction(place, f"it is {str(kind)[:100]!r}; parts of a prediction have the type 'text'")
        if not isinstance(part.get("text"), str):
            raise _wrong_prediction(f"{place}.text", "it must be text")
        texts.append(part["text"])
    return "".join(texts)


def _wrong_prediction(place: str, why: str) -> RequestError:
    return RequestError(f"{place}: {why}", param=place, code="invalid_type")
