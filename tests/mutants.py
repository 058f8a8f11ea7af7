"""``python -m tests.mutants``: do the tests notice a change of the code? (``make mutants``; not a part of CI.)

    cover    run the tests in this process's folder under coverage; each line learns the tests that run it
    sample   a seeded choice of the places that the operators of Cosmic Ray can change, annotations apart
    run      one change at a time in a copy of the tree; the nearest tests of its line, with a time limit

A place counts once, however many operators fit it. A mutant is killed by a failing test, by an error, or by the time
limit. One whose line no test runs counts as survived: ``no test``. Lines that run in other processes only, as those of
servers, have no contexts: tests of their folder that name the module are run. Results go to build/mutants/results.json,
so that a run that is cut goes on where it was.
"""

from __future__ import annotations

import argparse
import ast
import json
import os
import random
import shutil
import signal
import subprocess
import sys
import time
from collections import Counter, defaultdict
from collections.abc import Iterator
from dataclasses import asdict, dataclass
from pathlib import Path

ROOT = Path(__file__).resolve().parents[1]
FOLDERS = ("memory", "schedule", "engine", "text/tools", "store", "fleet", "server", "rpc")
COVERED = ("tests/unit", "tests/property", "tests/rpc", "tests/sim")
"""Folders of tests that run what they test in their own process."""
BUILD = ROOT / "build" / "mutants"
TREE, DATA, RESULTS = BUILD / "tree", BUILD / "coverage", BUILD / "results.json"
TESTS_MAX = 12
LIMIT_S = 30.0


@dataclass(frozen=True)
class Mutant:
    """``operator``: of Cosmic Ray, at its ``occurrence``th place in ``path``."""

    path: str
    line: int
    operator: str
    occurrence: int

    @property
    def folder(self) -> str:
        return next(name for name in FOLDERS if self.path.startswith(f"src/weft/{name}/"))


def cover(folders: list[str]) -> None:
    """Run the tests of ``folders``, and add the lines that each runs to DATA."""
    BUILD.mkdir(parents=True, exist_ok=True)
    config = BUILD / "coveragerc"
    config.write_text(
        f"[run]\ndynamic_context = test_function\ndata_file = {DATA}\nsource = src/weft\nsigterm = true\n"
    )
    command = ["coverage", "run", "--append", f"--rcfile={config}", "-m", "pytest", "-q", "-p", "no:cacheprovider"]
    subprocess.run([sys.executable, "-m", *command, *folders], cwd=ROOT, check=False)


def annotations(source: str) -> list[tuple[int, int]]:
    """Lines of the annotations of ``source``, which no run evaluates."""
    spans = []
    for node in ast.walk(ast.parse(source)):
        parts = [getattr(node, "annotation", None), getattr(node, "returns", None)]
        spans += [(part.lineno, part.end_lineno or part.lineno) for part in parts if isinstance(part, ast.expr)]
    return spans


def places(path: Path) -> Iterator[list[Mutant]]:
    """Yield the mutants of each place in a file."""
    from cosmic_ray.ast import ast_nodes, get_ast_from_path
    from cosmic_ray.plugins import get_operator, operator_names

    typed = annotations(path.read_text())
    nodes = list(ast_nodes(get_ast_from_path(path)))
    found: dict[tuple[object, ...], list[Mutant]] = defaultdict(list)
    for name in operator_names():
        try:
            operator = get_operator(name)()
        except TypeError:
            continue  # needs the names of variables
        positions = (position for node in nodes for position in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            if "BitOr" in name and any(first <= start[0] <= last for first, last in typed):
                continue
            kind = name.split("/")[1].split("_")[0]
            found[start, end, kind].append(Mutant(str(path.relative_to(ROOT)), start[0], name, occurrence))
    yield from found.values()


def sample(count: int, seed: int, folders: tuple[str, ...]) -> Iterator[Mutant]:
    """Yield ``count`` mutants that ``seed`` chooses, those of other folders left out: a file by its length, a place of
    it, and an operator of the place. A file is read when the first of its mutants is due."""
    files = sorted({file for name in FOLDERS for file in (ROOT / "src" / "weft" / name).rglob("*.py")})
    lengths = [file.stat().st_size for file in files]
    chance = random.Random(seed)
    read: dict[Path, list[list[Mutant]]] = {}
    for file in chance.choices(files, lengths, k=count):
        where, which = chance.random(), chance.random()
        if not any(file.is_relative_to(ROOT / "src" / "weft" / name) for name in folders):
            continue
        if file not in read:
            read[file] = list(places(file))
        if read[file]:
            place = read[file][int(where * len(read[file]))]
            yield place[int(which * len(place))]


def tests_of_lines() -> dict[tuple[str, int], set[str]]:
    """Return the tests (file::function) that run each line."""
    from coverage import CoverageData

    data = CoverageData(str(DATA))
    data.read()
    found: dict[tuple[str, int], set[str]] = defaultdict(set)
    for file in data.measured_files():
        for line, contexts in data.contexts_by_lineno(file).items():
            for context in contexts:
                module, _, function = context.rpartition(".")
                test = Path(module.replace(".", "/") + ".py")
                if function.startswith("test_") and (ROOT / test).is_file():
                    found[str(Path(file).relative_to(ROOT)), line].add(f"{test}::{function}")
    return found


def tests_of(mutant: Mutant, lines: dict[tuple[str, int], set[str]]) -> list[str]:
    """Return the tests to run, the nearest first: files named as the module, its folder's unit tests, others."""
    stem, top = Path(mutant.path).stem, mutant.folder.split("/")[0]

    def distance(test: str) -> tuple[bool, bool, bool, str]:
        return (stem not in Path(test.split("::")[0]).stem, f"unit/{top}" not in test, "sim/" in test, test)

    own = lines.get((mutant.path, mutant.line), set())
    if not own:  # a line of the module or of a class, which runs when it is imported
        own = set().union(*(tests for (path, _), tests in lines.items() if path == mutant.path))
    if own:
        return sorted(own, key=distance)[:TESTS_MAX]
    module = mutant.path.removeprefix("src/").removesuffix(".py").replace("/", ".")
    folder = ROOT / "tests" / top
    files = sorted(folder.glob("test_*.py")) if folder.is_dir() else []
    named = [file for file in files if stem in file.stem or module in file.read_text()]
    return [str(file.relative_to(ROOT)) for file in named[:3]]


def copy_tree() -> None:
    """Make TREE anew: what git knows, and the compiled kernels."""
    shutil.rmtree(TREE, ignore_errors=True)
    known = subprocess.run(["git", "ls-files"], cwd=ROOT, capture_output=True, text=True, check=True).stdout.split("\n")
    kernels = [str(file.relative_to(ROOT)) for file in (ROOT / "src" / "weft").glob("_native*.so")]
    for name in filter(None, [*known, *kernels]):
        (TREE / name).parent.mkdir(parents=True, exist_ok=True)
        shutil.copy(ROOT / name, TREE / name)


def outcome_of(mutant: Mutant, tests: list[str]) -> str:
    """Return killed, time limit, survived or no test."""
    from cosmic_ray.mutating import mutate_code
    from cosmic_ray.plugins import get_operator

    if not tests:
        return "no test"
    original = (ROOT / mutant.path).read_text()
    changed = mutate_code(original, get_operator(mutant.operator)(), mutant.occurrence)
    assert changed is not None, mutant
    (TREE / mutant.path).write_text(changed)
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "-p", "no:randomly", *tests]
    process = subprocess.Popen(
        command,
        cwd=TREE,
        env=os.environ | {"PYTHONPATH": os.pathsep.join([str(TREE / "src"), os.environ.get("PYTHONPATH", "")])},
        stdout=subprocess.DEVNULL,
        stderr=subprocess.DEVNULL,
        start_new_session=True,
    )
    try:
        return "killed" if process.wait(LIMIT_S) else "survived"
    except subprocess.TimeoutExpired:
        return "time limit"
    finally:
        if process.poll() is None:
            os.killpg(process.pid, signal.SIGKILL)
            process.wait()
        (TREE / mutant.path).write_text(original)


def report(results: list[dict[str, object]]) -> None:
    """Print a table by folder, and the mutants that are left."""
    print("| folder | mutants | killed | time limit | survived | no test |\n|---|---|---|---|---|---|")
    for name in (*FOLDERS, "all"):
        counts = Counter(str(one["outcome"]) for one in results if name in (one["folder"], "all"))
        kinds = ("killed", "time limit", "survived", "no test")
        print(f"| `{name}` | {counts.total()} | " + " | ".join(str(counts[kind]) for kind in kinds) + " |")
    for one in results:
        if one["outcome"] in ("survived", "no test"):
            print(f"{one['path']}:{one['line']}: {one['operator']} #{one['occurrence']}: {one['outcome']}")


def main() -> None:
    parser = argparse.ArgumentParser(prog="python -m tests.mutants")
    parser.add_argument("--count", type=int, default=600)
    parser.add_argument("--seed", type=int, default=61)
    parser.add_argument("--seconds", type=float, default=float("inf"), help="stop after this long; a later run goes on")
    parser.add_argument("--folders", default=",".join(FOLDERS), help="of the sample, those to run now")
    parser.add_argument("--cover", nargs="*", metavar="FOLDER", help="only measure which tests run which lines")
    arguments = parser.parse_args()
    if arguments.cover is not None or not DATA.exists():
        cover(arguments.cover or list(COVERED))
        if arguments.cover is not None:
            return
    end_s = time.monotonic() + arguments.seconds
    results = json.loads(RESULTS.read_text()) if RESULTS.exists() else []
    done = {(one["path"], one["operator"], one["occurrence"]) for one in results}
    lines = tests_of_lines()
    copy_tree()
    for mutant in sample(arguments.count, arguments.seed, tuple(arguments.folders.split(","))):
        if time.monotonic() > end_s:
            break
        if (mutant.path, mutant.operator, mutant.occurrence) not in done:
            outcome = outcome_of(mutant, tests_of(mutant, lines))
            results.append({**asdict(mutant), "folder": mutant.folder, "outcome": outcome})
            RESULTS.write_text(json.dumps(results, indent=1))
    report(results)


if __name__ == "__main__":
    main()
