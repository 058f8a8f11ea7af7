"""Exchanges between ranks: sums in rank order, gathered rows, and tokens from the first rank.

    add      few numbers    all-gather, every rank adds in rank order in float32; on a GPU two launches
             many           each rank gets its slice from all (all-to-all), adds it in rank order, all-gather

    rank 0   a0 a1 a2 a3          slice 0 of all -> rank 0: (a0 + b0)  -.
    rank 1   b0 b1 b2 b3          slice 1 of all -> rank 1: (a1 + b1)  -+-> all ranks: the full sum

Each number is the sum of the same floats in the same order, whatever its place in the step. So a row's result does not
depend on how many rows there are, or which (promise 1 of the design). Numbers travel in the dtype of the tensor: they
are widened where they are added, and float32 holds them exactly. The second way moves the same bytes as a ring: 2
(n - 1) / n of the tensor. The first has one round instead of two.

On a CPU the transport is gloo over the loopback device, on a GPU NCCL. Ranks meet through a file in a private
directory, so no port has to be free.
"""

from __future__ import annotations

import threading
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, Protocol

import torch
from torch import distributed

from weft.tensor.device import use
from weft.tensor.ops.elementwise import sum_in_order

FEW_NUMBERS = 1 << 16
"""Most numbers that are gathered and added by every rank."""
_LOOPBACK = "lo"


class Collectives(Protocol):
    """Interface of exchanges. Every rank calls the same methods in the same order, with tensors of the same shape."""

    @property
    def rank(self) -> int: ...

    @property
    def size(self) -> int: ...

    @property
    def device(self) -> torch.device:
        """Device of the tensors."""

    @property
    def seconds(self) -> float:
        """Seconds spent in collectives since the start, without those inside of graphs."""

    def add(self, x: torch.Tensor) -> torch.Tensor:
        """Return the sum over ranks, in the dtype of ``x``; each number is added in float32, in rank order."""

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        """Return ``x`` of every rank, in rank order."""

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        """Copy ``x`` of rank 0 into ``x`` of every other rank and return it."""


class GroupCollectives:
    """Exchanges over one process group of torch. ``seconds``: time spent waiting for it, since the start."""

    # An object of this process, not torch's default group: several engines may live in one process.
    def __init__(self, group: distributed.ProcessGroup, device: torch.device) -> None:
        self._group = group
        self.device = device
        self.rank, self.size = group.rank(), group.size()
        self.seconds = 0.0
        self.calls = 0

    @classmethod
    def open(cls, folder: Path, rank: int, size: int, device: torch.device, timeout_s: float) -> GroupCollectives:
        """Wait for all ranks and return their group. ``folder``: private, the same for all ranks, new for each group.
        Raises RuntimeError (torch's) if a rank does not come within ``timeout_s``.
        """
        timeout = timedelta(seconds=timeout_s)
        backends: Any = distributed  # its types leave out names that a build may lack
        store = backends.FileStore(str(folder / "ranks"), size)
        store.set_timeout(timeout)
        if device.type == "cuda":
            options = backends.ProcessGroupNCCL.Options()
            options._timeout = timeout
            group = cls(backends.ProcessGroupNCCL(store, rank, size, options), device)
            group.connect(timeout_s)
            return group
        options = backends.ProcessGroupGloo._Options()
        # Loopback by name: gloo would look up this machine's host name, which may not resolve.
        options._devices = [backends.ProcessGroupGloo.create_device(interface=_LOOPBACK)]
        options._timeout = timeout
        return cls(backends.ProcessGroupGloo(store, rank, size, options), device)

    def connect(self, timeout_s: float) -> None:
        """Gather a number, because NCCL connects with the first collective, without a deadline of its own: it would
        wait for ever for a rank that has ended. Raises RuntimeError if connecting takes longer than ``timeout_s``.
        """
        errors: list[BaseException] = []

        def gather() -> None:
            try:
                use(self.device)
                self.gather(torch.zeros(1, device=self.device))
            except BaseException as error:
                errors.append(error)

        thread = threading.Thread(target=gather, daemon=True)
        thread.start()
        thread.join(timeout_s)
        if thread.is_alive():
            raise RuntimeError(f"a rank did not connect in {timeout_s:g} s")
        if errors:
            raise errors[0]

    def add(self, x: torch.Tensor) -> torch.Tensor:
        x = x.contiguous()
        many = x.numel() > FEW_NUMBERS and x.shape[0] >= self.size
        return self._add_by_slices(x) if many else sum_in_order(self._gathered(x))

    def gather(self, x: torch.Tensor) -> list[torch.Tensor]:
        return list(self._gathered(x))

    def _gathered(self, x: torch.Tensor) -> torch.Tensor:
        """Return ``x`` of every rank, [ranks, ...]. NCCL writes them there; a list of tensors would be a copy each."""
        parts = x.new_empty((self.size, *x.shape))
        self._wait(self._group._allgather_base(parts.view(-1), x.contiguous().view(-1)))
        return parts

    def from_first(self, x: torch.Tensor) -> torch.Tensor:
        options = distributed.BroadcastOptions()
        options.rootRank = 0
        self._wait(self._group.broadcast([x], options))
        return x

    def _add_by_slices(self, x: torch.Tensor) -> torch.Tensor:
        """Add ``x`` [T, ...] by slices: rank r adds its slice of the rows."""
        counts = [len(rows) for rows in x.tensor_split(self.size)]
        own = counts[self.rank]
        received = x.new_empty((self.size * own, *x.shape[1:]))
        self._wait(self._group.alltoall_base(received, x, [own] * self.size, counts))
        total = sum_in_order(received.view(self.size, own, *x.shape[1:]))
        most = max(counts)
        # Slices of equal size: a gather takes tensors of one shape.
        padded = total if own == most else torch.cat((total, total.new_zeros((most - own, *x.shape[1:]))))
        parts = self.gather(padded)
        return torch.cat([part[:count] for part, count in zip(parts, counts, strict=True)])

    def _wait(self, work: distributed.Work) -> None:
        began_s = time.perf_counter()
        work.wait()
        self.seconds += time.perf_counter() - began_s
        self.calls += 1
