"""Faults that reading found in the GPU path, put back one by one: the emulated GPU must find each.

A mutant is one function of weft with one line changed. The table in ``docs/testing.md`` lists them. Without a
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
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import RESERVE_SLACK, Report
from tests.emulated_gpu.engines import (
    GREEDY,
    answers,
    assert_tokens_of_transformers,
    recorded_decodes,
    said_by_transformers,
    started,
)
from tests.emulated_gpu.install import CARD_BYTES
from tests.emulated_gpu.sample import sample
from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.drafters import AnswerDrafter
from weft.request import SamplingParams
from weft.runner import reserve, rows, sampler, torch_executor, transfers
from weft.runner.arena import DeviceArena
from weft.runner.graphs import CudaCapture
from weft.runner.staging import Staged
from weft.runner.step_graphs import StepGraphs
from weft.runner.torch_executor import TorchExecutor
from weft.schedule.store_tier import StoreTier
from weft.tensor import device
from weft.tensor.gpu import prefill_backend
from weft.tensor.gpu.host_memory import HostBuffer, HostRoom
from weft.tensor.inputs import StepInputs

CUDA = torch.device("cuda", 0)
PAGE = Path(__file__).resolve().parents[2] / "docs" / "testing.md"
LONGER = structs.replace(GREEDY, max_tokens=10)
PROMPTS = [[7], [300, 20, 411, 5, 123]]


def serve(
    family: str = "qwen3",
    prompts: list[list[int]] = PROMPTS,
    sampling: SamplingParams = GREEDY,
    card_bytes: int = CARD_BYTES,
    **more: Any,
) -> list[Report]:
    """What the card reports. Without a report, tokens are looked at."""
    checkpoint(family)
    with emulated(card_bytes) as card, started(card, family, **more) as engine:
        if more.get("drafter") is not None:  # snapshots are written at once, in steps with drafts
            cast(StoreTier, engine.core.scheduler.store).writes.draining = True
        made = answers(engine.core, prompts, sampling)
    if card.reports:
        return card.reports
    assert_tokens_of_transformers(family, prompts, made)
    return []


def store() -> list[Report]:
    """Snapshots are written, and come back."""
    prompt = list(range(3, 69))
    with tempfile.TemporaryDirectory() as directory:
        return [report for _ in range(2) for report in serve("qwen3_5", [prompt], store=directory)]


def drafts() -> list[Report]:
    """Steps with drafts store the snapshots of another prompt."""
    prompts = [list(range(3, 43)), list(range(50, 182))]
    said = said_by_transformers("qwen3_5", prompts[0], LONGER.max_tokens)
    drafter = AnswerDrafter("adversarial", dict.fromkeys(range(3), said), 512)
    with tempfile.TemporaryDirectory() as directory:
        reports = serve("qwen3_5", prompts, LONGER, store=directory, drafter=drafter)
        assert drafter.drafted
        return reports


def decodes() -> list[Report]:
    """In graphs, whose kernels read a table of runs."""
    return serve("qwen3_5")


def large_card() -> list[Report]:
    """There is room for a start that wastes memory."""
    return serve(card_bytes=512 << 20, memory="16MiB")


def hybrid() -> list[Report]:
    """A snapshot is copied: the second prompt begins as the first."""
    return serve("qwen3_5", [list(range(3, 69)), list(range(3, 72))])


def arena_apart() -> list[Report]:
    """Kernels of arena work do not compile with the others, as those of compressed records do not."""
    with mock.patch.object(reserve, "warm"):
        return hybrid()


def long_prompt() -> list[Report]:
    """A step with much to bring and many tokens, launched from Python."""
    return serve("qwen3", [list(range(3, 69))], cuda_graphs="off", max_num_seqs=1)


def small_steps() -> list[Report]:
    """A prefix comes back that takes more memory than a step."""
    with tempfile.TemporaryDirectory() as directory:
        return [
            report
            for _ in range(2)
            for report in serve(
                "qwen3",
                [list(range(3, 117))],
                store=directory,
                cuda_graphs="off",
                max_num_seqs=1,
                max_num_batched_tokens=16,
            )
        ]


def compaction() -> list[Report]:
    """Pages of more bytes than a step takes change places."""
    checkpoint("qwen3")
    with emulated() as card, started(card, "qwen3", cuda_graphs="off") as engine:
        held = cast(TorchExecutor, engine.core.executor).arena
        count = (card.reserve.step_bytes + RESERVE_SLACK) // held.plan.page_bytes + 2
        card.serving = False
        circle = np.stack([np.arange(count), (np.arange(count) + 1) % count])
        ids = Staged(circle, 0)
        ids._device = torch.from_numpy(circle).to(CUDA)
        card.begin_serving()
        held.copy_pages(ids.row(0), ids.row(1))
        return card.reports


def sleep() -> list[Report]:
    """The weights go to the host, and come back."""
    checkpoint("qwen3")
    with emulated() as card:
        with started(card, "qwen3", cuda_graphs="off") as engine:
            card.serving = False
            executor = cast(TorchExecutor, engine.core.executor)
            for part in executor.sleep(1):
                executor.wake(part)
        return card.reports


def other_versions() -> list[Report]:
    """A torch that no test ran with."""
    with emulated() as card, mock.patch.object(torch, "__version__", "2.10.1"):
        if not any("torch 2.10.1" in remark for remark in device.remarks(CUDA)):
            card.report("versions", "the start says nothing of torch 2.10.1, which was not tested")
        return card.reports


class LatePlans:
    """FlashInfer's wrapper, as far as its plans: numbers that it writes to pinned memory of its own, and
    copies from there."""

    def __init__(self, workspace: torch.Tensor, _: str, **__: str) -> None:
        self._numbers = torch.zeros(64, dtype=torch.int64, pin_memory=True)
        self._there = workspace[:512].view(torch.int64)

    def plan(self, *, numbers: list[int]) -> None:
        self._numbers.numpy()[:] = numbers
        self._there.copy_(self._numbers, non_blocking=True)


def plans() -> list[Report]:
    """Three steps of prompts by FlashInfer, launched before the first has run."""
    library = SimpleNamespace(BatchPrefillWithPagedKVCacheWrapper=LatePlans)
    with (
        emulated() as card,
        mock.patch.object(prefill_backend, "_library", library),
        mock.patch.object(prefill_backend, "WORKSPACE_BYTES", 4096),
    ):
        planner = prefill_backend._Planner(CUDA)
        for step in range(3):
            planner.plan(numbers=[step] * 64)
        torch.cuda.synchronize()
        return card.reports


def record() -> list[Report]:
    """One of three steps cannot be recorded."""
    with emulated() as card:
        x = torch.ones(4, device=CUDA)
        warm = [True]

        def forward(inputs: StepInputs, caches: object) -> torch.Tensor:
            rows = len(inputs.tokens_T)
            if rows != 2:
                return x + rows
            if warm:
                warm.clear()
                return x
            return x * x.sum().item()

        graphs = recorded_decodes(forward)
        recorded = [shape.decodes for shape in graphs.recorded()]
        assert recorded == [1, 3], f"recorded: {recorded}, refused: {graphs.refused_in_words()}"
        return card.reports


def refuse() -> list[Report]:
    """Two of three steps are refused, behind a launch that reads what the next one writes."""
    with emulated() as card:
        static = torch.zeros(4, device=CUDA)

        capture, refused = CudaCapture(CUDA), list[str]()
        for key in (3, 2, 1):
            static.fill_(key)

            def run(key: int = key) -> torch.Tensor:
                doubled = static * 2
                if key > 1:
                    raise RuntimeError(f"an op of step {key} reads a list on the host")
                return doubled

            try:
                replay = capture.capture(run)
            except RuntimeError as error:
                refused.append(str(error))
        assert replay().tolist() == [2] * 4
        assert len(refused) == 2
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
    "old 1: a table that only a graph reads is freed": Mutant(
        StepGraphs, "_record", "= self._memory.setdefault(shape, self._pad_memory(shape))",
        "= self._pad_memory(shape)\n    self._memory[shape] = memory.clone()", decodes,
        "^freed: .* on memory that was freed"),
    "old 2: one step that cannot be recorded ends the start": Mutant(
        StepGraphs, "_record", "except refusals() as error", "except ZeroDivisionError as error", record,
        "RuntimeError: .*during capture"),
    "old 3: weights are pinned by torch's allocator": Mutant(
        HostBuffer, "__init__", "torch.frombuffer(mapping or mmap.mmap(-1, size), dtype=torch.uint8)",
        "torch.empty(size, dtype=torch.uint8, pin_memory=True)", sleep,
        "^pinning: .* stay pinned in torch's allocator"),
    "old 4: each graph is recorded on a stream of its own": Mutant(
        CudaCapture, "capture", "self._stream or cuda.Stream", "cuda.Stream", large_card,
        "^pool: graphs of one pool are recorded on several streams"),
    "old 5: a version that was not tested starts silently": Mutant(
        device, "remarks", "if others:", "if False:", other_versions, "^versions: "),
    "old 6: a plan of FlashInfer is written while the one before is copied": Mutant(
        prefill_backend._Planner, "plan", "wait_for(self._copied[turn])", "pass", plans,
        "^reused: the host wrote"),
    "old 7: the reserve measures only decodes": Mutant(
        reserve.Measurement, "run", "for shape in self._shapes}", "for shape in self._shapes[-1:]}",
        long_prompt, "^reserve: .* more than the start counted"),
    "old 8: kernels of the arena's work compile when they are first needed": Mutant(
        TorchExecutor, "__init__", "warm(self.arena)", "pass", arena_apart,
        "^compile: .* inside of a request"),
    "old 9: each recording takes a workspace of cuBLAS": Mutant(
        CudaCapture, "capture", "self._stream or cuda.Stream", "cuda.Stream", large_card,
        "^workspace: one thread multiplies on more than 2 streams"),
    "old 10: a usual step does not fit into the staging buffer": Mutant(
        rows, "step_bytes", "return 1 << (8 *", "return 64 << (0 *", long_prompt,
        "^wait: a copy from pageable memory"),
    "old 11: another thread ends a recording": Mutant(
        CudaCapture, "capture", 'capture_error_mode="thread_local"', 'capture_error_mode="global"',
        record_beside_a_thread, "operation not permitted when stream is capturing|during capture"),
    "new 1: the sampler takes the card for the host": Mutant(
        sampler.Sampler, "__init__", "is_remote(device)", "False", serve, "same device|convert cuda"),
    "new 2: a step with drafts does not wait for its stores": Mutant(
        transfers.DeviceTransfers, "are_done", "self._ends[0][0] <= step", "False", drafts,
        "^early: the host reads at the store's thread"),
    "new 3: a load takes memory of its own size": Mutant(
        transfers.DeviceTransfers, "load", "room_B[: host_PB.numel()].view",
        "torch.empty_like(room_B[:host_PB.numel()]).view", small_steps,
        "^reserve: .* more than the start counted"),
    "new 4: a load or store brings its ids from pageable memory": Mutant(
        transfers.DeviceTransfers, "load", "ids.device[rows, 0]",
        "torch.from_numpy(ids.host[rows, 0].astype('int64')).to(room_B.device)", store,
        "^wait: a copy from pageable memory"),
    "new 5: the pool of an invalid recording is used again": Mutant(
        CudaCapture, "capture", "self._stream = self._pool = None", "pass", record,
        "already recording to mempool_id"),
    "new 6: transfer buffers are pinned when they are needed": Mutant(
        HostRoom, "take", "piece = self.find(size)",
        "return torch.empty(size, dtype=torch.uint8, pin_memory=True).numpy()", store,
        "^pinning: .* inside of a request"),
    "new 7: the steps' thread replays nothing before the first request": Mutant(
        TorchExecutor, "warm", "self._worker.call(self._warm)", "pass", serve,
        "^upload: a graph is replayed for the first time"),
    "new 8: nothing says which versions were tested": Mutant(
        device, "remarks", 'versions = {"torch": str(torch.__version__)}', "versions = {}", other_versions,
        "^versions: "),
    "also: a load does not wait for the steps that use its pages": Mutant(
        transfers._Lane, "after_steps", "self._stream.wait_stream(", "(lambda _: None)(", store, "^order: "),
    "also: a compaction in a circle takes memory of its own size": Mutant(
        DeviceArena, "_copy", "room=self._room",
        "room=torch.empty_like(words[:from_.size * stride_bytes // WORD_BYTES])", compaction,
        "^reserve: .* more than the start counted"),
    "also: a verify run without a graph brings its tables from pageable memory": Mutant(
        torch_executor, "replay", "verified_R = by_run.device",
        "verified_R = torch.from_numpy(by_run.host).to(runs.slots_R.device)", drafts,
        "^wait: a copy from pageable memory"),
    "also: launches of a refused step are not waited for": Mutant(
        CudaCapture, "capture", "finally:", "except ZeroDivisionError:\n        pass\n    else:", refuse,
        "^order: "),
    "also: pages are handed over before their load has ended": Mutant(
        transfers.DeviceTransfers, "are_done", "self._ends[0][0] <= step", "False", store,
        "^order: |^early: "),
}  # fmt: skip


@contextlib.contextmanager
def mutated(mutant: Mutant) -> Iterator[None]:
    function = getattr(mutant.owner, mutant.name)
    source = textwrap.dedent(inspect.getsource(function))
    assert source.count(mutant.old) == 1, f"{mutant.name} has not one {mutant.old!r}"
    scope = function.__globals__ if inspect.isfunction(function) else {}
    names: dict[str, Any] = {}
    code = compile(source.replace(mutant.old, mutant.new), "mutant", "exec", __future__.annotations.compiler_flag)
    exec(code, scope, names)
    with mock.patch.object(mutant.owner, mutant.name, names[mutant.name]):
        yield


SAMPLE = sample(MUTANTS, 2)
"""Each scenario of these is run without its mutant too."""


@pytest.mark.parametrize("name", SAMPLE)
def test_the_emulated_gpu_finds_a_fault_that_is_put_back(name: str) -> None:
    mutant = MUTANTS[name]
    told = []
    with mutated(mutant):
        try:
            told = [str(report) for report in mutant.scenario()]
        except Exception as error:
            told = [f"{type(error).__name__}: {error}", *getattr(error, "__notes__", ())]
    assert re.search(mutant.found, "\n".join(told), re.MULTILINE), f"not found, or otherwise: {told}"


@pytest.mark.parametrize("scenario", dict.fromkeys(MUTANTS[name].scenario for name in SAMPLE))
def test_the_control_without_a_mutant_nothing_is_found(scenario: Callable[[], list[Report]]) -> None:
    assert not scenario()


def test_the_table_of_the_documentation_has_each_fault_once() -> None:
    rows = re.findall(r"^\| (old \d+|new \d+|also): (.*?) \|", PAGE.read_text(), re.MULTILINE)
    assert [f"{fault}: {words}" for fault, words in rows] == list(MUTANTS)
    wanted = [*(f"old {number}" for number in range(1, 12)), *(f"new {number}" for number in range(1, 9))]
    assert [fault for fault, _ in rows if fault != "also"] == wanted
