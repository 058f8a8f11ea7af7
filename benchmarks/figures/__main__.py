"""Measure the figures of the README on this machine: ``make figures``.

    parts.py: a benchmark and its rows   --run-->   benchmarks/results/figures-KIND.json   --table-->   README.md

KIND is a kind of CPU, such as ``amd-zen-4``: the table has a column for each file. Each part says the commit, the day,
and the share of the machine that other programs used meanwhile. A figure that was not measured is left empty.

    make figures                                             every part: most of an hour on two cores
    make figures ARGS="--only prefix,restart"                some; the other figures of the file stay
    make figures ARGS="--table"                              only write the table of README.md again

A part whose engines are missing (vLLM, llama.cpp: ``python -m benchmarks.peers.make_env``) is named and left out.
"""

from __future__ import annotations

import argparse
import json
import os
import re
import resource
import subprocess
import sys
import tempfile
import time
from collections.abc import Sequence
from datetime import UTC, datetime
from importlib import metadata
from pathlib import Path
from typing import Any

from benchmarks.figures.parts import PARTS, Part
from benchmarks.figures.table import RESULTS, write_table
from benchmarks.peers.environment import DEFAULT_ENVIRONMENT, Absent, Environment
from weft.host import usable_cores

ROOT = Path(__file__).resolve().parents[2]
README = ROOT / "README.md"
MEASURED_FILES = ("benchmarks/results/", "README.md")
"""Files that a run writes: a change of any other file has to be committed first."""


class Failed(Exception):
    """A benchmark that ended with an error; says the end of its output."""


def cpu_kind(cpuinfo: str) -> str:
    """Return the kind of CPU that ``/proc/cpuinfo`` describes, such as "AMD Zen 4" or "Intel with AMX"."""
    facts = dict(re.findall(r"^([\w ]+?)\s*: (.*)$", cpuinfo, flags=re.MULTILINE)[::-1])
    flags = facts.get("flags", "").split()
    match facts.get("vendor_id"), facts.get("cpu family"):
        case "AuthenticAMD", "25":
            return "AMD Zen 4" if "avx512f" in flags else "AMD Zen 3"
        case "AuthenticAMD", "26":
            return "AMD Zen 5"
        case "GenuineIntel", _:
            return "Intel with AMX" if "amx_tile" in flags else "Intel without AMX"
        case _:
            return facts.get("model name", "another CPU")


def commit_now() -> str:
    """Return the commit of the checkout. Raise SystemExit where a file other than a result is changed."""
    changed = subprocess.run(
        ["git", "status", "--porcelain", "--untracked-files=no"], cwd=ROOT, capture_output=True, text=True, check=True
    ).stdout.splitlines()
    others = [line[3:] for line in changed if not line[3:].startswith(MEASURED_FILES)]
    if others:
        raise SystemExit(f"figures are of a commit; commit first: {', '.join(others)}")
    done = subprocess.run(
        ["git", "rev-parse", "--short=8", "HEAD"], cwd=ROOT, capture_output=True, text=True, check=True
    )
    return done.stdout.strip()


def busy_seconds() -> float:
    """Return the CPU seconds, of all cores since the boot, that were not idle."""
    names = Path("/proc/stat").read_text().split("\n", 1)[0].split()[1:9]
    user, nice, system, _, _, irq, softirq, steal = (int(ticks) for ticks in names)
    return (user + nice + system + irq + softirq + steal) / os.sysconf("SC_CLK_TCK")


def own_seconds() -> float:
    """Return the CPU seconds of this process and of its children that have ended."""
    own, children = (resource.getrusage(who) for who in (resource.RUSAGE_SELF, resource.RUSAGE_CHILDREN))
    return own.ru_utime + own.ru_stime + children.ru_utime + children.ru_stime


def measured(part: Part, env: Path, commit: str) -> dict[str, Any]:
    """Run the benchmark of ``part`` and return its figures with their circumstances. Raise Absent, or
    Failed also if a row of the table lacks a figure."""
    if part.needs_peers:
        environment = Environment(env)
        environment.python()
        environment.llama_server()
    with tempfile.TemporaryDirectory() as folder:
        file = Path(folder) / "result.json"
        command = part.command(file, env)
        print(f"{part.name}: {' '.join(command[1:])}", flush=True)
        load, busy, own, began = os.getloadavg()[0], busy_seconds(), own_seconds(), time.monotonic()
        done = subprocess.run(command, cwd=ROOT, capture_output=True, text=True)
        seconds = time.monotonic() - began
        if done.returncode:
            raise Failed(f"{part.name} failed:\n{done.stdout[-2000:]}{done.stderr[-2000:]}")
        others = busy_seconds() - busy - (own_seconds() - own)
        result = json.loads(file.read_text(encoding="utf-8") if file.exists() else done.stdout)
    figures = part.read(result)
    try:
        for row in part.rows:
            row.cell(figures)
    except KeyError as missing:  # an engine that did not start has no figures
        raise Failed(f"{part.name} has no figure {missing}:\n{done.stdout[-2000:]}") from missing
    return {
        "commit": commit,
        "day": datetime.now(UTC).date().isoformat(),
        "seconds": round(seconds),
        "load_before": round(load, 2),
        "others": round(max(0.0, others) / (seconds * (os.cpu_count() or 1)), 3),
        "figures": figures,
    }


def main(argv: Sequence[str] | None = None) -> int:
    """Run the parts that were named, write the file after each, then the table."""
    names = [part.name for part in PARTS]
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.figures", description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter
    )
    parser.add_argument("--only", type=lambda text: text.split(","), default=names, help=f"of {', '.join(names)}")
    parser.add_argument("--env", type=Path, default=DEFAULT_ENVIRONMENT, help="environment of the other engines")
    parser.add_argument("--table", action="store_true", help="measure nothing; write the table from the files")
    asked = parser.parse_args(argv)
    if unknown := set(asked.only) - set(names):
        parser.error(f"--only {','.join(sorted(unknown))}: the parts are {', '.join(names)}")
    failed: list[str] = []
    if not asked.table:
        kind = cpu_kind(Path("/proc/cpuinfo").read_text(encoding="utf-8"))
        file = RESULTS / f"figures-{re.sub(r'[^a-z0-9]+', '-', kind.lower()).strip('-')}.json"
        report = json.loads(file.read_text(encoding="utf-8")) if file.exists() else {"parts": {}}
        commit = commit_now()
        report |= {"kind": kind, "cores": usable_cores(), "python": sys.version.split()[0]}
        report |= {name: metadata.version(name) for name in ("torch", "transformers")}
        for part in PARTS:
            if part.name not in asked.only:
                continue
            try:
                report["parts"][part.name] = measured(part, asked.env, commit)
            except Absent as error:
                print(f"{part.name} is left out: {error}", file=sys.stderr)
            except Failed as error:
                print(error, file=sys.stderr)
                failed.append(part.name)
            file.write_text(json.dumps(report, indent=1) + "\n", encoding="utf-8")
    README.write_text(write_table(README.read_text(encoding="utf-8")), encoding="utf-8")
    return 1 if failed else 0


if __name__ == "__main__":
    raise SystemExit(main())
