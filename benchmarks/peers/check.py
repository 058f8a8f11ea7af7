"""Do the engines compute the same model? Greedy tokens of the same prompts in float32 on small checkpoints.

In bfloat16 near ties fall either way, so tokens say nothing there; in float32 engines that are right agree.
Engines that are known to differ are named with the reason, and are shown but not counted.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path

from benchmarks.peers.engines import SETTINGS, Bench, Setting
from benchmarks.peers.environment import Absent, Environment
from benchmarks.peers.lines import Failed, answered
from benchmarks.serve.checkpoints import Family, make_checkpoint
from benchmarks.serve.compare import same_prefix
from benchmarks.serve.load import LoadPlan
from weft_tools.bench.serve import Timing

PLAN = LoadPlan(requests=4, prompt_tokens=100, output_tokens=16, concurrency=1)
REFERENCE = "transformers"
KNOWN_TO_DIFFER: dict[tuple[str, Family], str] = {("vllm", "qwen"): "its gated delta net computes in bfloat16 only"}
"""By engine and checkpoint; seen with vLLM 0.32.0 for CPUs."""


def check(
    settings: Mapping[str, Setting],
    environment: Environment,
    families: Sequence[Family],
    threads: int,
    keep: Path,
    say: Callable[[str], None],
) -> int:
    """Print what share of each answer agrees with transformers'; 1 when one differs that should not."""
    names = [name for name, setting in settings.items() if setting.weight_bits == 16 and name != REFERENCE]
    wrong = 0
    for family in families:
        checkpoint = make_checkpoint(family, "small", "float32", under=keep)
        bench = Bench(checkpoint, environment, threads, limit_s=120.0)
        plan = replace(PLAN, vocab_size=checkpoint.vocab_size)
        expected = answers_of(SETTINGS[REFERENCE], bench, plan)
        for name in names:
            say(f"{checkpoint.name}: asking {name}")
            try:
                share = same_prefix(answers_of(settings[name], bench, plan), expected)
            except (Absent, Failed) as error:
                print(f"{checkpoint.name}  {name:<12} no answer: {error}")
                continue
            known = KNOWN_TO_DIFFER.get((settings[name].engine, family), "")
            wrong += share < 1.0 and not known
            print(
                f"{checkpoint.name}  {name:<12} {share:.0%} of each answer as {REFERENCE} has it"
                + (f" ({known})" if known else "")
            )
    return int(wrong > 0)


def answers_of(setting: Setting, bench: Bench, plan: LoadPlan) -> list[Timing]:
    """The answers, one request after another and so without company. Raises Absent, Failed."""
    with setting.start(bench) as side:
        return answered(side, plan)[1]
