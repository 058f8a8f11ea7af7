"""Import circles between modules. Imports under TYPE_CHECKING and inside functions count like any other."""

from __future__ import annotations

from collections.abc import Iterable

from tests.arch.rules import Source, imported_names

COMPILED = {"weft._native"}
"""Modules without Python source: they import nothing."""


def import_graph(sources: Iterable[Source]) -> dict[str, set[str]]:
    """Return for each module the modules of ``sources`` that it imports. ``from package import module`` is the
    module.
    """
    listed = list(sources)
    modules = {source.module for source in listed} | COMPILED
    graph: dict[str, set[str]] = {}
    for source in listed:
        targets = {
            f"{module}.{name}" if f"{module}.{name}" in modules else module for module, name in imported_names(source)
        }
        graph[source.module] = (targets & modules) - {source.module} - COMPILED
    return graph


def import_circles(sources: Iterable[Source]) -> list[list[str]]:
    """Return the strongly connected components of more than one module (Tarjan 1972, without recursion)."""
    graph = import_graph(sources)
    order: dict[str, int] = {}
    lowest: dict[str, int] = {}
    open_modules: list[str] = []
    circles = []
    for root in sorted(graph):
        if root in order:
            continue
        path = [(root, iter(sorted(graph[root])))]
        order[root] = lowest[root] = len(order)
        open_modules.append(root)
        while path:
            module, targets = path[-1]
            target = next(targets, None)
            if target is None:
                path.pop()
                if path:
                    lowest[path[-1][0]] = min(lowest[path[-1][0]], lowest[module])
                if lowest[module] == order[module]:
                    cut = open_modules.index(module)
                    circle, open_modules = open_modules[cut:], open_modules[:cut]
                    if len(circle) > 1:
                        circles.append(sorted(circle))
            elif target not in order:
                order[target] = lowest[target] = len(order)
                open_modules.append(target)
                path.append((target, iter(sorted(graph[target]))))
            elif target in open_modules:
                lowest[module] = min(lowest[module], order[target])
    return circles
