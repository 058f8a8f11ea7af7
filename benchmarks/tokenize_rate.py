"""Seconds to tokenize a very long text as /tokenize does, and how late the event loop is meanwhile.

    python -m benchmarks.tokenize_rate [--megabytes 20] [--vocabulary 30000]

The text is this repository's own Python and Markdown, repeated. The tokenizer is a byte-level BPE with the
regex of Llama 3, trained on that text (some seconds, not counted). A ticker in the event loop measures how
late it wakes.
"""

from __future__ import annotations

import argparse
import asyncio
import time
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import tokenizers
from tokenizers import Regex, decoders, models, pre_tokenizers, trainers

from weft.server.app import tokenize_answer
from weft.text.tokenizer import Tokenizer

ROOT = Path(__file__).resolve().parents[1]
PATTERN = (
    r"(?i:'s|'t|'re|'ve|'m|'ll|'d)|[^\r\n\p{L}\p{N}]?\p{L}+|\p{N}{1,3}| ?[^\s\p{L}\p{N}]+[\r\n]*|"
    r"\s*[\r\n]+|\s+(?!\S)|\s+"
)
TICK_S = 0.005


def trained(text: str, vocabulary: int) -> Tokenizer:
    backend = tokenizers.Tokenizer(models.BPE())
    backend.pre_tokenizer = pre_tokenizers.Sequence(
        [
            pre_tokenizers.Split(Regex(PATTERN), "isolated"),
            pre_tokenizers.ByteLevel(add_prefix_space=False, use_regex=False),
        ]
    )
    backend.decoder = decoders.ByteLevel()
    trainer = trainers.BpeTrainer(
        vocab_size=vocabulary, show_progress=False, initial_alphabet=pre_tokenizers.ByteLevel.alphabet()
    )
    backend.train_from_iterator([text], trainer)
    return Tokenizer(backend)


async def measure(tokenizer: Tokenizer, text: str) -> str:
    late_s: list[float] = []

    async def tick() -> None:
        while True:
            begin_s = time.perf_counter()
            await asyncio.sleep(TICK_S)
            late_s.append(time.perf_counter() - begin_s - TICK_S)

    model: Any = SimpleNamespace(tokenizer=tokenizer, info=SimpleNamespace(max_model_len=0))
    ticking = asyncio.create_task(tick())
    wall_s, cpu_s = time.perf_counter(), time.process_time()
    tokens = await asyncio.to_thread(tokenizer.encode, text, add_special_tokens=False)
    await tokenize_answer(model, tokens, with_texts=False)
    wall_s, cpu_s = time.perf_counter() - wall_s, time.process_time() - cpu_s
    ticking.cancel()
    ordered = sorted(late_s)
    return (
        f"{len(text):,} characters, {len(tokens):,} tokens: {wall_s:.2f} s, {cpu_s:.2f} s of all cores "
        f"together; the event loop was late by {ordered[-1] * 1e3:.0f} ms at most, "
        f"{ordered[len(ordered) * 99 // 100] * 1e3:.0f} ms in 99 %"
    )


def main() -> None:
    parser = argparse.ArgumentParser(description="Seconds to tokenize a very long text.")
    parser.add_argument("--megabytes", type=float, default=20.0)
    parser.add_argument("--vocabulary", type=int, default=30_000)
    args = parser.parse_args()
    files = sorted(
        path
        for kind in ("py", "md")
        for folder in ("src", "tests", "docs")
        for path in (ROOT / folder).rglob(f"*.{kind}")
    )
    source = "\n".join(path.read_text() for path in files)
    count = int(args.megabytes * 1e6)
    text = (source * (count // len(source) + 1))[:count]
    print(asyncio.run(measure(trained(source, args.vocabulary), text)))


if __name__ == "__main__":
    main()
