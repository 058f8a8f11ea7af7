"""One engine alone and the same engine over ranks, through one script of requests.

The script has what an engine does to a text: cold prompts, one longer than a step (chunks), a prefix hit, a
sampled answer. Logits that chose a token are kept by (request, position).
"""

from __future__ import annotations

import os
from dataclasses import dataclass, field, replace
from pathlib import Path
from typing import Any

import numpy as np
import torch

from weft.assemble.assembly import Assembled, assemble
from weft.config import EngineConfig
from weft.ranks.executor import RankedExecutor
from weft.ranks.peers import Peers
from weft.request import Request, SamplingParams
from weft.runner.torch_executor import TorchExecutor
from weft.schedule.plan import StepPlan

# 72 tokens a step: eight decodes beside one chunk of 64. Fewer would leave one row, and no company.
CONFIG = EngineConfig(
    memory="6MiB",
    max_model_len=512,
    max_num_seqs=8,
    max_num_batched_tokens=72,
    threads=1,
    rank_timeout=30.0,
    device=os.environ.get("WEFT_TEST_DEVICE", "cpu"),
    speculate="off",
)
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)
SAMPLED = SamplingParams(temperature=0.9, top_p=0.95, seed=7, max_tokens=12, ignore_eos=True)


def prompt(length: int, salt: int) -> list[int]:
    return [3 + (salt * 131 + i * i * 7 + i * 29) % 490 for i in range(length)]


@dataclass
class Story:
    """What an engine said. ``tokens`` by request; ``logits`` by (request, position of the token)."""

    tokens: dict[str, list[int]] = field(default_factory=dict)
    logits: dict[tuple[str, int], torch.Tensor] = field(default_factory=dict)
    cached_tokens: dict[str, int] = field(default_factory=dict)
    preemptions: int = 0

    def distance(self, other: Story) -> float:
        assert self.logits.keys() == other.logits.keys()
        return max(float((self.logits[key] - other.logits[key]).abs().max()) for key in self.logits)


def engine(directory: Path, *, peers: Peers | None = None, **changes: Any) -> Assembled:
    tp = 1 if peers is None else peers.size
    return assemble(replace(CONFIG, model=str(directory), tp=tp, **changes), peers=peers)


def own_executor(assembled: Assembled) -> TorchExecutor:
    executor = assembled.core.executor
    own = executor.own if isinstance(executor, RankedExecutor) else executor
    assert isinstance(own, TorchExecutor)
    return own


def run(assembled: Assembled, requests: dict[str, tuple[list[int], SamplingParams]], story: Story) -> Story:
    """Run ``requests`` to their ends."""
    core, names = assembled.core, {}

    def observe(plan: StepPlan, logits_XV: torch.Tensor) -> None:
        rows = iter(logits_XV)
        for run in np.flatnonzero(plan.samples):
            end = int(plan.starts[run] + plan.lengths[run])
            for position in range(int(plan.starts[run]) + 1 if run in plan.verify_runs else end, end + 1):
                story.logits[names[int(plan.seqs[run])], position] = next(rows).clone()

    own_executor(assembled).observer = observe
    for name, (tokens, sampling) in requests.items():
        core.submit(Request(request_id=name, prompt_tokens=tokens, sampling=sampling))
        names[core.streams.by_request[name][0]] = name
    while core.has_work:
        for event in core.step():
            story.tokens.setdefault(event.request_id, []).extend(event.tokens)
            story.cached_tokens[event.request_id] = event.cached_tokens
            story.preemptions += event.preemptions if event.finish_reason else 0
        if core.failure is not None:
            raise core.failure
    core.audit()
    return story


def whole_story(assembled: Assembled) -> Story:
    """Cold, in chunks of 64 (100 tokens), sampled, together; then a hit."""
    story = Story()
    first = prompt(100, 1)
    run(
        assembled,
        {"short": (prompt(5, 2), GREEDY), "long": (first, GREEDY), "sampled": (prompt(37, 3), SAMPLED)},
        story,
    )
    run(assembled, {"hit": (first + story.tokens["long"] + prompt(9, 4), GREEDY)}, story)
    assembled.core.close()
    return story
