"""What a kept prefix saves, measured: the same requests with the cache on and off, in one process.

    python -m benchmarks.prefix                          the model that ships with weft
    python -m benchmarks.prefix --checkpoint 300m        random weights in bfloat16, made on the spot
    python -m benchmarks.prefix path/to/checkpoint

    round 1   off  on       each round has tokens of its own, so nothing is warm that should not be;
    round 2   on   off      who is first alternates; what is printed are medians over the rounds,
    round 3   off  on       and in brackets the least and the most

*Shared prefix*: requests with ``--shared`` tokens in common and ``--own`` of their own, all sent at once; and
one after the other, where nothing is declared and where the boundary is (as the chat layer does).
*Conversation*: each turn sends all of it again with one question more. With the cache, what a turn computes
and the time to its first token follow what the turn adds; without it, what the conversation has become.

Both engines are loaded before anything is measured, and each has a run that is not counted. Tokens computed
are exact on any machine; seconds need a quiet one. Greedy answers of both are compared (in bfloat16 they may
differ in a late token). Speed does not depend on what the weights say, so random ones do.
"""

from __future__ import annotations

import argparse
import json
import shutil
import tempfile
import time
from collections.abc import Callable, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from benchmarks.serve.checkpoints import save_tokenizer
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams

_QWEN: dict[str, dict[str, int]] = {
    "300m": {"hidden_size": 1024, "intermediate_size": 4096, "num_hidden_layers": 16, "vocab_size": 32768},
    "tiny": {"hidden_size": 128, "intermediate_size": 256, "num_hidden_layers": 4, "vocab_size": 512},
}


class Driver:
    """Steps one engine and times it."""

    def __init__(self, config: EngineConfig) -> None:
        made = assemble(config)
        self.core: EngineCore = made.core
        self.info = made.info
        self._count = 0

    def run(self, prompts: Sequence[list[int]], out: int, *, boundaries: Sequence[int] = ()) -> Run:
        """All of ``prompts`` at once."""
        core, run = self.core, Run()
        answers: dict[str, list[int]] = {}
        computed_before, began = core.computed_tokens, time.perf_counter()
        for prompt in prompts:
            name = f"r{self._count}"
            self._count += 1
            answers[name] = []
            core.submit(
                Request(
                    request_id=name,
                    prompt_tokens=prompt,
                    boundaries=list(boundaries),
                    sampling=SamplingParams(temperature=0.0, max_tokens=out, ignore_eos=True),
                )
            )
        while core.has_work:
            for event in core.step():
                run.first_token_s = run.first_token_s or time.perf_counter() - began
                answers[event.request_id] += event.tokens
            if core.failure is not None:
                raise core.failure
        run.seconds = time.perf_counter() - began
        run.computed_tokens = core.computed_tokens - computed_before
        run.answers = list(answers.values())
        return run


@dataclass(slots=True)
class Run:
    seconds: float = 0.0
    first_token_s: float = 0.0
    computed_tokens: int = 0
    answers: list[list[int]] = field(default_factory=list)

    def add(self, other: Run) -> None:
        """``other`` came after it."""
        self.seconds += other.seconds
        self.first_token_s = self.first_token_s or other.first_token_s
        self.computed_tokens += other.computed_tokens
        self.answers += other.answers


@dataclass(slots=True)
class Pair:
    """The same work with the cache off and on, round by round."""

    title: str
    prompt_tokens: int
    off: list[Run] = field(default_factory=list)
    on: list[Run] = field(default_factory=list)

    def ratios(self, of: Callable[[Run], float]) -> list[float]:
        return [of(off) / of(on) for off, on in zip(self.off, self.on, strict=True)]

    @property
    def answers_equal(self) -> float:
        """Share of the answers in which both sides say the same."""
        equal = [
            a == b
            for off, on in zip(self.off, self.on, strict=True)
            for a, b in zip(off.answers, on.answers, strict=True)
        ]
        return sum(equal) / len(equal)


class Tokens:
    """Random tokens of a vocabulary, never the same twice."""

    def __init__(self, vocab_size: int, seed: int = 0) -> None:
        self._random = np.random.default_rng(seed)
        self._high = vocab_size

    def __call__(self, count: int) -> list[int]:
        drawn: list[int] = self._random.integers(5, self._high, count).tolist()
        return drawn


def alternating(rounds: int) -> list[tuple[str, str]]:
    return [("off", "on") if number % 2 == 0 else ("on", "off") for number in range(rounds)]


def shared_prefix(drivers: dict[str, Driver], tokens: Tokens, args: argparse.Namespace) -> list[Pair]:
    pairs = []
    for title, one_by_one, boundaries in (
        ("all at once", False, ()),
        ("one after another", True, ()),
        ("one after another, boundary known", True, (args.shared,)),
    ):
        pair = Pair(title, args.requests * (args.shared + args.own))
        for order in alternating(args.rounds):
            common = tokens(args.shared)
            prompts = [common + tokens(args.own) for _ in range(args.requests)]
            groups = [[prompt] for prompt in prompts] if one_by_one else [prompts]
            for name in order:
                run = Run()
                for group in groups:
                    run.add(drivers[name].run(group, args.out, boundaries=boundaries))
                getattr(pair, name).append(run)
        pairs.append(pair)
    return pairs


def conversation(drivers: dict[str, Driver], tokens: Tokens, args: argparse.Namespace) -> list[Pair]:
    """One pair for each turn."""
    turns = [Pair(f"turn {turn}", 0) for turn in range(1, args.turns + 1)]
    for order in alternating(args.rounds):
        prompt = tokens(args.shared)
        for pair in turns:
            prompt = prompt + tokens(args.own)
            pair.prompt_tokens = len(prompt)
            said = {name: drivers[name].run([prompt], args.out) for name in order}
            pair.off.append(said["off"])
            pair.on.append(said["on"])
            prompt = prompt + said["on"].answers[0]
    return turns


def spread(values: Sequence[float], form: str = ".2f") -> str:
    """Median, and the least and the most where they are others."""
    if len(values) == 1:
        return format(values[0], form)
    return f"{median(values):{form}} [{min(values):{form}}-{max(values):{form}}]"


def show_shared(pairs: Sequence[Pair], args: argparse.Namespace) -> None:
    print(
        f"\n{args.requests} requests, {args.shared} tokens in common, {args.own} of their own, {args.out} "
        f"out; medians of {args.rounds} rounds"
    )
    print(f"  {'':<34}{'off s':>20}{'on s':>20}{'x less time':>22}{'x fewer tokens':>16}  equal answers")
    for pair in pairs:
        fewer = median(pair.ratios(lambda run: run.computed_tokens))
        less = spread(pair.ratios(lambda run: run.seconds), ".1f")
        print(
            f"  {pair.title:<34}{spread([run.seconds for run in pair.off]):>20}"
            f"{spread([run.seconds for run in pair.on]):>20}"
            f"{less:>22}{fewer:>16.1f}  {pair.answers_equal:.0%}"
        )


def show_conversation(pairs: Sequence[Pair], args: argparse.Namespace) -> None:
    print(
        f"\nconversation of {args.turns} turns: {args.shared} tokens, then {args.own} more in each turn, "
        f"{args.out} out; medians of {args.rounds} rounds"
    )
    print(f"  {'':<8}{'prompt':>8}{'computed off':>14}{'on':>6}{'first token off ms':>22}{'on ms':>18}{'ratio':>18}")
    for pair in pairs:
        off_ms, on_ms = ([run.first_token_s * 1e3 for run in runs] for runs in (pair.off, pair.on))
        off_tokens, on_tokens = (median(run.computed_tokens for run in runs) for runs in (pair.off, pair.on))
        ratio = spread(pair.ratios(lambda run: run.first_token_s), ".1f")
        print(
            f"  {pair.title:<8}{pair.prompt_tokens:>8}{off_tokens:>14.0f}{on_tokens:>6.0f}"
            f"{spread(off_ms, '.0f'):>22}{spread(on_ms, '.0f'):>18}{ratio:>18}"
        )


def random_checkpoint(size: str, under: Path) -> str:
    """A hybrid like Qwen3.5 (three gated delta layers to one of attention) in bfloat16."""
    import torch
    import transformers
    from transformers.utils.logging import disable_progress_bar

    disable_progress_bar()  # type: ignore[no-untyped-call]
    shape = _QWEN[size]
    width = shape["hidden_size"]
    config = transformers.AutoConfig.for_model(
        "qwen3_5_text",
        **shape,
        num_attention_heads=width // 64,
        num_key_value_heads=max(1, width // 256),
        head_dim=64,
        linear_num_key_heads=width // 128,
        linear_num_value_heads=width // 64,
        linear_key_head_dim=64,
        linear_value_head_dim=64,
        max_position_embeddings=16384,
        tie_word_embeddings=True,
    )
    torch.manual_seed(0)
    auto: Any = transformers.AutoModelForCausalLM
    model = auto.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(under)
    save_tokenizer(under, config.vocab_size)
    print(f"random checkpoint: {sum(p.numel() for p in model.parameters()) / 1e6:.0f}M weights in bfloat16")
    return str(under)


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("model", nargs="?")
    parser.add_argument("--checkpoint", choices=list(_QWEN), help="random weights of this size, not MODEL")
    for name, value in (("requests", 32), ("shared", 1000), ("own", 50), ("out", 16), ("turns", 6), ("rounds", 5)):
        parser.add_argument(f"--{name}", type=int, default=value)
    parser.add_argument("--memory", default="1GiB")
    parser.add_argument("--snapshots", default="auto")
    parser.add_argument("--threads", type=int)
    parser.add_argument("--json", type=Path, help="write every round to this file")
    args = parser.parse_args(argv)
    folder = Path(tempfile.mkdtemp(prefix="weft-prefix-"))
    try:
        return measure(random_checkpoint(args.checkpoint, folder) if args.checkpoint else args.model, args)
    finally:
        shutil.rmtree(folder, ignore_errors=True)


def measure(model: str | None, args: argparse.Namespace) -> int:
    drivers = {
        name: Driver(
            EngineConfig(
                model=model,
                memory=args.memory,
                prefix_cache=name == "on",
                max_model_len=4096,
                threads=args.threads,
                snapshots=args.snapshots,
            )
        )
        for name in ("on", "off")
    }
    info = drivers["on"].info
    tokens = Tokens(info.vocab_size)
    for driver in drivers.values():  # the first steps of a process are slower
        driver.run([tokens(300), tokens(20)], 8)
    print(f"{info.family}: {info.layers}, {info.dtype}, {info.threads} threads")
    shared = shared_prefix(drivers, tokens, args)
    show_shared(shared, args)
    turns = conversation(drivers, tokens, args)
    show_conversation(turns, args)
    if args.json is not None:
        facts = {
            "family": info.family,
            "layers": info.layers,
            "dtype": info.dtype,
            "threads": info.threads,
            "weights_bytes": info.weights_bytes,
            "arguments": {key: str(value) for key, value in vars(args).items()},
        }
        args.json.write_text(
            json.dumps(
                {
                    "facts": facts,
                    "shared": [asdict(pair) for pair in shared],
                    "conversation": [asdict(pair) for pair in turns],
                },
                indent=1,
            )
        )
    return 0


if __name__ == "__main__":
    raise SystemExit(main())
