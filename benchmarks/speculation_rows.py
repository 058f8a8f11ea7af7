"""Whole steps that verify 4 and 8 rows against steps of one: what a window costs on a model of real size.

    python -m benchmarks.speculation_rows [--family lfm2 granite qwen] [--size 350m|small] [--bits 16 12]
                                          [--rounds 12] [--cpu-time] [--parts]

A model with random weights writes an answer without drafts first. Then the same answer is written again, with
runs of 1, 4 and 8 rows in turn. Its drafts are all right, or all wrong, in every other round. So a line
has planning, the products, attention, recurrences, the choice of tokens, the replay and settling.

    right    the replay consumes 4 or 8 tokens        wrong    it consumes one

Seconds are the least of all rounds. A row of one token is the last of three plain steps in a row, so the
steady decode path is the measure. ``--cpu-time`` counts CPU time of the process in place of seconds, for a
machine with other load. ``--parts`` adds milliseconds of the layers, of the head and of the replay.
"""

from __future__ import annotations

import argparse
import functools
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

from benchmarks.serve.checkpoints import make_checkpoint
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.memory.memory import Memory
from weft.request import Request, SamplingParams
from weft.runner import torch_executor
from weft.speculation.drafter import PLAIN_STEPS, DraftRow
from weft.speculation.profile_run import ProfileRun

DRAFTS = (0,) * PLAIN_STEPS + (3, 7)
_PROMPT = [(7 * at * at + 3 * at) % 400 + 3 for at in range(64)]
Seconds = dict[tuple[int, bool], float]


class Parts:
    """Seconds of the step at hand by part, of steps of some shape the least of each."""

    def __init__(self, clock: Callable[[], float]) -> None:
        self._clock = clock
        self._now: dict[str, float] = {}
        self.least: dict[tuple[int, bool], dict[str, float]] = {}

    def watch(self, holder: Any, name: str, part: str) -> None:
        call = getattr(holder, name)

        @functools.wraps(call)
        def timed(*given: Any, **named: Any) -> Any:
            began = self._clock()
            result = call(*given, **named)
            self._now[part] = self._now.get(part, 0.0) + self._clock() - began
            return result

        setattr(holder, name, timed)

    def end_step(self, at: tuple[int, bool] | None) -> None:
        if at is not None:
            least = self.least.setdefault(at, dict(self._now))
            for part, seconds in self._now.items():
                least[part] = min(seconds, least.get(part, seconds))
        self._now.clear()


class Windows(ProfileRun):
    """Drafts what ``answer`` goes on with, or what it does not."""

    def __init__(self, answer: Sequence[int], rounds: int, parts: Parts | None = None) -> None:
        super().__init__()
        self._answer = answer
        self._due = (
            [(count, right) for number in range(rounds) for right in (True, False) for count in DRAFTS]
            if answer
            else []
        )
        self._parts = parts
        self.seconds: Seconds = {}
        self.said: list[int] = []

    @property
    def complete(self) -> bool:
        return bool(self._answer) and not self._due

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        count, right = self._due[0] if self._due else (0, True)
        place = len(self.said) + 1  # ``begin`` had the first token
        tokens = self._answer[place : place + count]
        if not right:
            tokens = [max(0, token - 1) or 2 for token in tokens]
        return {rows[0].key: tuple(tokens[: rows[0].limit])} if tokens else {}

    def settle(self, key: int, tokens: Sequence[int], *, drafted: int, accepted: int) -> None:
        self.said += tokens

    def observe(self, decodes: int, drafted: int, seconds: float, *, prefills: bool = False) -> None:
        if prefills or not self._due:
            return
        at = self._due.pop(0)
        counts = drafted == at[0] and (drafted or (self._due and self._due[0][0]))  # of plain steps the last
        if counts:
            self.seconds[at] = min(seconds, self.seconds.get(at, seconds))
        if self._parts is not None:
            self._parts.end_step(at if counts else None)


def write(core: EngineCore, drafter: Windows, tokens: int, clock: Callable[[], float]) -> list[int]:
    """The answer of ``tokens`` tokens, over a memory of its own."""
    engine = EngineCore(
        vocab_size=core.vocab_size,
        sizes=core.sizes,
        memory=Memory(core.memory.plan),
        executor=core.executor,
        clock=clock,
        seed=0,
        eos_ids=(),
        drafter=drafter,
    )
    engine.submit(
        Request(
            request_id="rows",
            prompt_tokens=_PROMPT,
            sampling=SamplingParams(temperature=0.0, max_tokens=tokens, ignore_eos=True),
        )
    )
    said: list[int] = []
    while engine.has_work:
        for event in engine.step():
            said += event.tokens
        if drafter.complete:
            engine.cancel("rows")
    if engine.failure is not None:
        raise engine.failure
    return said


def measured(
    checkpoint: str, bits: int, rounds: int, clock: Callable[[], float], parts: Parts | None = None
) -> Seconds:
    core = assemble(
        EngineConfig(model=checkpoint, memory="256MiB", speculate="off", max_num_seqs=4, twelve_bit=bits == 12)
    ).core
    tokens = 2 + rounds * (2 * len(DRAFTS) + sum(DRAFTS))
    answer = write(core, Windows((), rounds), tokens, clock)
    drafter = Windows(answer, rounds, parts)
    if parts is not None:
        executor: Any = core.executor
        parts.watch(executor, "_forward", "layers")
        parts.watch(executor.model, "logits", "head")
        parts.watch(torch_executor, "replay", "replay")
    again = write(core, drafter, tokens, clock)
    assert again == answer[: len(again)], "drafts changed the answer: are these weights too small for tiles?"
    core.close()
    return drafter.seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", nargs="+", default=["lfm2", "granite", "qwen"])
    parser.add_argument("--size", default="350m", choices=("350m", "small"))
    parser.add_argument("--bits", nargs="+", type=int, default=[16, 12], choices=(16, 12))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--parts", action="store_true")
    asked = parser.parse_args()
    clock = time.process_time if asked.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as under:
        for family in asked.family:
            checkpoint = make_checkpoint(family, asked.size, "bfloat16", under=Path(under))
            for bits in asked.bits:
                parts = Parts(clock) if asked.parts else None
                seconds = measured(str(checkpoint.directory), bits, asked.rounds, clock, parts)
                one = min(seconds[0, True], seconds[0, False])
                cells = "   ".join(
                    f"{1 + drafts} rows {'right' if right else 'wrong'} {value / one:5.2f}x"
                    for (drafts, right), value in sorted(seconds.items())
                    if drafts
                )
                print(f"{family:8} {bits} bits   one row {one * 1e3:7.2f} ms   {cells}", flush=True)
                for (drafts, right), least in sorted(parts.least.items() if parts else ()):
                    said = "   ".join(f"{part} {value * 1e3:6.2f}" for part, value in sorted(least.items()))
                    print(f"    {1 + drafts} rows {'right' if right else 'wrong'}   {said} ms", flush=True)


if __name__ == "__main__":
    main()
