"""Tokens per second with a prediction against none, on a real model: a rewrite with edits, forced.

    python -m benchmarks.speculation [--model DIR | --family lfm2] [--tokens 1000] [--share 0.05]
                                     [--cpu-time]

A model with random weights rewrites nothing, and the embedded one is too small for it. So the answer comes
first, and the prediction is derived from it: the same tokens with edits at a share of their places. The
drafts are then right and wrong as those of a rewrite. Both runs are in one process, one after the other and
repeated, and their tokens must be equal. Seconds are those of decode steps.

``--family`` takes random weights of real size (350M parameters, bfloat16), made on the spot. ``--cpu-time``
counts CPU time of the process in place of seconds, for a machine with other load."""

from __future__ import annotations

import argparse
import json
import tempfile
import time
from collections.abc import Callable
from pathlib import Path

from benchmarks.serve.checkpoints import make_checkpoint
from benchmarks.speculation_sources import edited
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams
from weft.speculation.speculator import Speculator
from weft.units import parse_bytes


def answer(
    core: EngineCore, name: str, prompt: list[int], count: int, prediction: list[int], clock: Callable[[], float]
) -> tuple[list[int], int, float]:
    """Tokens, steps and seconds of the decodes."""
    core.submit(
        Request(
            request_id=name,
            prompt_tokens=prompt,
            cache_salt=name,
            prediction=prediction,
            sampling=SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True),
        )
    )
    tokens: list[int] = []
    steps, began_s = 0, 0.0
    while core.has_work:
        events = core.step()
        if tokens:
            steps += bool(events)
        for event in events:
            tokens += event.tokens
        began_s = began_s or clock()
    return tokens, steps, clock() - began_s


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("--model")
    parser.add_argument("--family", choices=("lfm2", "granite", "qwen"))
    parser.add_argument("--bits", type=int, default=12, choices=(12, 16), help="of a weight")
    parser.add_argument("--cpu-time", action="store_true")
    parser.add_argument("--tokens", type=int, default=1000)
    parser.add_argument("--share", type=float, default=0.05)
    parser.add_argument("--memory", default="512MiB")
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--dtype", default="auto")
    parser.add_argument("--json", type=Path, help="write the ratio to this file")
    asked = parser.parse_args()
    parse_bytes(asked.memory, flag="--memory")
    clock = time.process_time if asked.cpu_time else time.perf_counter
    with tempfile.TemporaryDirectory() as under:
        model = (
            asked.model
            if asked.family is None
            else str(make_checkpoint(asked.family, "350m", "bfloat16", under=Path(under)).directory)
        )
        core = assemble(
            EngineConfig(
                model=model,
                memory=asked.memory,
                speculate="prediction",
                dtype=asked.dtype,
                twelve_bit=asked.bits == 12,
                max_num_seqs=4,
            )
        ).core
    prompt = [(7 * at * at + 3 * at) % min(500, core.vocab_size) for at in range(64)]
    truth, _, _ = answer(core, "first", prompt, asked.tokens, [], clock)
    guess = [token % core.vocab_size for token in edited(truth, asked.share, 8)]
    before = core.stats().speculation
    plain, drafted = [], []
    for round_number in range(asked.rounds):
        for name, prediction, results in (("plain", [], plain), ("predicted", guess, drafted)):
            tokens, steps, seconds = answer(core, f"{name}-{round_number}", prompt, asked.tokens, prediction, clock)
            assert tokens == truth, "drafts changed the answer"
            results.append((seconds, steps))
    stats = core.stats().speculation
    accepted, verified = stats.accepted - before.accepted, stats.drafted - before.drafted
    plain_s, drafted_s = min(plain)[0], min(drafted)[0]
    print(f"{asked.tokens} tokens, {asked.share:.0%} of the places edited, best of {asked.rounds}")
    print(f"without a prediction   {asked.tokens / plain_s:8.1f} tokens/s   {plain[0][1]} steps")
    print(
        f"with a prediction      {asked.tokens / drafted_s:8.1f} tokens/s   {drafted[-1][1]} steps, "
        f"{accepted / max(verified, 1):.0%} of the drafts right"
    )
    print(f"ratio                  {plain_s / drafted_s:8.2f}")
    if asked.json is not None:
        asked.json.write_text(json.dumps({"ratio": plain_s / drafted_s}) + "\n", encoding="utf-8")
    assert isinstance(core.drafter, Speculator)
    costs = core.drafter.costs
    print(
        f"a step of one token    {costs.seconds(1) * 1e3:8.2f} ms; with a window of "
        + ", ".join(
            f"{rows} rows {costs.verify_seconds(1, rows - 1) / costs.seconds(1):.2f}x" for rows in (2, 4, 8, 16)
        )
    )


if __name__ == "__main__":
    main()
