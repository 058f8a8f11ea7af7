"""What narrow KV and narrow states cost in accuracy and save in bytes, on one model.

    python benchmarks/cache_dtypes.py [--model DIR] [--length 1024] [--texts 8]

The same texts go through an engine for each dtype. The reference is the engine with its cache in the model's
dtype (float32 states). The logprob of every token is compared with the reference: mean and largest
difference, perplexity, and how often the most likely token is the same. Texts are conversations of the
embedded model's kind, which any model can read; nothing is generated, so the speed is that of prefills.

"compressed int8" and "compressed int4" are KV as `--no-exact` leaves it, and `cache.compress_kv = 'int4'`, at
the worst: texts are computed 128 tokens at a time, and all that was computed before went into the codes and
back.
"""

from __future__ import annotations

import argparse
import math
import time
from typing import Any

import msgspec
import numpy as np
import torch

from weft import Engine, SamplingParams
from weft.engine.engine import EngineCore
from weft.memory.arena_work import CompressKv, KvForm
from weft.memory.frames.plan import ArenaPlan, with_compressed_kv
from weft.memory.values import NodeId
from weft.request import TokenLogprobs
from weft.runner.compressed import compress_kv, restore_kv
from weft.schedule.plan import StepPlan, StepResult
from weft.spec import COMPRESSED_KV_DTYPES, CompressedKvName
from weft.units import PAGE_TOKENS, PageId, SeqId, ceil_div
from weft_tools.eval.recall import make_episodes

CASES = [
    ("auto", "float32"),
    ("compressed int8", "float32"),
    ("compressed int4", "float32"),
    ("float16", "float32"),
    ("bfloat16", "float32"),
    ("int8", "float32"),
    ("fp8", "float32"),
    ("auto", "float16"),
    ("auto", "bfloat16"),
    ("fp8", "float16"),
]
STEP_TOKENS = 128
ASKED = SamplingParams(temperature=0.0, max_tokens=1, prompt_logprobs=1)


class Measured(msgspec.Struct):
    """``token_bytes`` of KV, ``state_bytes`` of a sequence, ``logprobs`` of every token of every text."""

    token_bytes: int
    state_bytes: int
    tokens_per_s: float
    logprobs: list[TokenLogprobs]


COMPRESSED: dict[str, CompressedKvName] = {f"compressed {dtype}": dtype for dtype in COMPRESSED_KV_DTYPES}


class ParksAfterEachStep:
    """In place of the executor of ``core``: pages that a step has filled go into the codes of ``arena`` and
    back."""

    def __init__(self, core: EngineCore, arena: ArenaPlan) -> None:
        self._core = core
        self._inner: Any = core.executor
        self._arena = arena

    def execute(self, plan: StepPlan) -> StepResult:
        made: StepResult = self._inner.execute(plan)
        for seq, start, length in zip(plan.seqs, plan.starts.tolist(), plan.lengths.tolist(), strict=True):
            pages = self._core.memory.lease(SeqId(seq)).pages
            self._compress(tuple(pages[start // PAGE_TOKENS : (start + length) // PAGE_TOKENS]))
        return made

    def _compress(self, pages: tuple[PageId, ...]) -> None:
        if not pages:
            return
        form = KvForm(self._arena.page_bytes, self._arena.compressed_kv_bytes)
        compressed_count = ceil_div(len(pages) * form.record_bytes, form.page_bytes)
        rows = torch.from_numpy(CompressKv(NodeId(0), pages, compressed_count, form).ids.astype(np.int64))
        buffer = self._inner.arena.buffer
        compress_kv(buffer, self._arena, rows)
        restore_kv(buffer, self._arena, rows.flip(0))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._inner, name)


def measure(model: str | None, kv: str, state: str, length: int, texts: int) -> Measured | None:
    """None: nothing of this model is compressed."""
    compressed = COMPRESSED.get(kv)
    more: dict[str, Any] = {"kv_dtype": kv}
    if compressed is not None:
        more = {"max_num_batched_tokens": STEP_TOKENS, "max_num_seqs": 1}
    with Engine(model, state_dtype=state, prefix_cache=False, **more) as engine:
        if compressed is not None:
            core = engine._core  # a benchmark may look inside
            arena = with_compressed_kv(core.memory.plan, compressed)
            if not arena.compressed_kv_bytes:
                return None
            core.parts.executor = ParksAfterEachStep(core, arena)

        def count_tokens(text: str) -> int:
            return len(engine.tokenizer.encode(text, add_special_tokens=False))

        episodes = make_episodes(1, length, texts, count_tokens)
        prompts = [engine.render_chat(episode.messages_before(len(episode.turns) - 1)) for episode in episodes]
        started = time.perf_counter()
        made = engine.generate(prompts, ASKED)
        took_s = time.perf_counter() - started
        memory = {row.name: row.size_bytes for row in engine.info.memory}
    found = [one for answer in made for one in answer.prompt_logprobs if one is not None]
    token_bytes = memory["a token's KV"] if compressed is None else arena.compressed_kv_bytes // PAGE_TOKENS
    return Measured(token_bytes, memory["a sequence's state"], len(found) / took_s, found)


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--model")
    parser.add_argument("--length", type=int, default=1024)
    parser.add_argument("--texts", type=int, default=8)
    asked = parser.parse_args()
    print(
        f"{'KV':12} {'states':9} {'B/token':>8} {'B/state':>10} {'mean':>9} {'largest':>9} "
        f"{'perplexity':>11} {'same':>7} {'tokens/s':>9}"
    )
    exact: list[TokenLogprobs] = []
    for kv, state in CASES:
        made = measure(asked.model, kv, state, asked.length, asked.texts)
        if made is None:
            continue
        exact = exact or made.logprobs
        gaps = [abs(one.logprob - other.logprob) for one, other in zip(made.logprobs, exact, strict=True)]
        same = sum(one.top[0][0] == other.top[0][0] for one, other in zip(made.logprobs, exact, strict=True))
        perplexity = math.exp(-sum(one.logprob for one in made.logprobs) / len(gaps))
        print(
            f"{kv:12} {state:9} {made.token_bytes:8,} {made.state_bytes:10,} {sum(gaps) / len(gaps):9.1e} "
            f"{max(gaps):9.1e} {perplexity:11.4f} {same / len(gaps):7.2%} {made.tokens_per_s:9,.0f}"
        )


if __name__ == "__main__":
    main()
