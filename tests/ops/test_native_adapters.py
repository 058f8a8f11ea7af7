"""What adapters add to a product, in C++: against a loop over rows, on every instruction set of this CPU."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from tests.support import naive_ops
from weft.models.blocks.adapted import AdaptedProduct, Factor, Part, ProductChange
from weft.tensor import native
from weft.tensor.adapter_rows import ActiveAdapters, RowGroups, StepAdapters

WIDTH, OUT = 78, 700
SETS = native.extension().instruction_sets() if native.MISSING is None else []


@pytest.fixture(autouse=True)
def kernels() -> Iterator[None]:
    native.choose("auto")
    yield
    native.extension().use(SETS[0])


def noise(seed: int, *shape: int) -> torch.Tensor:
    return torch.randn(*shape, generator=torch.Generator().manual_seed(seed))


def change(seed: int, spans: list[tuple[int, int, int]], dtype: torch.dtype, *, scaled: bool = False) -> ProductChange:
    """``spans``: (first row, last row, rank) of each part."""
    parts, begin, downs = [], 0, []
    for at, (first, last, rank) in enumerate(spans):
        vectors = {"gain": noise(seed + 70 + at, last - first), "shift": noise(seed + 80 + at, last - first)}
        parts.append(
            Part(
                first,
                last,
                Factor.of(noise(seed + 50 + at, last - first, rank).to(dtype)),
                begin,
                begin + rank,
                **{name: one.to(dtype) for name, one in vectors.items() if scaled},
            )
        )
        downs.append(noise(seed + at, rank, WIDTH) * WIDTH**-0.5)
        begin += rank
    return ProductChange(Factor.of(torch.cat(downs).to(dtype)), tuple(parts), dtype)


def product(dtype: torch.dtype) -> AdaptedProduct:
    """a: two parts with a gap between; b: one part, scaled and shifted; c: changes another product."""
    made, active = AdaptedProduct(), ActiveAdapters()
    made.install("a", change(1, [(0, 600, 4), (640, 700, 30)], dtype), active)
    made.install("b", change(20, [(30, 695, 16)], dtype, scaled=True), active)
    assert not active.unfused, "the kernels compute all of them"
    return made


def added(made: AdaptedProduct, x: torch.Tensor, y: torch.Tensor, whose: list[str]) -> torch.Tensor:
    assert made.active is not None
    made.active.step = StepAdapters({len(whose): RowGroups.of(whose)})
    return made.added(x, y.clone())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=lambda dtype: str(dtype).removeprefix("torch."))
@pytest.mark.parametrize("instructions", SETS)
def test_rows_of_adapters_equal_a_loop_over_rows_with_the_bits_that_they_have_alone(
    instructions: str, dtype: torch.dtype
) -> None:
    made = product(dtype)
    native.extension().use(instructions)
    whose = ["a", "", "b", "c", *"b" * 20, *"a" * 70, "b"]
    x, y = noise(3, len(whose), WIDTH).to(dtype), noise(4, len(whose), OUT).to(dtype)
    got, want = added(made, x, y, whose), naive_ops.adapted(x, y, whose, made.changes)
    torch.testing.assert_close(
        got, want, rtol=1e-5 if dtype == torch.float32 else 2e-2, atol=1e-4 if dtype == torch.float32 else 0.25
    )
    assert torch.equal(got[[1, 3]], y[[1, 3]]), "rows of others have not moved"
    assert (want.float() - y.float()).abs().max() > 1, "the control: adapters add something"
    for row in (0, 2, 23, 24, 60, len(whose) - 1):
        alone = added(made, x[row : row + 1], y[row : row + 1], [whose[row]])
        assert torch.equal(alone[0], got[row])


def test_threads_change_no_bit() -> None:
    made, whose = product(torch.float32), ["a", "b"] * 40
    x, y = noise(3, len(whose), WIDTH), noise(4, len(whose), OUT)
    said = []
    threads = native.extension().threads()
    for count in (1, 3):
        native.set_threads(count)
        said.append(added(made, x, y, whose))
    native.set_threads(threads)
    assert torch.equal(*said)


def test_a_removed_adapter_adds_nothing() -> None:
    made, x, y = product(torch.float32), noise(3, 2, WIDTH), noise(4, 2, OUT)
    made.remove("b")
    got = added(made, x, y, ["b", "a"])
    assert torch.equal(got[0], y[0])
    assert not torch.equal(got[1], y[1])
