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

from collections.abc import Callable, Iterator
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


@dataclass(frozen=True, slots=True)
class Operator:
    """One of torch's own launches. ``read``, ``written``: its tensors by storage. ``by_row``: it reads of its
    source what it returns."""

    name: str
    args: Any
    out: Any
    read: dict[int, torch.Tensor]
    written: dict[int, torch.Tensor]

    @property
    def by_row(self) -> bool:
        return self.name.startswith(_ROWS)


class Operators(TorchDispatchMode):
    """``launched`` is told what torch launches, ``made`` the storages of new tensors."""

    def __init__(self, launched: Callable[[Operator], None], made: Callable[[set[int]], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._launched, self._made = launched, made

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        out = func(*args, **(kwargs or {}))
        read = {storage_of(one): one for one in _tensors((args, kwargs))}
        written = {storage_of(one): one for one in _tensors(out)}
        new = written.keys() - read.keys()
        if not new and not func._schema.is_mutable:
            return out  # a view
        self._made(new)
        if not str(func).startswith(_FREE):
            self._launched(Operator(str(func), args, out, read, written))
        return out


def hit_share(launch: Launch, name: str, tensor: torch.Tensor) -> float:
    """The part of ``tensor``, the argument ``name``, that a launch reads: experts as evenly chosen."""
    if launch.kernel != "moe._product" or name not in ("weight", "scales", "zeros"):
        return 1.0
    return float(1 - (1 - 1 / tensor.shape[0]) ** len(launch.tensors["order"]))


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
    plan = plan_arena(
        spec, memory_for(spec, spec.dtype, batch + 1, max(CONTEXT, prompt))[0], kv_dtype=spec.dtype, kv_layout="rows"
    )
    arena = DeviceArena(plan, META)
    caches = arena.layer_caches(len(spec.layers))
    inputs = step_inputs(batch, prompt)
    arena_storage = storage_of(arena.buffer)

    def launched(operator: Operator) -> None:
        counts.torch += 1
        sources = operator.written if operator.by_row else operator.read
        counts.bytes += sum(map(bytes_in, (*sources.values(), *operator.written.values())))
        if operator.name.startswith(_PRODUCTS):
            counts.flops += 2 * operator.out.numel() * operator.args[0].shape[-1]
        elif operator.name.startswith("aten.addmm"):
            counts.flops += 2 * operator.out.numel() * operator.args[1].shape[-1]

    def made(storages: set[int]) -> None:
        counts.allocations += len(storages)

    def note(launch: Launch) -> None:
        counts.triton += 1
        known: set[int] = set()  # an argument that a kernel does not read is another one of its tensors
        for name, tensor in launch.tensors.items():
            if storage_of(tensor) == arena_storage or id(tensor) in known:
                continue
            known.add(id(tensor))
            if launch.kernel == "moe._product" and name == "weight":
                counts.flops += 2 * len(launch.tensors["order"]) * tensor.numel() / tensor.shape[0]
            counts.bytes += hit_share(launch, name, tensor) * bytes_in(tensor)

    with recorded(note, zeros=False), Operators(launched, made):
        hidden_TD = model.forward(inputs, caches)
        logits = model.logits(hidden_TD[: inputs.runs.run_count])
        sampling_kernels.choose(logits, None, masked=False)
    if plan.pages_per_frame:
        counts.bytes += plan.page_bytes * (batch * pages_for(CONTEXT) + 2 * pages_for(prompt))
    if plan.slots_per_frame:
        counts.bytes += plan.slot_bytes * (2 * batch + bool(prompt))
    return counts


def step_inputs(batch: int, prompt: int, *, padded: bool = False) -> StepInputs:
    """Of ``batch`` decodes behind CONTEXT tokens and ``prompt`` tokens of a new sequence."""
    starts = [CONTEXT - 1] * batch + [0] * bool(prompt)
    lengths = [1] * batch + [prompt] * bool(prompt)
    count = len(starts)
    rows = torch.zeros(count, dtype=torch.int64, device=META)
    runs = Runs(
        offsets=[*range(batch), *([batch] if prompt else [])],
        starts=starts,
        lengths=lengths,
        slots=list(range(count)),
        fresh=[False] * batch + [True] * bool(prompt),
        decode_count=batch,
        starts_R=rows,
        slots_R=rows,
        context_R=rows,
        padded=padded,
        page_table_RP=torch.zeros(count, pages_for(max(CONTEXT, prompt)), dtype=torch.int32, device=META),
    )
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


def storage_of(tensor: torch.Tensor) -> int:
    return tensor.untyped_storage()._cdata


def bytes_in(tensor: torch.Tensor) -> int:
    """Without what a broadcast repeats."""
    sizes = [size for size, stride in zip(tensor.shape, tensor.stride(), strict=True) if stride]
    count = tensor.itemsize
    for size in sizes:
        count *= size
    return count
