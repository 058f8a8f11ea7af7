"""Grammars of answers, as text: JSON schema, regex, choice, lark or GBNF.

    json_grammar(schema)  regex_grammar(text)  choice_grammar(texts)  text_grammar(text)  ->  Grammar
    behind_reasoning(grammar, ...), bounded_reasoning(field, ...)                      ->  Grammar

A ``Grammar`` is text: the list of grammars that llguidance reads, the first of which is the start. It is compiled
elsewhere (``weft.text.grammar_sandbox``, ``weft.engine.grammars``), so functions here check only the type and size of a
schema, not its content.

*Forcing is off.* If only one text can follow, the library would allow only the usual tokens of that text. It would then
take a text that looks like a special token ("<think>" in an enum) for that token, and refuse it afterwards. Without
forcing, every tokenization of the text is allowed; the model prefers the usual one anyway.

*Whitespace is bounded.* JSON allows any amount between two tokens, and a weak model may write whitespace without end.

*Reasoning comes first.* A model that thinks before it answers is constrained after the end of its reasoning: the
grammar begins with free text up to the end marker. Markers that are tokens of the vocabulary are written by id, because
free text never contains such a token.
"""

from __future__ import annotations

import json
import re
from collections.abc import Callable, Sequence
from typing import Any

import msgspec

from weft.errors import RequestError
from weft.request import Grammar
from weft.text.grammar_limits import check_choice_count, check_length, check_nesting

WHITESPACE = r"( |\n {0,24}|\n\t{0,8})"
"""Regex between two tokens of JSON: a space, or a line end and the indentation of a deeply nested value."""
FREE_TEXT = r"/(.|\n)*/"
ANY_TOKENS = "<[*]>*"
BUDGET_FIELD = "thinking_token_budget"
NO_FORCING = '%llguidance {"no_forcing": true}\n'
KINDS = ("json", "regex", "choice", "grammar")
_BODY = "body"
_ESCAPED = re.compile(r"[\\.+*?()|\[\]{}^$#&~-]")
_MARKER = re.compile(r"<[^>]*>|\[[^\]]*\]|\]<\][^\[]*\[>\[")
"""Pattern of a marker: from a bracket to the next closing one, or as MiniMax writes it (``]<]minimax[>[``)."""
_LINE_ENDS = "LINE_ENDS: /\\n{0,3}/\n"

GUIDANCE = "x-guidance"
"""Keyword of the compiler's options in a schema."""
_LOOK_AROUND = re.compile(r"\(\?<?[=!]|\\[1-9k]")
"""Look-around and references to groups, in a pattern."""
_VALUES = frozenset({"const", "enum", "default", "examples"})
"""Keywords of a schema that hold values, not schemas."""
_READABLE = {
    "$schema": re.compile(
        r"(http://json-schema\.org/draft-0[3467]/schema|https://json-schema\.org/draft/20(19-09|20-12)/schema)?#?"
    ),
    "$id": re.compile(r"([A-Za-z0-9._~/?@!$&'()*+,;=:#-]|%[0-9A-Fa-f]{2})*"),
}
"""Values that the compiler can read: drafts that it has, since it fetches none, and names in a URI's syntax."""

TokenOf = Callable[[str], int | None]
"""A function from a text to its id, if the text is one added token of the vocabulary (a marker), else to None."""


def grammar_from(kind: str, value: Any, field: str, *, whitespace: str | None = WHITESPACE) -> Grammar:
    """Return the grammar of a request's field. ``kind`` is one of KINDS; ``value`` comes from a request and has any
    type. Raise RequestError."""
    if kind == "json":
        return json_grammar(value, field=field, whitespace=whitespace)
    if kind == "choice":
        if not isinstance(value, (list, tuple)) or not all(isinstance(item, str) for item in value):
            raise RequestError(f"{field}: expected an array of texts", param=field)
        return choice_grammar(value, field=field)
    if not isinstance(value, str):
        raise RequestError(f"{field}: expected str, got {type(value).__name__}", param=field)
    return regex_grammar(value, field=field) if kind == "regex" else text_grammar(value, field=field)


def json_grammar(schema: Any, *, field: str, whitespace: str | None = WHITESPACE) -> Grammar:
    """Return a grammar of JSON. ``schema``: a JSON schema as an object, True or its JSON text. ``whitespace``: a regex
    of the text allowed between two tokens of JSON; None allows nothing. Raise RequestError if ``schema`` is none of
    these."""
    return _grammar({"json_schema": json_schema(schema, field=field, whitespace=whitespace)}, field)


def json_schema(schema: Any, *, field: str, whitespace: str | None = WHITESPACE) -> dict[str, Any]:
    """Return ``schema`` with weft's compile options; ``x-guidance`` of the schema overrides them."""
    if isinstance(schema, str):
        try:
            schema = json.loads(schema)
        except (ValueError, RecursionError) as error:
            raise RequestError(f"{field} is not JSON: {error}", param=field) from None
    if schema is True:
        schema = {}
    if not isinstance(schema, dict):
        raise RequestError(f"{field} is {type(schema).__name__}; a JSON schema is an object", param=field)
    schema = _without_unread_names(schema, check_nesting(schema, field))
    options: dict[str, Any] = {"whitespace_flexible": False}
    if whitespace is not None:
        options = {"whitespace_pattern": whitespace}
    own = schema.get(GUIDANCE)
    return {**schema, GUIDANCE: {**options, **(own if isinstance(own, dict) else {})}}


def lenient(schema: dict[str, Any], *, field: str) -> dict[str, Any]:
    """Return ``schema`` for a grammar that enforces all parts that a grammar can, and leaves out the others. Raise
    RequestError for a schema that is nested too deeply."""
    check_nesting(schema, field)
    own = schema.get(GUIDANCE)
    return {**_without(schema, _has_look_around), GUIDANCE: {"lenient": True, **(own if isinstance(own, dict) else {})}}


def _without_unread_names(schema: dict[str, Any], targets: set[str]) -> dict[str, Any]:
    """Return a copy of ``schema`` without drafts and names of schemas that the compiler cannot read, since clients
    write titles there, and without a name of the whole that no reference needs. ``targets``: of all references."""
    copy: dict[str, Any] = _without(schema, _is_unread_name)
    if all(target.startswith("#") and target != copy.get("$id") for target in targets):
        copy.pop("$id", None)
    return copy


def _is_unread_name(keyword: str, part: str) -> bool:
    readable = _READABLE.get(keyword)
    return readable is not None and readable.fullmatch(part) is None


def _has_look_around(keyword: str, part: str) -> bool:
    """Return whether this is a pattern that the compiler cannot read: it refuses these in every mode."""
    return keyword == "pattern" and _LOOK_AROUND.search(part) is not None


def _without(schema: Any, is_left_out: Callable[[str, str], bool]) -> Any:
    """Return a copy of ``schema`` without the keywords with a text for which ``is_left_out`` is true."""
    if isinstance(schema, list):
        return [_without(part, is_left_out) for part in schema]
    if not isinstance(schema, dict):
        return schema
    return {
        name: part if name in _VALUES else _without(part, is_left_out)
        for name, part in schema.items()
        if not (isinstance(part, str) and is_left_out(name, part))
    }


def regex_grammar(regex: str, *, field: str) -> Grammar:
    """Return a grammar of answers that match ``regex`` completely: the syntax of Rust's regex crate, without
    look-around."""
    return _grammar({"lark_grammar": f"start: {slashed(regex)}"}, field)


def choice_grammar(choices: Sequence[str], *, field: str) -> Grammar:
    """Return a grammar of answers that are one of ``choices``. Raise RequestError for no choices, an empty choice, or
    too many choices.

    The grammar is one regex: 100,000 texts as alternatives of a rule took 25 seconds to compile."""
    if not choices:
        raise RequestError(f"{field} is empty: it needs at least one text to choose", param=field)
    if not all(choices):
        raise RequestError(f"{field} has an empty text: an answer has at least one token", param=field)
    check_choice_count(len(choices), field)
    alternatives = "|".join(_ESCAPED.sub(r"\\\g<0>", choice) for choice in dict.fromkeys(choices))
    return _grammar({"lark_grammar": f"start: {slashed(alternatives)}"}, field)


def text_grammar(grammar: str, *, field: str) -> Grammar:
    """Return the grammar in ``grammar``: lark (with llguidance's extensions) or GBNF, which has a "::=". Raise
    RequestError when it is empty. The sandbox rewrites GBNF as lark (``weft.text.grammar_worker``)."""
    if not grammar.strip():
        raise RequestError(f"{field} is empty: it needs a grammar", param=field)
    return _grammar({"gbnf" if "::=" in grammar else "lark_grammar": grammar}, field)


def lark_grammar(rules: str, *, field: str) -> Grammar:
    """Return a grammar of ``rules`` written by weft, whose first is ``start``."""
    return Grammar(grammar=json.dumps({"grammars": [{"lark_grammar": NO_FORCING + rules}]}), field=field)


def behind_reasoning(
    grammar: Grammar,
    *,
    start: str,
    end: str,
    opened: bool,
    token_of: TokenOf,
    budget: int | None = None,
    bare_end: bool = False,
) -> Grammar:
    """Return ``grammar`` for an answer that may reason first: between ``start`` and ``end``, or up to ``end`` if the
    prompt has ``opened`` the reasoning already. ``budget``: most tokens of the reasoning. ``bare_end``: whether ``end``
    without ``start`` may come instead."""
    grammars = json.loads(grammar.grammar)["grammars"]
    inner = grammars[0]["lark_grammar"].removeprefix(NO_FORCING)
    rest = [{"name": "answer", "lark_grammar": inner}, *grammars[1:], *bounded_thoughts(budget)]
    rules = reasoning_rule(start=start, end=end, opened=opened, token_of=token_of, budget=budget)
    unopened = f"(reasoning | {literal(end, token_of)} LINE_ENDS)?" if bare_end else "reasoning?"
    head = f"{NO_FORCING}start: {'reasoning' if opened else unopened} @answer\n{rules}"
    return Grammar(grammar=json.dumps({"grammars": [{"lark_grammar": head}, *rest]}), field=grammar.field)


def framed(grammar: Grammar, around: tuple[str, str], token_of: TokenOf) -> Grammar:
    """Return ``grammar`` with texts before and after the answer."""
    if not any(around):
        return grammar
    first, *rest = json.loads(grammar.grammar)["grammars"]
    inner = {"name": "framed", "lark_grammar": first["lark_grammar"].removeprefix(NO_FORCING)}
    before, behind = (literal(text, token_of) if text else "" for text in around)
    head = {"lark_grammar": f"{NO_FORCING}start: {before} @framed {behind}"}
    return Grammar(grammar=json.dumps({"grammars": [head, inner, *rest]}), field=grammar.field)


def bounded_reasoning(*, start: str, end: str, opened: bool, again: bool, token_of: TokenOf, budget: int) -> Grammar:
    """Return the grammar of an answer whose reasoning has ``budget`` tokens at most, and whose other text is free. Both
    markers are tokens. ``again``: whether the model may also reason after some content; the grammar then allows it
    once."""
    # Reasoning is bounded wherever its start marker comes: models write spaces before the marker, and a rule for the
    # spaces would compete with the rule for an answer without reasoning.
    before = f"<[^{token_of(start)}]>*"
    rest = before if again else ANY_TOKENS
    rules = reasoning_rule(start=start, end=end, opened=opened, token_of=token_of, budget=budget)
    answer = f"reasoning {rest}" if opened else f"{before} (reasoning {rest})?"
    head = {"lark_grammar": f"{NO_FORCING}start: {answer}\n{rules}"}
    return Grammar(grammar=json.dumps({"grammars": [head, *bounded_thoughts(budget)]}), field=BUDGET_FIELD)


def bounded_thoughts(budget: int | None) -> list[dict[str, Any]]:
    """Return the grammar ``thoughts``, free text of ``budget`` tokens at most; nothing without a budget. It is a
    grammar of its own: as a rule of the grammar that uses it, the library would refuse other texts with the same
    beginning."""
    text = f"{NO_FORCING}start[max_tokens={budget}]: {FREE_TEXT}"
    return [] if budget is None else [{"name": "thoughts", "lark_grammar": text}]


def reasoning_rule(*, start: str, end: str, opened: bool, token_of: TokenOf, budget: int | None = None) -> str:
    """Return the lark rule ``reasoning``, including the line ends that follow. With a ``budget``, ``end`` must be a
    token, and ``bounded_thoughts`` must be added to the grammar."""
    begin = "" if opened else literal(start, token_of) + " "
    closing = literal(end, token_of)
    if budget is not None:
        return f"reasoning: {begin}@thoughts {closing} LINE_ENDS\n{_LINE_ENDS}"
    if closing.startswith("<["):
        return f"reasoning: {begin}THOUGHTS {closing} LINE_ENDS\nTHOUGHTS: {FREE_TEXT}\n{_LINE_ENDS}"
    return f"reasoning: {begin}thoughts LINE_ENDS\nthoughts[suffix={quoted(end)}]: {FREE_TEXT}\n{_LINE_ENDS}"


def literal(text: str, token_of: TokenOf) -> str:
    """Return ``text`` for a lark rule: markers by token id, the rest quoted."""
    whole = token_of(text)
    if whole is not None:
        return f"<[{whole}]>"
    parts: list[str] = []
    plain = ""
    position = 0
    while position < len(text):
        marker = _marker_at(text, position, token_of)
        if marker is None:
            plain += text[position]
            position += 1
            continue
        parts += [quoted(plain)] if plain else []
        parts.append(f"<[{token_of(marker)}]>")
        plain = ""
        position += len(marker)
    parts += [quoted(plain)] if plain else []
    return " ".join(parts)


def quoted(text: str) -> str:
    """Return ``text`` as a lark string."""
    return json.dumps(text)


def slashed(regex: str) -> str:
    """Return ``regex`` as a lark regex: a slash ends it, so those inside are escaped."""
    out, escaped = [], False
    for character in regex:
        if character == "/" and not escaped:
            out.append("\\")
        escaped = character == "\\" and not escaped
        out.append("\\n" if character == "\n" else character)
    return "/" + "".join(out) + "/"


def _marker_at(text: str, start: int, token_of: TokenOf) -> str | None:
    """Return the marker that begins at ``start``."""
    marker = _MARKER.match(text, start)
    return marker[0] if marker and token_of(marker[0]) is not None else None


def _grammar(body: dict[str, Any], field: str) -> Grammar:
    """Return the grammar ``body``. Raise RequestError for a grammar that is too long, or nested too deeply to be
    written as JSON."""
    grammars = [{"lark_grammar": f"{NO_FORCING}start: @{_BODY}"}, {"name": _BODY, **body}]
    try:
        text = msgspec.json.encode({"grammars": grammars})
    except RecursionError:
        raise RequestError(f"{field} is nested too deeply", param=field, code="invalid_grammar") from None
    except UnicodeEncodeError:
        raise RequestError(
            f"{field} has half of a surrogate pair, which is not text", param=field, code="invalid_grammar"
        ) from None
    check_length(text, field)
    return Grammar(grammar=text.decode(), field=field)
