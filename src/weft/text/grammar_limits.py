"""Limits on the shape of a grammar, checked before a compiler written in native code sees it.

    length       in bytes                  where the grammar is written (``weft.text.grammars``)
    choices      texts of one choice       likewise
    nesting      of a JSON schema          here, in the process that compiles
    references   different $ref targets    here
    rules        of a lark grammar         here
    items        of the parser, a token    by the compiler, with ``parser_limits``

The compiler recurses through nesting, references and rules, so their number bounds its stack. The limits are a fraction
of the depth that overflows a stack of 8 MiB, and far above the depth of real schemas. A limit gives the client a clear
message, but it is not the only protection: a grammar within the limits is still compiled in a process that may die
(``weft.text.grammar_sandbox``).
"""

from __future__ import annotations

import re
from collections.abc import Sequence
from typing import Any

from weft.errors import RequestError

GRAMMAR_BYTES_MAX = 2_000_000
CHOICES_MAX = 20_000
NESTING_MAX = 100
REFERENCES_MAX = 1_000
RULES_MAX = 2_000
_RULE = re.compile(r"(?m)^[ \t]*[?!]?[A-Za-z_][\w-]*(?:\.\w+|\[[^\]\n]*\])?\s*(?::|::=)")
_REFERENCE_WORDS = ("$ref", "$dynamicRef", "$recursiveRef")


_ROW_ITEMS_PER_MS = 16_000
"""Items of a row of the parser, squared, that an ambiguous grammar completes in a millisecond."""
_ROW_BURST = 6
"""Budgets of a step that one token of one answer may take, before ``weft.runner.grammars`` sees that it is slow."""
_MASK_ITEMS_PER_MS = 20_000
_MASK_ITEMS_MAX = 50_000


def parser_limits(step_s: float) -> Any:
    """Return llguidance's limits for grammars that may take ``step_s`` of a step. The parser of an ambiguous grammar
    keeps an item for each position where a rule may have begun, and completing a token costs at least the square of
    their number."""
    from llguidance import LLParserLimits

    step_ms = step_s * 1e3
    return LLParserLimits(
        max_items_in_row=int((_ROW_ITEMS_PER_MS * step_ms * _ROW_BURST) ** 0.5),
        step_max_items=min(int(_MASK_ITEMS_PER_MS * step_ms), _MASK_ITEMS_MAX),
        verbose_errors=False,
    )


def check_choice_count(count: int, field: str) -> None:
    if count > CHOICES_MAX:
        raise RequestError(
            f"{field} has {count} texts; the limit is {CHOICES_MAX}", param=field, code="invalid_grammar"
        )


def check_length(grammar: bytes, field: str) -> None:
    if len(grammar) > GRAMMAR_BYTES_MAX:
        raise RequestError(
            f"{field} is a grammar of {len(grammar)} bytes; the limit is {GRAMMAR_BYTES_MAX}",
            param=field,
            code="invalid_grammar",
        )


def check_nesting(schema: Any, field: str) -> set[str]:
    """Return the targets of the schema's references. Raise RequestError for a schema nested too deeply."""
    targets: set[str] = set()
    try:
        _walk_schema(schema, targets)
    except ValueError as error:
        raise RequestError(f"{field} {error}", param=field, code="invalid_grammar") from None
    return targets


def check_shape(grammars: Sequence[dict[str, Any]]) -> None:
    """Raise ValueError with the number and the limit for a grammar beyond a limit. ``grammars``: the list that a
    ``Grammar`` holds, parsed."""
    rules = 0
    targets: set[str] = set()
    written_references = 0
    for grammar in grammars:
        lark = grammar.get("lark_grammar")
        if isinstance(lark, str):
            rules += sum(1 for _ in _RULE.finditer(lark))
            written_references += sum(lark.count(f'"{word}"') for word in _REFERENCE_WORDS)
        _walk_schema(grammar.get("json_schema"), targets)
    if rules > RULES_MAX:
        raise ValueError(f"has {rules} rules; the limit is {RULES_MAX}")
    if len(targets) + written_references > REFERENCES_MAX:
        raise ValueError(
            f"refers to {len(targets) + written_references} definitions ($ref); the limit is {REFERENCES_MAX}"
        )


def _walk_schema(schema: Any, targets: set[str]) -> None:
    """Add the targets of all references to ``targets``. Raise ValueError for a schema nested too deeply."""
    level, depth = [schema], 0
    while level:
        if depth > NESTING_MAX:
            raise ValueError(f"is nested more than {NESTING_MAX} levels deep")
        below: list[Any] = []
        for value in level:
            if isinstance(value, dict):
                targets.update(target for word in _REFERENCE_WORDS if isinstance(target := value.get(word), str))
                below += [item for item in value.values() if isinstance(item, dict | list)]
            elif isinstance(value, list):
                below += [item for item in value if isinstance(item, dict | list)]
        level, depth = below, depth + 1
