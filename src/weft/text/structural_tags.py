"""Structural tags: text that is free up to a trigger, and follows a grammar after it.

    {"type": "structural_tag", "triggers": [...], "structures": [{"begin", "schema", "end"}, ...]}   of vLLM 0.8
    {"type": "structural_tag", "format": {"type": ...}}                                              of xgrammar

    const_string {value}        regex {pattern}       sequence {elements}      tag {begin, content, end}
    json_schema {json_schema}   grammar {grammar}     or {elements}            any_text {}
    triggered_tags {triggers, tags, at_least_one, stop_after_first}
    tags_with_separator {tags, separator, at_least_one, stop_after_first}

A format becomes an expression of lark and, for schemas and grammars of the client, a grammar of its own. Free text ends
at a trigger: if the trigger is a token of the vocabulary, free text cannot contain it; otherwise a lazy lexeme ends it.
Sources: the documentation of xgrammar's structural tag and of llguidance's lazy lexemes.
"""

from __future__ import annotations

import json
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any, NoReturn

from weft.errors import RequestError
from weft.request import Grammar
from weft.text.grammar_limits import check_choice_count, check_length, check_nesting
from weft.text.grammars import FREE_TEXT, NO_FORCING, TokenOf, json_schema, literal, quoted, slashed


def structural_tag(value: dict[str, Any], path: str, token_of: TokenOf) -> Grammar:
    """Return the grammar of the structural tag ``value``, a field called ``path``. Raise RequestError that names the
    part that is missing, has another type, or is unknown."""
    check_nesting(value, path)
    if "format" in value:
        form, form_path = value["format"], f"{path}.format"
    else:
        structures = _list(value, "structures", path)
        form = {
            "type": "triggered_tags",
            "triggers": value.get("triggers"),
            "tags": [_from_structure(structure) for structure in structures],
        }
        form_path = path
    lark = _Lark(token_of)
    start = lark.expression(form, form_path)
    rules = "\n".join([f"start: {start}", *lark.rules])
    grammars = [{"lark_grammar": f"{NO_FORCING}{rules}\nTEXT: {FREE_TEXT}\n"}, *lark.grammars]
    text = json.dumps({"grammars": grammars})
    check_length(text.encode(), path)
    return Grammar(grammar=text, field=path)


def _from_structure(structure: Any) -> Any:
    """Return a structure of vLLM's older form as a tag; return anything else unchanged, for the error."""
    if not isinstance(structure, dict):
        return structure
    content = {"type": "json_schema", "json_schema": structure.get("schema", True)}
    return {"type": "tag", "begin": structure.get("begin"), "content": content, "end": structure.get("end")}


@dataclass(slots=True)
class _Lark:
    """Rules and grammars to which the expressions made so far refer."""

    token_of: TokenOf
    rules: list[str] = field(default_factory=list)
    grammars: list[dict[str, Any]] = field(default_factory=list)

    def expression(self, form: Any, path: str) -> str:
        """Return the lark expression of the format at ``path``. Raise RequestError."""
        if not isinstance(form, dict):
            _wrong(path, f"is {type(form).__name__}; it takes an object with a type")
        maker = _FORMATS.get(form.get("type", ""))
        if maker is None:
            _wrong(f"{path}.type", f"is {form.get('type')!r}; it is one of {', '.join(_FORMATS)}")
        return maker(self, form, path)

    def rule(self, body: str, attributes: str = "") -> str:
        """Add a rule and return its name."""
        name = f"part_{len(self.rules)}"
        self.rules.append(f"{name}{attributes}: {body}")
        return name

    def grammar(self, body: dict[str, Any]) -> str:
        """Add a grammar and return a reference to it."""
        name = f"form_{len(self.grammars)}"
        self.grammars.append({"name": name, **body})
        return f"@{name}"

    def free_until(self, end: str) -> str:
        """Return an expression of free text and the text ``end`` after it, which the free text does not contain."""
        token = self.token_of(end)
        return f"TEXT <[{token}]>" if token is not None else self.rule(f"TEXT {quoted(end)}", "[lazy]")

    def tag(self, tag: Any, path: str, *, after: str = "") -> str:
        """Return the expression of the tag at ``path``, without the text ``after``, with which its ``begin`` starts.
        Raise RequestError."""
        if not isinstance(tag, dict) or tag.get("type", "tag") != "tag":
            _wrong(path, "is not a tag: an object with begin, content and end")
        begin, ends = _text(tag, "begin", path)[len(after) :], tag.get("end")
        ends = ends if isinstance(ends, list) else [ends]
        if not ends or not all(isinstance(end, str) for end in ends):
            _wrong(f"{path}.end", "has to be a text, or a list of texts")
        content = tag.get("content")
        opened = literal(begin, self.token_of) if begin else ""
        if isinstance(content, dict) and content.get("type") == "any_text" and all(ends):
            return f"{opened} ({' | '.join(self.free_until(end) for end in ends)})".strip()
        closed = [literal(end, self.token_of) if end else '""' for end in ends]
        last = f"({' | '.join(closed)})" if ends != [""] else ""
        return " ".join(part for part in (opened, self.expression(content, f"{path}.content"), last) if part)


def _const_string(lark: _Lark, form: dict[str, Any], path: str) -> str:
    return literal(_text(form, "value", path), lark.token_of)


def _json_schema(lark: _Lark, form: dict[str, Any], path: str) -> str:
    return lark.grammar({"json_schema": json_schema(form.get("json_schema"), field=f"{path}.json_schema")})


def _regex(lark: _Lark, form: dict[str, Any], path: str) -> str:
    return lark.rule(slashed(_text(form, "pattern", path)))


def _grammar(lark: _Lark, form: dict[str, Any], path: str) -> str:
    text = _text(form, "grammar", path)
    return lark.grammar({"gbnf" if "::=" in text else "lark_grammar": text})


def _any_text(lark: _Lark, form: dict[str, Any], path: str) -> str:
    return "TEXT"


def _sequence(lark: _Lark, form: dict[str, Any], path: str) -> str:
    parts = enumerate(_list(form, "elements", path))
    return " ".join(f"({lark.expression(part, f'{path}.elements[{index}]')})" for index, part in parts)


def _or(lark: _Lark, form: dict[str, Any], path: str) -> str:
    parts = enumerate(_list(form, "elements", path))
    return " | ".join(f"({lark.expression(part, f'{path}.elements[{index}]')})" for index, part in parts)


def _tag(lark: _Lark, form: dict[str, Any], path: str) -> str:
    return lark.tag(form, path)


def _triggered_tags(lark: _Lark, form: dict[str, Any], path: str) -> str:
    tags, triggers = _list(form, "tags", path), _list(form, "triggers", path)
    rests: dict[str, list[str]] = {}
    for index, tag in enumerate(tags):
        where = f"{path}.tags[{index}]"
        begin = _text(tag, "begin", where) if isinstance(tag, dict) else ""
        trigger = next(
            (
                candidate
                for candidate in triggers
                if isinstance(candidate, str) and candidate and begin.startswith(candidate)
            ),
            None,
        )
        if trigger is None:
            _wrong(f"{where}.begin", f"is {begin!r}, which begins with none of the triggers")
        rests.setdefault(trigger, []).append(lark.rule(lark.tag(tag, where, after=trigger) or '""'))
    each = " | ".join(f"{lark.free_until(trigger)} ({' | '.join(rest)})" for trigger, rest in rests.items())
    once, least = bool(form.get("stop_after_first")), bool(form.get("at_least_one"))
    if once:
        return f"({each})" if least else f"({each}) | TEXT"
    return f"({each}){'+' if least else '*'} TEXT"


def _tags_with_separator(lark: _Lark, form: dict[str, Any], path: str) -> str:
    tags = enumerate(_list(form, "tags", path))
    any_tag = lark.rule(" | ".join(f"({lark.tag(tag, f'{path}.tags[{index}]')})" for index, tag in tags))
    separator = literal(_text(form, "separator", path), lark.token_of) if form.get("separator") else ""
    several = any_tag if form.get("stop_after_first") else f"{any_tag} ({separator} {any_tag})*"
    return several if form.get("at_least_one") else f"({several})?"


_FORMATS: dict[Any, Callable[[_Lark, dict[str, Any], str], str]] = {
    "const_string": _const_string,
    "json_schema": _json_schema,
    "regex": _regex,
    "grammar": _grammar,
    "any_text": _any_text,
    "sequence": _sequence,
    "or": _or,
    "tag": _tag,
    "triggered_tags": _triggered_tags,
    "tags_with_separator": _tags_with_separator,
}


def _text(form: dict[str, Any], key: str, path: str) -> str:
    value = form.get(key)
    if not isinstance(value, str) or not value:
        _wrong(f"{path}.{key}", "is missing: it takes a text" if value in (None, "") else "has to be a text")
    return value


def _list(form: dict[str, Any], key: str, path: str) -> Sequence[Any]:
    value = form.get(key)
    if not isinstance(value, list) or not value:
        _wrong(f"{path}.{key}", "is missing: it takes a list with one item or more")
    check_choice_count(len(value), f"{path}.{key}")
    return value


def _wrong(path: str, said: str) -> NoReturn:
    raise RequestError(f"{path} {said}", param=path, code="invalid_grammar")
