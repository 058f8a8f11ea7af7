"""Graphs: a recording does not run, refuses what CUDA refuses, and is replayed on its addresses."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Card
from tests.emulated_gpu.engines import recorded_decodes
from weft.runner.graph_shapes import GraphShape
from weft.runner.graphs import CudaCapture
from weft.tensor.gpu.host_memory import room_for
from weft.tensor.inputs import StepInputs

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card() -> Iterator[Card]:
    with emulated() as one:
        yield one


def test_a_replay_computes_on_what_is_there_now(card: Card) -> None:
    x = torch.zeros(4, device=CUDA)
    replay = CudaCapture(CUDA).capture(lambda: x + 1)
    x.fill_(5)
    assert replay().tolist() == [6] * 4
    x.fill_(7)
    assert replay().tolist() == [8] * 4
    assert not card.reports


def test_a_recording_does_not_run(card: Card) -> None:
    x, graph = torch.zeros(4, device=CUDA), torch.cuda.CUDAGraph()
    with torch.cuda.graph(graph, stream=torch.cuda.Stream()):
        x.add_(1)
    assert x.tolist() == [0] * 4
    graph.replay()
    assert x.tolist() == [1] * 4


@pytest.mark.parametrize(
    "refused",
    [
        lambda x: x.sum().item(),
        lambda x: x.cpu(),
        lambda x: x.nonzero(),
        lambda x: x[x > 0],
        lambda x: torch.ones(4).to(CUDA),
        lambda x: torch.cuda.synchronize(),
        lambda x: torch.tensor([1], device=CUDA),
        lambda x: bool(x.any()),
        lambda x: room_for(CUDA, 1 << 16),
    ],
)
def test_a_recording_refuses_what_waits(card: Card, refused: Callable[[torch.Tensor], Any]) -> None:
    x = torch.ones(4, device=CUDA)
    graph = torch.cuda.CUDAGraph()
    with (
        pytest.raises(RuntimeError, match="previous error during capture"),
        torch.cuda.graph(graph, stream=torch.cuda.Stream()),
    ):
        refused(x)


def test_the_control_a_pool_goes_on_recording_behind_an_error_of_cuda(card: Card) -> None:
    x, pool = torch.ones(4, device=CUDA), torch.cuda.graph_pool_handle()
    with pytest.raises(RuntimeError), torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=torch.cuda.Stream()):
        x.sum().item()
    with (
        pytest.raises(RuntimeError, match="already recording to mempool_id"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), pool=pool, stream=torch.cuda.Stream()),
    ):
        x.add_(1)


def test_a_shape_that_cannot_be_recorded_costs_no_other_shape(card: Card) -> None:
    """Fault 5: the pool of an invalid recording refused all later ones."""
    x = torch.ones(4, device=CUDA)
    looks = {3: lambda: x + 3, 2: lambda: x * x.sum().item(), 1: lambda: x + 1}
    came: list[int] = []

    def forward(inputs: StepInputs, caches: object) -> torch.Tensor:
        rows = len(inputs.tokens_T)
        came.append(rows)
        return looks[rows]() if rows != 2 or came.count(2) > 1 else x

    graphs = recorded_decodes(forward)
    assert graphs.recorded() == (GraphShape.of_decodes(1), GraphShape.of_decodes(3))
    refused = graphs.refused_in_words()
    assert refused is not None
    assert refused.startswith("batch size 2: ")
    assert "captur" in refused
    for rows in (1, 3):
        with torch.inference_mode():
            assert graphs.idle(GraphShape.of_decodes(rows)).tolist() == [1 + rows] * 4


def test_memory_that_was_freed_behind_a_recording_is_poison_at_its_replay(card: Card) -> None:
    """Old fault 1: a table that only the recorded kernels read was freed."""
    table = torch.arange(4, dtype=torch.float32, device=CUDA)
    replay = CudaCapture(CUDA).capture(lambda table=table: table * 1)
    assert replay().tolist() == [0, 1, 2, 3]
    del table
    torch.zeros(1, device=CUDA)
    assert replay().isnan().all() or replay().tolist() != [0, 1, 2, 3]
    assert [report.kind for report in card.reports] == ["freed"]


def test_the_control_a_table_that_lives_is_no_report(card: Card) -> None:
    table = torch.arange(4, dtype=torch.float32, device=CUDA)
    replay = CudaCapture(CUDA).capture(lambda: table * 1)
    torch.zeros(1, device=CUDA)
    assert replay().tolist() == [0, 1, 2, 3]
    assert not card.reports


def test_graphs_of_one_pool_on_several_streams_are_reported(card: Card) -> None:
    x, pool = torch.ones(4, device=CUDA), torch.cuda.graph_pool_handle()
    graphs = [torch.cuda.CUDAGraph() for _ in range(2)]
    for graph in graphs:
        with torch.cuda.graph(graph, pool=pool, stream=torch.cuda.Stream()):
            x.add_(1)
    assert [report.kind for report in card.reports] == ["pool"]


def test_memory_that_went_back_to_the_driver_is_an_illegal_access(card: Card) -> None:
    table = torch.ones(30 << 20, dtype=torch.uint8, device=CUDA)
    replay = CudaCapture(CUDA).capture(lambda table=table: table[:4] + 1)
    del table
    torch.cuda.empty_cache()
    replay()
    with pytest.raises(RuntimeError, match="illegal memory access"):
        torch.cuda.synchronize()


def test_results_of_graphs_in_one_pool_share_memory(card: Card) -> None:
    capture, x = CudaCapture(CUDA), torch.ones(1 << 20, device=CUDA)
    before = torch.cuda.memory_reserved()
    replays = [capture.capture(lambda n=n: (x * n) + 1) for n in (1, 2)]
    assert replays[1]()[0].item() == 3
    assert replays[0]()[0].item() == 2
    assert torch.cuda.memory_reserved() - before < 4 * 20 << 20
