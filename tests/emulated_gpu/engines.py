"""Engines and servers as a user starts them, with ``--device cuda``."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Sequence
from typing import Any
from unittest import mock

from tests.emulated_gpu.card import Card
from tests.fixtures.checkpoints import checkpoint
from weft.assemble.assembly import Assembled, assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams
from weft.runner import reserve
from weft.runner.torch_executor import TorchExecutor

SMALL: dict[str, Any] = {"device": "cuda", "max_num_seqs": 4, "max_num_batched_tokens": 64,
                         "max_model_len": 256, "threads": 1, "speculate": "off"}


@contextlib.contextmanager
def quick_start(card: Card) -> Iterator[None]:
    """Inside, the steps that only measure and compile are asked for and not computed."""

    def asked_for(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            card.computes = False
            try:
                return function(*args, **kwargs)
            finally:
                card.computes = True
        return called

    with (mock.patch.object(reserve, "measure_reserve", asked_for(reserve.measure_reserve)),
          mock.patch.object(TorchExecutor, "record_graphs", asked_for(TorchExecutor.record_graphs))):
        yield


@contextlib.contextmanager
def started(card: Card, family: str, **more: Any) -> Iterator[Assembled]:
    """An engine that is ready for requests; from then on, what belongs to the start is a report."""
    with quick_start(card):
        made = assemble(EngineConfig(model=str(checkpoint(family)), **SMALL | more))
    card.serving = True
    try:
        yield made
    finally:
        card.serving = False
        made.core.close()


def answers(core: EngineCore, prompts: Sequence[list[int]],
            sampling: SamplingParams | Sequence[SamplingParams], *, name: str = "") -> list[list[int]]:
    """The tokens of each."""
    samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    tokens: dict[str, list[int]] = {f"{name}{at}": [] for at in range(len(prompts))}
    for (request, prompt), one in zip(zip(tokens, prompts, strict=True), samplings, strict=True):
        core.submit(Request(request_id=request, prompt_tokens=prompt, sampling=one))
    while core.has_work:
        for event in core.step():
            tokens[event.request_id] += event.tokens
        if core.failure is not None:
            raise core.failure
    return list(tokens.values())
