"""NCCL between the cards of several processes: each collective goes over gloo when its stream comes to it.

    stream of rank 0   work | all-gather | work         the host has asked for all of it, and waits for none
                                  '-- gloo, when the stream comes to it --.
    stream of rank 1   work | work | all-gather | work  <-----------------'

As with NCCL, ``wait`` lets the stream wait and not the host, and a collective is recorded like a kernel. The group
connects with its first collective, on the host, and waits there for ranks that never come. Both ends have to ask in
the same order, or they hang until the group's timeout. Not emulated: a stream of the
group's own, and the memory and bandwidth that NCCL takes.
"""

from __future__ import annotations

import functools
import threading
from collections.abc import Callable, Sequence
from datetime import timedelta
from typing import Any

import torch
from torch import distributed

from tests.emulated_gpu.tensors import DeviceTensor, card

LOOPBACK = "lo"
NO_DEADLINE = timedelta(days=1)


class _Asked:
    """``distributed.Work`` of a collective that its stream has now."""

    def wait(self) -> bool:
        return True


class ProcessGroupNCCL:
    class Options:
        _timeout = timedelta(seconds=600)

    def __init__(self, store: Any, rank: int, size: int, options: Options) -> None:
        self._store, self._rank, self._size, self._options = store, rank, size, options
        self._connecting = threading.Lock()

    @functools.cached_property
    def _gloo(self) -> Any:
        gloo: Any = distributed
        own = gloo.ProcessGroupGloo._Options()
        own._devices = [gloo.ProcessGroupGloo.create_device(interface=LOOPBACK)]
        own._timeout = self._options._timeout
        self._store.set_timeout(NO_DEADLINE)
        return gloo.ProcessGroupGloo(self._store, self._rank, self._size, own)

    def rank(self) -> int:
        return self._rank

    def size(self) -> int:
        return self._size

    def _allgather_base(self, output: torch.Tensor, own: torch.Tensor) -> _Asked:
        return self._ask("all-gather", [own], [output], lambda: self._gloo._allgather_base(output.mem, own.mem))  # type: ignore[attr-defined]

    def broadcast(self, tensors: list[torch.Tensor], options: Any) -> _Asked:
        [x] = tensors
        reads, writes = ([x], []) if options.rootRank == self.rank() else ([], [x])
        return self._ask("broadcast", reads, writes, lambda: self._gloo.broadcast([x.mem], options))  # type: ignore[attr-defined]

    def alltoall_base(
        self, output: torch.Tensor, source: torch.Tensor, output_rows: list[int], source_rows: list[int]
    ) -> _Asked:
        return self._ask(
            "all-to-all",
            [source],
            [output],
            lambda: self._gloo.alltoall_base(output.mem, source.mem, output_rows, source_rows),
        )  # type: ignore[attr-defined]

    def _ask(
        self, name: str, reads: Sequence[torch.Tensor], writes: Sequence[torch.Tensor], collective: Callable[[], Any]
    ) -> _Asked:
        tensors: Any = [*reads, *writes]
        for one in tensors:
            if not isinstance(one, DeviceTensor):
                raise RuntimeError(f"NCCL: no backend type associated with device type {one.device.type}")
            if not one.is_contiguous():
                raise RuntimeError("NCCL: Tensors must be contiguous")
        one = card()
        one.refuse_other_card(f"NCCL's {name}")
        with self._connecting, torch._C._DisableTorchDispatch():
            assert self._gloo is not None, "it connects here"

        def run() -> None:
            collective().wait()

        if one.computes or one.own_capture() is not None:
            one.enqueue(name, run, reads, writes, always=True)  # type: ignore[arg-type]
        else:  # the other ranks ask for it too, and what follows may read it
            one.synchronize()
            with torch._C._DisableTorchDispatch():
                run()
        return _Asked()
