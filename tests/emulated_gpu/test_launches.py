"""Launches: of device memory alone, inside of their arguments, compiled before the first request."""

from __future__ import annotations

from collections.abc import Iterator
from types import SimpleNamespace
from typing import Any, cast

import pytest
import torch
import triton
import triton.language as tl

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Card
from tests.emulated_gpu.engines import kinds
from weft.tensor.collectives import GroupCollectives
from weft.tensor.gpu.ahead import compiled_ahead
from weft.tensor.gpu.launch import launch

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card() -> Iterator[Card]:
    with emulated() as one:
        yield one


@triton.jit
def _gather(x, index, out, COUNT: tl.constexpr):
    at = tl.arange(0, COUNT)
    tl.store(out + at, tl.load(x + tl.load(index + at)))


def gather(x: torch.Tensor, index: torch.Tensor) -> torch.Tensor:
    out = torch.empty(4, device=x.device)
    kernel: Any = _gather
    kernel[(1,)](x, index, out, COUNT=4)
    return out


def test_a_launch_computes_on_the_card(card: Card) -> None:
    x, index = torch.arange(8, dtype=torch.float32, device=CUDA), torch.tensor([3, 0, 7, 1], device=CUDA)
    assert gather(x, index).tolist() == [3, 0, 7, 1]
    assert not card.reports


def test_a_launch_refuses_memory_of_the_host(card: Card) -> None:
    with pytest.raises(ValueError, match="Pointer argument"):
        gather(torch.ones(8, device=CUDA), torch.arange(4))


def test_a_launch_refuses_a_grid_that_is_too_large(card: Card) -> None:
    x, kernel = torch.ones(8, device=CUDA), _gather
    with pytest.raises(RuntimeError, match="invalid argument"):
        kernel[(1, 65_536)](x, torch.arange(4, device=CUDA), x, COUNT=4)  # type: ignore[index]


@pytest.mark.parametrize("index", [[0, 1, 2, 8], [0, 1, 2, -1]])
def test_an_address_outside_of_the_arguments_is_reported(card: Card, index: list[int]) -> None:
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gather(torch.ones(8, device=CUDA), torch.tensor(index, device=CUDA)).tolist()
    assert kinds(card) == {"bounds"}
    assert "_gather" in card.reports[0].text


@triton.jit
def _take(x, index, out, wanted):
    tl.store(out, tl.load(x + tl.load(index), mask=wanted > 0, other=-1.0))


def test_a_number_outside_of_the_arguments_is_reported_where_it_is_read(card: Card) -> None:
    """Most loads are of one number, which are looked at in another way than those of tiles."""
    x, out, kernel = torch.arange(8, dtype=torch.float32, device=CUDA), torch.zeros(1, device=CUDA), cast(Any, _take)
    for index, wanted, number in ((7, 1, 7.0), (8, 0, -1.0)):
        kernel[(1,)](x, torch.tensor([index], device=CUDA), out, wanted)
        assert out.tolist() == [number]
    assert not card.reports
    kernel[(1,)](x, torch.tensor([8], device=CUDA), out, 1)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        out.tolist()
    assert kinds(card) == {"bounds"}


def test_a_number_that_two_streams_touch_needs_an_order(card: Card) -> None:
    """The one that is read needs it, and the one that is written."""
    x, index, kernel = torch.zeros(64, device=CUDA), torch.tensor([0], device=CUDA), cast(Any, _take)
    other = torch.cuda.Stream()
    for first, second, clashes in ((x[:1], x[32:], False), (x[:1], x, True)):
        torch.cuda.synchronize()
        card.reports.clear()
        kernel[(1,)](second, index, x[48:], 1)
        with torch.cuda.stream(other):
            kernel[(1,)](x[32:], index, first, 1)
        torch.cuda.synchronize()
        assert bool(card.reports) == clashes, card.reports


def test_an_index_in_freed_memory_is_reported(card: Card) -> None:
    """Poison is an index far outside: it ends no process."""
    x, index = torch.ones(8, device=CUDA), torch.empty(4, dtype=torch.int64, device=CUDA)
    with pytest.raises(RuntimeError, match="illegal memory access"):
        gather(x, index).tolist()
    assert kinds(card) == {"bounds"}


def test_only_bytes_that_a_launch_touches_need_an_order(card: Card) -> None:
    """Two streams in one tensor: halves of it are no clash, the same half is one."""
    for first, clashes in ((4, False), (0, True)):
        x, other = torch.zeros(256, device=CUDA), torch.cuda.Stream()
        index = torch.arange(4, device=CUDA)
        torch.cuda.synchronize()
        card.reports.clear()
        with torch.cuda.stream(other):
            x[32 * first : 32 * first + 128].fill_(1)
        gather(x, index)
        torch.cuda.synchronize()
        assert ("order" in kinds(card)) is clashes, card.reports


def test_a_compilation_inside_of_a_request_is_reported(card: Card) -> None:
    x, index = torch.ones(8, device=CUDA), torch.arange(4, device=CUDA)
    gather(x, index)
    card.serving = True
    gather(x, index)
    assert not card.reports, "the control: it is compiled"
    gather(x, index[:4].to(torch.int32))
    assert kinds(card) == {"compile"}
    assert "test_launches.py" in card.reports[0].text


def test_a_kernel_that_is_compiled_ahead_computes_nothing_and_never_compiles_again(card: Card) -> None:
    """The control: a kernel that nothing compiled before. New memory is zeros meanwhile, as torch's operators
    read what no kernel has written."""
    x, index = torch.ones(8, device=CUDA), torch.arange(4, device=CUDA)

    def launched(index: torch.Tensor) -> list[float]:
        out = torch.empty(4, device=CUDA)
        launch(_gather, (1,))(x, index, out, COUNT=4)
        return out.tolist()

    with compiled_ahead(2, print):
        assert launched(index) == [0, 0, 0, 0]
    assert launched(index) == [1, 1, 1, 1]
    assert not card.compiled_alone
    launched(index.to(torch.int32))
    assert card.compiled_alone == ["_gather"]


def test_a_recording_refuses_to_compile(card: Card) -> None:
    x, index = torch.ones(8, device=CUDA), torch.arange(4, device=CUDA)
    with (
        pytest.raises(RuntimeError, match="compiling _gather"),
        torch.cuda.graph(torch.cuda.CUDAGraph(), stream=torch.cuda.Stream()),
    ):
        gather(x, index)


class Gathers:
    """A group of two ranks whose all-gather leaves its target as it is, and costs nothing here."""

    def rank(self) -> int:
        return 0

    def size(self) -> int:
        return 2

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> Any:
        assert output.dtype == own.dtype, "no more bytes than the tensor has"
        return SimpleNamespace(wait=lambda: True)


def test_a_sum_over_ranks_is_an_all_gather_and_one_launch(card: Card, monkeypatch: pytest.MonkeyPatch) -> None:
    x = torch.ones((16, 256), dtype=torch.bfloat16, device=CUDA)
    names, enqueue = list[str](), card.enqueue

    def noting(name: str, *args: Any, **more: Any) -> None:
        names.append(name)
        enqueue(name, *args, **more)

    monkeypatch.setattr(card, "enqueue", noting)
    total = GroupCollectives(cast(Any, Gathers()), x.device).add(x)
    assert (total.shape, total.dtype) == (x.shape, x.dtype)
    assert [name for name in names if "empty" not in name] == ["_sum_in_order"]
