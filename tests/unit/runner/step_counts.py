"""Launches, allocations and bytes of a step of a released model, counted on torch's meta device.

The model is built from the release's configuration, in bfloat16, without weights. torch's operators run on
meta tensors and launches of Triton kernels are noted (``launches``), so nothing is computed.

    launches       Triton kernels, and torch operators other than views; a sort counts once
    allocations    new tensors: torch's allocator is asked so many times where no graph is replayed
    bytes          tensors that launches read and write, an argument at a time, without the arena; weights of
                   experts as many as tokens hit that choose evenly; then KV of the context and states
    flops          of matrix products, attention left out
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import torch
from torch.utils._python_dispatch import TorchDispatchMode

from tests.unit.runner.launches import Launch, recorded
from weft.config import QuantizeChoice
from weft.families import read_architecture
from weft.memory.frames.plan import memory_for, plan_arena
from weft.models.checkpoint_files import CheckpointFiles
from weft.models.families import build
from weft.models.reader import TensorCheck
from weft.models.runtime_form import RuntimeForm
from weft.runner import sampling_kernels
from weft.runner.arena import DeviceArena
from weft.tensor.inputs import Runs, StepInputs
from weft.units import pages_for

META = torch.device("meta")
CONTEXT = 2048
PROMPT = 1024
_FREE = ("aten.empty", "aten.new_empty", "aten.detach", "aten.alias", "aten._unsafe_view", "aten.lift_fresh")
_ROWS = ("aten.index_select", "aten.embedding", "aten.gather")
"""They read of their source what they return."""
_PRODUCTS = ("aten.mm", "aten.bmm", "aten.matmul", "aten.linear")


@dataclass
class StepCounts:
    triton: int = 0
    torch: int = 0
    allocations: int = 0
    bytes: float = 0.0
    flops: float = 0.0

    @property
    def launches(self) -> int:
        return self.triton + self.torch


class _Operators(TorchDispatchMode):
    def __init__(self, counts: StepCounts) -> None:
        super().__init__()
        self._counts = counts

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        name, read = str(func), {_storage(one): one for one in _tensors((args, kwargs))}
        written = {_storage(one): one for one in _tensors(out)}
        new = written.keys() - read.keys()
        if not new and not func._schema.is_mutable:
            return out   # a view
        self._counts.allocations += len(new)
        if name.startswith(_FREE):
            return out
        self._counts.torch += 1
        sources = [*written.values()] if name.startswith(_ROWS) else [*read.values()]
        self._counts.bytes += sum(map(_bytes, (*sources, *written.values())))
        if name.startswith(_PRODUCTS):
            self._counts.flops += 2 * out.numel() * args[0].shape[-1]
        elif name.startswith("aten.addmm"):
            self._counts.flops += 2 * out.numel() * args[1].shape[-1]
        return out


def released_model(config: dict[str, Any], quantize: QuantizeChoice = "none") -> Any:
    """The model of ``config`` on the meta device."""
    architecture = read_architecture(config)
    headers = CheckpointFiles(None, config, {}, "", None)  # type: ignore[arg-type]
    check = TensorCheck(headers, torch.bfloat16, RuntimeForm(quantize))
    return build(architecture, check)


@torch.inference_mode()
def counts_of(model: Any, batch: int, *, prompt: int = 0) -> StepCounts:
    """A step of ``batch`` decodes behind CONTEXT tokens, beside ``prompt`` tokens of a new sequence."""
    counts = StepCounts()
    spec = model.spec
    plan = plan_arena(spec, memory_for(spec, spec.dtype, batch + 1, max(CONTEXT, prompt))[0],
                      kv_dtype=spec.dtype, kv_layout="rows")
    arena = DeviceArena(plan, META)
    caches = arena.layer_caches(len(spec.layers))
    inputs = _step(batch, prompt)
    arena_storage = _storage(arena.buffer)

    def note(launch: Launch) -> None:
        counts.triton += 1
        known: set[int] = set()   # an argument that a kernel does not read is another one of its tensors
        for name, tensor in launch.tensors.items():
            if _storage(tensor) == arena_storage or id(tensor) in known:
                continue
            known.add(id(tensor))
            hit = 1.0
            if launch.kernel == "moe._product" and name in ("weight", "scales", "zeros"):
                pairs = len(launch.tensors["order"])
                hit = 1 - (1 - 1 / tensor.shape[0]) ** pairs
                counts.flops += 2 * pairs * tensor.numel() / tensor.shape[0] if name == "weight" else 0
            counts.bytes += hit * _bytes(tensor)

    with recorded(note, zeros=False), _Operators(counts):
        hidden_TD = model.forward(inputs, caches)
        logits = model.logits(hidden_TD[: inputs.runs.run_count])
        sampling_kernels.choose(logits, None, masked=False)
    if plan.pages_per_frame:
        counts.bytes += plan.page_bytes * (batch * pages_for(CONTEXT) + 2 * pages_for(prompt))
    if plan.slots_per_frame:
        counts.bytes += plan.slot_bytes * (2 * batch + bool(prompt))
    return counts


def _step(batch: int, prompt: int) -> StepInputs:
    starts = [CONTEXT - 1] * batch + [0] * bool(prompt)
    lengths = [1] * batch + [prompt] * bool(prompt)
    count = len(starts)
    rows = torch.zeros(count, dtype=torch.int64, device=META)
    runs = Runs(offsets=[*range(batch), *([batch] if prompt else [])], starts=starts, lengths=lengths,
                slots=list(range(count)), fresh=[False] * batch + [True] * bool(prompt), decode_count=batch,
                starts_R=rows, slots_R=rows, context_R=rows,
                page_table_RP=torch.zeros(count, pages_for(CONTEXT), dtype=torch.int32, device=META))
    tokens_T = torch.zeros(sum(lengths), dtype=torch.int64, device=META)
    return StepInputs(tokens_T, tokens_T, runs)


def _tensors(of: Any) -> Iterator[torch.Tensor]:
    if isinstance(of, torch.Tensor):
        yield of
    elif isinstance(of, list | tuple):
        for one in of:
            yield from _tensors(one)
    elif isinstance(of, dict):
        yield from _tensors([*of.values()])


def _storage(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def _bytes(tensor: torch.Tensor) -> int:
    """Without what a broadcast repeats."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    count = tensor.itemsize
    for size in sizes:
        count *= size
    return count

