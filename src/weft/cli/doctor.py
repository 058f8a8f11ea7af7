"""``weft doctor``: the machine's facts, and for each what it means for speed or for getting started.

Facts come from ``machine``; this file only judges them. A judgement is a pure function of the facts, so
that every sentence can be tested with facts of machines that are not here. Exit code 1 when something
must be mended before weft can run, else 0.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Literal

import click

from weft.cli.flags import FlagCommand
from weft.units import format_bytes

Verdict = Literal["good", "note", "bad"]
_MARKS: dict[Verdict, str] = {"good": "[green]ok[/]", "note": "[yellow]note[/]", "bad": "[red]bad[/]"}

RAM_NEEDED_BYTES = 1 << 30
DISK_NEEDED_BYTES = 2 << 30


@dataclass(frozen=True, slots=True)
class Finding:
    about: str
    fact: str
    verdict: Verdict
    advice: str = ""


def findings(facts: Mapping[str, Any]) -> list[Finding]:
    """Judge ``machine_facts()``; one row per thing a user can look at or change."""
    return [_python(facts), *_cpu(facts["cpu"]), _memory(facts["memory"]), _omp(facts["threads"]),
            *_torch(facts["torch"]), *_hub(facts["hub"])]


def _python(facts: Mapping[str, Any]) -> Finding:
    from weft.cli.version import weft_version

    system = facts["system"]
    return Finding("weft", f"{weft_version()} on Python {system['python']}, {system['os']}", "good")


def _cpu(cpu: Mapping[str, Any]) -> list[Finding]:
    cores, usable = cpu["cores"], cpu["usable_cores"]
    rows = [Finding("CPU", cpu["model"], "good")]
    if cores is not None and usable < cores:
        rows.append(Finding("cores", f"{usable} usable of {cores}", "note",
                            "the rest are outside this process's affinity or container quota"))
    else:
        rows.append(Finding("cores", f"{usable}", "good"))
    features = cpu["features"]
    if features is None:
        return [*rows, Finding("CPU features", "unknown on this system", "note")]
    present = [name for name, available in features.items() if available]
    fast = any(features[name] for name in ("avx512_bf16", "amx_bf16", "bf16"))
    wide = any(features[name] for name in ("avx2", "avx512f", "asimd"))
    if fast:
        rows.append(Finding("CPU features", ", ".join(present), "good", "bfloat16 arithmetic in hardware"))
    elif wide:
        rows.append(Finding("CPU features", ", ".join(present), "note",
                            "no bfloat16 instructions: --dtype float32 may be as fast"))
    else:
        rows.append(Finding("CPU features", ", ".join(present) or "none of those looked for", "note",
                            "no wide vector instructions: expect low speed"))
    return rows


def _memory(memory: Mapping[str, Any]) -> Finding:
    free, total = memory["available_bytes"], memory["total_bytes"]
    limit = memory["container_limit_bytes"]
    fact = f"{format_bytes(free)} free of {format_bytes(total)}"
    if limit is not None:
        fact += f", container limit {format_bytes(limit)}"
    if free < RAM_NEEDED_BYTES:
        return Finding("RAM", fact, "note", "enough for the embedded model only; name a size with --memory")
    return Finding("RAM", fact, "good")


def _omp(variables: Mapping[str, str | None]) -> Finding:
    policy = variables["OMP_WAIT_POLICY"]
    chosen = ", ".join(f"{name}={value}" for name, value in variables.items() if value is not None)
    if policy is None:
        return Finding("OMP policy", chosen or "unset", "good",
                       "weft sets OMP_WAIT_POLICY=passive for itself")
    if policy.lower() != "passive":
        return Finding("OMP policy", chosen, "note",
                       "threads that spin take the cores from the HTTP process: unset OMP_WAIT_POLICY")
    return Finding("OMP policy", chosen, "good")


def _torch(torch: Mapping[str, Any]) -> list[Finding]:
    if "error" in torch:
        return [Finding("torch", torch["error"], "bad", "run `make install`, or `pip install torch`")]
    fact = f"{torch['version']} ({torch['capability']}, {torch['threads']} threads) in {torch['path']}"
    rows = [Finding("torch", fact, "good")]
    if not torch["mkldnn"]:
        rows.append(Finding("oneDNN", "not in this build of torch", "note", "bfloat16 products will be slow"))
    if torch["kernels"]:
        rows.append(Finding("kernels", f"C++ (weft._native), {torch['matrix_unit']}", "good"))
    elif torch["kernels_stale"]:
        rows.append(Finding("kernels", "torch alone: the C++ kernels are of other sources", "note",
                            torch["kernels_missing"]))
    else:
        rows.append(Finding("kernels", "torch alone: the C++ kernels were not built", "note",
                            "install a C++ compiler, then reinstall weft"))
    gpus = torch["gpus"]
    if gpus:
        rows += _gpus(gpus, torch["triton"], flashinfer=torch["flashinfer"])
    else:
        rows.append(Finding("GPU", "none that torch can use", "good", "none is needed"))
    return rows


def _gpus(gpus: list[Mapping[str, Any]], triton: str | None, *, flashinfer: bool) -> list[Finding]:
    named = ", ".join(f"{gpu['name']} ({format_bytes(gpu['free_bytes'])} free of "
                      f"{format_bytes(gpu['total_bytes'])})" for gpu in gpus)
    old = [gpu["name"] for gpu in gpus if tuple(gpu["capability"]) < (8, 0)]
    rows = [Finding("GPU", named, "note", f"{', '.join(old)}: older than the kernels are made for (8.0)")
            if old else Finding("GPU", named, "good", "--device auto takes it; see docs/gpu.md")]
    if triton is None:
        rows.append(Finding("GPU kernels", "torch alone: Triton is not installed", "note",
                            "pip install 'weft[gpu]'"))
    else:
        rows.append(Finding("GPU kernels", f"Triton {triton}", "good"))
    if flashinfer:
        rows.append(Finding("attention", "FlashInfer is installed", "good",
                            "debug.attention_backend flashinfer takes it for prompts; see docs/gpu.md"))
    return rows


def _hub(hub: Mapping[str, Any]) -> list[Finding]:
    cache = f"{hub['cache']} ({hub['cached_models']} models, {format_bytes(hub['disk_free_bytes'])} free)"
    if not hub["writable"]:
        row = Finding("hub cache", cache, "note", "not writable: set HF_HOME to a folder that is")
    elif hub["disk_free_bytes"] < DISK_NEEDED_BYTES:
        row = Finding("hub cache", cache, "note", "little room: set HF_HOME to another disk")
    else:
        row = Finding("hub cache", cache, "good")
    if hub["offline"]:
        access = Finding("hub", "offline by HF_HUB_OFFLINE", "note",
                         "cached models and directories still work")
    elif hub["reachable"] is None:
        access = Finding("hub", f"{hub['endpoint']}, not asked", "good")
    elif hub["reachable"]:
        access = Finding("hub", f"{hub['endpoint']} answers", "good")
    else:
        access = Finding("hub", f"{hub['endpoint']} does not answer", "note",
                         "the embedded model, directories and cached models work without it")
    return [row, access]


@click.command("doctor", cls=FlagCommand)
@click.option("--json", "as_json", is_flag=True, help="Print the facts as JSON.")
@click.option("--offline", is_flag=True, help="Do not ask whether the model hub answers.")
def command(as_json: bool, offline: bool) -> int:
    """Show what this machine has, and what would make it faster."""
    from weft.cli.machine import machine_facts

    facts = machine_facts(ask_hub=not offline)
    rows = findings(facts)
    if as_json:
        facts["findings"] = [asdict(row) for row in rows]
        click.echo(json.dumps(facts, indent=2))
    else:
        _show(rows)
    return 1 if any(row.verdict == "bad" for row in rows) else 0


def _show(rows: list[Finding]) -> None:
    from rich.console import Console
    from rich.markup import escape
    from rich.table import Table

    table = Table(box=None, show_header=False, padding=(0, 2, 0, 0))
    table.add_column(no_wrap=True)
    table.add_column(no_wrap=True, style="bold")
    table.add_column(overflow="fold")
    for row in rows:
        advice = f"\n[dim]{escape(row.advice)}[/]" if row.advice else ""
        table.add_row(_MARKS[row.verdict], row.about, escape(row.fact) + advice)
    Console().print(table)
