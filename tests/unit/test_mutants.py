"""The mutants of ``make mutants`` are switches: each form of a place runs when it should, and no other."""

from __future__ import annotations

import ast
from types import SimpleNamespace
from typing import Any

import pytest

from tests.mutants.switches import with_switches

SOURCE = '''"""An essay."""

from __future__ import annotations


def double(function):
    return lambda *given: 2 * function(*given)


@double
def total(items, first=3):
    """Return a sum."""
    for item in items:
        if item > first and item != 7:
            break
        first = first + item
    return first


def text(value):
    return f"{value + 1:>3}"
'''
CHANGES = {
    0: ("item > first", "item >= first"),
    1: ("first and item", "first or item"),
    2: ("break", "continue"),
    3: ("first + item", "first - item"),
    4: ("first=3", "first=4"),
    5: ("@double\n", ""),
    6: ("value + 1", "value + 2"),
    7: ("in items", "in []"),
}


def run(tree: ast.Module, on: int | None) -> tuple[Any, set[int]]:
    """Return what the functions of ``tree`` give while the mutant ``on`` is, and the places that they reach."""
    places: set[int] = set()

    def reached(number: int) -> bool:
        places.add(number)
        return number == on

    del tree.body[2]  # the import of the switches
    module: dict[str, Any] = {"_mutant": reached}
    exec(compile(tree, "module", "exec"), module)
    values = [module["total"]([1, 4, 9, 5]), module["total"]([7, 2]), module["total"]([3]), module["text"](4)]
    return SimpleNamespace(values=values), places


def changed(number: int) -> str:
    before, after = CHANGES[number]
    assert SOURCE.count(before) == 1
    return SOURCE.replace(before, after)


@pytest.mark.parametrize("number", CHANGES)
def test_a_switch_gives_its_mutant_and_none_gives_the_source(number: int) -> None:
    everything = {one: changed(one) for one in CHANGES}
    plain: dict[str, Any] = {}
    for source, on in ((SOURCE, None), (changed(number), number)):
        plain = {}
        exec(compile(source, "module", "exec"), plain)
        expected = [plain["total"]([1, 4, 9, 5]), plain["total"]([7, 2]), plain["total"]([3]), plain["text"](4)]
        found, places = run(with_switches(SOURCE, everything, 99), on)
        assert found.values == expected
        assert {number, 99} <= places
