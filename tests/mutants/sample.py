"""A seeded choice of mutants: a file by its length, a place of it, and an operator of Cosmic Ray for the place.

A place counts once, however many operators fit it. Annotations are left out, since no run evaluates them, and so are
changes that do not compile or that leave the syntax tree as it is.
"""

from __future__ import annotations

import ast
import copy
import difflib
import random
from collections import defaultdict
from collections.abc import Iterable
from dataclasses import dataclass
from functools import cache
from itertools import zip_longest
from pathlib import Path
from typing import Any

from tests.mutants.switches import difference

FOLDERS = ("memory", "schedule", "engine", "text/tools", "store", "fleet", "server", "rpc")
SIGNS = frozenset(["+", "-", "*", "/", "//", "%", "**", ">>", "<<", "|", "&", "^"])
"""Operators of Python that operators of Cosmic Ray replace; other punctuation is not looked at, which saves hours."""


@dataclass(frozen=True)
class Mutant:
    """Operator of Cosmic Ray at its ``occurrence``th place in ``path``; ``before`` and ``after`` are the lines."""

    path: str
    line: int
    operator: str
    occurrence: int
    before: str
    after: str

    @property
    def folder(self) -> str:
        return next(name for name in FOLDERS if self.path.startswith(f"src/weft/{name}/"))

    @property
    def key(self) -> str:
        return f"{self.path}:{self.line} {self.operator}#{self.occurrence}"


@dataclass(frozen=True)
class _Choice:
    """Operator at its ``occurrence``th place of a file: the ``index``th of a node of the syntax tree."""

    line: int
    operator: str
    occurrence: int
    node: Any
    index: int


def _annotations(tree: ast.AST) -> list[tuple[int, int]]:
    """Return the first and last lines of annotations."""
    spans = []
    for node in ast.walk(tree):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        spans += [(part.lineno, part.end_lineno or part.lineno) for part in parts if isinstance(part, ast.expr)]
    return spans


def _looked_at(nodes: Iterable[Any]) -> dict[str, list[Any]]:
    """Return the nodes by the first word of the operators that look at them; "" for other operators."""
    by_word: dict[str, list[Any]] = {"": [], "ReplaceBinaryOperator": [], "ReplaceComparisonOperator": []}
    for node in nodes:
        if node.type == "operator":
            if node.value not in SIGNS:
                continue
            by_word["ReplaceBinaryOperator"].append(node)
        if node.type == "comparison":
            by_word["ReplaceComparisonOperator"].append(node)
        by_word[""].append(node)
    return by_word


@cache
def _operators() -> list[tuple[str, Any]]:
    from cosmic_ray.plugins import get_operator, operator_names

    operators = []
    for name in operator_names():
        if "Variable" not in name:  # they need the names of variables
            operators.append((name, get_operator(name)()))
    return operators


@cache
def places(path: Path) -> list[list[_Choice]]:
    """Return the possible changes of each place in a file, in the order of the places."""
    from cosmic_ray.ast import ast_nodes, get_ast

    source = path.read_text()
    typed = _annotations(ast.parse(source))
    by_word = _looked_at(ast_nodes(get_ast(source)))
    found: dict[tuple[Any, ...], list[_Choice]] = defaultdict(list)
    for name, operator in _operators():
        kind = name.split("/")[1].split("_")[0]
        nodes = by_word.get(kind, by_word[""])
        positions = ((node, *one) for node in nodes for one in enumerate(operator.mutation_positions(node)))
        for occurrence, (node, index, (start, end)) in enumerate(positions):
            if "BitOr" in name and any(first <= start[0] <= last for first, last in typed):
                continue
            found[start, end, kind].append(_Choice(start[0], name, occurrence, node, index))
    return [found[key] for key in sorted(found)]


def changed_source(source: str, choice: _Choice) -> str:
    """Return the source with a node of it changed; to parse the whole file again takes a hundred times as long."""
    node = copy.deepcopy(choice.node, {id(choice.node.parent): choice.node.parent})
    changed = dict(_operators())[choice.operator].mutate(node, choice.index)
    lines = source.split("\n")
    (first, start), (last, end) = choice.node.get_start_pos_of_prefix(), choice.node.end_pos
    code = changed.get_code() if changed is not None else ""
    return "\n".join([*lines[: first - 1], lines[first - 1][:start] + code + lines[last - 1][end:], *lines[last:]])


def _lines_of(source: str, changed: str) -> tuple[str, str]:
    """Return the lines that differ, before and after."""
    lines = [line for line in difflib.ndiff(source.split("\n"), changed.split("\n")) if line[:2] in ("- ", "+ ")]
    return tuple(" ".join(line[2:].strip() for line in lines if line[0] == sign) for sign in "-+")  # type: ignore[return-value]


def sample(root: Path, count: int, seed: int) -> dict[Mutant, str]:
    """Return ``count`` mutants and the changed source of each, one folder after the other in turns: a part of them is
    spread over all folders."""
    files = sorted(file for name in FOLDERS for file in (root / "src" / "weft" / name).rglob("*.py"))
    lengths = [file.stat().st_size for file in files]
    chance = random.Random(seed)
    taken: set[tuple[Path, int]] = set()
    chosen: dict[str, list[tuple[Mutant, str]]] = {name: [] for name in FOLDERS}
    while len(taken) < count:
        file = chance.choices(files, lengths)[0]
        own = places(file)
        if not own:
            continue
        number = chance.randrange(len(own))
        choice = chance.choice(own[number])
        source = file.read_text()
        try:
            changed = changed_source(source, choice)
            same = difference(ast.parse(source), ast.parse(changed)) is None
        except (AssertionError, AttributeError, IndexError, SyntaxError):  # or Cosmic Ray cannot make it
            continue
        if same or (file, number) in taken:
            continue
        taken.add((file, number))
        path = str(file.relative_to(root))
        mutant = Mutant(path, choice.line, choice.operator, choice.occurrence, *_lines_of(source, changed))
        chosen[mutant.folder].append((mutant, changed))
    return dict(one for turn in zip_longest(*chosen.values()) for one in turn if one is not None)
