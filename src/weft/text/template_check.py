"""Whether a chat template may be rendered in the server's own process: a whitelist over its syntax tree.

    source --parse--> tree --is_harmless--> True: weft.text.inline_template may try it
                                            False: only weft.text.template_worker renders it

A rendering cannot be stopped from outside. So an operation of a harmless template must be short in itself,
and loops and growing texts must be countable. The whitelist sees to the first, the budget of
``inline_template`` to the second. What the whitelist leaves out:

* arithmetic that makes large values: ``**``; other operators see their operands at run time;
* calls of anything but macros, a few functions and a few methods, by their names: ``format`` and ``center``
  write as much as an argument says;
* lists and objects that hold more than constants: one that holds another twice, and so on, has 2^n parts;
* filters and tests by a name that the tree does not show, imports, recursive loops, call blocks;
* names that hide a function or a macro.

A template that does not pass is rendered all the same: it costs a round trip to the worker for each
conversation.

The check runs in the worker, as the parser does: a tree can be deep.

Rejected: a blacklist (Jinja grows); the sandbox of Jinja alone (it keeps a template from the interpreter, and
bounds no work).
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator

from jinja2 import nodes

SOURCE_CHARS_MAX = 65_536
NODES_MAX = 4_000
DEPTH_MAX = 80
REPLACE_GROWTH_MAX = 16
"""Characters that ``replace`` may write for each one that it takes away."""
INDENT_MAX = 4
SEPARATOR_CHARS_MAX = 16
FUNCTIONS = frozenset({"raise_exception", "strftime_now", "namespace", "range"})
FILTERS = frozenset({
    "abs", "capitalize", "count", "d", "default", "first", "float", "int", "items", "join", "last", "length",
    "list", "lower", "map", "reject", "rejectattr", "replace", "reverse", "select", "selectattr", "string",
    "title", "tojson", "trim", "upper"})
TESTS = frozenset({
    "boolean", "defined", "eq", "equalto", "false", "float", "ge", "gt", "in", "integer", "iterable", "le",
    "lt", "mapping", "ne", "none", "number", "sameas", "sequence", "string", "true", "undefined", "==", "!=",
    "<", "<=", ">", ">="})
"""Without ``odd``, ``even`` and ``divisibleby``: they calculate ``%``, which formats a text."""
_METHODS = frozenset({
    "capitalize", "count", "endswith", "find", "get", "index", "items", "keys", "lower", "lstrip", "rfind",
    "rsplit", "rstrip", "split", "splitlines", "startswith", "strip", "title", "upper", "values"})
_CHOOSERS = frozenset({"map", "reject", "rejectattr", "select", "selectattr"})
"""Filters that call a filter or test of a given name."""
_INTEGER_MAX = 10**9
_DATE_FORMAT = re.compile(r"(?:[^%]|%[-A-Za-z%])*")
_PLAIN: tuple[type[nodes.Node], ...] = (
    nodes.Template, nodes.Output, nodes.TemplateData, nodes.If, nodes.CondExpr, nodes.Assign,
    nodes.AssignBlock, nodes.Break, nodes.Continue, nodes.NSRef, nodes.Keyword, nodes.Pair, nodes.Getitem,
    nodes.Slice, nodes.Concat, nodes.Compare, nodes.Operand, nodes.And, nodes.Or, nodes.Not, nodes.Neg,
    nodes.Pos, nodes.Add, nodes.Sub, nodes.Mul, nodes.Div, nodes.FloorDiv, nodes.Mod)
"""Nodes that need no look at what they hold, besides the nodes below them."""


def is_harmless(tree: nodes.Template, source: str) -> bool:
    """``tree`` is ``source``, parsed."""
    if len(source) > SOURCE_CHARS_MAX:
        return False
    if any(number > NODES_MAX or depth > DEPTH_MAX for number, (_, depth) in enumerate(_walk(tree))):
        return False
    macros = frozenset(macro.name for macro in tree.find_all(nodes.Macro))
    reserved = macros | FUNCTIONS | {"loop", "caller", "varargs", "kwargs"}
    return not macros & FUNCTIONS and all(_is_allowed(node, macros, reserved) for node, _ in _walk(tree))


def _walk(tree: nodes.Node) -> Iterator[tuple[nodes.Node, int]]:
    """Every node with its depth, without recursion."""
    waiting: list[tuple[nodes.Node, int]] = [(tree, 0)]
    while waiting:
        node, depth = waiting.pop()
        yield node, depth
        waiting.extend((child, depth + 1) for child in node.iter_child_nodes())


def _is_allowed(node: nodes.Node, macros: frozenset[str], reserved: frozenset[str]) -> bool:
    if type(node) in _PLAIN:
        return True
    match node:
        case nodes.Name():
            return node.ctx == "load" or node.name not in reserved
        case nodes.Macro():
            return True
        case nodes.Call():
            return _is_call_allowed(node, macros)
    look = _LOOKS.get(type(node))
    return look is not None and look(node)


def _is_call_allowed(call: nodes.Call, macros: frozenset[str]) -> bool:
    if call.dyn_args is not None or call.dyn_kwargs is not None:
        return False
    target = call.node
    if isinstance(target, nodes.Getattr):
        if target.attr == "replace":
            return not call.kwargs and _is_replace_allowed(call.args)
        return target.attr in _METHODS
    if not isinstance(target, nodes.Name):
        return False
    if target.name == "strftime_now":
        return (len(call.args) == 1 and not call.kwargs and isinstance(call.args[0], nodes.Const)
                and isinstance(call.args[0].value, str) and len(call.args[0].value) <= 64
                and _DATE_FORMAT.fullmatch(call.args[0].value) is not None)
    return target.name in FUNCTIONS or target.name in macros


def _is_replace_allowed(args: list[nodes.Expr]) -> bool:
    """The old and the new text are constants, and the new one is not much longer."""
    values = [arg.value if isinstance(arg, nodes.Const) else None for arg in args]
    match values:
        case [str(old), str(new)]:
            return bool(old) and len(new) <= REPLACE_GROWTH_MAX * len(old)
    return False


def _is_filter_allowed(node: nodes.Filter) -> bool:
    if node.name not in FILTERS or node.dyn_args is not None or node.dyn_kwargs is not None:
        return False
    if node.name == "replace":
        return not node.kwargs and _is_replace_allowed(node.args)
    if node.name == "tojson":
        return not node.args and all(
            isinstance(one.value, nodes.Const) and (
                one.key in ("ensure_ascii", "sort_keys")
                or (one.key == "indent" and one.value.value in (None, *range(INDENT_MAX + 1))))
            for one in node.kwargs)
    if node.name in _CHOOSERS:
        shown = [*node.args, *(one.value for one in node.kwargs)]
        return all(isinstance(one, nodes.Const) for one in shown) and "replace" not in [
            one.value for one in shown if isinstance(one, nodes.Const)]
    if node.name == "join":
        separators = [one.value if isinstance(one, nodes.Const) else None for one in node.args]
        return not node.kwargs and len(separators) <= 1 and all(
            isinstance(one, str) and len(one) <= SEPARATOR_CHARS_MAX for one in separators)
    return True


def _is_test_allowed(node: nodes.Test) -> bool:
    return node.name in TESTS and node.dyn_args is None and node.dyn_kwargs is None


def _is_constant(node: nodes.Const) -> bool:
    value = node.value
    return value is None or isinstance(value, str | bool | float) or (
        isinstance(value, int) and abs(value) <= _INTEGER_MAX)


def _holds_constants(node: nodes.Tuple | nodes.List | nodes.Dict) -> bool:
    """Or names to assign to."""
    if isinstance(node, nodes.Tuple) and node.ctx == "store":
        return True
    parts = [value for pair in node.items for value in (pair.key, pair.value)] if isinstance(
        node, nodes.Dict) else node.items
    return all(isinstance(part, nodes.Const | nodes.Tuple | nodes.List | nodes.Dict) for part in parts)


_LOOKS: dict[type[nodes.Node], Callable[..., bool]] = {
    nodes.For: lambda node: not node.recursive,
    nodes.Getattr: lambda node: not node.attr.startswith("_"),
    nodes.Filter: _is_filter_allowed,
    nodes.Test: _is_test_allowed,
    nodes.Const: _is_constant,
    nodes.List: _holds_constants,
    nodes.Tuple: _holds_constants,
    nodes.Dict: _holds_constants,
}
