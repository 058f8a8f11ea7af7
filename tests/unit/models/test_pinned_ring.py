"""Weights reach a GPU through a ring of pinned buffers: none is written before its transfer has ended."""

from __future__ import annotations

from typing import Any

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from weft.models import reader
from weft.models.loading import load_model
from weft.tensor.gpu.host_memory import HostBuffer, PinnedRing, ring_for

CPU = torch.device("cpu")
Transfer = tuple[torch.Tensor, torch.Tensor]


class LateTransfers:
    """They read their source as late as hardware may: when they are awaited."""

    def __init__(self) -> None:
        self.under_way: list[Transfer] = []

    def start(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
        self.under_way.append((destination, source))
        return self.under_way[-1]

    def wait(self, transfer: Any) -> None:
        while any(one is transfer for one in self.under_way):
            destination, source = self.under_way.pop(0)
            destination.copy_(source)


class Forgetful(LateTransfers):
    """The control: a ring that does not wait."""

    def wait(self, transfer: Any) -> None:
        pass


class Pins:
    def __init__(self) -> None:
        self.locked: dict[int, int] = {}

    def register(self, address: int, size: int) -> bool:
        self.locked[address] = size
        return True

    def unregister(self, address: int) -> None:
        del self.locked[address]


def tensors() -> list[torch.Tensor]:
    noise = torch.Generator().manual_seed(1)
    shapes = [(7,), (40, 13), (100, 100), (3, 5, 64), (64,)]
    dense = [torch.randn(*shape, generator=noise) for shape in shapes]
    return [*dense, dense[1].bfloat16(), dense[2].t(), torch.zeros(0, 4), torch.tensor(3.0)]


def through_ring(transfers: LateTransfers, pins: Pins) -> list[torch.Tensor]:
    ring = PinnedRing(CPU, pins, transfers, buffer_bytes=1000, least_bytes=200)
    out = []
    for tensor in tensors():
        copied = tensor.clone()
        out.append(ring.to_device(copied))
        if copied.nbytes >= 200:
            copied.fill_(-1.0)  # the caller's memory may be used again at once
    assert len(pins.locked) == 2
    ring.close()
    ring.close()
    return out


def test_every_byte_arrives_though_transfers_are_late() -> None:
    pins = Pins()
    for got, want in zip(through_ring(LateTransfers(), pins), tensors(), strict=True):
        assert got.dtype == want.dtype
        assert torch.equal(got, want)
    assert not pins.locked, "the buffers are given back"


def test_memory_that_nothing_holds_any_more_is_not_locked_either() -> None:
    """Else the driver takes what is mapped at its address next for locked, and copies other memory."""
    pins = Pins()
    buffer = HostBuffer(8192, pins)
    assert buffer.pinned
    assert pins.locked == {buffer.tensor.data_ptr(): 8192}
    del buffer
    assert not pins.locked


def test_a_model_is_read_through_the_ring_and_is_the_same(monkeypatch: pytest.MonkeyPatch) -> None:
    rings: list[PinnedRing] = []

    class AtOnce(LateTransfers):
        def start(self, destination: torch.Tensor, source: torch.Tensor) -> Transfer:
            destination.copy_(source)
            return destination, source

    def ring(device: torch.device) -> PinnedRing:
        rings.append(PinnedRing(device, Pins(), AtOnce(), buffer_bytes=4096, least_bytes=64))
        return rings[-1]

    plain = load_model(checkpoint("lfm2"), device=CPU).model
    monkeypatch.setattr(reader, "ring_for", ring)
    piped = load_model(checkpoint("lfm2"), device=CPU).model
    assert rings
    tokens = torch.tensor([3, 5, 300])
    assert torch.equal(piped._embedded.rows_at(tokens), plain._embedded.rows_at(tokens))
    hidden = torch.randn(2, plain.architecture.hidden_size)
    assert torch.equal(piped.logits(hidden), plain.logits(hidden))


def test_the_control_a_ring_that_does_not_wait_loses_bytes() -> None:
    late = Forgetful()
    ring = PinnedRing(CPU, None, late, buffer_bytes=1000, least_bytes=200)
    want = tensors()[2]
    got = ring.to_device(want)
    for destination, source in late.under_way:
        destination.copy_(source)
    assert not torch.equal(got, want)


def test_only_gpus_have_a_ring() -> None:
    assert ring_for(CPU) is None
