"""What narrow KV and narrow states cost in accuracy and save in bytes, on one model.

    python benchmarks/cache_dtypes.py [--model DIR] [--length 1024] [--texts 8]

The same texts go through an engine for each dtype, and the logprob of every token of them is compared with
that of the engine whose cache is in the model's dtype (float32 states): mean and largest difference,
perplexity, and how often the most likely token is the same. Texts are conversations of the embedded model's
kind, which any model can read; nothing is generated, so the speed is that of prefills.
"""

from __future__ import annotations

import argparse
import math
import time

import msgspec

from weft import Engine, SamplingParams
from weft.eval.recall import make_episodes
from weft.request import TokenLogprobs

CASES = [("auto", "float32"), ("float16", "float32"), ("bfloat16", "float32"), ("int8", "float32"),
         ("fp8", "float32"), ("auto", "float16"), ("auto", "bfloat16"), ("fp8", "float16")]
ASKED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)


class Measured(msgspec.Struct):
    """``token_bytes`` of KV, ``state_bytes`` of a sequence, ``logprobs`` of every token of every text."""

    token_bytes: int
    state_bytes: int
    tokens_per_s: float
    logprobs: list[TokenLogprobs]


def measure(model: str | None, kv: str, state: str, length: int, texts: int) -> Measured:
    with Engine(model, kv_dtype=kv, state_dtype=state, prefix_cache=False) as engine:
        def count_tokens(text: str) -> int:
            return len(engine.tokenizer.encode(text, add_special_tokens=False))

        episodes = make_episodes(1, length, texts, count_tokens)
        prompts = [engine.render_chat(episode.messages_before(len(episode.turns) - 1))
                   for episode in episodes]
        started = time.perf_counter()
        made = engine.generate(prompts, ASKED)
        took_s = time.perf_counter() - started
        memory = {row.name: row.size_bytes for row in engine.info.memory}
    found = [one for answer in made for one in answer.prompt_logprobs if one is not None]
    return Measured(memory["a token's KV"], memory["a sequence's state"], len(found) / took_s, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__,
                                     formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=8)
    asked = parser.parse_args()
    print(f"{'KV':9} {'states':9} {'B/token':>8} {'B/state':>10} {'mean':>9} {'largest':>9} "
          f"{'perplexity':>11} {'same':>7} {'tokens/s':>9}")
    exact: list[TokenLogprobs] = []
    for kv, state in CASES:
        made = measure(asked.model, kv, state, asked.length, asked.texts)
        exact = exact or made.logprobs
        gaps = [abs(one.logprob - other.logprob) for one, other in zip(made.logprobs, exact, strict=True)]
        same = sum(one.top[0][0] == other.top[0][0] for one, other in zip(made.logprobs, exact, strict=True))
        perplexity = math.exp(-sum(one.logprob for one in made.logprobs) / len(gaps))
        print(f"{kv:9} {state:9} {made.token_bytes:8,} {made.state_bytes:10,} {sum(gaps) / len(gaps):9.1e} "
              f"{max(gaps):9.1e} {perplexity:11.4f} {same / len(gaps):7.2%} {made.tokens_per_s:9,.0f}")


if __name__ == "__main__":
    main()
