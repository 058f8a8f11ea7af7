"""How far knowing kinds of requests can bring a cache: conversations by class, each held for the best time.

    python benchmarks/return_bound.py TRACE [--limit 4000] [--memory 15GB,35GB,75GB,150GB]

Of each answer it is known when the next turn came, if it came. Answers fall into classes by what a policy
can see when they end. A class is held for one time at most, and that time is chosen with hindsight: so that
all classes together save the most tokens in the memory given, on average over time (Lagrange: tokens saved
less a price for byte-seconds, for every price). A policy that tells answers apart by these classes only, and
has learned all there is to learn of them, comes to this. Many classes with few answers each fit the chance
in the trace, and are shown for that.

Left out: the beginnings that all share, forks, and running requests; memory is what waiting conversations
have. KV and state as in `cache_policy.py`: 15,360 B a token and 24.01 MB.
"""

from __future__ import annotations

import argparse

import numpy as np
import numpy.typing as npt

from weft.units import parse_bytes
from weft_tools.sim.recording import SAMPLE, read_trace

KV_TOKEN_BYTES, STATE_BYTES = 15_360, 24.01e6
PREFILL_TOKEN_S, DECODE_TOKEN_S = 7e-6, 0.014
HELD_S = np.concatenate([[0.0], 2.0 ** np.arange(0, 10.6, 0.25)])
"""How long a class may be held."""
PRICES = np.geomspace(1e-10, 1e-2, 3000)
"""Tokens for a byte and second."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]


class Answers:
    """Arrays [requests]: tokens of prompt and answer, seconds to the next turn (inf: none), and the time left
    in the trace."""

    def __init__(self, trace: str, limit: int) -> None:
        requests = read_trace(trace)[0].requests[:limit]
        self.prompts = np.array([one.prompt_tokens for one in requests])
        self.answers = np.array([one.output_tokens for one in requests])
        at_s = np.array([one.at_s for one in requests])
        ended_s = at_s + self.prompts * PREFILL_TOKEN_S + self.answers * DECODE_TOKEN_S
        again_s = np.full(len(requests), np.inf)
        self.later_turn = np.zeros(len(requests), np.int64)
        self.gap_s = np.zeros(len(requests))
        for index, one in enumerate(requests):
            if one.next_turn is not None and one.next_turn < len(requests):
                again_s[index] = at_s[one.next_turn]
                self.later_turn[one.next_turn] = 1
                self.gap_s[one.next_turn] = at_s[one.next_turn] - at_s[index]
        self.again_s = np.maximum(again_s - ended_s, 0.0)
        self.left_s = np.maximum(at_s[-1] - ended_s, 0.0)
        self.duration_s = float(at_s[-1] - at_s[0])

    def classes(self) -> dict[str, Ints]:
        length = np.log2(self.prompts).astype(np.int64)
        gap = np.log2(self.gap_s + 1).astype(np.int64)
        answer = np.log2(self.answers).astype(np.int64)
        return {
            "all alike": np.zeros_like(length),
            "first turn or later": self.later_turn,
            "and length": self.later_turn * 100 + length,
            "and time since the turn before": self.later_turn * 10_000 + gap * 100 + length // 2,
            "turn, length and answer": self.later_turn * 10_000 + length * 100 + answer,
        }


def curve(one: Answers, classes: Ints) -> tuple[Floats, Floats]:
    """Bytes held on average, rising, and tokens saved, [prices]."""
    tokens = one.prompts + one.answers
    size = tokens * KV_TOKEN_BYTES + STATE_BYTES
    held: Floats = np.zeros(len(PRICES))
    saved: Floats = np.zeros(len(PRICES))
    for number in np.unique(classes):
        mine = classes == number
        until = np.minimum(one.again_s[mine], one.left_s[mine])
        gains = np.array([(tokens[mine] * (one.again_s[mine] <= most)).sum() * (most > 0) for most in HELD_S])
        areas = np.array([(size[mine] * np.minimum(until, most)).sum() for most in HELD_S])
        best = (gains[:, None] - areas[:, None] * PRICES).argmax(axis=0)
        held += areas[best] / one.duration_s
        saved += gains[best]
    return held[::-1], saved[::-1]


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__.split("\n")[0])
    parser.add_argument("trace", nargs="?", default=SAMPLE)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--memory", default="15GB,35GB,75GB,150GB")
    asked = parser.parse_args()
    texts = asked.memory.split(",")
    sizes = [parse_bytes(text, flag="--memory") for text in texts]
    answers = Answers(asked.trace, asked.limit)
    print(f"{'of prompt tokens':34}{'classes':>8}" + "".join(f"{text:>9}" for text in texts))
    for name, classes in answers.classes().items():
        held, saved = curve(answers, classes)
        rates = np.interp(sizes, np.append(0.0, held), np.append(0.0, saved)) / answers.prompts.sum()
        print(f"{name:34}{len(np.unique(classes)):>8}" + "".join(f"{rate:>9.1%}" for rate in rates))


if __name__ == "__main__":
    main()
