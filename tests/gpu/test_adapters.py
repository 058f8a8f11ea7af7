"""What adapters add to a product, in Triton, against a loop over rows; and as data of one recording."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.gpu.tolerances import close
from tests.support import naive_ops
from weft.models.blocks.adapted import AdaptedProduct, Factor, Part, ProductChange
from weft.tensor import native
from weft.tensor.adapter_rows import ActiveAdapters, AdapterBlocks, RowGroups, StepAdapters, most_blocks

WIDTH, OUT = 72, 150


@pytest.fixture(autouse=True)
def no_native_kernels() -> Iterator[None]:
    """Factors are plain matrices, as they are on a GPU."""
    native.choose("torch")
    yield
    native.choose("auto")


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def change(
    seed: int, spans: list[tuple[int, int, int]], dtype: torch.dtype, device: torch.device, *, scaled: bool = False
) -> ProductChange:
    """``spans``: (first row, last row, rank) of each part."""
    parts, begin, downs = [], 0, []
    for at, (first, last, rank) in enumerate(spans):
        vectors = {"gain": noise(seed + 70 + at, last - first), "shift": noise(seed + 80 + at, last - first)}
        parts.append(
            Part(
                first,
                last,
                Factor(noise(seed + 50 + at, last - first, rank).to(device, dtype)),
                begin,
                begin + rank,
                **{name: one.to(device, dtype) for name, one in vectors.items() if scaled},
            )
        )
        downs.append(noise(seed + at, rank, WIDTH) * WIDTH**-0.5)
        begin += rank
    return ProductChange(Factor(torch.cat(downs).to(device, dtype)), tuple(parts), dtype)


def product(dtype: torch.dtype, device: torch.device) -> AdaptedProduct:
    """a: two parts with a gap between; b: one part of another rank, scaled and shifted; c: does not change
    this product; d: a rank over a block of ranks."""
    active, made = ActiveAdapters(), AdaptedProduct()
    for digest in "abcd":
        active.hold(digest)
    made.open(active, dtype, device)
    made.install("a", change(1, [(0, 70, 4), (100, 150, 6)], dtype, device), active)
    made.install("b", change(20, [(30, 150, 16)], dtype, device, scaled=True), active)
    made.install("d", change(40, [(0, 150, 40)], dtype, device), active)
    assert active.recorded("abd")
    return made


def on_device(groups: RowGroups, lines: dict[str, int], device: torch.device, blocks: int | None = None) -> RowGroups:
    groups.device = AdapterBlocks.of(torch.from_numpy(groups.in_blocks(lines, blocks)).to(device))
    return groups


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float16], ids=lambda dtype: str(dtype).removeprefix("torch.")
)
def test_rows_of_adapters_equal_a_loop_over_rows(dtype: torch.dtype, device: torch.device) -> None:
    made = product(dtype, device)
    whose = ["a", "", "b", "c", *"d" * 18, "a", "b"]
    x, y = noise(3, len(whose), WIDTH).to(device, dtype), noise(4, len(whose), OUT).to(device, dtype)
    assert made.active is not None
    made.active.step = StepAdapters({len(whose): on_device(RowGroups.of(whose), made.active.lines, device)})
    want = naive_ops.adapted(x, y, whose, made.changes)
    got = made.added(x, y.clone())
    # The first product is rounded before the second, which adds up to 40 of its numbers.
    atol = {torch.float32: 1e-4, torch.float16: 0.03, torch.bfloat16: 0.25}[dtype]
    torch.testing.assert_close(got.cpu().float(), want.float(), rtol=close(dtype)["rtol"], atol=atol)
    assert torch.equal(got[[1, 3]], y[[1, 3]]), "rows of others have not moved"
    assert (want - y.cpu()).abs().max() > 1, "the control: adapters add something"
    alone = y[2:3].clone()
    made.active.step = StepAdapters({1: on_device(RowGroups.of(["b"]), made.active.lines, device)})
    assert torch.equal(made.added(x[2:3], alone)[0], got[2]), "the bits that a row has alone"


def test_one_recording_replays_with_whatever_adapters_come(device: torch.device) -> None:
    """Which row has which adapter, and where its factors lie, is data of fixed addresses."""
    made, width = product(torch.float32, device), 4
    active = made.active
    assert active is not None
    x, y = noise(3, width, WIDTH).to(device), noise(4, width, OUT).to(device)
    held = on_device(RowGroups(), active.lines, device, most_blocks(width))
    for whose in (["a", "b", "", "a"], ["", "", "d", "b"], [""] * 4):
        now = RowGroups.of(whose).in_blocks(active.lines, most_blocks(width))
        assert held.device is not None
        order = held.device.order
        order.copy_(torch.from_numpy(now[: len(order)]))
        held.device.places.copy_(torch.from_numpy(now[len(order) :]))
        active.step = StepAdapters({width: held})
        want = naive_ops.adapted(x, y, whose, made.changes)
        torch.testing.assert_close(made.added(x, y.clone()).cpu(), want, rtol=1e-5, atol=1e-4)
    made.remove("b")
    assert active.lines["b"] >= 0
    now = RowGroups.of(["b"] * 4).in_blocks(active.lines, most_blocks(width))
    held.device = AdapterBlocks.of(torch.from_numpy(now).to(device))
    assert torch.equal(made.added(x, y.clone()), y), "a removed adapter leaves an empty line"
