"""Every test asserts something: directly, or by a checker of the tests that does."""

from __future__ import annotations

import ast
from collections.abc import Iterable

from tests.arch.circles import import_graph
from tests.arch.rules import Source, statements

CHECKS = {
    *("raises", "warns", "fail", "assert_close", "assert_allclose", "assert_array_equal"),
    "run_state_machine_as_test",
}
"""Calls that fail a test by themselves: those of pytest, torch, NumPy and hypothesis."""

_Function = ast.FunctionDef | ast.AsyncFunctionDef


def _called(function: _Function) -> set[str]:
    """Return the names that a function calls or passes on: ``check(x)``, ``model.check(x)``, ``run(check)``."""
    names = set()
    for node in ast.walk(function):
        if isinstance(node, ast.Call):
            callee = node.func
            names |= {callee.id} if isinstance(callee, ast.Name) else set()
            names |= {callee.attr} if isinstance(callee, ast.Attribute) else set()
            names |= {value.id for value in node.args if isinstance(value, ast.Name)}
    return names


def _asserts_itself(function: _Function) -> bool:
    return any(
        isinstance(node, ast.Assert)
        or (isinstance(node, ast.Raise) and "AssertionError" in ast.dump(node))
        or (
            isinstance(node, ast.Call)
            and any(keyword.arg == "check" and ast.unparse(keyword.value) == "True" for keyword in node.keywords)
        )
        for node in ast.walk(function)
    )


def tests_without_assertion(sources: Iterable[Source]) -> list[str]:
    """Test functions that neither assert nor call a function that does, in their file or its imports."""
    listed = list(sources)
    functions = {
        source.module: [node for node in statements(ast.parse(source.text)) if isinstance(node, _Function)]
        for source in listed
    }
    visible = {module: {module} | targets for module, targets in import_graph(listed).items()}
    called = {function: _called(function) for inside in functions.values() for function in inside}
    checkers = {
        module: {function.name for function in inside if called[function] & CHECKS or _asserts_itself(function)}
        for module, inside in functions.items()
    }
    grew = True
    while grew:
        grew = False
        for module, inside in functions.items():
            known = set().union(*(checkers[other] for other in visible[module]))
            more = {function.name for function in inside if called[function] & known} - checkers[module]
            checkers[module] |= more
            grew = grew or bool(more)
    return [
        f"{source.path}:{function.lineno}: {function.name} asserts nothing"
        for source in listed
        for function in functions[source.module]
        if function.name.startswith("test_") and function.name not in checkers[source.module]
    ]
