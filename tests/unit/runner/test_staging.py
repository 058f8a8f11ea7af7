"""One buffer for all that a step brings to the device."""

from __future__ import annotations

import numpy as np
import pytest
import torch

from tests.fixtures.far_memory import far_memory
from weft.runner.staging import ALIGN, Staging

CPU = torch.device("cpu")


@pytest.mark.parametrize("copies", [False, True])
def test_what_is_staged_arrives_whatever_its_shape_and_dtype(copies: bool) -> None:
    with far_memory(copies):
        staging = Staging(CPU)
    for _ in range(3):
        staging.begin()
        filled = staging.take((2, 3))
        filled.host[...] = [[1, 2, 3], [4, 5, 6]]
        narrow = staging.add(np.array([7, -8], np.int32))
        widened = staging.add(np.array([9], np.int32), np.int64)
        nothing = staging.add(np.empty((2, 0), np.int64))
        numbers = staging.add(np.array([0.5, 2.5]))
        staging.send()
        assert filled.device.tolist() == [[1, 2, 3], [4, 5, 6]]
        assert (narrow.device.dtype, narrow.device.tolist()) == (torch.int32, [7, -8])
        assert (widened.device.dtype, widened.device.tolist()) == (torch.int64, [9])
        assert nothing.device.shape == (2, 0)
        assert numbers.device.tolist() == [0.5, 2.5]
        assert filled.row(1).device.tolist() == filled.row(1).host.tolist() == [4, 5, 6]


def test_on_a_cpu_nothing_is_copied() -> None:
    staging = Staging(CPU)
    staging.begin()
    piece = staging.add(np.array([1, 2]))
    staging.send()
    piece.host[0] = 5
    assert piece.device.tolist() == [5, 2]
    with far_memory():
        copying = Staging(CPU)
    copying.begin()
    piece = copying.add(np.array([1, 2]))
    copying.send()
    piece.host[0] = 5
    assert piece.device.tolist() == [1, 2], "the control: a copy does not see what is written later"


def test_the_host_writes_another_buffer_than_the_one_that_is_on_its_way() -> None:
    with far_memory():
        staging = Staging(CPU)
    hosts = []
    for step in range(3):
        staging.begin()
        hosts.append(staging.add(np.array([step])).host)
        staging.send()
    assert hosts[1].tolist() == [1], "step 2 wrote where step 1 still may be read from"
    assert np.shares_memory(hosts[0], hosts[2])
    assert not np.shares_memory(hosts[0], hosts[1])


def test_every_piece_begins_where_kernels_like_it() -> None:
    with far_memory():
        staging = Staging(CPU)
    staging.begin()
    pieces = [staging.add(np.zeros(count, np.int32)) for count in (1, 3, 5, 4)]
    staging.send()
    first = pieces[0].device.data_ptr()
    assert all((piece.device.data_ptr() - first) % ALIGN == 0 for piece in pieces)


@pytest.mark.parametrize("copies", [False, True])
def test_a_step_that_does_not_fit_is_served_and_the_next_finds_room(copies: bool) -> None:
    with far_memory(copies):
        staging = Staging(CPU, capacity_bytes=64)
    for _ in range(2):
        staging.begin()
        pieces = [staging.add(np.arange(n)) for n in (4, 100, 2)]
        staging.send()
        assert [piece.device.tolist() for piece in pieces] == [list(range(n)) for n in (4, 100, 2)]
    assert staging.capacity_bytes == 1024
    staging.begin()
    staging.begin()
    assert staging.capacity_bytes == 1024, "it grows to the largest step and no further (L11)"


def test_reading_before_sending_is_a_bug() -> None:
    staging = Staging(CPU)
    staging.begin()
    with pytest.raises(AssertionError, match="before it was sent"):
        _ = staging.add(np.array([1])).device
