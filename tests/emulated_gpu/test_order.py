"""Order: work runs when something waits for it; what is not ordered is reported with both places."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest
import torch

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Card
from tests.emulated_gpu.engines import kinds

CUDA = torch.device("cuda", 0)


@pytest.fixture
def card() -> Iterator[Card]:
    with emulated() as one:
        yield one


def test_a_copy_home_has_not_ended_before_somebody_waits(card: Card) -> None:
    home, x = torch.zeros(4, pin_memory=True), torch.ones(4, device=CUDA)
    home.copy_(x, non_blocking=True)
    event = torch.cuda.Event()
    event.record()
    assert home.isnan().all()
    assert [report.kind for report in card.reports] == ["early"]
    assert "test_order.py" in card.reports[0].text
    event.synchronize()
    assert home.tolist() == [1] * 4


def test_a_buffer_that_is_written_before_its_copy_has_ended_is_reported(card: Card) -> None:
    source = torch.ones(4, pin_memory=True)
    numbers = source.numpy()
    y = torch.empty(4, device=CUDA)
    y.copy_(source, non_blocking=True)
    numbers[:] = 2
    assert y.tolist() == [2] * 4, "as late as CUDA allows"
    assert [report.kind for report in card.reports] == ["reused"]


def two_streams(card: Card, between: Callable[[torch.cuda.Stream, torch.cuda.Stream], Any]) -> torch.Tensor:
    one, other = torch.cuda.current_stream(), torch.cuda.Stream()
    x = torch.zeros(4, device=CUDA)
    torch.cuda.synchronize()
    with torch.cuda.stream(other):
        x.add_(1)
    between(one, other)
    return x * 2


def test_streams_without_an_event_are_reported(card: Card) -> None:
    two_streams(card, lambda one, other: None)
    torch.cuda.synchronize()
    assert kinds(card) == {"order"}
    assert card.reports[0].text.count("test_order.py") == 2, "both places"


def test_streams_without_an_event_run_in_any_order() -> None:
    """By the seed: now and then the other stream is late, and the answer is wrong."""
    seen = set()
    for seed in range(40):
        with emulated(seed=seed) as card:
            y = two_streams(card, lambda one, other: [torch.zeros(1, device=CUDA) for _ in range(9)])
            seen.add(y.tolist()[0])
    assert seen == {0, 2}


@pytest.mark.parametrize(
    "between",
    [
        lambda one, other: one.wait_stream(other),
        lambda one, other: one.wait_event(other.record_event()),
        lambda one, other: other.synchronize(),
        lambda one, other: torch.cuda.synchronize(),
    ],
)
def test_the_control_streams_with_an_event_are_not(card: Card, between: Any) -> None:
    assert two_streams(card, between).tolist() == [2] * 4
    assert not card.reports


def test_memory_that_another_stream_still_reads_is_given_out_again(card: Card) -> None:
    """Without ``record_stream`` or an event, the allocator knows of its own stream only."""
    x, other = torch.ones(4, device=CUDA), torch.cuda.Stream()
    other.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(other):
        y = x + 1
    del x
    torch.zeros(4, device=CUDA)
    torch.cuda.synchronize()
    assert "order" in kinds(card)
    assert y.shape == (4,)


def test_seeded_orders_of_correct_streams_report_nothing() -> None:
    random = np.random.default_rng(5)
    for seed in range(20):
        with emulated(seed=seed) as card:
            streams = [torch.cuda.current_stream(), torch.cuda.Stream(), torch.cuda.Stream()]
            x, total = torch.zeros(1, device=CUDA), 0
            for stream in streams[1:]:
                stream.wait_stream(streams[0])
            for _ in range(25):
                before, stream = random.choice(3), random.choice(3)
                for other in streams:
                    streams[stream].wait_stream(other)
                with torch.cuda.stream(streams[stream]):
                    x.add_(int(before))
                    total += int(before)
            torch.cuda.synchronize()
            assert (x.item(), card.reports) == (total, [])
