"""A hundred steps of each kind of traffic: graphs compute them, and what is launched outside of graphs is listed.

Values are not computed here (``Card.values``), as in ``test_steps``.
"""

from __future__ import annotations

import random
import re
from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any, cast

import pytest
import torch

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Card
from tests.emulated_gpu.engines import started
from tests.emulated_gpu.test_adapters import adapters
from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.drafters import AnswerDrafter
from tests.fixtures.vision_checkpoints import vision_checkpoint
from tests.oracle.test_mtp import EMBEDDED, FREE
from tests.oracle.test_pictures import BIG, CLIP, seeing
from weft.adapters import Adapter
from weft.costs.rows import RowCosts
from weft.engine.engine import EngineCore
from weft.request import PlacedPicture, Request, SamplingParams
from weft.runner.graph_shapes import OUTSIDE
from weft.runner.mtp import HeadRunner
from weft.runner.torch_executor import GRAPH, TorchExecutor
from weft.speculation.drafter import Drafter
from weft.speculation.speculator import Speculator

STEPS = 100
PAGE = Path(__file__).resolve().parents[2] / "docs" / "gpu.md"
SIZES = {"max_num_seqs": 12, "max_num_batched_tokens": 128}
Prompts = Iterator[dict[str, Any]]
"""Fields of each request that comes."""


@dataclass
class Traffic:
    """``prompts`` of a seed; ``more``: settings of the engine. ``at_once``: requests that come together."""

    prompts: Callable[[random.Random, list[Adapter]], Prompts]
    family: Callable[[], str] = lambda: "qwen3_5"
    more: dict[str, Any] = field(default_factory=dict)
    drafter: Callable[[], Drafter | None] = lambda: None
    at_once: int = 1
    adapts: bool = False


def text(chance: random.Random, least: int, most: int) -> list[int]:
    return [chance.randrange(3, 380) for _ in range(chance.randrange(least, most))]


def chat(chance: random.Random, _: list[Adapter]) -> Prompts:
    while True:
        yield {"prompt_tokens": text(chance, 4, 90)}


def agents(chance: random.Random, _: list[Adapter]) -> Prompts:
    """Turns of two conversations that begin with the same system prompt."""
    turns = [text(chance, 60, 61)] * 2
    while True:
        at = chance.randrange(2)
        turns[at] = [*turns[at], *text(chance, 5, 30)] if len(turns[at]) < 180 else turns[at][:60]
        yield {"prompt_tokens": turns[at]}


def mixed_adapters(chance: random.Random, known: list[Adapter]) -> Prompts:
    while True:
        yield {"prompt_tokens": text(chance, 4, 60), "adapter": chance.choice([None, *known])}


def pictures(chance: random.Random, _: list[Adapter]) -> Prompts:
    cases = [seeing("qwen3_5_vl", 20, (CLIP,), 12, seed=2), seeing("qwen3_5_vl", 40, (BIG,), 40, seed=7)]
    shown: list[tuple[list[int], list[PlacedPicture]]] = [(case.tokens, case.pictures) for case in cases]
    while True:
        tokens, placed = chance.choice([*shown, (text(chance, 4, 40), [])])
        yield {"prompt_tokens": tokens, "pictures": placed}


def with_head() -> Drafter:
    return Speculator(("mtp",), costs=RowCosts(FREE), head_seconds={1: 1e-6, 2: 2e-6, 3: 3e-6})


def certain(head: HeadRunner) -> None:
    """Without values a draft would have no chance, and the head would rest."""
    assert head.graphs is not None
    drafts = head.graphs.drafts
    head.graphs.drafts = lambda *all: torch.ones_like(drafts(*all))  # type: ignore[method-assign]


def saying_zeros() -> Drafter:
    return AnswerDrafter("random", dict.fromkeys(range(10 * STEPS), [0] * 40), 512)


TRAFFIC = {
    "chat": Traffic(chat),
    "agents": Traffic(agents),
    "adapters mixed with the base model": Traffic(mixed_adapters, adapts=True, more={"lora_memory": "8MiB"}),
    "pictures": Traffic(pictures, lambda: str(vision_checkpoint("qwen3_5_vl"))),
    "drafts": Traffic(chat, drafter=saying_zeros, more={"speculate": "auto"}),
    "drafts of the model's own head": Traffic(
        chat, lambda: str(EMBEDDED), drafter=with_head, more={"speculate": "mtp"}
    ),
    "bursts of eight prompts": Traffic(chat, at_once=8),
}


def served(core: EngineCore, traffic: Traffic, known: list[Adapter], card: Card) -> None:
    """Compute STEPS steps with runs."""
    chance = random.Random(7)
    prompts, came = traffic.prompts(chance, known), 0
    executor = cast(TorchExecutor, core.executor)
    while sum(executor.steps_by_form.values()) < STEPS:
        if core.live_count + traffic.at_once <= 12 and chance.random() < 0.4:
            for _ in range(traffic.at_once):
                sampling = SamplingParams(temperature=0.0, max_tokens=chance.randrange(2, 25), ignore_eos=True)
                core.submit(Request(request_id=f"r{came}", sampling=sampling, **next(prompts)))
                came += 1
        if core.has_work:
            core.step()
        assert core.failure is None, core.failure


@pytest.mark.parametrize("name", TRAFFIC)
def test_graphs_compute_all_steps_of(name: str, tmp_path: Path) -> None:
    traffic = TRAFFIC[name]
    family = traffic.family()
    if "/" not in family:
        checkpoint(family)
    if name == "pictures":
        next(pictures(random.Random(), []))  # its cases compute on the CPU
    with emulated() as card, started(card, family, drafter=traffic.drafter(), **SIZES | traffic.more) as engine:
        executor = cast(TorchExecutor, engine.core.executor)
        known = adapters(tmp_path, executor.model) if traffic.adapts else []
        for one in known:
            engine.core.adapters.load(one)
        if executor._head is not None:
            certain(executor._head)
        card.values = False
        card.launched.clear()
        served(engine.core, traffic, known, card)
        outside = {form: count for form, count in executor.steps_by_form.items() if count and form != GRAPH}
        assert not outside, f"of {STEPS} steps"
        unlisted = set(card.launched) - listed()
        assert not unlisted, "launched outside of graphs, and not in docs/gpu.md"


def listed() -> set[str]:
    """Return the kernels that docs/gpu.md lists as launched next to graphs."""
    [table] = re.findall(r"\| launched next to graphs \|.*?\n\n", PAGE.read_text(), re.DOTALL)
    return set(re.findall(r"`(_?\w+)`", table))


def test_the_page_has_each_form_of_a_step() -> None:
    [table] = re.findall(r"\| form \| step \|.*?\n\n", PAGE.read_text(), re.DOTALL)
    assert re.findall(r"^\| `(\w+)`", table, re.MULTILINE) == [GRAPH, *OUTSIDE]


def test_the_control_a_step_that_no_shape_holds_is_counted_by_its_reason() -> None:
    checkpoint("qwen3_5")
    more = {"max_num_seqs": 24, "max_num_batched_tokens": 128}
    with emulated() as card, started(card, "qwen3_5", **more) as engine:
        card.values = False
        for at in range(18):
            engine.core.submit(
                Request(request_id=f"r{at}", prompt_tokens=[5 + at, 9], sampling=SamplingParams(max_tokens=2))
            )
        while engine.core.has_work:
            engine.core.step()
        assert engine.core.failure is None
        assert engine.core.stats().steps_by_form["prompts"] == 1
        assert not cast(TorchExecutor, engine.core.executor).steps_by_form["tokens"]
