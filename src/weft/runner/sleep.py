"""Moves the weights of a sleeping engine to the host, and returns free memory to the system.

    level 1, on a device   every storage -> a pinned buffer on the host; the storage shrinks to 0 bytes
                           waking: it grows again, and the bytes come back
    level 1, on a CPU      the weights are in host memory already: nothing moves. Nothing may: C++ blocks keep
                           the addresses that weights had when the block was made
    level 2                the model is dropped; waking reads the checkpoint again

Tensors are found by a walk over the model's own objects.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping

import torch

from weft.host import trim_heap
from weft.spec import ModelSpec
from weft.tensor.gpu.host_memory import CudaPin, HostBuffer, Pin
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.scratch import scratch


class DroppedModel:
    """Stand-in for a model whose weights are gone: it has the shapes, and computes nothing."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        raise AssertionError("the weights are dropped: wake the engine first")

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("the weights are dropped: wake the engine first")


class HostWeights:
    """Bytes of ``storages`` on the host until ``restore``; meanwhile the storages are empty. ``pin``: locks the host's
    memory, by default for storages on a GPU.
    """

    def __init__(self, storages: Iterable[torch.UntypedStorage], *, pin: Pin | None = None) -> None:
        self._copies: list[tuple[torch.UntypedStorage, HostBuffer, int]] = []
        # Storages, not tensors: views, slices of joined matrices and a tied head share one. All are valid
        # again when it is, because a kernel of a device takes the address at each call.
        for storage in storages:
            size = storage.nbytes()
            on_gpu = storage.device.type == "cuda"
            buffer = HostBuffer(size, pin or (CudaPin(storage.device) if on_gpu else None))
            buffer.tensor.copy_(bytes_of(storage))
            storage.resize_(0)
            self._copies.append((storage, buffer, size))

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self._copies)

    def restore(self) -> None:
        """Restore the storages. Raises RuntimeError (torch's) if the device has not enough memory. Restored storages
        stay, and another call goes on from there.
        """
        while self._copies:
            storage, buffer, size = self._copies[-1]
            storage.resize_(size)
            bytes_of(storage).copy_(buffer.tensor)
            buffer.close()
            self._copies.pop()

    def drop(self) -> None:
        """Free the copies without restoring them."""
        for _, buffer, _ in self._copies:
            buffer.close()
        self._copies.clear()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """Return all bytes of ``storage``, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(root: object) -> list[torch.UntypedStorage]:
    """Return the storages of every tensor that ``root`` reaches, each once. Tensors in a layout of the matrix library
    (on a CPU) have no storage and are left out.
    """
    storages: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(root):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            storages.setdefault(storage._cdata, storage)
    return list(storages.values())


def storages_on_devices(root: object) -> list[torch.UntypedStorage]:
    """Return the storages that are not on a CPU."""
    return [storage for storage in storages_of(root) if storage.device.type != "cpu"]


def tensors_of(root: object) -> Iterator[torch.Tensor]:
    """Yield every tensor that weft's own objects and plain containers reach from ``root``."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        reached = waiting.pop()
        if id(reached) in seen:
            continue
        seen.add(id(reached))
        if isinstance(reached, torch.Tensor):
            yield reached
        elif isinstance(reached, Mapping):
            waiting.extend(reached.values())
        elif isinstance(reached, list | tuple | set):
            waiting.extend(reached)
        elif type(reached).__module__.startswith("weft."):
            if dataclasses.is_dataclass(reached) and not isinstance(reached, type):
                waiting.extend(getattr(reached, field.name) for field in dataclasses.fields(reached))
            waiting.extend(getattr(reached, "__dict__", {}).values())


def give_back(device: torch.device) -> None:
    """Return free memory to the system: step buffers, torch's cached blocks, the ends of the heap."""
    scratch.drop()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    trim_heap()
