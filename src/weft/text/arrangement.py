"""A conversation in an order and in forms that its chat template takes.

    turns --arranged(turns, takes)--> turns that the template writes completely

Templates refuse some forms of messages and, worse, leave others out without an error: a system message after a turn,
two messages of one role in a row, a result of a tool, arguments that are not an object. Clients send all of them. Trial
conversations with words of no language find out which forms a template takes (``TemplateTakes``): it takes a form if
its text has each word, in order. A form is tried when a conversation first has it, and the result depends only on the
template. So a message is written the same way in each request of a conversation, and the cached prefix stays valid.

The rules, each applied only where the template does not take the message as it was sent:

    system messages at the beginning      one message, joined by an empty line
    a system message to a template
        without a system role             the beginning of the user's message that follows
    a system message after a turn         a message of the user in the same place
    a result of a tool                    a message of the role "observation" (GLM 4), else of the user
    messages of one role in a row         one message, joined by an empty line
    an answer without a question          an empty message of the user before it
    a question after a call or result     an empty answer before it
    several calls in one answer           an answer for each call, followed by its result
    a result without a call               as a result of a tool
    an empty answer                       a space
    only system messages                  a message of the user
    arguments of a call                   an object, or JSON text to a template that prints them
    ids of calls                          nine letters and digits
    a call that is left out               the text in which the model writes it, after its answer's content

A template may still refuse a combination that no trial has. ``STRICTEST`` applies every rule: it is the last attempt.
"""

from __future__ import annotations

import base64
import functools
import hashlib
import json
from collections.abc import Callable, Sequence
from typing import Any, TypeVar, cast

from weft.errors import RequestError
from weft.text.surrogates import whole_characters
from weft.text.tools.formats import ToolFormat
from weft.text.tools.writing import calls_text

Turn = dict[str, Any]
Content = str | list[Any]
SYSTEM_ROLES = ("system", "developer")
_BETWEEN = "\n\n"
_WORDS = ("qzjvword", "wkxqword", "vjqzword")
_CALL_ID = "call_0123456789abcdef"
_SHORT_ID_CHARS = 9
_TOOL = {"type": "function", "function": {"name": "f", "description": "", "parameters": {"type": "object"}}}
_OPEN_ARGUMENTS = "arguments"
"""Name of the one parameter of a past call whose arguments are not a JSON object."""
Trial = TypeVar("Trial", bound=Callable[..., bool])


def _once(trial: Trial) -> Trial:
    """Make a method of ``TemplateTakes`` try a form only once."""

    @functools.wraps(trial)
    def known(takes: TemplateTakes, *arguments: str) -> bool:
        key = (trial.__name__, *arguments)
        if key not in takes.known:
            takes.known[key] = trial(takes, *arguments)
        return takes.known[key]

    return cast(Trial, known)


class TemplateTakes:
    """The forms that a template takes, found by trials. ``write`` renders turns with the template and the definitions
    of tools, without the beginning of an answer; it raises RequestError. ``known``: results by the name of the method
    and its arguments."""

    def __init__(
        self, write: Callable[[list[Turn], list[Any]], str], known: dict[tuple[str, ...], bool] | None = None
    ) -> None:
        self._write = write
        self.known = {} if known is None else known

    @_once
    def system(self, role: str) -> bool:
        return self._writes_all(_said(role, 0), _said("user", 1))

    @_once
    def several_systems(self, role: str) -> bool:
        return self._writes_all(_said(role, 0), _said(role, 1), _said("user", 2))

    @_once
    def later_system(self, role: str) -> bool:
        """Return whether a system message may follow a turn of ``role``, a question or an answer: a template that
        counts turns takes it after only one of them."""
        question, answer, said = _said("user", 0), _said("assistant", 1), _said(role, 2)
        after_answer = self._writes_all(question, answer, said, _said("user", 1))
        return after_answer and self._writes_all(question, _said(role, 1), _said("assistant", 2))

    @_once
    def tool_results(self) -> bool:
        return self._writes_all(*_called(), _said("tool", 1), words=_WORDS[1:2])

    @_once
    def observations(self) -> bool:
        """Return whether the template knows results of tools only by the older name of their role."""
        return not self.tool_results() and self._writes_all(*_called(), _said("observation", 1), words=_WORDS[1:2])

    @_once
    def repeated(self, role: str) -> bool:
        before = () if role == "user" else (_said("user", 0),)
        first = len(before)
        return self._writes_all(*before, _said(role, first), _said(role, first + 1))

    @_once
    def answer_first(self) -> bool:
        return self._writes_all(_said("assistant", 0), _said("user", 1))

    @_once
    def question_behind(self, role: str) -> bool:
        """Return whether a question may follow a result ("tool"), or calls without a result ("assistant")."""
        result = (_said("tool", 1),) if role == "tool" else ()
        return self._writes_all(*_called(), *result, _said("user", 2), words=_WORDS[2:])

    @_once
    def system_alone(self, role: str) -> bool:
        return self._writes_all(_said(role, 0))

    @_once
    def several_calls(self) -> bool:
        question, answer = _called()
        turns = (question, {**answer, "tool_calls": answer["tool_calls"] * 2}, _said("tool", 1), _said("tool", 2))
        return self._writes_all(*turns) or not self.tool_results()

    @_once
    def lone_result(self) -> bool:
        return self._writes_all(_said("user", 0), _said("tool", 1))

    @_once
    def empty_answer(self) -> bool:
        answer: Turn = {"role": "assistant", "content": ""}
        return self._writes_all(_said("user", 0), answer, _said("user", 1), words=_WORDS[:2])

    @_once
    def object_arguments(self) -> bool:
        """Return whether the template takes arguments of calls as objects. False only if it prints JSON text as it is,
        and an object in Python's form or not at all."""
        arguments = {_WORDS[0]: _WORDS[1]}
        text = json.dumps(arguments)
        shown = self._written([*_called(arguments), _said("tool", 2)])
        if _WORDS[0] in shown and _WORDS[1] in shown and str(arguments) not in shown:
            return True
        return text not in self._written([*_called(text), _said("tool", 2)])

    @_once
    def any_call_ids(self) -> bool:
        long = self._written(_called_turns(_CALL_ID))
        return bool(long) or not self._written(_called_turns(_short_id(_CALL_ID)))

    @_once
    def calls(self) -> bool:
        """Return whether the template writes anything of a past call, with tools or without. (A result may show name
        and id of its call.)"""
        arguments = {_WORDS[0]: _WORDS[1]}
        turns = [
            *_called(arguments if self.object_arguments() else json.dumps(arguments), name=_WORDS[2]),
            _said("tool", 0),
        ]
        turns[0] = {"role": "user", "content": "?"}
        shown = (*_WORDS[1:], _short_id(_CALL_ID))
        return not self._writes_questions() or any(
            any(word in self._written(turns[:2], tools) for word in shown) or _WORDS[1] in self._written(turns, tools)
            for tools in ((), (_TOOL,))
        )

    @_once
    def thinking_with_content(self) -> bool:
        """Return whether an answer with content and a call may have reasoning by the name ``thinking``."""
        question, answer = _called({} if self.object_arguments() else "{}")
        said = dict.fromkeys(("thinking", "reasoning", "reasoning_content"), _WORDS[0])
        turns = [question | {"content": "?"}, answer | said | {"content": _WORDS[1]}, _said("tool", 2)]
        text = self._written(turns)
        return _in_order(_WORDS[:2], text) and text.count(_WORDS[0]) == 1

    def _writes_all(self, *turns: Turn, words: Sequence[str] | None = None) -> bool:
        """Return whether the template writes all of ``turns``. Return True if it does not even write a question: then
        no other form would help."""
        wanted = _WORDS[: min(len(turns), len(_WORDS))] if words is None else words
        return _in_order(wanted, self._written(list(turns))) or not self._writes_questions()

    @_once
    def _writes_questions(self) -> bool:
        return _WORDS[0] in self._written([_said("user", 0)])

    def _written(self, turns: list[Turn], tools: Sequence[Any] = ()) -> str:
        try:
            return self._write(turns, list(tools))
        except RequestError:
            return ""


STRICTEST = TemplateTakes(
    lambda turns, tools: "",
    dict.fromkeys([("_writes_questions",), ("tool_results",), ("object_arguments",), ("any_call_ids",)], True)
    | {("system", role): True for role in SYSTEM_ROLES},
)
"""Template that takes only the plainest forms: every trial fails that is not known."""


def arranged(turns: list[Turn], takes: TemplateTakes) -> list[Turn]:
    """Return ``turns``, changed by the rules in the module's docstring."""
    if any(turn.get("tool_calls") or turn["role"] == "tool" for turn in turns):
        turns = _with_results(_with_calls(turns, takes), takes)
    turns = _with_system(turns, takes)
    if any(turn["role"] == "tool" for turn in turns) and not takes.tool_results():
        turns = [_retold(turn, takes) if turn["role"] == "tool" else turn for turn in turns]
    return [_filled(turn, takes) for turn in _joined(_with_question(turns, takes), takes)]


def with_spoken_calls(turns: list[Turn], row: ToolFormat | None) -> list[Turn]:
    """Return ``turns`` with past calls as texts in the format ``row``, for a template that leaves calls out."""
    return [_spoken(turn, row) if turn.get("tool_calls") else turn for turn in turns]


def _spoken(turn: Turn, row: ToolFormat | None) -> Turn:
    text = calls_text(row, turn["tool_calls"])
    said = {**turn, "content": _both(turn["content"], text, between="\n")}
    del said["tool_calls"]
    return said


def _with_system(turns: list[Turn], takes: TemplateTakes) -> list[Turn]:
    leading = next((index for index, turn in enumerate(turns) if turn["role"] not in SYSTEM_ROLES), len(turns))
    first, rest = turns[:leading], turns[leading:]
    if len(first) > 1 and not all(takes.several_systems(role) for role in {turn["role"] for turn in first}):
        first = [_merged(first)]
    rest = [_as_user(turn, takes.later_system) for turn in rest]
    if first and not takes.system(first[0]["role"]):
        begins = [{**turn, "role": "user"} for turn in first]
        if rest and rest[0]["role"] == "user":
            return [_merged([*begins, rest[0]]), *rest[1:]]
        return [_merged(begins), *rest]
    return [*first, *rest]


def _as_user(turn: Turn, takes_role: Callable[[str], bool]) -> Turn:
    role = turn["role"]
    return {**turn, "role": "user"} if role in SYSTEM_ROLES and not takes_role(role) else turn


def _filled(turn: Turn, takes: TemplateTakes) -> Turn:
    if turn["role"] != "assistant" or turn["content"] or turn.get("tool_calls") or takes.empty_answer():
        return turn
    return {**turn, "content": " "}


def _with_results(turns: list[Turn], takes: TemplateTakes) -> list[Turn]:
    """Return ``turns`` with each result after its call, and results without a call as messages of the user, where the
    template needs it."""
    if any(len(turn.get("tool_calls") or ()) > 1 for turn in turns) and not takes.several_calls():
        turns = _one_call_each(turns)
    out, called = [], False
    for turn in turns:
        if turn["role"] == "assistant":
            called = bool(turn.get("tool_calls"))
        is_lone = turn["role"] == "tool" and not called and not takes.lone_result()
        out.append(_retold(turn, takes) if is_lone else turn)
    return out


def _retold(result: Turn, takes: TemplateTakes) -> Turn:
    """Return a result of a tool as a message of another role."""
    return {"role": "observation" if takes.observations() else "user", "content": result["content"]}


def _one_call_each(turns: list[Turn]) -> list[Turn]:
    out: list[Turn] = []
    position = 0
    while position < len(turns):
        turn, position = turns[position], position + 1
        calls = turn.get("tool_calls") or []
        if len(calls) < 2:
            out.append(turn)
            continue
        end = next((end for end in range(position, len(turns)) if turns[end]["role"] != "tool"), len(turns))
        results, position = turns[position:end], end
        for call in calls:
            out.append({**turn, "tool_calls": [call]})
            turn = {"role": "assistant", "content": ""}
            own = next((result for result in results if result.get("tool_call_id") in (None, call.get("id"))), None)
            if own is not None:
                results.remove(own)
                out.append(own)
        out += results
    return out


def _with_question(turns: list[Turn], takes: TemplateTakes) -> list[Turn]:
    leading = next((index for index, turn in enumerate(turns) if turn["role"] not in SYSTEM_ROLES), len(turns))
    if leading == len(turns):
        return [_as_user(turn, takes.system_alone) for turn in turns]
    if turns[leading]["role"] == "user" or takes.answer_first():
        return turns
    return [*turns[:leading], {"role": "user", "content": ""}, *turns[leading:]]


def _joined(turns: list[Turn], takes: TemplateTakes) -> list[Turn]:
    out: list[Turn] = []
    for turn in turns:
        role, before = turn["role"], out[-1] if out else {}
        asks_behind = role == "user" and (before.get("role") == "tool" or before.get("tool_calls"))
        if asks_behind and not takes.question_behind(before["role"]):
            out.append({"role": "assistant", "content": ""})
        if out and out[-1]["role"] == role and role in ("user", "assistant") and not takes.repeated(role):
            out[-1] = _merged([out[-1], turn])
        else:
            out.append(turn)
    return out


def _merged(turns: Sequence[Turn]) -> Turn:
    """Return one turn with the contents, calls and reasoning of ``turns``, which have one role."""
    merged = dict(turns[0])
    for turn in turns[1:]:
        merged["content"] = _both(merged["content"], turn["content"])
        for name in ("reasoning", "reasoning_content", "thinking"):
            if turn.get(name):
                merged[name] = _both(merged.get(name, ""), turn[name])
        if turn.get("tool_calls"):
            merged["tool_calls"] = [*merged.get("tool_calls", ()), *turn["tool_calls"]]
    return merged


def _both(left: Content, right: Content, between: str = _BETWEEN) -> Content:
    if isinstance(left, str) and isinstance(right, str):
        return between.join(filter(None, (left, right)))
    return [*_parts(left), *_parts(right)]


def _parts(content: Content) -> list[Any]:
    if isinstance(content, list):
        return content
    return [{"type": "text", "text": content}] if content else []


def _with_calls(turns: list[Turn], takes: TemplateTakes) -> list[Turn]:
    as_objects, any_ids = takes.object_arguments(), takes.any_call_ids()
    if as_objects and any_ids:
        return turns
    out = []
    for turn in turns:
        changed = dict(turn)
        if turn.get("tool_calls"):
            changed["tool_calls"] = [
                _call(call, as_text=not as_objects, short=not any_ids) for call in turn["tool_calls"]
            ]
        if not any_ids and isinstance(turn.get("tool_call_id"), str):
            changed["tool_call_id"] = _short_id(turn["tool_call_id"])
        out.append(changed)
    return out


def _call(call: dict[str, Any], *, as_text: bool, short: bool) -> dict[str, Any]:
    call, function = dict(call), call.get("function")
    if short and isinstance(call.get("id"), str):
        call["id"] = _short_id(call["id"])
    if as_text and isinstance(function, dict):
        call["function"] = {**function, "arguments": json.dumps(function.get("arguments"), ensure_ascii=False)}
    return call


def _short_id(call_id: str) -> str:
    """Return an id of nine letters and digits, as templates of Mistral require; an id that has that form stays."""
    if len(call_id) == _SHORT_ID_CHARS and call_id.isascii() and call_id.isalnum():
        return call_id
    return base64.b32encode(hashlib.sha256(call_id.encode()).digest()).decode()[:_SHORT_ID_CHARS].lower()


def argument_object(arguments: Any) -> dict[str, Any]:
    """Return the arguments of a past call as the object that templates walk. No arguments are an empty object. Text
    that is not an object, such as that of a call that ``max_tokens`` cut, becomes the one parameter ``arguments``.
    Raise RequestError for JSON that is nested too deeply."""
    if isinstance(arguments, dict):
        return arguments
    if arguments is None or (isinstance(arguments, str) and not arguments.strip()):
        return {}
    try:
        is_text = isinstance(arguments, str)
        value = json.loads(whole_characters(arguments.encode("utf-8", "surrogatepass"))) if is_text else arguments
    except ValueError:
        value = arguments
    except RecursionError:
        raise RequestError("the arguments of a tool call are nested too deeply", param="messages") from None
    if value is None:
        return {}
    return value if isinstance(value, dict) else {_OPEN_ARGUMENTS: arguments}


def _said(role: str, word: int) -> Turn:
    turn: Turn = {"role": role, "content": _WORDS[word]}
    if role == "tool":
        turn.update(name="f", tool_call_id=_short_id(_CALL_ID))
    return turn


def _called(arguments: Any = None, name: str = "f") -> list[Turn]:
    call = {
        "id": _short_id(_CALL_ID),
        "type": "function",
        "function": {"name": name, "arguments": {} if arguments is None else arguments},
    }
    return [_said("user", 0), {"role": "assistant", "content": "", "tool_calls": [call]}]


def _called_turns(call_id: str) -> list[Turn]:
    turns = [*_called(), _said("tool", 1)]
    turns[1]["tool_calls"][0]["id"] = turns[2]["tool_call_id"] = call_id
    return turns


def _in_order(words: Sequence[str], text: str) -> bool:
    position = 0
    for word in words:
        position = text.find(word, position)
        if position < 0:
            return False
    return True
