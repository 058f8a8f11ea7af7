"""What a kept prefix saves, measured: the same requests with the cache on and off, in one run.

    python benchmarks/prefix.py [MODEL] [--requests 32] [--shared 1000] [--own 50] [--out 16] [--turns 6]

Without MODEL, the embedded one; ``--random 300M`` makes a checkpoint of about so many weights with random
numbers instead (a Qwen3.5-like hybrid; speed does not depend on what the numbers say).

*Shared prefix*: requests with ``--shared`` tokens in common and ``--own`` of their own, all sent at once; and
once more one after the other, where nothing is declared and where the boundary is (as the chat layer does).
*Conversation*: each turn sends all of it again with one question more. With the cache, the time to the first
token follows what the turn adds, without it, what the conversation has become.

Both engines are loaded before anything is measured; each scenario has tokens of its own, so nothing is warm
that should not be. Seconds need a quiet machine; the tokens computed do not. Greedy answers of both are
compared (in bfloat16 they may differ in a late token).
"""

from __future__ import annotations

import argparse
import tempfile
import time
from pathlib import Path

import numpy as np

from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams


class Driver:
    """Steps one engine and times it."""

    def __init__(self, config: EngineConfig) -> None:
        made = assemble(config)
        self.core: EngineCore = made.core
        self.info = made.info
        self._count = 0

    def run(self, prompts: list[list[int]], out: int, *, boundaries: list[int] | None = None,
            ) -> tuple[float, float, list[list[int]], int]:
        """All at once: (seconds, seconds to the first first token, answers, cached tokens)."""
        core, answers, cached = self.core, {}, {}
        first_s = 0.0
        began = time.perf_counter()
        for prompt in prompts:
            name = f"r{self._count}"
            self._count += 1
            answers[name] = list[int]()
            core.submit(Request(
                request_id=name, prompt_tokens=prompt, boundaries=boundaries or [],
                sampling=SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True)))
        while core.has_work:
            for event in core.step():
                first_s = first_s or time.perf_counter() - began
                answers[event.request_id] += event.tokens
                cached[event.request_id] = event.cached_tokens
            if core.failure is not None:
                raise core.failure
        return time.perf_counter() - began, first_s, list(answers.values()), sum(cached.values())


class Tokens:
    """Random tokens of a vocabulary, never the same twice."""

    def __init__(self, vocab_size: int) -> None:
        self._random = np.random.default_rng(0)
        self._high = vocab_size

    def __call__(self, count: int) -> list[int]:
        drawn: list[int] = self._random.integers(5, self._high, count).tolist()
        return drawn


def shared_prefix(on: Driver, off: Driver, tokens: Tokens, args: argparse.Namespace) -> None:
    def requests() -> list[list[int]]:
        common = tokens(args.shared)
        return [common + tokens(args.own) for _ in range(args.requests)]

    print(f"{args.requests} requests, {args.shared} tokens in common, {args.own} of their own, "
          f"{args.out} out")
    print(f"  {'':<34}{'off s':>8}{'on s':>8}{'ratio':>8}{'tokens off':>12}{'on':>8}{'ratio':>8}"
          "  answers equal")
    for title, one_by_one, boundaries in (
            ("all at once", False, None), ("one after another", True, None),
            ("one after another, boundary known", True, [args.shared])):
        prompts = requests()
        groups = [[prompt] for prompt in prompts] if one_by_one else [prompts]
        taken: dict[str, float] = {"on": 0.0, "off": 0.0}
        answers: dict[str, list[list[int]]] = {"on": [], "off": []}
        computed: dict[str, int] = {}
        for name, driver in (("off", off), ("on", on)):
            before = driver.core.computed_tokens
            for group in groups:
                seconds, _, said, _ = driver.run(group, args.out, boundaries=boundaries)
                taken[name] += seconds
                answers[name] += said
            computed[name] = driver.core.computed_tokens - before
        equal = sum(a == b for a, b in zip(answers["on"], answers["off"], strict=True))
        print(f"  {title:<34}{taken['off']:>8.2f}{taken['on']:>8.2f}{taken['off'] / taken['on']:>7.1f}x"
              f"{computed['off']:>12}{computed['on']:>8}{computed['off'] / computed['on']:>7.1f}x"
              f"  {equal} of {len(prompts)}")


def conversation(on: Driver, off: Driver, tokens: Tokens, args: argparse.Namespace) -> None:
    print(f"conversation of {args.turns} turns: {args.shared} tokens, then {args.own} more in each turn, "
          f"{args.out} out")
    print(f"  {'turn':>4}{'prompt':>8}{'cached':>8}{'first token off ms':>20}{'on ms':>8}{'ratio':>8}")
    prompt = tokens(args.shared)
    for turn in range(1, args.turns + 1):
        prompt = prompt + tokens(args.own)
        _, first_off_s, _, _ = off.run([prompt], args.out)
        _, first_on_s, answers, cached = on.run([prompt], args.out)
        print(f"  {turn:>4}{len(prompt):>8}{cached:>8}{first_off_s * 1e3:>20.0f}{first_on_s * 1e3:>8.0f}"
              f"{first_off_s / first_on_s:>7.1f}x")
        prompt = prompt + answers[0]


def random_checkpoint(weights: str) -> str:
    """A directory with a hybrid of about ``weights`` parameters."""
    import torch
    import transformers

    count = float(weights.upper().removesuffix("M")) * 1e6
    width = max(128, round((count / (14 * 12)) ** 0.5 / 64) * 64)
    config = transformers.AutoConfig.for_model(
        "qwen3_5_text", vocab_size=8192, hidden_size=width, intermediate_size=3 * width,
        num_hidden_layers=12, num_attention_heads=width // 64, num_key_value_heads=max(1, width // 256),
        head_dim=64, linear_num_key_heads=width // 128, linear_num_value_heads=width // 64,
        linear_key_head_dim=64, linear_value_head_dim=64, max_position_embeddings=16384)
    directory = tempfile.mkdtemp(prefix="weft-random-")
    torch.manual_seed(0)
    model = transformers.AutoModelForCausalLM.from_config(config, dtype=torch.float32)
    model.save_pretrained(directory)
    print(f"random checkpoint: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M weights")
    return directory


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--random", metavar="300M")
    for name, value in (("requests", 32), ("shared", 1000), ("own", 50), ("out", 16), ("turns", 6)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--checkpoints", default="auto")
    args = parser.parse_args()
    model = random_checkpoint(args.random) if args.random else args.model
    drivers = [Driver(EngineConfig(model=model, memory=args.memory, prefix_cache=cache, max_model_len=4096,
                                   checkpoints=args.checkpoints)) for cache in (True, False)]
    on, off = drivers
    tokens = Tokens(on.info.vocab_size)
    for driver in drivers:  # the first steps of a process are slower
        driver.run([tokens(300), tokens(20)], 8)
    print(f"{Path(on.info.directory).name}, {on.info.layers}, {on.info.dtype}, {on.info.threads} threads")
    shared_prefix(on, off, tokens, args)
    conversation(on, off, tokens, args)


if __name__ == "__main__":
    main()
