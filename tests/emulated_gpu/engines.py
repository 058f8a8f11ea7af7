"""Engines as a user starts them, with ``--device cuda``."""

from __future__ import annotations

import contextlib
import gc
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import torch

from tests.emulated_gpu.card import Card
from tests.emulated_gpu.sample import ALL
from tests.fixtures.checkpoints import checkpoint
from tests.oracle.test_models_against_transformers import expected
from weft.assemble import assembly, prefix_store
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.info import ModelInfo
from weft.memory.prefix_store import NewSnapshot
from weft.ranks.peers import Peers
from weft.request import Request, SamplingParams
from weft.runner import reserve
from weft.runner.graph_shapes import GraphShape
from weft.runner.graphs import CudaCapture
from weft.runner.step_graphs import GraphSet, StepGraphs
from weft.runner.torch_executor import TorchExecutor
from weft.speculation.drafter import Drafter
from weft.tensor import adapter_rows
from weft.tensor.inputs import LayerCache, StepInputs
from weft.units import PAD

SMALL: dict[str, Any] = {
    "device": "cuda",
    "max_num_seqs": 4,
    "max_num_batched_tokens": 72,
    "max_model_len": 256,
    "threads": 1,
    "speculate": "off",
}
ADAPTERS_MAX = 4
"""Adapters of a recorded step, in place of 64: programs of the other 60 end at once, and take a third of a step."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=4 if ALL else 3, ignore_eos=True)
"""Tokens of a prompt, and of decodes: the last one is replayed by the graph that computed the one before it."""


@dataclass
class Started:
    """``puts``: snapshots that its store was given."""

    core: EngineCore
    info: ModelInfo
    puts: list[int] = field(default_factory=list)


@contextlib.contextmanager
def quick_start(card: Card) -> Iterator[None]:
    """Inside, the steps that only measure and compile are asked for and not computed."""

    def asked_for(function: Any) -> Any:
        def called(*args: Any, **kwargs: Any) -> Any:
            card.computes = False
            try:
                made = function(*args, **kwargs)
            finally:
                card.computes = True
            if isinstance(made, reserve.Reserve):
                card.reserve = made
            return made

        return called

    with contextlib.ExitStack() as stack:
        for owner, name in ((reserve, "measure_reserve"), (TorchExecutor, "record_graphs"), (TorchExecutor, "warm")):
            stack.enter_context(mock.patch.object(owner, name, asked_for(getattr(owner, name))))
        stack.enter_context(mock.patch.object(reserve, "check_kernels"))  # its numbers would be nobody's
        yield


@contextlib.contextmanager
def started(
    card: Card,
    family: str,
    *,
    drafter: Drafter | None = None,
    peers: Peers | None = None,
    quick: bool = True,
    **more: Any,
) -> Iterator[Started]:
    """An engine that is ready for requests; from then on, what belongs to the start is a report. Its
    checkpoint was made before the card. ``peers``: its other ranks. ``quick``: see ``quick_start``."""
    drafts = mock.patch.object(assembly, "make_drafter", return_value=drafter)
    dear = mock.patch.object(prefix_store, "GPU_FLOPS", 1.0)  # or a tiny model computes what it could load
    start = quick_start(card) if quick else contextlib.nullcontext()
    few = contextlib.nullcontext() if ALL else mock.patch.object(adapter_rows, "LINES", ADAPTERS_MAX)
    with start, few, dear, contextlib.nullcontext() if drafter is None else drafts:
        made = assembly.assemble(EngineConfig(model=str(_directory(family)), **SMALL | more), peers=peers)
    engine = Started(made.core, made.info)
    _watch_store(card, engine)
    card.begin_serving()
    try:
        with few, contextlib.nullcontext() if ALL else quick_start(card):  # it may wake, or get adapters
            yield engine
    finally:
        card.serving = False
        engine.core.close()
        del made, engine
        gc.collect()  # pinned memory is given back while there is a card
        card.look_at_host_memory()


def _directory(family: str) -> Path:
    """Of a family's test checkpoint, or the path itself."""
    return Path(family) if "/" in family else checkpoint(family)


def _watch_store(card: Card, engine: Started) -> None:
    """A store's thread reads what it is given: no copy into it may be under way."""
    tier = engine.core.scheduler.store
    if tier is None:
        return
    put = tier.store.put

    def watched(snapshot: NewSnapshot) -> Any:
        engine.puts.append(snapshot.position)
        for one in snapshot.payloads:
            bytes_of = np.frombuffer(one, np.uint8)
            card.host_touches(
                (bytes_of.ctypes.data, bytes_of.ctypes.data + bytes_of.nbytes), writes=False, where="the store's thread"
            )
        return put(snapshot)

    tier.store.put = watched  # type: ignore[method-assign]


def answers(
    core: EngineCore,
    prompts: Sequence[list[int]],
    sampling: SamplingParams | Sequence[SamplingParams] = GREEDY,
    *,
    name: str = "",
) -> list[list[int]]:
    """The tokens of each."""
    samplings = [sampling] * len(prompts) if isinstance(sampling, SamplingParams) else sampling
    return answered(
        core,
        [
            Request(request_id=f"{name}{at}", prompt_tokens=prompt, sampling=one)
            for at, (prompt, one) in enumerate(zip(prompts, samplings, strict=True))
        ],
    )


def answered(core: EngineCore, requests: Sequence[Request]) -> list[list[int]]:
    """The tokens of each."""
    tokens: dict[str, list[int]] = {one.request_id: [] for one in requests}
    for one in requests:
        core.submit(one)
    while core.has_work:
        for event in core.step():
            tokens[event.request_id] += event.tokens
        if core.failure is not None:
            raise core.failure
    return list(tokens.values())


def said_by_transformers(family: str, prompt: list[int], count: int) -> list[int]:
    """The greedy tokens behind ``prompt``."""
    tokens: list[int] = []
    for _ in range(count):
        tokens.append(int(expected(family, [*prompt, *tokens])[-1].argmax()))
    return tokens


def assert_tokens_of_transformers(family: str, prompts: Sequence[list[int]], made: Sequence[list[int]]) -> None:
    for prompt, tokens in zip(prompts, made, strict=True):
        wanted = expected(family, [*prompt, *tokens[:-1]])[-len(tokens) :]
        assert tokens == wanted.argmax(-1).tolist(), f"{family}: prompt of {len(prompt)} tokens"


def kinds(card: Card) -> set[str]:
    """Of its reports."""
    return {report.kind for report in card.reports}


def recorded_decodes(forward: Callable[[StepInputs, list[LayerCache]], torch.Tensor]) -> StepGraphs:
    """Return graphs of decode steps of 1, 2 and 3 rows."""
    cuda, shapes = torch.device("cuda", 0), [GraphShape.of_decodes(rows) for rows in (1, 2, 3)]
    table = torch.full((4, 1), PAD, dtype=torch.int32, device=cuda)
    graphs = StepGraphs(table, torch.zeros(4, dtype=torch.int64, device=cuda), shapes, CudaCapture(cuda))
    graphs.record(GraphSet("base", shapes, forward, []))
    return graphs
