"""weft beside llama.cpp's server on a released model: one GGUF file, the same threads, in turns.

    python -m benchmarks.peers.real                      three rounds: some five minutes on two cores
    python -m benchmarks.peers.real --rounds 1 --only b --env /elsewhere/env

    a   32 requests at once, 256 -> 64       output tokens per second
    b   one stream, 512 -> 128               decode tokens per second; prompt tokens per second
    f   the second turn of a conversation    milliseconds to its first token; the turn before had 832 -> 64

Both read the blocks of the file (SmolLM2-135M-Instruct, Q4_1) and answer greedily. ``weft`` guesses nothing ahead, as
llama.cpp does not; ``weft-guesses`` is weft as it starts by itself. Prompts are token ids drawn from a seed. Where
llama.cpp's server dies at its start (seen with AMX in a virtual machine), ``--llama-flags=--no-repack`` helps.
"""

from __future__ import annotations

import argparse
import json
import os
import signal
from collections.abc import Sequence
from dataclasses import replace
from datetime import UTC, datetime
from pathlib import Path
from typing import Any

from benchmarks.peers.engines import SETTINGS, Bench, Setting, llama_side, weft_side
from benchmarks.peers.environment import DEFAULT_ENVIRONMENT, Environment
from benchmarks.peers.lines import Failed, Figures, Line, Promise, Side, Talk, lines
from benchmarks.peers.serve import KEEP, leave, measure, say, show
from benchmarks.serve.__main__ import machine_now
from benchmarks.serve.checkpoints import Checkpoint
from tests.support.real_model import real_model
from weft.host import usable_cores

VOCAB_SIZE = 49152
PARAMETERS = 134_515_008
SECOND = Talk(conversations=1, turns=2, opening=800, own=32, output_tokens=64)
"""Its tokens fit the slots with which llama.cpp's server is started."""


def second_turn(side: Side, vocab_size: int, seed: int) -> Figures:
    [turns] = side.talk(replace(SECOND, vocab_size=vocab_size, seed=seed))
    errors = [turn.error for turn in turns if turn.error is not None]
    if errors or len(turns) != SECOND.turns:
        raise Failed(f"the conversation broke off: {'; '.join(errors)}")
    return {"second_turn_ms": 1000 * turns[1].first_token_s}


LINES = {
    **{key: line for key, line in lines([], Promise()).items() if key in "ab"},
    "f": Line("second turn: 928 tokens, 32 of them new", second_turn, {"second_turn_ms": False}),
}
ENGINES = {
    "weft": replace(SETTINGS["weft"], lines="abf"),
    "weft-guesses": Setting("weft", lambda bench: weft_side(bench, speculate="auto"), lines="ab"),
    "llama": replace(SETTINGS["llama"], lines="abf"),
}


def main(argv: Sequence[str] | None = None) -> int:
    asked = _parse(argv)
    for number in (signal.SIGTERM, signal.SIGHUP):
        signal.signal(number, leave)
    threads = asked.threads or usable_cores()
    checkpoint = Checkpoint("smollm2", "135m-q4_1", "bfloat16", real_model(), VOCAB_SIZE, PARAMETERS)
    flags = asked.llama_flags.split()
    engines = {**ENGINES, "llama": replace(ENGINES["llama"], start=lambda bench: llama_side(bench, flags=flags))}
    settings = {name: engines[name] for name in asked.engines.split(",")}
    chosen = {key: line for key, line in LINES.items() if key in asked.only}
    machine = machine_now(threads, "bfloat16") | {"started": datetime.now(UTC).isoformat("T", "seconds")}
    bench = Bench(checkpoint, Environment(asked.env), threads, asked.limit_s)
    results = measure(bench, settings, chosen, asked.rounds, say)
    show(checkpoint, results, settings, chosen, machine, asked.rounds)
    machine["load_average_at_end"] = os.getloadavg()
    report: dict[str, Any] = {"machine": machine, "figures": results.figures, "trouble": results.trouble}
    asked.json.parent.mkdir(parents=True, exist_ok=True)
    asked.json.write_text(json.dumps(report, indent=1))
    print(f"\n{os.path.relpath(asked.json)} has every round.")
    return 0


def _parse(argv: Sequence[str] | None) -> argparse.Namespace:
    parser = argparse.ArgumentParser(
        prog="python -m benchmarks.peers.real",
        description=__doc__,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--only", default="abf", help="lines, such as ab")
    parser.add_argument("--engines", default=",".join(ENGINES))
    parser.add_argument("--llama-flags", default="", help="of llama.cpp's server, such as --llama-flags=--no-repack")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads", type=int, help="default: all usable cores")
    parser.add_argument("--limit-s", type=float, default=300.0, help="longest that a line may take")
    parser.add_argument("--env", type=Path, default=DEFAULT_ENVIRONMENT)
    parser.add_argument("--json", type=Path, default=KEEP / "real.json")
    return parser.parse_args(argv)


if __name__ == "__main__":
    raise SystemExit(main())
