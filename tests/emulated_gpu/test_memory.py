"""Memory: a budget, poison, the same addresses again; the start counts what serving takes."""

from __future__ import annotations

import functools
import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any, cast
from unittest import mock

import numpy as np
import pytest
import torch

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import RESERVE_SLACK, Card
from tests.emulated_gpu.engines import started
from tests.emulated_gpu.sample import ALL, sample
from tests.fixtures.checkpoints import checkpoint
from weft.errors import ConfigError
from weft.runner import arena
from weft.runner.reserve import Reserve
from weft.runner.torch_executor import TorchExecutor
from weft.tensor.device import wait_for
from weft.tensor.gpu.host_memory import room_for

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card() -> Iterator[Card]:
    with emulated() as one:
        yield one


def test_new_and_freed_memory_is_poison(card: Card) -> None:
    assert torch.empty(8, device=CUDA).isnan().all()
    x = torch.ones(1000, device=CUDA)
    address = x.data_ptr()
    del x
    again = torch.empty(1000, device=CUDA)
    assert again.data_ptr() == address, "the same memory at once"
    assert again.isnan().all()
    assert int(torch.empty(3, dtype=torch.int64, device=CUDA).min()) > 1 << 60, "an index far outside"


def test_a_view_keeps_its_memory(card: Card) -> None:
    view = torch.arange(1000, device=CUDA)[3:5]
    torch.full((1000,), 7, device=CUDA)
    assert view.tolist() == [3, 4]


def test_a_strided_view_counts_from_its_own_memory(card: Card) -> None:
    """A second tensor lies behind the first, in one segment of torch's."""
    first, second = torch.zeros(1000, device=CUDA), torch.zeros(1000, device=CUDA)
    view = second.as_strided((2, 3), (10, 1), 5)
    assert view.data_ptr() == second.data_ptr() + 20
    view.fill_(7)
    assert first.sum().item() == 0
    assert second.nonzero().flatten().tolist() == [5, 6, 7, 15, 16, 17]


def test_segments_are_counted_as_torch_does(card: Card) -> None:
    before, mib = torch.cuda.mem_get_info(CUDA)[0], 1 << 20
    held = [torch.empty(size, dtype=torch.uint8, device=CUDA) for size in (100, mib // 2, 3 * mib, 4 * mib)]
    assert before - torch.cuda.mem_get_info(CUDA)[0] == (2 + 20) * mib
    held.append(torch.empty(21 * mib, dtype=torch.uint8, device=CUDA))
    assert before - torch.cuda.mem_get_info(CUDA)[0] == (2 + 20 + 22) * mib
    del held
    assert torch.cuda.mem_get_info(CUDA)[0] < before, "cached"
    torch.cuda.empty_cache()
    assert torch.cuda.mem_get_info(CUDA)[0] == before


def test_a_product_takes_a_workspace_for_each_thread_and_stream(card: Card) -> None:
    x = torch.ones(4, 4, device=CUDA)
    before = torch.cuda.memory_allocated()
    x @ x
    one = torch.cuda.memory_allocated() - before
    assert one > 1 << 20
    x @ x
    assert torch.cuda.memory_allocated() - before == one
    with torch.cuda.stream(torch.cuda.Stream()):
        x @ x
    assert torch.cuda.memory_allocated() - before == 2 * one


def test_products_on_a_third_stream_are_reported(card: Card) -> None:
    x = torch.ones(4, 4, device=CUDA)
    for _ in range(2):
        assert not card.reports
        x @ x
        with torch.cuda.stream(torch.cuda.Stream()):
            x @ x
    assert [report.kind for report in card.reports] == ["workspace"]


def test_memory_beyond_what_the_start_counted_is_reported(card: Card) -> None:
    card.reserve = Reserve(1 << 20, 0, "a step")
    card.begin_serving()
    held = torch.empty(1 << 20, dtype=torch.uint8, device=CUDA)
    assert not card.reports, "the control: as much as was counted"
    more = torch.empty(32 << 10, dtype=torch.uint8, device=CUDA)
    assert [report.kind for report in card.reports] == ["reserve"]
    assert held.numel() > more.numel()


def test_pinned_memory_that_stays_for_nothing_is_reported(card: Card) -> None:
    held = torch.empty((1 << 20) + 1, dtype=torch.uint8, pin_memory=True)
    card.look_at_host_memory()
    assert not card.reports, "the control: it is used"
    del held
    card.look_at_host_memory()
    assert [report.kind for report in card.reports] == ["pinning"]
    assert str(2 << 20) in card.reports[0].text, "a power of two"
    before = len(card.pinned)
    torch.empty(2 << 20, dtype=torch.uint8, pin_memory=True)
    assert "again" in card.pinned[before][1]


def test_pieces_of_one_pinned_mapping_are_free_again_behind_their_copies(card: Card) -> None:
    room = room_for(CUDA, 64 << 10)
    assert [how for _, how in card.pinned] == ["registered"]
    one, two = room.take(40 << 10), room.take(20 << 10)
    assert not np.shares_memory(one, two)
    torch.from_numpy(one).copy_(torch.ones(40 << 10, dtype=torch.uint8, device=CUDA), non_blocking=True)
    assert not card.waits
    room.give(one)
    assert not np.shares_memory(room.take(8 << 10), one), "the copy into it may be under way"
    event = torch.cuda.Event()
    event.record()
    wait_for(event)
    assert np.shares_memory(room.take(40 << 10), one)
    assert not np.shares_memory(room.take(40 << 10), one), "what fits nowhere is ordinary memory"
    assert not card.reports


LACKS: dict[str, tuple[int, dict[str, Any], str]] = {
    "weights": (9, {}, r"weights do not fit.*--quantize"),
    "a step of any size": (14, {}, r"does not fit into.* Nor does one of 65 tokens and 1 .*--quantize int4"),
    "graphs": (
        104,
        {"max_num_batched_tokens": 4096, "max_model_len": 4096},
        r"MiB too many. debug.cuda_graphs off frees \d+",
    ),
    "a store": (100, {"store": ""}, r"MiB too many. .*no --store frees 64.0 MiB"),
}


@pytest.mark.parametrize("what", sample(LACKS, 1))
def test_a_start_that_lacks_memory_says_what_to_lower_and_by_how_much(what: str, tmp_path: Path) -> None:
    mebibytes, more, said = LACKS[what]
    if "store" in more:
        more = more | {"store": str(tmp_path)}
    checkpoint("qwen3_5")
    with emulated(mebibytes << 20) as small, pytest.raises(ConfigError, match=said), started(small, "qwen3_5", **more):
        pass


LONG: dict[str, Any] = {"max_num_batched_tokens": 4096, "max_model_len": 4096, "cuda_graphs": "off"}


def refusal(mebibytes: int, **more: Any) -> str | None:
    """Of a start on a card of that size; None where it starts."""
    checkpoint("qwen3_5")
    try:
        with emulated(mebibytes << 20) as small, started(small, "qwen3_5", **LONG | more) as engine:
            assert engine.info.sizes.step_tokens_max == (LONG | more)["max_num_batched_tokens"]
    except ConfigError as error:
        return error.message
    return None


@functools.cache
def smallest_card() -> int:
    """Mebibytes with which the long step starts. Searched: where segments end is the allocator's."""
    refused, starts = 32, 96
    assert refusal(refused)
    assert not refusal(starts)
    while starts - refused > 1:
        middle = (refused + starts) // 2
        refused, starts = (middle, starts) if refusal(middle) else (refused, middle)
    return starts


if ALL:

    @pytest.mark.parametrize("below", [1, 2, 4])
    def test_the_step_that_a_refused_start_names_does_fit(below: int) -> None:
        small = smallest_card() - below
        fits = re.search(r"--max-num-batched-tokens (\d+) fits", refusal(small) or "")
        assert fits
        assert int(fits[1]) < LONG["max_num_batched_tokens"]
        assert not refusal(small, max_num_batched_tokens=int(fits[1]))


def test_what_a_failed_step_took_is_free_when_a_shorter_one_is_tried() -> None:
    """Its error holds it as long as that is handled: a larger card would say that less is free."""
    said = [refusal(mebibytes) or "" for mebibytes in (40, 54)]
    less, more = (
        float(free) for one in said for free in re.findall(r"([\d.]+) MiB of the GPU (?:that )?are free", one)
    )
    assert more - less == 54 - 40


def test_a_compaction_in_a_circle_takes_no_memory_of_its_size() -> None:
    """Fault 3: pieces of all pages go through a room that the start counted."""
    checkpoint("qwen3")
    with mock.patch.object(arena, "MOVES_ROOM_BYTES", 4096), emulated() as card, started(card, "qwen3") as engine:
        held = cast(TorchExecutor, engine.core.executor).arena
        rows = held.buffer[: 12 * held.plan.page_bytes].view(12, -1)
        rows.copy_(torch.arange(12, device=CUDA).to(torch.uint8)[:, None].expand_as(rows))
        assert rows.nbytes > RESERVE_SLACK
        before = torch.cuda.memory_allocated()
        torch.cuda.reset_peak_memory_stats()
        held.copy_pages(list(range(12)), [*range(1, 12), 0])
        assert torch.cuda.max_memory_allocated() - before < 2048, "ids alone"
        card.serving = False
        assert rows.float().mean(1).tolist() == [11, *range(11)]
