"""Bytes of a step on a GPU by kernel, beside the least possible: counted from launch arguments, not measured.

    python -m benchmarks.gpu_bytes                       the tables of docs/gpu.md
    python -m benchmarks.gpu_bytes --kernels --model Qwen3.5-4B --batch 16

Released geometries are built on torch's meta device, in bfloat16. Their decode step and the step of a long
prompt are asked for as on an H100, with Triton's kernels; nothing is computed. Each launch is a row of the
table, by kernel:

    read, written   each argument once, as the kernel's source loads and stores it. What programs read again
                    comes from the cache; experts count as evenly chosen
    least           weights, KV and states of the context, new KV and new states: what any step of this model
                    has to move. What one launch passes on to the next counts as nothing

The quotient of a step is what its launches move over the least. One kernel for the whole step would have 1.
"""

from __future__ import annotations

import argparse
import ast
import inspect
import json
import os
import sys
import textwrap
from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field
from functools import cache
from pathlib import Path
from typing import Any

os.environ.setdefault("TRITON_INTERPRET", "1")

import torch
from triton.runtime.interpreter import InterpretedFunction

from tests.unit.runner.launches import Launch, recorded
from tests.unit.runner.step_counts import (
    CONTEXT,
    META,
    Operator,
    Operators,
    bytes_in,
    hit_share,
    released_model,
    step_inputs,
    storage_of,
)
from weft.memory.frames.plan import ArenaPlan, memory_for, plan_arena
from weft.planning.geometries import find_geometry
from weft.runner import sampling_kernels
from weft.runner.arena import DeviceArena
from weft.tensor import gpu
from weft.tensor.inputs import StepInputs
from weft.units import pages_for

MODELS = ("Qwen3.5-4B", "Qwen3.5-35B-A3B")
BATCHES = (1, 16, 64, 256)
PROMPT = 8192
SHOWN_SHARE = 0.01
"""Of a step's bytes: a kernel that moves less is not in the table by kernels."""
GOAL = 1.10
"""Bytes of a decode step over the least."""
WINDOW_ROWS = 4
"""Tokens of a run that a convolution's window reaches."""


@dataclass
class Moved:
    """Of one kernel in a step. ``least`` is a part of ``read`` and ``written``."""

    launches: int = 0
    read: float = 0.0
    written: float = 0.0
    least: float = 0.0

    @property
    def moved(self) -> float:
        return self.read + self.written

    def add(self, read: float, written: float, least: float) -> None:
        self.launches += 1
        self.read += read
        self.written += written
        self.least += least


@dataclass
class StepBytes:
    """``kernels``: by name, those of torch as ``torch.name``."""

    kernels: dict[str, Moved] = field(default_factory=dict)

    def of(self, name: str) -> Moved:
        return self.kernels.setdefault(name, Moved())

    @property
    def total(self) -> Moved:
        every = self.kernels.values()
        return Moved(
            sum(one.launches for one in every),
            sum(one.read for one in every),
            sum(one.written for one in every),
            sum(one.least for one in every),
        )

    @property
    def quotient(self) -> float:
        total = self.total
        return total.moved / total.least


class _Source(ast.NodeVisitor):
    """Which parameters of a kernel its loads and stores reach. A value that was loaded is no address."""

    def __init__(self, function: Any, names: Sequence[str], roots: Sequence[frozenset[str]]) -> None:
        self.loads: set[str] = set()
        self.stores: set[str] = set()
        self._scope = function.__globals__
        self._of: dict[str, frozenset[str]] = dict(zip(names, roots, strict=True))
        tree = ast.parse(textwrap.dedent(inspect.getsource(function)))
        for _ in range(2):  # a loop assigns behind its use
            self.visit(tree)

    def roots(self, node: ast.AST) -> frozenset[str]:
        if isinstance(node, ast.Name):
            return self._of.get(node.id, frozenset())
        if isinstance(node, ast.Call) and self._name(node) in ("load", "where", "sum", "arange"):
            return frozenset()
        return frozenset().union(*(self.roots(one) for one in ast.iter_child_nodes(node)))

    @staticmethod
    def _name(call: ast.Call) -> str:
        return call.func.attr if isinstance(call.func, ast.Attribute) else getattr(call.func, "id", "")

    def visit_Assign(self, node: ast.Assign) -> None:
        self.generic_visit(node)
        for target in node.targets:
            pairs = [(target, node.value)]
            if isinstance(target, ast.Tuple) and isinstance(node.value, ast.Tuple):
                pairs = list(zip(target.elts, node.value.elts, strict=True))
            for name, value in pairs:
                if isinstance(name, ast.Name):
                    self._of[name.id] = self._of.get(name.id, frozenset()) | self.roots(value)

    def visit_AugAssign(self, node: ast.AugAssign) -> None:
        self.generic_visit(node)
        if isinstance(node.target, ast.Name):
            self._of[node.target.id] = self._of.get(node.target.id, frozenset()) | self.roots(node.value)

    def visit_Call(self, node: ast.Call) -> None:
        self.generic_visit(node)
        name = self._name(node)
        if name == "load" and node.args:
            self.loads |= self.roots(node.args[0])
        elif name in ("store", "atomic_add", "atomic_max", "atomic_cas"):
            self.stores |= self.roots(node.args[0])
            if name != "store":
                self.loads |= self.roots(node.args[0])
        called = self._scope.get(name) if isinstance(node.func, ast.Name) else None
        if isinstance(called, InterpretedFunction):
            names = list(inspect.signature(called.fn).parameters)
            given = dict(zip(names, map(self.roots, node.args), strict=False))
            given |= {one.arg: self.roots(one.value) for one in node.keywords if one.arg}
            inner = _Source(called.fn, names, [given.get(one, frozenset()) for one in names])
            self.loads |= inner.loads
            self.stores |= inner.stores


@cache
def roles(function: Any) -> tuple[frozenset[str], frozenset[str]]:
    """Parameters of a kernel that it loads, and those that it stores."""
    names = list(inspect.signature(function).parameters)
    source = _Source(function, names, [frozenset({name}) for name in names])
    return frozenset(source.loads), frozenset(source.stores)


class _Arena:
    """Bytes of KV and states that a launch moves of its arguments in the arena."""

    def __init__(self, buffer: torch.Tensor, plan: ArenaPlan, inputs: StepInputs) -> None:
        self.storage = storage_of(buffer)
        self._plan = plan
        runs = inputs.runs
        contexts = [start + length for start, length in zip(runs.starts, runs.lengths, strict=True)]
        self._sequences = runs.run_count
        self._pages = sum(map(pages_for, contexts))
        self._tokens = sum(runs.lengths)

    def bytes_of(self, view: torch.Tensor, *, stores: bool) -> float:
        """``view``: all slots' part of a state, or all pages' part of K or V."""
        part = bytes_in(view[:1])
        if view.shape[0] != self._plan.page_count or view.dim() < 3:
            return self._sequences * part
        return self._tokens * part / self._plan.page_tokens if stores else self._pages * part


@torch.inference_mode()
def bytes_of(model: Any, batch: int, *, prompt: int = 0) -> StepBytes:
    """A step of ``batch`` decodes behind CONTEXT tokens; with ``prompt`` of one new sequence instead."""
    step, made = StepBytes(), set[int]()
    spec = model.spec
    plan = plan_arena(
        spec, memory_for(spec, spec.dtype, batch + 1, max(CONTEXT, prompt))[0], kv_dtype=spec.dtype, kv_layout="rows"
    )
    buffer = DeviceArena(plan, META)
    inputs = step_inputs(batch, prompt, padded=True)
    arena = _Arena(buffer.buffer, plan, inputs)
    made |= {storage_of(one) for one in (inputs.tokens_T, inputs.runs.starts_R, inputs.runs.page_table_RP)}

    def note(launch: Launch) -> None:
        loads, stores = roles(_function(launch.kernel))
        read = written = least = 0.0
        seen: set[int] = set()
        for name, tensor in launch.tensors.items():
            if (name not in loads and name not in stores) or (id(tensor) in seen and name not in stores):
                continue
            seen.add(id(tensor))
            size, needed = float(bytes_in(tensor)), False
            if storage_of(tensor) == arena.storage:
                size, needed = arena.bytes_of(tensor, stores=name in stores and name not in loads), True
            elif launch.kernel == "causal_conv._rows":  # those that a window begins or ends in
                size *= min(1.0, inputs.runs.run_count * WINDOW_ROWS / len(inputs.tokens_T))
            elif (share := hit_share(launch, name, tensor)) < 1:
                size, needed = size * share, True
            elif storage_of(tensor) not in made:
                needed = tensor.dim() > 1
            read += size * (name in loads)
            written += size * (name in stores)
            least += size * needed * ((name in loads) + (name in stores))
        step.of(launch.kernel).add(read, written, least)

    def launched(operator: Operator) -> None:
        sources = (
            operator.written
            if operator.by_row
            else {at: one for at, one in operator.read.items() if at not in operator.written}
        )
        weights = (
            0
            if operator.by_row
            else sum(bytes_in(one) for at, one in sources.items() if at not in made and one.dim() > 1)
        )
        step.of(f"torch.{operator.name.split('.')[1]}").add(
            sum(map(bytes_in, sources.values())), sum(map(bytes_in, operator.written.values())), weights
        )

    with recorded(note, zeros=False), Operators(launched, made.update):
        hidden_TD = model.forward(inputs, buffer.layer_caches(len(spec.layers)))
        logits = model.logits(hidden_TD[: inputs.runs.run_count])
        sampling_kernels.choose(logits, None, masked=False)
    return step


_FUNCTIONS: dict[str, Any] = {}


def _function(kernel: str) -> Any:
    """The Python source of ``module.name``."""
    if kernel not in _FUNCTIONS:
        module, name = kernel.rsplit(".", 1)
        [found] = {
            id(one): one
            for path, held in list(sys.modules.items())
            if path.startswith("weft.") and path.removesuffix(".triton").endswith(f".{module}")
            for one in [getattr(held, name, None)]
            if isinstance(one, InterpretedFunction) and one.fn.__module__ == path
        }.values()
        _FUNCTIONS[kernel] = found.fn
    return _FUNCTIONS[kernel]


def rows_of(name: str, batches: Sequence[int] = BATCHES) -> Iterator[tuple[str, StepBytes]]:
    """The steps of ``name``: how each is called, and its bytes."""
    geometry = find_geometry(name)
    assert geometry is not None, f"no geometry is called {name}"
    model = released_model(dict(geometry.config))
    for batch in batches:
        yield f"{batch} decode{'s' if batch > 1 else ''}", bytes_of(model, batch)
    yield f"a prompt of {PROMPT:,}", bytes_of(model, 0, prompt=PROMPT)


def line_of(model: str, step: str, counted: StepBytes) -> str:
    """Of the table in docs/gpu.md."""
    total = counted.total
    return (
        f"| {model} | {step} | {total.launches} | {total.read / 1e9:.3g} | {total.written / 1e9:.3g} | "
        f"{total.least / 1e9:.3g} | {counted.quotient:.2f} |"
    )


def kernel_lines(model: str, steps: Sequence[StepBytes]) -> list[str]:
    """Of the table by kernels in docs/gpu.md: launches, GB moved and GB at least in each of ``steps``."""
    totals = [step.total.moved for step in steps]

    def shares(kernel: str) -> list[float]:
        return [step.kernels.get(kernel, Moved()).moved / total for step, total in zip(steps, totals, strict=True)]

    lines = []
    every = {name for step in steps for name in step.kernels}
    for kernel in sorted(every, key=lambda name: (-sum(shares(name)), name)):
        if max(shares(kernel)) >= SHOWN_SHARE:
            cells = [
                f"{one.launches} | {one.moved / 1e9:.3g} | {one.least / 1e9:.3g}"
                if (one := step.kernels.get(kernel))
                else " | | "
                for step in steps
            ]
            lines.append(f"| {model} | `{kernel}` | {' | '.join(cells)} |")
    return lines


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model", choices=MODELS, action="append")
    parser.add_argument("--batch", type=int, action="append")
    parser.add_argument("--kernels", action="store_true", help="each kernel of each step")
    parser.add_argument("--output", type=Path, help="JSON of all kernels")
    asked = parser.parse_args(argv)
    gpu.choose("triton")
    written: dict[str, dict[str, dict[str, Any]]] = {}
    by_kernel: list[str] = []
    print("| model | step | launches | GB read | GB written | GB at least | over the least |")
    print("|---|---|---|---|---|---|---|")
    for name in asked.model or MODELS:
        every_step = dict(rows_of(name, asked.batch or BATCHES))
        by_kernel += kernel_lines(name, list(every_step.values())[-2:])
        for called, counted in every_step.items():
            print(line_of(name, called, counted), flush=True)
            kernels = counted.kernels.items()
            written.setdefault(name, {})[called] = {kernel: vars(one) for kernel, one in kernels}
            every = sorted(kernels, key=lambda one: one[1].least - one[1].read - one[1].written)
            for kernel, one in every if asked.kernels else ():
                print(
                    f"    {kernel:36} {one.launches:5} launches {one.read / 1e6:10,.1f} MB read "
                    f"{one.written / 1e6:10,.1f} written {one.least / 1e6:10,.1f} at least"
                )
    print(
        "\n".join(
            (
                "",
                "| model | kernel | launches | GB | at least | launches | GB | at least |",
                "|---|---|---|---|---|---|---|---|",
                *by_kernel,
            )
        )
    )
    if asked.output is not None:
        asked.output.write_text(json.dumps(written, indent=1) + "\n")


if __name__ == "__main__":
    main()
