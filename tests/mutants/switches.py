"""All mutants of a file in one module, each behind a switch: no mutant costs an import, and one process tries them all.

    source           a + b
    mutant 17        a - b
    compiled         (a - b) if _mutant(17) else (a + b)

The changed and the original file are parsed, the smallest expression or statement that differs is found, and both forms
are compiled. The module is written as a ``.pyc`` that Python takes without a look at the source (an unchecked hash), so
lines and sources stay those of the file. ``_mutant`` notes in a file in shared memory that the place was reached, and
answers whether its mutant is switched on, in all processes that a test starts too.

    bytes 0, 1       the mutant that is on (NONE: none of them)
    byte 2 + i       the place of mutant i was reached; behind the mutants, a function of file j was called
"""

from __future__ import annotations

import ast
import importlib.util
import mmap
from importlib import _bootstrap_external  # type: ignore[attr-defined]
from pathlib import Path
from typing import Any

NONE = 0xFFFF
MODULE = "weft_mutants"
"""Name of the module by which the changed modules read the shared file: each worker has one in its folder."""
CODE = """
import mmap

with open({path!r}, "r+b") as _file:
    _bytes = mmap.mmap(_file.fileno(), 0)
_active = memoryview(_bytes).cast("H")


def reached(number):
    _bytes[2 + number] = 1
    return _active[0] == number
"""

Step = tuple[str, int | None]
"""Field of a node of the syntax tree, and the index in it."""


class Switches:
    """View of the shared file."""

    def __init__(self, path: Path, count: int) -> None:
        if not path.exists() or path.stat().st_size != 2 + count + count % 2:
            path.write_bytes(bytes(2 + count + count % 2))
        with path.open("r+b") as file:
            self._bytes = mmap.mmap(file.fileno(), 0)
        self._count = count
        self.switch(NONE)

    def switch(self, number: int) -> None:
        self._bytes[:2] = number.to_bytes(2, "little")

    def clear(self) -> None:
        self._bytes[2:] = bytes(len(self._bytes) - 2)

    def reached(self) -> list[int]:
        return [number for number in range(self._count) if self._bytes[2 + number]]


def difference(old: ast.AST, new: ast.AST, path: tuple[Step, ...] = ()) -> tuple[Step, ...] | None:
    """Return the path of the smallest node that holds all that differs, or None where nothing does."""
    if type(old) is not type(new):
        return path
    found = []
    for field in old._fields:
        before, after = getattr(old, field, None), getattr(new, field, None)
        if isinstance(before, list) and isinstance(after, list) and len(before) == len(after):
            pairs = [(one, other, (field, index)) for index, (one, other) in enumerate(zip(before, after, strict=True))]
        else:
            pairs = [(before, after, (field, None))]
        for one, other, step in pairs:
            if isinstance(one, ast.AST) and isinstance(other, ast.AST):
                inner = difference(one, other, (*path, step))
                found += [inner] if inner is not None else []
            elif type(one) is not type(other) or one != other:
                return path
    return found[0] if len(found) == 1 else path if found else None


def _nodes(tree: ast.AST, path: tuple[Step, ...]) -> list[Any]:
    """Return the nodes on a path, the tree first."""
    nodes: list[Any] = [tree]
    for field, index in path:
        inner = getattr(nodes[-1], field)
        nodes.append(inner if index is None else inner[index])
    return nodes


def _can_switch(nodes: list[Any]) -> bool:
    """Whether the last node can be chosen when its code runs."""
    node = nodes[-1]
    if any(isinstance(parent, ast.pattern) for parent in nodes):
        return False
    if isinstance(node, ast.stmt):
        return True
    if not isinstance(node, ast.expr) or isinstance(node, ast.Slice | ast.Starred | ast.FormattedValue):
        return False
    if isinstance(nodes[-2], ast.JoinedStr):
        return False
    return isinstance(getattr(node, "ctx", None) or ast.Load(), ast.Load)


def _call(number: int) -> ast.Call:
    return ast.Call(ast.Name("_mutant", ast.Load()), [ast.Constant(number)], [])


def _put(tree: ast.AST, path: tuple[Step, ...], node: ast.AST) -> None:
    field, index = path[-1]
    parent = _nodes(tree, path[:-1])[-1]
    if index is None:
        setattr(parent, field, node)
    else:
        getattr(parent, field)[index] = node


def _count_calls(tree: ast.Module, number: int) -> None:
    """Have each function of ``tree`` note that it was called."""
    for node in ast.walk(tree):
        if isinstance(node, ast.FunctionDef | ast.AsyncFunctionDef):
            node.body.insert(1 if ast.get_docstring(node) is not None else 0, ast.Expr(_call(number)))


def with_switches(source: str, mutants: dict[int, str], own: int) -> ast.Module:
    """Return the syntax tree of ``source`` with the changed sources of ``mutants`` in it; ``own`` counts its calls."""
    tree = ast.parse(source)
    wraps = []
    for number, changed in mutants.items():
        new = ast.parse(changed)
        path = difference(ast.parse(source), new)
        assert path is not None
        while not _can_switch(_nodes(tree, path)):
            path = path[:-1]
        wraps.append((path, number, _nodes(new, path)[-1]))
    for path, number, node in sorted(wraps, key=lambda wrap: -len(wrap[0])):  # inner places first: paths stay valid
        old = _nodes(tree, path)[-1]
        if isinstance(node, ast.stmt):
            _put(tree, path, ast.If(_call(number), [node], [old]))
        else:
            _put(tree, path, ast.IfExp(_call(number), node, old))
    _count_calls(tree, own)
    first = 0
    while first < len(tree.body) and (
        (isinstance(tree.body[first], ast.Expr) and first == 0)
        or (isinstance(tree.body[first], ast.ImportFrom) and tree.body[first].module == "__future__")  # type: ignore[attr-defined]
    ):
        first += 1
    tree.body.insert(first, ast.ImportFrom(MODULE, [ast.alias("reached", "_mutant")], 0))
    return ast.fix_missing_locations(tree)


def write_compiled(path: Path, tree: ast.Module) -> None:
    """Write the compiled module of the file ``path``, which Python takes in place of its source."""
    code = compile(tree, str(path), "exec", dont_inherit=True)
    compiled = Path(importlib.util.cache_from_source(str(path)))
    compiled.parent.mkdir(exist_ok=True)
    compiled.write_bytes(_bootstrap_external._code_to_hash_pyc(code, bytes(8), False))
