"""Faults that reading found in the GPU path, put back one by one: the emulated GPU must find each.

A mutant is one function of weft with one line changed. The table in ``docs/gpu.md`` lists them. Without a
mutant the same scenarios find nothing.
"""

from __future__ import annotations
import __future__

import contextlib
import inspect
import re
import tempfile
import textwrap
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any, cast
from unittest import mock

import pytest
import torch
from msgspec import structs

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Report
from tests.emulated_gpu.engines import (
    GREEDY,
    answers,
    assert_tokens_of_transformers,
    said_by_transformers,
    started,
)
from tests.emulated_gpu.sample import sample
from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.drafters import AnswerDrafter
from weft.request import SamplingParams
from weft.runner import sampler, transfers
from weft.runner.graphs import CudaCapture, Recordings
from weft.schedule.store_tier import StoreTier

CUDA = torch.device("cuda", 0)
LONGER = structs.replace(GREEDY, max_tokens=10)
PROMPTS = [[7], [300, 20, 411, 5, 123]]


def serve(family: str = "qwen3", prompts: list[list[int]] = PROMPTS, sampling: SamplingParams = GREEDY,
          **more: Any) -> list[Report]:
    """What the card reports. Without a report, streams and tokens are looked at."""
    checkpoint(family)
    with emulated() as card, started(card, family, **more) as engine:
        if more.get("drafter") is not None:   # checkpoints are written at once, in steps with drafts
            cast(StoreTier, engine.core.scheduler.store).writes.draining = True
        made = answers(engine.core, prompts, sampling)
        streams = len(card.order.queues)
    if card.reports:
        return card.reports
    lanes = 0 if more.get("store") is None else 2   # of transfers
    assert streams <= 2 + lanes, f"{streams} streams: recordings do not share one"
    assert_tokens_of_transformers(family, prompts, made)
    return []


def store() -> list[Report]:
    """Checkpoints are written, and come back."""
    prompt = list(range(3, 69))
    with tempfile.TemporaryDirectory() as directory:
        return [report for _ in range(2) for report in serve("qwen3_5", [prompt], store=directory)]


def drafts() -> list[Report]:
    """Steps with drafts store their checkpoints. Their replays wait for tables, which is known."""
    prompt = list(range(3, 69))
    said = said_by_transformers("qwen3_5", prompt, LONGER.max_tokens)
    drafter = AnswerDrafter("perfect", dict.fromkeys(range(3), said), 512)
    with tempfile.TemporaryDirectory() as directory:
        reports = serve("qwen3_5", [prompt], LONGER, store=directory, drafter=drafter)
        assert drafter.drafted
        return [report for report in reports if report.kind != "wait"]


def hybrid() -> list[Report]:
    return serve("qwen3_5")


def eager() -> list[Report]:
    """Prompts beside decodes, launched from Python."""
    return serve("qwen3_5", [list(range(3, 60)), [7], list(range(3, 40))], cuda_graphs="off")


def full_card() -> list[Report]:
    """The arena takes all but a tenth of what the start leaves; no graph is overestimated."""
    with tempfile.TemporaryDirectory() as directory:
        return serve("qwen3_5", [list(range(3, 69))], store=directory, cuda_graphs="off")


def record() -> list[Report]:
    """One of three steps cannot be recorded."""
    with emulated() as card:
        x = torch.ones(4, device=CUDA)
        steps: dict[int, Callable[[], torch.Tensor]] = {1: lambda: x + 1, 3: lambda: x + 3}
        warm = [True]

        def looks() -> torch.Tensor:
            if warm:
                warm.clear()
                return x
            return x * x.sum().item()

        recordings: Recordings[int] = Recordings(CudaCapture(CUDA))
        recordings.record([1, 2, 3], lambda key: (steps.get(key, looks), ()))
        assert recordings.keys == (1, 3), f"recorded: {recordings.keys}, refused: {recordings.refused}"
        return card.reports


def record_beside_a_thread() -> list[Report]:
    """Another thread copies while a step is recorded."""
    with emulated() as card:
        x = torch.ones(4, device=CUDA)

        def step() -> torch.Tensor:
            thread = threading.Thread(target=lambda: torch.ones(4).to(CUDA))
            thread.start()
            thread.join()
            return x + 1

        assert CudaCapture(CUDA).capture(step)().tolist() == [2] * 4
        return card.reports


@dataclass(frozen=True)
class Mutant:
    """``old`` becomes ``new`` in ``owner.name``; ``scenario`` then fails with ``found``."""

    owner: Any
    name: str
    old: str
    new: str
    scenario: Callable[[], list[Report]]
    found: str


MUTANTS: dict[str, Mutant] = {
    "old 2: one step that cannot be recorded ends the start": Mutant(
        Recordings, "record", "except refusals() as error", "except ZeroDivisionError as error", record,
        "during capture"),
    "old 11: another thread ends a recording": Mutant(
        CudaCapture, "capture", 'capture_error_mode="thread_local"', 'capture_error_mode="global"',
        record_beside_a_thread, "stream is capturing|during capture"),
    "new 1: the sampler takes the card for the host": Mutant(
        sampler.Sampler, "__init__", "is_remote(device)", "False", serve, "same device|convert cuda"),
    "new 4: a load does not wait for the steps that use its pages": Mutant(
        transfers._Lane, "behind_steps", "self._stream.wait_stream(", "(lambda _: None)(", store, "order: "),
    "new 4: pages are handed over before their load has ended": Mutant(
        transfers.DeviceTransfers, "are_done", "self._ends[0][0] <= step", "False", store, "order: |early: "),
    "new 5: the pool of an invalid recording is used again": Mutant(
        CudaCapture, "capture", "self._stream = self._pool = None", "pass", record,
        "already recording to mempool_id"),
}


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    function = getattr(mutant.owner, mutant.name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.name} has not one {mutant.old!r}"
    scope = function.__globals__ if inspect.isfunction(function) else {}
    names: dict[str, Any] = {}
    code = compile(source.replace(mutant.old, mutant.new), "mutant", "exec",
                   __future__.annotations.compiler_flag)
    exec(code, scope, names)
    with mock.patch.object(mutant.owner, mutant.name, names[mutant.name]):
        yield


@pytest.mark.parametrize("name", sample(MUTANTS, 2))
def test_the_emulated_gpu_finds_a_fault_that_is_put_back(name: str) -> None:
    mutant = MUTANTS[name]
    told = []
    with mutated(mutant):
        try:
            told = [str(report) for report in mutant.scenario()]
        except Exception as error:
            told = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    assert re.search(mutant.found, "\n".join(told)), f"not found, or otherwise: {told}"


@pytest.mark.parametrize("scenario", [record, record_beside_a_thread])
def test_the_control_without_a_mutant_nothing_is_found(scenario: Callable[[], list[Report]]) -> None:
    assert not scenario()
