"""weft beside vLLM, transformers and llama.cpp: one machine, the same weights, dtype and threads, one run.

    python -m benchmarks.peers.serve                                   everything (hours on two cores)
    python -m benchmarks.peers.serve --only a,b --engines weft,vllm --checkpoint lfm2 --rounds 1
    python -m benchmarks.peers.serve --check                           greedy tokens, float32, small weights

    round 1   weft  vllm  transformers  llama     an engine is started, warmed up, asked all lines, and
    round 2   llama  transformers  vllm  weft     stopped; then the next one. Each round turns the order.

Every line has tokens of its own in every round, so a prefix cache finds what the line itself shares. Printed
are medians over the rounds and ratios; the JSON has every round and the facts of the machine. An engine that
is not there, refuses a model or breaks off is a line of text, not the end of the run. See docs/benchmarks.md.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
import statistics
import sys
import time
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import UTC, datetime
from pathlib import Path
from types import FrameType
from typing import Any

from benchmarks.peers.check import check
from benchmarks.peers.engines import SETTINGS, Bench, Setting
from benchmarks.peers.environment import DEFAULT_ENVIRONMENT, ROOT, Absent, Environment
from benchmarks.peers.lines import WARM_UP, Failed, Figures, Line, Promise, lines
from benchmarks.serve.__main__ import machine_now
from benchmarks.serve.checkpoints import FAMILIES, SIZES, Checkpoint, make_checkpoint
from weft.host import usable_cores

KEEP = ROOT / "build" / "benchmarks"
Say = Callable[[str], None]


@dataclass(slots=True)
class Results:
    """Of one checkpoint: setting -> line -> the figures of each round, or why there are none."""

    figures: dict[str, dict[str, list[Figures]]] = field(default_factory=dict)
    trouble: dict[str, dict[str, str]] = field(default_factory=dict)

    def add(self, setting: str, line: str, figures: Figures) -> None:
        self.figures.setdefault(setting, {}).setdefault(line, []).append(figures)

    def fail(self, setting: str, line: str, reason: str) -> None:
        self.trouble.setdefault(setting, {})[line] = reason

    def medians(self, setting: str, line: str) -> Figures | None:
        """None where a round is missing or broke off."""
        if line in self.trouble.get(setting, {}) or not (rounds := self.figures.get(setting, {}).get(line)):
            return None
        return {name: statistics.median(one[name] for one in rounds) for name in rounds[0]}


def order_of(names: Sequence[str], number: int) -> list[str]:
    """The order of the engines in round ``number``, counted from 0."""
    return list(names) if number % 2 == 0 else list(reversed(names))


def ratio(weft: float, other: float, higher: bool) -> float | None:
    """How many times better weft is; None where one of them did nothing."""
    if not weft or not other:
        return None
    return weft / other if higher else other / weft


def measure(bench: Bench, settings: Mapping[str, Setting], asked: Mapping[str, Line], rounds: int, say: Say) -> Results:
    results = Results()
    for number in range(rounds):
        for name in order_of(list(settings), number):
            setting = settings[name]
            wanted = {key: line for key, line in asked.items() if key in setting.lines}
            refused = results.trouble.get(name, {})
            if wanted and set(refused) != set(wanted):
                one_turn(bench, name, setting, wanted, number, results, say)
    return results


def one_turn(
    bench: Bench, name: str, setting: Setting, asked: Mapping[str, Line], number: int, results: Results, say: Say
) -> None:
    """Start the engine, warm it up, run the lines, stop it."""
    begin, vocab_size = time.perf_counter(), bench.checkpoint.vocab_size
    left = list(asked)
    try:
        with setting.start(bench) as side:
            side.load(replace(WARM_UP, vocab_size=vocab_size))
            say(f"round {number + 1}, {name}: ready after {time.perf_counter() - begin:.0f} s")
            while left:
                key = left[0]
                try:
                    figures = asked[key].run(side, vocab_size, seed_of(key, number))
                    results.add(name, key, figures)
                    said = ", ".join(f"{what} {value:.4g}" for what, value in figures.items())
                    say(f"round {number + 1}, {name}, {key}: {said}")
                except Failed as error:
                    results.fail(name, key, str(error))
                    say(f"round {number + 1}, {name}, {key}: {error}")
                left.pop(0)
    except (Absent, Failed) as error:
        for key in left:
            results.fail(name, key, str(error))
        say(f"round {number + 1}, {name}: {error}")


def seed_of(line: str, number: int) -> int:
    """Its own for every line of every round; a line may use the thousand seeds after it."""
    return 1000 * (100 * number + ord(line) - ord("a") + 1)


def table(results: Results, settings: Mapping[str, Setting], asked: Mapping[str, Line], ours: str) -> list[str]:
    """Rows of text: each line's figures by setting, and how many times better ``ours`` is."""
    names = list(settings)
    widths = [max(18, len(name)) + 2 for name in names]

    def aligned(cells: Sequence[str]) -> str:
        return "".join(f"{cell:>{width}}" for cell, width in zip(cells, widths, strict=True))

    rows = [" " * 38 + aligned(names)]
    for key, line in asked.items():
        rows.append(f"({key}) {line.about}")
        own = results.medians(ours, key)
        for figure, higher in line.higher.items():
            cells = []
            for name in names:
                theirs = results.medians(name, key)
                if theirs is None:
                    cells.append("failed" if key in results.trouble.get(name, {}) else "-")
                    continue
                better = own and ratio(own[figure], theirs[figure], higher)
                beside = "" if name == ours or not better else f" ({better:.2f}x)"
                cells.append(f"{theirs[figure]:,.4g}{beside}")
            arrow = "" if higher else ", less is better"
            rows.append(f"  {figure + arrow:<36}" + aligned(cells))
    for name, troubles in results.trouble.items():
        for reason in dict.fromkeys(troubles.values()):
            keys = ",".join(key for key, said in troubles.items() if said == reason)
            rows.append(f"{name} ({keys}): {reason}")
    return rows


def leave(number: int, frame: FrameType | None) -> None:
    """A signal unwinds the stack, so that the engine that runs is stopped too."""
    raise SystemExit(128 + number)


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    families = FAMILIES if asked.checkpoint == "all" else (asked.checkpoint,)
    threads = asked.threads or usable_cores()
    environment = Environment(asked.env)
    settings = {name: SETTINGS[name] for name in asked.engines}
    if asked.check:
        return check(settings, environment, families, threads, asked.keep, say)
    chosen = {key: line for key, line in lines(asked.rates, asked.promise).items() if key in asked.only}
    machine = machine_now(threads, "bfloat16") | {"started": datetime.now(UTC).isoformat("T", "seconds")}
    report: dict[str, Any] = {"machine": machine, "arguments": {k: _shown(v) for k, v in vars(asked).items()}}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    for family in families:
        say(f"{family}: making the checkpoint, unless it is there")
        checkpoint = make_checkpoint(family, asked.size, "bfloat16", under=asked.keep)
        bench = Bench(checkpoint, environment, threads, asked.limit_s)
        results = measure(bench, settings, chosen, asked.rounds, say)
        show(checkpoint, results, settings, chosen, machine, asked.rounds)
        report[checkpoint.name] = {
            "parameters": checkpoint.parameters,
            "figures": results.figures,
            "trouble": results.trouble,
        }
        machine["load_average_at_end"] = os.getloadavg()
        asked.json.write_text(json.dumps(report, indent=1))
    print(f"\n{os.path.relpath(asked.json)} has every round.")
    return 0


def show(
    checkpoint: Checkpoint,
    results: Results,
    settings: Mapping[str, Setting],
    chosen: Mapping[str, Line],
    machine: Mapping[str, Any],
    rounds: int,
) -> None:
    print(
        f"\n{checkpoint.name} ({checkpoint.parameters / 1e6:.0f}M weights), {machine['cpu']['model']}, "
        f"{machine['threads']} threads, load {machine['load_average'][0]:.1f} at start, "
        f"medians of {rounds} rounds"
    )
    ours = "weft" if "weft" in settings else next(iter(settings))
    print("\n".join(table(results, settings, chosen, ours)))
    print(f"in brackets: how many times better {ours} is")


def say(line: str) -> None:
    print(line, file=sys.stderr, flush=True)


def _letters(text: str) -> str:
    wrong = set(text.replace(",", "")) - set("abcde")
    if wrong:
        raise argparse.ArgumentTypeError(f"no line {', '.join(sorted(wrong))}; there are a, b, c, d, e")
    return text


def _names(text: str) -> list[str]:
    names = text.split(",")
    wrong = [name for name in names if name not in SETTINGS]
    if wrong:
        raise argparse.ArgumentTypeError(f"no engine {', '.join(wrong)}; there are {', '.join(SETTINGS)}")
    return names


def _shown(value: Any) -> str:
    """Return ``value`` as a report has it: a path from the working directory, since results are published."""
    return os.path.relpath(value) if isinstance(value, Path) else str(value)


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.serve",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", type=_letters, default="abcde", help="lines, such as a,b")
    parser.add_argument("--engines", type=_names, default=list(SETTINGS), help=", ".join(SETTINGS))
    parser.add_argument("--checkpoint", choices=(*FAMILIES, "all"), default="all")
    parser.add_argument("--size", choices=SIZES, default="350m")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: all usable cores")
    parser.add_argument("--limit-s", type=float, default=300.0, help="longest that a line may take")
    parser.add_argument(
        "--rates",
        type=lambda text: [float(part) for part in text.split(",")],
        default=[0.5, 1.0, 2.0, 4.0],
        help="line e: arrivals per second, rising",
    )
    parser.add_argument(
        "--promise",
        type=lambda text: Promise(*map(float, text.split(","))),
        default=Promise(),
        help="line e: seconds to the first token and between two: 2,0.2",
    )
    parser.add_argument("--check", action="store_true", help="compare greedy tokens instead")
    parser.add_argument("--env", type=Path, default=DEFAULT_ENVIRONMENT)
    parser.add_argument("--keep", type=Path, default=KEEP, help="folder that keeps the checkpoints")
    parser.add_argument("--json", type=Path, default=KEEP / "peers.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
