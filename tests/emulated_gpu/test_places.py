"""Places: what lies on the card, what on the host, and what happens where they meet."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Card
from weft.models.blocks.adapted import Factor, Part, ProductChange
from weft.tensor import device as devices
from weft.tensor import gpu
from weft.tensor.device import choose_device, describe, free_bytes
from weft.tensor.ops.paged_attention import paged_attention
from weft_tools.bench.kernels import Bench, pages_of

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card() -> Iterator[Card]:
    with emulated() as one:
        yield one


def on_card(*values: float) -> torch.Tensor:
    return torch.tensor(values, device=CUDA)


def test_torch_has_a_gpu_and_operators_give_what_they_give_on_a_cpu(card: Card) -> None:
    assert choose_device("auto") == CUDA
    assert describe(CUDA) == "cuda:0 (emulated)"
    x = torch.arange(12, dtype=torch.float32).reshape(3, 4)
    y = x.to(CUDA)
    assert (y.device, y.is_cuda, y[1:].device) == (CUDA, True, CUDA)
    for compute in (
        lambda a: a @ a.T,
        lambda a: a.softmax(1),
        lambda a: a[:, 1:3].contiguous().view(-1),
        lambda a: torch.where(a > 5, a, -1),
        lambda a: a.index_select(0, a[0, :2].long()),
        lambda a: torch.cat([a, a * 2]).sum(0),
        lambda a: a.to(torch.bfloat16).float(),
    ):
        assert torch.equal(compute(y).cpu(), compute(x))
    y[1:, 0] = 7
    y[y > 9] = 0
    assert y.tolist() == [[0, 1, 2, 3], [7, 5, 6, 7], [7, 9, 0, 0]]


@pytest.mark.parametrize(
    "mixes",
    [
        lambda y: y + torch.ones(3),
        lambda y: y.index_select(0, torch.arange(2)),
        lambda y: torch.ones(2) @ y[:2],
        lambda y: torch.cat([y, torch.ones(1)]),
        lambda y: torch.arange(3)[y.long()],
    ],
)
def test_an_operator_that_mixes_places_raises(card: Card, mixes: Callable[[torch.Tensor], Any]) -> None:
    with pytest.raises(RuntimeError, match=r"same device|indices should be"):
        mixes(on_card(0, 1, 2))


def test_a_scalar_of_the_host_travels_with_the_launch(card: Card) -> None:
    y = on_card(1, 2)
    before = len(card.waits)
    y = y + torch.tensor(1.0)
    y.fill_(3)
    assert len(card.waits) == before
    assert y.tolist() == [3, 3]


@pytest.mark.parametrize(
    "looks",
    [
        lambda y: y.sum().item(),
        lambda y: y.tolist(),
        lambda y: y.cpu(),
        lambda y: bool((y > 0).all()),
        lambda y: y.nonzero(),
        lambda y: y[y > 0],
        lambda y: torch.ones(3).copy_(y),
        lambda y: y.to("cpu"),
        lambda y: torch.ones(3).to(CUDA),
        lambda y: y.copy_(torch.ones(3)),
        lambda y: torch.tensor([1], device=CUDA),
        lambda y: y.copy_(torch.ones(3), non_blocking=True),
        lambda y: torch.equal(y, y),
        lambda y: torch.masked_select(y, y > 1),
        lambda y: y[torch.arange(2)],
    ],
)
def test_each_wait_is_counted_with_its_line(card: Card, looks: Callable[[torch.Tensor], Any]) -> None:
    y = on_card(1, 2, 3)
    card.waits.clear()
    looks(y)
    assert card.waits
    assert all(wait.place.startswith("test_places.py:") for wait in card.waits)


def test_the_control_what_does_not_wait_is_not_counted(card: Card) -> None:
    y, pinned = on_card(1, 2, 3), torch.ones(3, pin_memory=True)
    card.waits.clear()
    y.copy_(pinned, non_blocking=True)
    pinned.copy_(y.index_select(0, (y * 0).long()).masked_fill_(y > 1, 0), non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    event.synchronize()
    assert not card.waits
    assert pinned.tolist() == [1, 1, 1]
    assert not card.reports


def test_numpy_does_not_see_the_card(card: Card) -> None:
    for look in (lambda y: y.numpy(), np.asarray):
        with pytest.raises(TypeError, match="can't convert cuda"):
            look(on_card(1))


def test_free_memory_is_that_of_the_card() -> None:
    with emulated(64 << 20) as card:
        before = free_bytes(CUDA)
        held = torch.empty(30 << 20, dtype=torch.uint8, device=CUDA)
        assert free_bytes(CUDA) == before - (30 << 20)
        with pytest.raises(torch.OutOfMemoryError, match="Tried to allocate"):
            torch.empty(30 << 20, dtype=torch.uint8, device=CUDA)
        del held
        assert free_bytes(CUDA) == before
        assert card.allocator.allocated == 0


def test_outside_there_is_no_gpu_again() -> None:
    with emulated():
        assert devices.is_remote(CUDA)
    assert not torch.cuda.is_available()


def test_decodes_by_torch_stay_on_the_card(card: Card) -> None:
    """What ``debug.gpu_kernels torch`` computes, and what no Triton kernel takes."""
    bench = Bench(CUDA, torch.float32, (2,), (), 20)
    runs, q = bench.runs(2, 1, 19), bench.noise(2, 4, 32)
    k, v = pages_of(bench, runs, 2, 32)
    by_triton = paged_attention(q, k, v, runs, 0.2)
    gpu.choose("torch")
    try:
        by_torch = paged_attention(q, k, v, runs, 0.2)
    finally:
        gpu.choose("auto")
    assert by_torch.is_cuda
    torch.testing.assert_close(by_torch.cpu(), by_triton.cpu(), atol=1e-5, rtol=1e-5)


def test_rows_of_an_adapter_that_are_no_neighbours_are_changed_on_the_card(card: Card) -> None:
    """As torch does for factors that no Triton kernel takes."""
    x, down, up = torch.randn(4, 3), torch.randn(2, 3), torch.randn(5, 2)
    change = ProductChange(Factor(down.to(CUDA)), (Part(0, 5, Factor(up.to(CUDA)), 0, 2),), torch.float32)
    y = torch.zeros(4, 5, device=CUDA)
    change.add(x.to(CUDA), y, torch.tensor([0, 2]))
    want = x @ down.T @ up.T
    want[[1, 3]] = 0
    torch.testing.assert_close(y.cpu(), want)
