"""Everything that a machine with a GPU can say about weft and a machine without one cannot, in one run.

    PYTHONPATH=src python -m benchmarks.gpu_first_run [--output benchmarks/results/gpu.json] [--budget-s 540]

    machine     GPU, torch, Triton, and which of weft's other dependencies are not installed
    served      one small model with every organ through weft serve: drafts, store, sleep, adapters (``gpu_served``)
    tests       make test-gpu, where pytest is installed: each test that failed, by name
    profile     the time on the device of each kernel of a step, decodes and prompts
    decode      a model of random weights (Qwen3.5-4B by default, bfloat16): the time of a decode step
    drafts      steps that verify drafts, and the model's own head, in both loops
    small       decode steps with joined kernels and with separate ones
    rivals      the gated delta rule and attention beside fla, FlashQLA and FlashInfer, of those that are installed
    server      weft serve with such a model, and loads over HTTP (``gpu_server``)
    experts     ``profile`` with the geometry of Qwen3.5-35B-A3B
    27b         ``decode`` with that of Qwen3.5-27B
    long        ``decode`` after 128k tokens
    nccl        a sum over one rank, launched and in a graph
    tune        other launch parameters of each kernel (``gpu_tune``)
    check       every kernel beside torch's operators on the same numbers
    kernels     time, bytes, FLOPs, share of the measured ceiling
    families    small models with sinks, rings, pictures, adapters: with graphs, without, and by torch
    compile     every shape of every Triton kernel, for the GPUs it is made for

It needs torch, Triton and numpy and nothing else, and runs unattended. A part is a process of its own
(``gpu_parts``), with a share of the time. A part that hangs or dies is ended, and its results until then
stay. A part that goes over kernels is started again behind the kernel that ended it. The file is rewritten
after each result, so a run that is cut short leaves its results.

The figures of docs/gpu.md come from this file.
"""

from __future__ import annotations

import argparse
import contextlib
import importlib.util
import json
import os
import queue
import re
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Sequence
from pathlib import Path
from typing import Any

SHARES_S = {
    "machine": 30,
    "served": 150,
    "tests": 130,
    "profile": 80,
    "decode": 100,
    "drafts": 60,
    "small": 60,
    "rivals": 70,
    "server": 150,
    "experts": 70,
    "27b": 80,
    "long": 60,
    "nccl": 30,
    "tune": 100,
    "check": 140,
    "kernels": 150,
    "families": 120,
    "compile": 300,
}
"""The most that a part may take; what the parts before it left is less. In the order of their worth: what never ran
comes first, what was verified once comes last.
"""
SILENT_S = 90
"""A part that says nothing for so long hangs. Compiling a kernel takes seconds, loading a model some tens."""
KERNEL_PARTS = ("served", "rivals", "check", "kernels", "families")
"""Of cases, each of which may end its process."""
RESTARTS_MAX = 8
OTHER_SIZES = {
    "rivals": ("kernels", "--geometries", "Qwen3.5-4B", "--groups", "delta", "attention", "--batch", "16", "256"),
    "small": ("small", "--batch", "1", "16", "48"),
    "experts": ("profile", "--geometry", "Qwen3.5-35B-A3B", "--batch", "1", "16", "64", "256"),
    "27b": ("decode", "--geometry", "Qwen3.5-27B", "--batch", "1", "16", "64", "--prefill", "8192"),
    "long": ("decode", "--batch", "1", "4", "--context", "131072", "--prefill", "32768"),
}
"""Arguments of ``gpu_parts`` for geometries and contexts that the other parts do not have."""
RIVALS = ("fla", "flash_qla", "flashinfer")
"""Packages with kernels to compare with."""
NEEDED = {"tests": ("pytest",), "rivals": RIVALS}
"""Packages of which a part needs one."""
WHOLE = ("tune",)
"""Of which all lines are kept: they are its results."""
FAILED = re.compile(r"\b(FAILED|ERROR)\b.*::|::.* (FAILED|ERROR)\b")
"""A line of pytest that names a test."""


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=(__doc__ or "").split("\n")[0])
    parser.add_argument("--output", type=Path, default=Path("benchmarks/results/gpu.json"))
    parser.add_argument("--budget-s", type=float, default=540, help="for all of it")
    parser.add_argument("--only", nargs="*", choices=SHARES_S, default=list(SHARES_S))
    parser.add_argument("--skip", nargs="*", choices=SHARES_S, default=[])
    args, more = parser.parse_known_args(argv)
    ends_s = time.monotonic() + args.budget_s
    args.output.parent.mkdir(parents=True, exist_ok=True)
    found: dict[str, Any] = {}
    for part, share_s in SHARES_S.items():
        if part not in args.only or part in args.skip:
            continue
        left_s = min(share_s, ends_s - time.monotonic())
        said = found[part] = {"results": [], "last_lines": []}
        if left_s < 5:
            said["left_out"] = "there was no time left"
        elif part in NEEDED and not any(map(importlib.util.find_spec, NEEDED[part])):
            said["left_out"] = f"{' or '.join(NEEDED[part])} is not installed"
        else:
            run_part(part, more, said, time.monotonic() + left_s, lambda: write(args.output, found))
        write(args.output, found)
    print(f"written to {args.output}", flush=True)
    return int(any(said.get("exit_code") for said in found.values()))


def command_of(part: str, more: Sequence[str], after: int) -> list[str]:
    if part == "tests":  # -v: a run that is cut off has the names of what failed until then
        return ["make", "test-gpu", f"GPU_PYTHON={sys.executable}", "ARGS=-v"]
    if part == "tune":
        return [sys.executable, "-m", "benchmarks.gpu_tune"]
    if part == "server":
        return [sys.executable, "-m", "benchmarks.gpu_server", *more]
    if part == "served":
        return [sys.executable, "-m", "benchmarks.gpu_served", "--after", str(after), *more]
    if part in OTHER_SIZES:
        name, *sizes = OTHER_SIZES[part]
        return [sys.executable, "-m", "benchmarks.gpu_parts", name, "--after", str(after), *more, *sizes]
    if part == "compile":
        return [sys.executable, "-m", "tests.support.compile_gate", "--all"]
    return [sys.executable, "-m", "benchmarks.gpu_parts", part, "--after", str(after), *more]


def run_part(part: str, more: Sequence[str], said: dict[str, Any], ends_s: float, keep: Any) -> None:
    """Into ``said``: ``results``, ``last_lines`` (of ``WHOLE`` parts all), ``failed`` tests, ``exit_code``,
    ``seconds``, ``ended`` (why, if not by itself) and, of the kernels that took their process with them,
    ``lost``."""
    began_s, after = time.monotonic(), 0
    for _ in range(RESTARTS_MAX + 1):
        process = Process(command_of(part, more, after))
        begun: dict[str, Any] | None = None
        while (line := process.line(min(SILENT_S, ends_s - time.monotonic()))) is not None:
            if line.startswith("@"):
                result = json.loads(line[1:])
                begun = result if "begins" in result else None
                if begun is None:
                    said["results"].append(result)
                    keep()
            said["last_lines"] = [*said["last_lines"][-(2000 if part in WHOLE else 29) :], line]
            if FAILED.search(line):
                said.setdefault("failed", []).append(line)
                keep()
        out_of_time = time.monotonic() >= ends_s - 0.5
        said["exit_code"] = process.end()
        said["seconds"] = round(time.monotonic() - began_s, 1)
        if process.hung:
            said["ended"] = "its time was over" if out_of_time else f"it said nothing for {SILENT_S} s"
        if said["exit_code"] == 0 or out_of_time or part not in KERNEL_PARTS:
            return
        if begun is not None:
            said.setdefault("lost", []).append(begun["begins"])
        reached = [result["number"] for result in (*said["results"], begun or {}) if "number" in result]
        if not reached:
            return  # it cannot even begin
        after = max(max(reached), after) + 1  # one more where it got nowhere


class Process:
    """A command whose output is read line by line, each with a time limit."""

    def __init__(self, command: Sequence[str]) -> None:
        print(f"== {' '.join(command)}", flush=True)
        paths = [str(Path("src").resolve()), os.environ.get("PYTHONPATH", "")]
        self.hung = False
        self._process = subprocess.Popen(
            command,
            stdout=subprocess.PIPE,
            stderr=subprocess.STDOUT,
            text=True,
            errors="replace",
            start_new_session=True,
            env=os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))},
        )
        self._lines: queue.Queue[str | None] = queue.Queue()
        threading.Thread(target=self._read, daemon=True).start()

    def _read(self) -> None:
        assert self._process.stdout is not None
        for line in self._process.stdout:
            self._lines.put(line.rstrip("\n"))
        self._lines.put(None)

    def line(self, limit_s: float) -> str | None:
        """The next line; None at the end, or where none came in time (``hung``)."""
        try:
            line = self._lines.get(timeout=max(limit_s, 0.01))
        except queue.Empty:
            self.hung = True
            return None
        if line is not None:
            print(line, flush=True)
        return line

    def end(self) -> int:
        """Its exit code; it and what it started are ended where it has not."""
        if self.hung:
            with contextlib.suppress(ProcessLookupError):
                os.killpg(self._process.pid, signal.SIGKILL)
        return self._process.wait()


def write(path: Path, found: dict[str, Any]) -> None:
    """All at once: a run that is cut short leaves the file before it, or this one."""
    aside = path.with_suffix(".part")
    aside.write_text(json.dumps(found, indent=1) + "\n")
    aside.replace(path)


if __name__ == "__main__":
    raise SystemExit(main())
