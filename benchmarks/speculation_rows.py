"""Whole steps that verify 4 and 8 rows against steps of one: what a window costs on a model of real size.

    python -m benchmarks.speculation_rows [--family lfm2 granite qwen] [--size 350m|small] [--bits 16 12]
                                          [--rounds 12] [--cpu-time]

A model with random weights writes an answer without drafts first. Then the same answer is written again, with
windows of 1, 4 and 8 rows in turn. Its drafts are all right, or all wrong, in every other round. So a line
has planning, the products, attention, recurrences, the choice of tokens, the replay and settling.

    right    the replay consumes 4 or 8 tokens        wrong    it consumes one

Seconds are the least of all rounds. A row of one token is the last of three plain steps in a row, so the
steady decode path is the measure. ``--cpu-time`` counts CPU time of the process in place of seconds, for a
machine with other load.
"""

from __future__ import annotations

import argparse
import tempfile
import time
from collections.abc import Callable, Sequence
from pathlib import Path

from benchmarks.serve.checkpoints import make_checkpoint
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.memory.memory import Memory
from weft.request import Request, SamplingParams
from weft.speculation.drafter import PLAIN_STEPS, DraftRow
from weft.speculation.rehearsal import Rehearsal

DRAFTS = (0,) * PLAIN_STEPS + (3, 7)
_PROMPT = [(7 * at * at + 3 * at) % 400 + 3 for at in range(64)]
Seconds = dict[tuple[int, bool], float]


class Windows(Rehearsal):
    """Drafts what ``answer`` goes on with, or what it does not."""

    def __init__(self, answer: Sequence[int], rounds: int) -> None:
        super().__init__()
        self._answer = answer
        self._due = [(count, right) for number in range(rounds) for right in (True, False)
                     for count in DRAFTS] if answer else []
        self._place = 0
        self.seconds: Seconds = {}
        self.said: list[int] = []

    @property
    def complete(self) -> bool:
        return bool(self._answer) and not self._due

    def draft(self, rows: Sequence[DraftRow]) -> dict[int, tuple[int, ...]]:
        count, right = self._due[0] if self._due else (0, True)
        place = len(self.said) + 1   # ``begin`` had the first token
        tokens = self._answer[place:place + count]
        if not right:
            tokens = [max(0, token - 1) or 2 for token in tokens]
        return {rows[0].key: tuple(tokens[:rows[0].limit])} if tokens else {}

    def settle(self, key: int, tokens: Sequence[int], *, drafted: int, accepted: int) -> None:
        self.said += tokens

    def observe(self, decodes: int, drafted: int, seconds: float, *, prefills: bool = False) -> None:
        if prefills or not self._due:
            return
        at = self._due.pop(0)
        if drafted == at[0] and (drafted or (self._due and self._due[0][0])):   # of plain steps the last
            self.seconds[at] = min(seconds, self.seconds.get(at, seconds))


def write(core: EngineCore, drafter: Windows, tokens: int, clock: Callable[[], float]) -> list[int]:
    """The answer of ``tokens`` tokens, over a memory of its own."""
    engine = EngineCore(vocab_size=core.vocab_size, sizes=core.sizes,
                        memory=Memory(core.memory.plan), executor=core.executor, clock=clock, seed=0,
                        eos_ids=(), drafter=drafter)
    engine.submit(Request(request_id="rows", prompt_tokens=_PROMPT, sampling=SamplingParams(
        temperature=0.0, max_tokens=tokens, ignore_eos=True)))
    said: list[int] = []
    while engine.has_work:
        for event in engine.step():
            said += event.tokens
        if drafter.complete:
            engine.cancel("rows")
    if engine.failure is not None:
        raise engine.failure
    return said


def measured(checkpoint: str, bits: int, rounds: int, clock: Callable[[], float]) -> Seconds:
    core = assemble(EngineConfig(model=checkpoint, memory="256MiB", speculate="off", max_num_seqs=4,
                                 twelve_bit=bits == 12)).core
    tokens = 2 + rounds * (2 * len(DRAFTS) + sum(DRAFTS))
    answer = write(core, Windows((), rounds), tokens, clock)
    drafter = Windows(answer, rounds)
    again = write(core, drafter, tokens, clock)
    assert again == answer[:len(again)], "drafts changed the answer: are these weights too small for tiles?"
    core.close()
    return drafter.seconds


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--family", nargs="+", default=["lfm2", "granite", "qwen"])
    parser.add_argument("--size", default="350m", choices=("350m", "small"))
    parser.add_argument("--bits", nargs="+", type=int, default=[16, 12], choices=(16, 12))
    parser.add_argument("--rounds", type=int, default=12)
    parser.add_argument("--cpu-time", action="store_true")
    asked = parser.parse_args()
    clock = time.process_time if asked.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as under:
        for family in asked.family:
            checkpoint = make_checkpoint(family, asked.size, "bfloat16", under=Path(under))
            for bits in asked.bits:
                seconds = measured(str(checkpoint.directory), bits, asked.rounds, clock)
                one = min(seconds[0, True], seconds[0, False])
                cells = "   ".join(f"{1 + drafts} rows {'right' if right else 'wrong'} {value / one:5.2f}x"
                                   for (drafts, right), value in sorted(seconds.items()) if drafts)
                print(f"{family:8} {bits} bits   one row {one * 1e3:7.2f} ms   {cells}", flush=True)


if __name__ == "__main__":
    main()
