"""Makes measured seconds of steps longer or shorter: WEFT_TEST_COST_SCALE=0.1 is a machine ten times as fast.

    tests/conftest.py          installs it before weft is imported, and puts this folder on PYTHONPATH
    processes of the tests     Python imports ``sitecustomize`` from there at their start

Engines then decide by other costs, while their clocks, timeouts and metrics stay unchanged. Two kinds of costs are
not scaled: those of engines on a virtual clock, and those that a test sets (``debug.step_costs``).
"""

from __future__ import annotations

import importlib.abc
import importlib.machinery
import os
import sys
import time
from collections.abc import Callable, Sequence
from types import ModuleType
from typing import Any

VARIABLE = "WEFT_TEST_COST_SCALE"
MODULE = "weft.engine.engine"
REAL_CLOCKS = (time.monotonic, time.perf_counter)


def scale_steps(module: ModuleType, factor: float) -> None:
    """Scale the measured steps of each ``EngineCore`` of ``module`` by ``factor``."""
    core: Any = module.EngineCore
    begin: Callable[..., None] = core.__init__

    def begin_scaled(self: Any, **fields: Any) -> None:
        begin(self, **fields)
        if fields["clock"] in REAL_CLOCKS and fields.get("step_costs") is None:
            self.counters.priced_s = lambda plan, seconds: factor * seconds

    core.__init__ = begin_scaled


class _Finder(importlib.abc.MetaPathFinder):
    """A finder that changes MODULE right after its import."""

    def __init__(self, factor: float) -> None:
        self._factor = factor

    def find_spec(
        self, fullname: str, path: Sequence[str] | None, target: ModuleType | None = None
    ) -> importlib.machinery.ModuleSpec | None:
        if fullname != MODULE:
            return None
        spec = importlib.machinery.PathFinder.find_spec(fullname, path)
        if spec is None or spec.loader is None:
            return spec
        run: Callable[[ModuleType], None] = spec.loader.exec_module

        def run_and_scale(module: ModuleType) -> None:
            run(module)
            scale_steps(module, self._factor)

        spec.loader.exec_module = run_and_scale  # type: ignore[method-assign]
        return spec


def install() -> None:
    """Scale the steps of this process if the variable is set. The finder goes first, because Python uses the first that
    answers."""
    factor = float(os.environ.get(VARIABLE, "1"))
    if factor != 1:
        sys.meta_path.insert(0, _Finder(factor))


install()
