"""Test files that a change can affect, by the graph of imports: ``make affected`` runs them, and CI on main runs all.

    files changed since BASE --> modules --importers, over and over--> test files

A module depends on the modules that it imports, on their packages, and on those that a string names: entry points,
tables of lazily imported modules and ``python -m`` are such strings. A test file depends on the conftest.py of its
folders too. A file that is no module stands for the modules that read it (``NEAR``), for the tests of its folder, or,
where nothing here knows it, for all tests. ``tests/arch`` is always run.

    python -m tests.affected [BASE]      prints the files; BASE is a commit, by default main
"""

from __future__ import annotations

import ast
import functools
import itertools
import re
import subprocess
import sys
from collections.abc import Iterable, Iterator
from pathlib import Path

from tests.arch.rules import ROOT

PACKAGES = {
    "src/weft": "weft",
    "src/weft_tools": "weft_tools",
    "tests": "tests",
    "benchmarks": "benchmarks",
    "deploy": "deploy",
}
NEAR = {
    "csrc/": ("weft.tensor.native",),
    "CMakeLists.txt": ("weft.tensor.native",),
    "docs/": ("tests.docs", "tests.arch"),
    "README.md": ("tests.docs", "tests.arch"),
    "CHANGELOG.md": ("tests.docs", "tests.arch"),
    "CONTRIBUTING.md": ("tests.docs", "tests.arch"),
    "SECURITY.md": ("tests.docs", "tests.arch"),
    "deploy/": ("tests.deploy", "tests.docs"),
    "benchmarks/results/": ("tests.docs",),
    "train/": ("tests.docs",),
}
"""Modules that read files of these paths, and packages all of whose tests do."""
_NAME = re.compile(r"(?:weft|weft_tools|tests|benchmarks)(?:\.\w+)+\.?")


@functools.cache
def modules() -> dict[str, Path]:
    """Return each module of the repository with its file, relative to the root."""
    found = {}
    for folder, package in PACKAGES.items():
        for file in (ROOT / folder).rglob("*.py"):
            parts = [package, *file.relative_to(ROOT / folder).with_suffix("").parts]
            found[".".join(parts[:-1] if parts[-1] == "__init__" else parts)] = file.relative_to(ROOT)
    return found


def _running_nodes(tree: ast.AST) -> Iterator[ast.AST]:
    """Yield the nodes of ``tree`` but for those that only a type checker reads."""
    for child in ast.iter_child_nodes(tree):
        if isinstance(child, ast.If) and isinstance(child.test, ast.Name) and child.test.id == "TYPE_CHECKING":
            continue
        yield child
        yield from _running_nodes(child)


LAZY = ":names"
"""Suffix of the node that stands for the names which a package's ``__init__.py`` imports when they are asked for."""


def named_modules(text: str, module: str, known: Iterable[str], *, is_package: bool) -> tuple[set[str], set[str]]:
    """Return the modules of ``known`` that the source ``text`` of ``module`` imports, and those that a string names."""
    known = set(known)
    imported: set[str] = set()
    in_strings: set[str] = set()
    package = module if is_package else module.rpartition(".")[0]
    for node in _running_nodes(ast.parse(text)):
        match node:
            case ast.Import():
                imported |= {name for alias in node.names for name in (alias.name, alias.name + LAZY)}
            case ast.ImportFrom():
                base = ".".join(package.split(".")[: len(package.split(".")) - node.level + 1]) if node.level else ""
                base = ".".join(part for part in (base, node.module) if part)
                members = {f"{base}.{alias.name}" for alias in node.names}
                imported |= {base} | members
                if not members <= known:
                    imported.add(base + LAZY)
            case ast.Constant(value=str(value)) if found := _NAME.match(value):
                name = found.group(0)
                in_strings |= {one for one in known if one.startswith(name)} if name.endswith(".") else {name}
            case ast.List() | ast.Tuple():
                words = [part.value if isinstance(part, ast.Constant) else None for part in node.elts]
                if any(pair == ("-m", "weft") for pair in itertools.pairwise(words)):
                    in_strings.add("weft.__main__")

    def with_packages(names: set[str]) -> set[str]:
        ends = {".".join(name.split(".")[: end + 1]) for name in names for end in range(name.count(".") + 1)}
        lazy = {name for name in ends if name.endswith(LAZY) and name.removesuffix(LAZY) in known}
        return (ends & known) - {module} | lazy

    return with_packages(imported), with_packages(in_strings)


@functools.cache
def importers() -> dict[str, set[str]]:
    """Return, for each module, those that depend on it directly."""
    files = modules()
    graph: dict[str, set[str]] = {node: set() for module in files for node in (module, module + LAZY)}
    for module, file in files.items():
        is_package = file.name == "__init__.py"
        text = (ROOT / file).read_text(encoding="utf-8")
        imported, in_strings = named_modules(text, module, files, is_package=is_package)
        for target in imported:
            graph[target].add(module)
        for target in in_strings:  # a package imports them for the names that somebody asks it for
            graph[target].add(module + LAZY if is_package else module)
        if module.startswith("tests.") and file.name.startswith("test_"):
            folders = module.split(".")[:-1]
            for end in range(1, len(folders) + 1):
                conftest = ".".join([*folders[:end], "conftest"])
                if conftest in graph:
                    graph[conftest].add(module)
    return graph


def start_of(changed: str, files: dict[str, Path]) -> set[str] | None:
    """Return the modules that a changed file stands for; None: it may concern any test."""
    if changed.endswith(".py"):
        for folder, package in PACKAGES.items():
            if changed.startswith(f"{folder}/"):
                parts = [package, *Path(changed).relative_to(folder).with_suffix("").parts]
                return {".".join(parts[:-1] if parts[-1] == "__init__" else parts)}
    for path in sorted(NEAR, key=len, reverse=True):
        if changed == path or (path.endswith("/") and changed.startswith(path)):
            return {
                one
                for one in files
                for near in NEAR[path]
                if one.startswith(f"{near}.test_") or (one == near and near.startswith("weft."))
            }
    if changed.startswith(("src/", "tests/")) and changed.count("/") > 1:
        folder = Path(changed).parent
        while not (inside := {one for one, file in files.items() if folder in file.parents}):
            folder = folder.parent
        return inside
    return None


def affected(changed: Iterable[str]) -> list[str]:
    """Return the test files, sorted, that files changed at these paths can affect."""
    files = modules()
    tests = {module: str(file) for module, file in files.items() if file.name.startswith("test_")}
    graph = importers()
    reached = {module for module in tests if module.startswith("tests.arch.")}
    waiting: list[str] = []
    for path in changed:
        start = start_of(path, files)
        if start is None:
            return sorted(tests.values())
        readers = set() if path.endswith(".py") else start & tests.keys()  # they change in nothing that others import
        reached |= readers
        waiting += start - readers
    while waiting:
        module = waiting.pop()
        reached.add(module)
        waiting += graph.get(module, set()) - reached
    return sorted(file for module, file in tests.items() if module in reached)


def changed_since(base: str) -> list[str]:
    """Return the paths that differ from the point where this branch left ``base``, uncommitted ones too."""

    def git(*words: str) -> list[str]:
        return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout.splitlines()

    [fork] = git("merge-base", base, "HEAD")
    return [*git("diff", "--name-only", fork), *git("ls-files", "--others", "--exclude-standard")]


if __name__ == "__main__":
    print("\n".join(affected(changed_since(sys.argv[1] if len(sys.argv) > 1 else "main"))))
