"""A hundred forks of a state: with a session, and with the prefix cache alone.

    python -m benchmarks.session_forks --family qwen --size small

Both arms compute the same prefix once and then answer the same hundred requests, each the prefix and 16 tokens of its
own. In the arm ``session`` the prefix has a hundred names (``weft.memory.prefix.pins``); in the arm ``cache`` it has
none. ``quiet``: nothing else runs. ``busy``: after each QUARTER requests, other prompts come that fill memory twice.

Counts (tokens computed, bytes of names) do not depend on the machine; seconds do.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np

from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams

FORKS = 100
QUARTER = 25
PREFIX_TOKENS = 2000
OWN_TOKENS = 16
OTHER_TOKENS = 1000


def answer(core: EngineCore, name: str, tokens: list[int], count: int) -> int:
    """Return the prompt tokens that were computed."""
    sampling = SamplingParams(temperature=0.0, max_tokens=count, ignore_eos=True)
    core.submit(Request(request_id=name, prompt_tokens=tokens, sampling=sampling))
    cached = 0
    while core.has_work:
        for event in core.step():
            cached = max(cached, event.cached_tokens)
        if core.failure is not None:
            raise core.failure
    return len(tokens) - cached


def measure(core: EngineCore, *, named: bool, busy: bool, seed: int) -> dict[str, Any]:
    """One arm, with prompts of its own."""
    random = np.random.default_rng(seed)

    def prompt(count: int) -> list[int]:
        drawn: list[int] = random.integers(3, core.vocab_size, count).tolist()
        return drawn

    core.memory.flush()
    prefix = prompt(PREFIX_TOKENS)
    answer(core, f"prefix-{seed}", prefix, 0)
    before = replace(core.memory.usage(), pinned_bytes=0)
    for number in range(FORKS if named else 0):
        core.memory.pins.add(f"fork-{number}", "", np.asarray(prefix, np.int32).tobytes())
    after = replace(core.memory.usage(), pinned_bytes=0)
    computed, seconds, fillers = 0, 0.0, 0
    page_bytes = core.memory.plan.page_bytes
    filler_bytes = OTHER_TOKENS // 16 * page_bytes + core.memory.plan.slot_stride_bytes
    for number in range(FORKS):
        if busy and number % QUARTER == 0:
            for _ in range(2 * core.memory.plan.arena_bytes // filler_bytes + 1):
                fillers += 1
                answer(core, f"other-{seed}-{fillers}", prompt(OTHER_TOKENS), 1)
        asked = [*prefix, *prompt(OWN_TOKENS)]
        began = time.perf_counter()
        computed += answer(core, f"fork-{seed}-{number}", asked, 1)
        seconds += time.perf_counter() - began
    for number in range(FORKS):
        core.memory.pins.drop(f"fork-{number}")
    return {
        "arm": "session" if named else "cache",
        "load": "busy" if busy else "quiet",
        "computed_tokens": computed,
        "seconds": round(seconds, 2),
        "bytes_of_names": after.cached_bytes - before.cached_bytes,
        "bytes_of_prefix": (PREFIX_TOKENS // 16) * page_bytes + core.memory.plan.slot_stride_bytes,
    }


def main(argv: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--family", default="qwen", choices=("lfm2", "granite", "qwen"))
    parser.add_argument("--size", default="small", choices=("350m", "small", "tiny"))
    parser.add_argument("--memory", default="24MiB")
    parser.add_argument("--under", type=Path, default=Path("/tmp/weft-benchmarks"))
    parser.add_argument("--out", type=Path)
    given = parser.parse_args(argv)
    from benchmarks.serve.checkpoints import make_checkpoint
    from weft.assemble import assemble
    from weft.config import EngineConfig

    model = make_checkpoint(given.family, given.size, "bfloat16", under=given.under).directory
    core = assemble(EngineConfig(model=str(model), memory=given.memory, device="cpu", max_model_len=4096)).core
    rows = [
        measure(core, named=named, busy=busy, seed=2 * busy + named + 1)
        for busy in (False, True)
        for named in (False, True)
    ]
    core.close()
    text = json.dumps(rows, indent=1)
    sys.stdout.write(text + "\n")
    if given.out is not None:
        given.out.write_text(text + "\n")
    return 0


if __name__ == "__main__":
    sys.exit(main())
