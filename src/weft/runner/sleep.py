"""Where weights are while the engine sleeps, and how memory is really given back.

    level 1, on a device   every storage -> one pinned buffer on the host; the storage shrinks to 0 bytes
                           waking: it grows again, and the bytes come back
    level 1, on a CPU      they are in host memory already: nothing moves
    level 2                the model is let go of; waking reads the checkpoint once more

Storages are moved, not tensors: views, slices of joined matrices and a head tied to its embedding share one,
and all of them are good again when it is, because a kernel takes the address at each call. What holds an
address over several steps (a captured graph) must be let go of with the arena.

Tensors are found by walking the model's own objects. Rejected: a list of tensors kept by every block (a
second list of weights to keep in step); ``tensor.to`` (breaks what is shared, and needs every owner found).
"""

from __future__ import annotations

import contextlib
import ctypes
import dataclasses
from collections.abc import Iterator, Mapping

import torch

from weft.spec import ModelSpec
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.scratch import scratch


class DroppedModel:
    """Stands where the model was: it knows the shapes, and nothing can be computed with it."""

    def __init__(self, spec: ModelSpec) -> None:
        self.spec = spec

    def forward(self, inputs: StepInputs, caches: list[LayerCache]) -> torch.Tensor:
        raise AssertionError("the weights are dropped: wake the engine first")

    def logits(self, hidden_XD: torch.Tensor, out_XV: torch.Tensor | None = None) -> torch.Tensor:
        raise AssertionError("the weights are dropped: wake the engine first")


class HostWeights:
    """The weights of ``model`` on the host, from the moment this is made until ``restore``; their storages on
    the device have 0 bytes meanwhile. What is on a CPU stays where it is unless ``also_from_cpu``."""

    def __init__(self, model: object, *, also_from_cpu: bool = False) -> None:
        self._kept: list[tuple[torch.UntypedStorage, torch.Tensor, int]] = []
        for storage in storages_of(model):
            if storage.device.type == "cpu" and not also_from_cpu:
                continue
            on_device = bytes_of(storage)
            on_host = torch.empty(on_device.numel(), dtype=torch.uint8,
                                  pin_memory=on_device.device.type == "cuda")
            on_host.copy_(on_device)
            size = storage.nbytes()
            del on_device
            storage.resize_(0)
            self._kept.append((storage, on_host, size))

    @property
    def bytes(self) -> int:
        return sum(size for _, _, size in self._kept)

    def restore(self) -> None:
        """Raises RuntimeError (torch's) where the device has not enough memory; what is back then stays, and
        calling it again goes on from there."""
        while self._kept:
            storage, on_host, size = self._kept[-1]
            storage.resize_(size)
            bytes_of(storage).copy_(on_host)
            self._kept.pop()


def bytes_of(storage: torch.UntypedStorage) -> torch.Tensor:
    """All of it, uint8."""
    return torch.empty(0, dtype=torch.uint8, device=storage.device).set_(storage)


def storages_of(root: object) -> list[torch.UntypedStorage]:
    """The storages of every tensor that ``root`` holds, each once. Tensors in an order of the matrix
    library's own (on a CPU) have none and are left out."""
    found: dict[int, torch.UntypedStorage] = {}
    for tensor in tensors_of(root):
        if tensor.layout == torch.strided:
            storage = tensor.untyped_storage()
            found.setdefault(storage._cdata, storage)
    return list(found.values())


def tensors_of(root: object) -> Iterator[torch.Tensor]:
    """Every tensor that is reached from ``root`` through weft's own objects and plain containers."""
    seen: set[int] = set()
    waiting: list[object] = [root]
    while waiting:
        at = waiting.pop()
        if id(at) in seen:
            continue
        seen.add(id(at))
        if isinstance(at, torch.Tensor):
            yield at
        elif isinstance(at, Mapping):
            waiting.extend(at.values())
        elif isinstance(at, list | tuple | set):
            waiting.extend(at)
        elif type(at).__module__.startswith("weft."):
            if dataclasses.is_dataclass(at) and not isinstance(at, type):
                waiting.extend(getattr(at, field.name) for field in dataclasses.fields(at))
            waiting.extend(getattr(at, "__dict__", {}).values())


def give_back(device: torch.device) -> None:
    """Hand what is free to the system: step buffers, torch's cached blocks, the heap's ends."""
    scratch.drop()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    with contextlib.suppress(OSError, AttributeError):  # glibc alone keeps freed memory, and has this
        ctypes.CDLL(None).malloc_trim(0)
