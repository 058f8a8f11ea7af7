"""The arena's kernels against torch's operators on the same bytes, to the bit."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures.far_memory import far_memory
from tests.support.arena_fills import fill_frames, fill_pages, fill_slots
from weft.memory.arena_work import CompressKv, KvForm, WorkKind
from weft.memory.frames.plan import ArenaPlan, plan_arena, with_compression
from weft.memory.values import NodeId
from weft.runner.arena import NAN_BYTE, DeviceArena, warm
from weft.runner.staging import Staging
from weft.spec import (
    CompressedKvName,
    DTypeName,
    ModelSpec,
    attention,
    gated_delta,
    mamba1,
    mamba2,
    short_conv,
    with_cache_dtypes,
)
from weft.tensor import gpu
from weft.tensor.layout import DTYPES
from weft.units import PAD, PageId

HYBRID = ModelSpec("tiny", 32, 16, 512, "float32", (attention(2, 16), short_conv(32, 3)))
RECURRENT = {
    "gated delta": gated_delta(2, 4, 16, 16, 4),
    "mamba2": mamba2(4, 16, 1, 32, 4),
    "mamba1": mamba1(64, 16, 4),
}


@contextmanager
def torch_alone() -> Iterator[None]:
    gpu.choose("torch")
    yield
    gpu.choose("triton")


def both_ways(
    plan: ArenaPlan, device: torch.device, do: Callable[[DeviceArena], None], numbers: bool = False
) -> tuple[torch.Tensor, torch.Tensor, torch.Tensor]:
    """The arena's bytes before, after the kernels, and after torch's operators. ``numbers``: small float32
    numbers and not bytes of any kind."""
    generator = torch.Generator().manual_seed(1)
    if numbers:
        before = torch.randn(plan.arena_bytes // 4, generator=generator).view(torch.uint8)
    else:
        before = torch.randint(0, 256, (plan.arena_bytes,), dtype=torch.uint8, generator=generator)
    arena = DeviceArena(plan, device)
    arena.buffer.copy_(before)
    assert gpu.fits(arena.buffer)
    do(arena)
    by_kernels = arena.buffer.cpu().clone()
    arena.buffer.copy_(before)
    with torch_alone():
        assert not gpu.fits(arena.buffer)
        do(arena)
    return before, by_kernels, arena.buffer.cpu()


@pytest.mark.parametrize(
    ("fill", "items"), [(fill_frames, [1, 3]), (fill_pages, [0, 7, 2]), (fill_slots, [4]), (fill_frames, [])]
)
@pytest.mark.parametrize("byte", [0, NAN_BYTE, 0x41])
def test_filling_touches_the_named_items_and_no_other_byte(
    device: torch.device, fill: Callable[[DeviceArena, list[int], int], None], items: list[int], byte: int
) -> None:
    plan = plan_arena(HYBRID, 40_000)
    before, kernels, alone = both_ways(plan, device, lambda arena: fill(arena, items, byte))
    assert torch.equal(kernels, alone)
    assert torch.equal(kernels, before) == (not items)


@pytest.mark.parametrize("kind", ["slots", "pages"])
@pytest.mark.parametrize("copies", [[(1, 4)], [(1, 4), (1, 5), (2, 0)], [(3, 4), (4, 5), (5, 3)]])
def test_copies_read_every_source_before_they_write(
    device: torch.device, kind: str, copies: list[tuple[int, int]]
) -> None:
    """The last: three in a circle."""
    plan = plan_arena(HYBRID, 40_000)
    ids = np.array(copies, np.int32).T
    before, kernels, alone = both_ways(plan, device, lambda arena: getattr(arena, f"copy_{kind}")(*ids))
    assert torch.equal(kernels, alone)
    stride = plan.slot_stride_bytes if kind == "slots" else plan.page_bytes
    whole = plan.arena_bytes // stride * stride
    was, now = before[:whole].view(-1, stride), kernels[:whole].view(-1, stride)
    assert all(torch.equal(now[to], was[from_]) for from_, to in copies)


def test_the_kernels_skip_pad(device: torch.device) -> None:
    """No plan has a PAD to fill or copy; if one had, nothing would be written at -1 times the stride (L4)."""
    from weft.runner import arena_kernels

    words = torch.arange(64, device=device)
    items = torch.tensor([PAD, 2], device=device)
    arena_kernels.fill(words[16:], items, 8, 0)
    expected = torch.arange(64, device=device)
    expected[32:40] = 0
    assert torch.equal(words, expected)
    arena_kernels.copy(words[16:], items, torch.tensor([3, PAD], device=device), 8, room=None)
    assert torch.equal(words, expected)


@pytest.mark.parametrize("name", RECURRENT)
def test_compression_gives_the_codes_and_scales_that_torch_gives(device: torch.device, name: str) -> None:
    spec = ModelSpec("tiny", 32, 16, 512, "float32", (attention(1, 8), RECURRENT[name]))
    plan = with_compression(plan_arena(spec, 300_000), spec)
    state_compressions = compressed_rows(plan)
    before, kernels, alone = both_ways(plan, device, lambda arena: arena.compress(state_compressions), numbers=True)
    meant = bytes_that_mean_something(plan, state_compressions)
    assert torch.equal(kernels[meant], alone[meant])
    assert not torch.equal(kernels[meant], before[meant])

    def there_and_back(arena: DeviceArena) -> None:
        arena.compress(state_compressions)
        fill_slots(arena, state_compressions[:, 0].tolist(), NAN_BYTE)
        arena.restore(state_compressions)

    _, kernels, alone = both_ways(plan, device, there_and_back, numbers=True)
    slots = state_compressions[:, 0]
    for ours, theirs in zip(fields(kernels, plan), fields(alone, plan), strict=True):
        assert torch.equal(ours[slots], theirs[slots])
        assert not ours[slots].isnan().any()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_states_in_half_the_bytes_are_compressed_alike(device: torch.device, dtype: DTypeName) -> None:
    """Compressed, to the bit. Restored, to one unit in the last place: the interpreter cuts off where a GPU
    rounds."""
    layers = (attention(1, 8), RECURRENT["mamba2"])
    spec = with_cache_dtypes(ModelSpec("tiny", 32, 16, 512, "float32", layers), None, dtype)
    plan = with_compression(plan_arena(spec, 200_000), spec)
    state_compressions = compressed_rows(plan)

    def compress(arena: DeviceArena) -> None:
        for part in arena.layer_caches(2)[1].state.values():
            part.copy_(torch.linspace(-3, 2, part[0].numel()).view(part[0].shape).expand(part.shape))
        arena.compress(state_compressions)

    _, kernels, alone = both_ways(plan, device, compress)
    meant = bytes_that_mean_something(plan, state_compressions)
    assert torch.equal(kernels[meant], alone[meant])

    def restore(arena: DeviceArena) -> None:
        compress(arena)
        arena.restore(state_compressions)
        found.append(arena.layer_caches(2)[1].state["recurrent"][0].float())

    found: list[torch.Tensor] = []
    both_ways(plan, device, restore)
    assert torch.allclose(found[0], found[1], rtol=2**-7, atol=0)


@pytest.mark.parametrize(("compressed", "least", "most"), [("int8", 1e-4, 0.01), ("int4", 1e-2, 0.1)])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_kv_is_compressed_and_restored_by_kernels_as_by_torch(
    device: torch.device, dtype: DTypeName, compressed: CompressedKvName, least: float, most: float
) -> None:
    """Codes and scales to the bit; what is restored in 16 bits to one unit in the last place: the interpreter
    cuts off where a GPU rounds."""
    spec = ModelSpec("tiny", 32, 16, 512, dtype, (attention(2, 16), RECURRENT["mamba1"], attention(1, 32)))
    plan = plan_arena(spec, 300_000, compress=True, compress_kv=compressed, kv_layout="rows")
    assert plan.compressed_kv_bytes % 64 == 0
    records = records_of(plan)

    def fill(arena: DeviceArena) -> None:
        for cache in arena.layer_caches(3):
            for part in (cache.k, cache.v):
                if part is not None:
                    numbers = torch.randn(part.shape, generator=torch.Generator().manual_seed(2))
                    part.copy_(numbers.to(part.dtype))

    def compress(arena: DeviceArena) -> None:
        fill(arena)
        arena.compress_kv(records)

    _, kernels, alone = both_ways(plan, device, compress)
    assert torch.equal(kernels, alone)

    def there_and_back(arena: DeviceArena) -> None:
        compress(arena)
        arena.restore_kv(records[::-1].copy())
        found.append(
            [
                part.float().cpu().clone()
                for cache in arena.layer_caches(3)
                for part in (cache.k, cache.v)
                if part is not None
            ]
        )

    found: list[list[torch.Tensor]] = []
    both_ways(plan, device, there_and_back)
    exact = DeviceArena(plan, torch.device("cpu"))
    fill(exact)
    parts = [part for cache in exact.layer_caches(3) for part in (cache.k, cache.v) if part is not None]
    pages = records[:, 0].tolist()
    for ours, theirs, was in zip(*found, parts, strict=True):
        assert torch.allclose(ours[pages], theirs[pages], rtol=2**-7 if dtype != "float32" else 0, atol=0)
        gap = (theirs[pages] - was[pages].float()).abs().max() / was[pages].float().abs().max()
        assert least < gap < most


def records_of(plan: ArenaPlan) -> np.ndarray:
    """Five pages, packed onto the first ones of them without gaps."""
    form = KvForm(plan.page_bytes, plan.compressed_kv_bytes)
    pages = tuple(PageId(page) for page in (3, 0, 5, 1, 7))
    compressed_count = -(-len(pages) * form.record_bytes // form.page_bytes)
    return CompressKv(NodeId(1), pages, compressed_count, form).ids


def bytes_that_mean_something(plan: ArenaPlan, state_compressions: np.ndarray) -> torch.Tensor:
    """bool [arena bytes]: all but what no field fills of the pages of the compressed states."""
    held = torch.zeros(plan.compressed_bytes, dtype=torch.bool)
    for compressed in plan.compressed_fields:
        rows, width = int(np.prod(compressed.field.shape[:-1])), compressed.field.shape[-1]
        coded = compressed.scale_offset_bytes is not None
        size = rows * width * (1 if coded else DTYPES[compressed.field.dtype].itemsize)
        held[compressed.offset_bytes : compressed.offset_bytes + size] = True
        if compressed.scale_offset_bytes is not None:
            held[compressed.scale_offset_bytes : compressed.scale_offset_bytes + 4 * rows] = True
    meant = torch.ones(plan.page_count, plan.page_bytes, dtype=torch.bool)
    for pages in state_compressions[:, 1:]:
        meant[pages] = held.view(-1, plan.page_bytes)
    return meant.flatten()


def fields(arena_bytes: torch.Tensor, plan: ArenaPlan) -> list[torch.Tensor]:
    arena = DeviceArena(plan, torch.device("cpu"))
    arena.buffer.copy_(arena_bytes)
    return list(arena.layer_caches(2)[1].state.values())


def compressed_rows(plan: ArenaPlan) -> np.ndarray:
    """Two slots of the first frame, and pages behind it in no order."""
    each = plan.compressed_pages
    assert each > 1
    pages = np.arange(plan.page_count - 2 * each, plan.page_count, dtype=np.int32)[::-1].reshape(2, each)
    slots = np.array([[0], [min(1, plan.slots_per_frame - 1)]], np.int32)
    assert pages.min() >= plan.pages_per_frame, "the states lie in pages"
    return np.concatenate([slots, pages], axis=1)


def test_staged_ids_do_what_ids_on_the_host_do(device: torch.device) -> None:
    plan = plan_arena(HYBRID, 40_000)
    with far_memory():
        staging = Staging(device)
    staging.begin()
    frames, copies = staging.add(np.array([2, 1])), staging.add(np.array([[3, 4], [0, 1]]))
    staging.send()

    def staged(arena: DeviceArena) -> None:
        fill_frames(arena, frames, 7)
        arena.copy_slots(copies.row(0), copies.row(1))

    def named(arena: DeviceArena) -> None:
        fill_frames(arena, [2, 1], 7)
        arena.copy_slots(np.array([3, 4], np.int32), np.array([0, 1], np.int32))

    for one, other in zip(both_ways(plan, device, staged), both_ways(plan, device, named), strict=True):
        assert torch.equal(one, other)


def test_a_warmed_arena_compiles_nothing_inside_a_request(
    device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The constants of every launch of a day's work were launched with before it."""
    from weft.runner import arena_kernels

    launches: set[tuple[object, ...]] = set()
    kernel_class: Any = type(arena_kernels._fill_kernel)
    run = kernel_class.run

    def watched(kernel: Any, *arguments: object, **options: object) -> object:
        constants = [(name, str(value)) for name, value in options.items() if name.isupper()]
        launches.add((kernel.fn.__name__, *sorted(constants)))
        return run(kernel, *arguments, **options)

    monkeypatch.setattr(kernel_class, "run", watched)
    spec = ModelSpec("tiny", 32, 16, 512, "bfloat16", (attention(1, 16), RECURRENT["gated delta"]))
    plan = plan_arena(spec, 600_000, compress=True, compress_kv="int8", kv_layout="rows")
    arena = DeviceArena(plan, device)
    arena._never_written = None  # as on a GPU: frames are zeroed the first time too
    warm(arena)
    warmed = set(launches)
    assert len(warmed) >= 8
    launches.clear()
    states = np.array([[slot, *range(plan.compressed_pages)] for slot in (2, 3)])
    records = np.array([[page, 20, 21, 0] for page in (1, 2, 3)])
    for kind, ids in (
        (WorkKind.ZERO_FRAMES, [1, 2]),
        (WorkKind.COPY_SLOTS, [[1], [2]]),
        (WorkKind.COPY_SLOTS, [[1, 2], [2, 3]]),
        (WorkKind.COPY_PAGES, [[5], [6]]),
        (WorkKind.COPY_PAGES, [[5, 6], [6, 5]]),
        (WorkKind.COMPRESS_STATES, states),
        (WorkKind.RESTORE_STATES, states),
        (WorkKind.COMPRESS_KV, records),
        (WorkKind.RESTORE_KV, records),
    ):
        arena.perform(kind, np.array(ids))
    assert launches
    assert launches <= warmed
