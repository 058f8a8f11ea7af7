"""``python -m tests.mutants``: make the sample and the copy of the tree, run the worker there, print the table.

Results are in ``build/mutants``, and a run that is cut goes on where it was, with the sources of its beginning: tests
alone are copied anew. ``--new`` begins again with the sources of today.
"""

from __future__ import annotations

import argparse
import importlib.util
import json
import os
import shutil
import subprocess
import sys
import time
from collections import Counter, defaultdict
from dataclasses import asdict
from pathlib import Path

from tests.mutants.equivalent import EQUIVALENT, is_equivalent
from tests.mutants.sample import FOLDERS, Mutant, sample
from tests.mutants.switches import with_switches, write_compiled
from tests.mutants.worker import KILLED, NO_TEST, STAGES, SURVIVED, TESTS_MAX, TESTS_S_MAX, TIME_LIMIT, Files

ROOT = Path(__file__).resolve().parents[2]
REMOVED = "removed"
"""A mutant that survived, and whose code is gone since then."""
FORMS = (KILLED, TIME_LIMIT, SURVIVED, NO_TEST, REMOVED, "equivalent")

SITE = """
import sys

sys.meta_path[:] = [finder for finder in sys.meta_path if not type(finder).__module__.startswith("_editable_")]
"""
"""Module that each Python of the copy runs first: an editable install would import weft from where it was installed."""


def _git(*words: str) -> str:
    return subprocess.run(["git", *words], cwd=ROOT, capture_output=True, text=True, check=True).stdout


def copy_tree(files: Files, only: str = "") -> None:
    """Copy the files that git knows, or will, and the compiled kernels; all but those that are the same."""
    known = _git("ls-files", "--cached", "--others", "--exclude-standard").split("\n")
    for name in filter(None, known):
        source, copy = ROOT / name, files.tree / name
        if not name.startswith(only) or not source.is_file():
            continue
        if not copy.exists() or copy.read_bytes() != source.read_bytes():
            copy.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy(source, copy)
    if not only:
        (files.tree / "src" / "sitecustomize.py").write_text(SITE)
        kernels = importlib.util.find_spec("weft._native")
        if kernels is not None and kernels.origin is not None:
            shutil.copy(kernels.origin, files.tree / "src" / "weft")


def begin(files: Files, count: int, seed: int) -> None:
    """Choose the sample, and compile it into a new copy of the tree."""
    shutil.rmtree(files.build, ignore_errors=True)
    files.build.mkdir(parents=True)
    copy_tree(files)
    sources = sample(ROOT, count, seed)
    mutants = list(sources)
    of_files: dict[str, list[int]] = defaultdict(list)
    for number, mutant in enumerate(mutants):
        of_files[mutant.path].append(number)
    commit = _git("rev-parse", "--short", "HEAD").strip()
    kept = {"commit": commit, "files": list(of_files), "mutants": [asdict(mutant) for mutant in mutants]}
    for at, (path, numbers) in enumerate(of_files.items()):
        source = (ROOT / path).read_text()
        changes = {i: sources[mutants[i]] for i in numbers}
        write_compiled(files.tree / path, with_switches(source, changes, len(mutants) + at))
    files.write("sample", kept)


def outcomes(files: Files, which: str) -> list[tuple[Mutant, str]]:
    """Return the mutants that ran, with the outcome of the first run or of the last."""
    results = files.read("results")
    found = []
    for mutant in files.mutants():
        outcome = "equivalent" if is_equivalent(mutant) else results.get(mutant.key, {}).get(which)
        if outcome in (SURVIVED, NO_TEST) and which == "outcome" and not is_in_file(mutant.path, mutant.before):
            outcome = REMOVED
        if outcome is not None:
            found.append((mutant, outcome))
    return found


def is_in_file(path: str, lines: str) -> bool:
    """Whether the file has these lines today, however they are indented."""
    file = ROOT / path
    return file.exists() and " ".join(lines.split()) in " ".join(file.read_text().split())


def report(files: Files) -> None:
    """Print a table by folder for the first run and the last, and the mutants that are left."""
    chosen = Counter(mutant.folder for mutant in files.mutants())
    for which in ("first", "outcome"):
        print(f"\n{which}, sources of {files.read('sample')['commit']}:\n")
        print(f"| folder | of | ran | {' | '.join(FORMS)} |\n|---|---|---|{'---|' * len(FORMS)}")
        rows: dict[str, Counter[str]] = defaultdict(Counter)
        for mutant, outcome in outcomes(files, which):
            rows[mutant.folder][outcome] += 1
            rows["all"][outcome] += 1
        for name in (*FOLDERS, "all"):
            counts = " | ".join(str(rows[name][form]) for form in FORMS)
            print(f"| `{name}` | {chosen[name] or chosen.total()} | {rows[name].total()} | {counts} |")
    for mutant, outcome in outcomes(files, "outcome"):
        if outcome in (SURVIVED, NO_TEST):
            print(f"{mutant.path}:{mutant.line}: {outcome}\n    - {mutant.before}\n    + {mutant.after}")
    for path, before, _, _ in EQUIVALENT:
        if not is_in_file(path, before):
            print(f"{path} has no {before!r} any more: take it off the list of equivalent mutants")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--new", action="store_true", help="choose a sample of the sources of today")
    parser.add_argument("--count", type=int, default=600, help="mutants of a new sample")
    parser.add_argument("--seed", type=int, default=61, help="of a new sample")
    parser.add_argument("--seconds", type=float, default=1e9, help="stop after this long; a later run goes on")
    parser.add_argument(
        "--stages", type=int, nargs="*", default=list(range(len(STAGES))), help="0: unit, 1: servers, 2: sim"
    )
    parser.add_argument("--first", type=int, default=1_000_000, help="this many of the sample alone")
    parser.add_argument(
        "--places", nargs="*", default=[], metavar="PATH", help="mutants of these folders or files alone"
    )
    parser.add_argument("--files", nargs="*", default=[], metavar="FILE", help="these files of tests alone")
    parser.add_argument("--wide", action="store_true", help="try what survived with five times the tests")
    parser.add_argument("--again", action="store_true", help="try what survived once more, as its tests are better now")
    parser.add_argument("--pause", default="", metavar="FILE", help="wait while this file exists")
    parser.add_argument("--tests", type=int, default=TESTS_MAX, help="most tests that a stage asks about a mutant")
    parser.add_argument("--tests-seconds", type=float, default=TESTS_S_MAX, help="their usual seconds together")
    parser.add_argument("--workers", type=int, default=1, help="processes that share the mutants")
    parser.add_argument("--report", action="store_true", help="only print the tables")
    arguments = parser.parse_args()
    files = Files(ROOT / "build" / "mutants")
    if arguments.new or not files.read("sample"):
        begin(files, arguments.count, arguments.seed)
    if not arguments.report:
        copy_tree(files, "tests/")
        given = vars(arguments) | {"build": str(files.build), "run": time.time()}
        path = os.pathsep.join([str(files.tree / "src"), str(files.tree)])
        command = [sys.executable, "-m", "tests.mutants.worker", json.dumps(given)]
        environment = os.environ | {"PYTHONPATH": path}
        workers = [subprocess.Popen(command, cwd=files.tree, env=environment) for _ in range(arguments.workers)]
        for worker in workers:
            worker.wait()
    report(files)


if __name__ == "__main__":
    main()
