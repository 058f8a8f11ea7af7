"""The experts in Triton, against the twin that takes one token and one choice at a time."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import replace

import pytest
import torch

from tests.gpu.tolerances import close
from tests.support.naive_ops import moe as naive_moe
from weft.tensor.gpu import products
from weft.tensor.gpu.products import ColumnSplits
from weft.tensor.gpu.runs import GRID_YZ_MAX
from weft.tensor.kernels import moe as triton
from weft.tensor.ops.elementwise import Activation
from weft.tensor.ops.moe import ExpertBiases, moe
from weft.tensor.weights.quantized import QuantizedWeight, in_tiles
from weft.tensor.weights.rounded import rounded
from weft.units import PAD

Case = dict[str, torch.Tensor]


def case(
    tokens: int,
    experts: int,
    choices: int,
    width: int,
    inner: int,
    *,
    gated: bool = True,
    dtype: torch.dtype = torch.float32,
) -> Case:
    noise = torch.Generator().manual_seed(0)
    ids = torch.stack([torch.randperm(experts, generator=noise)[:choices] for _ in range(tokens)])
    shapes = {
        "x": (tokens, width),
        "up": (experts, (2 if gated else 1) * inner, width),
        "down": (experts, width, inner),
    }
    made = {
        name: (torch.randn(*shape, generator=noise) * (1 if name == "x" else 0.2)).to(dtype)
        for name, shape in shapes.items()
    }
    return made | {"ids": ids, "weights": torch.rand(tokens, choices, generator=noise)}


def call(made: Case, device: torch.device, activation: Activation = "silu", gated: bool = True) -> torch.Tensor:
    on = {name: x.to(device) for name, x in made.items()}
    return moe(on["x"], on["ids"], on["weights"], on["up"], on["down"], activation=activation, gated=gated).cpu()


def twin(made: Case, activation: Activation = "silu", gated: bool = True) -> torch.Tensor:
    return naive_moe(
        made["x"], made["ids"], made["weights"], made["up"], made["down"], activation=activation, gated=gated
    )


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16], ids=["float32", "bfloat16"])
@pytest.mark.parametrize(
    ("sizes", "activation", "gated"),
    [
        ((1, 8, 3, 64, 32), "gelu", True),
        ((5, 4, 2, 40, 24), "silu", True),
        ((60, 3, 2, 33, 70), "relu2", False),
        ((0, 4, 2, 16, 16), "silu", True),
    ],
)
def test_experts_of_any_size_equal_their_formula(
    sizes: tuple[int, ...], activation: Activation, gated: bool, dtype: torch.dtype, device: torch.device
) -> None:
    made = case(*sizes, gated=gated, dtype=dtype) if sizes[0] else case(1, *sizes[1:], dtype=dtype)
    if not sizes[0]:
        made |= {name: made[name][:0] for name in ("x", "ids", "weights")}
    want, got = twin(made, activation, gated), call(made, device, activation, gated)
    scale = {"atol": 5e-2 if dtype == torch.bfloat16 else 2e-5, "rtol": 4 * close(dtype)["rtol"]}
    torch.testing.assert_close(got, want, **scale)
    assert got.dtype == dtype


@pytest.mark.parametrize("tokens", [1, 40])
def test_biases_and_the_clamped_activation(tokens: int, device: torch.device) -> None:
    """With columns in one part and, for a token alone, in several."""
    made = case(tokens, 4, 2, 256, 24)
    made["x"] *= 4
    biases = ExpertBiases(
        torch.randn(4, 48, generator=torch.Generator().manual_seed(1)) * 3,
        torch.randn(4, 256, generator=torch.Generator().manual_seed(2)),
    )
    parts = [made[name] for name in ("x", "ids", "weights", "up", "down")]
    want = naive_moe(*parts, activation="clamped_swiglu", biases=biases)
    on = ExpertBiases(biases.gate_up_EJ.to(device), biases.down_ED.to(device))
    got = moe(*(x.to(device) for x in parts), activation="clamped_swiglu", biases=on).cpu()
    torch.testing.assert_close(got, want, atol=1e-4, rtol=1e-4)
    assert (got - call(made, device, "clamped_swiglu")).abs().max() > 0.1  # the control: without biases


@pytest.mark.parametrize("tokens", [1, 40])
def test_gates_and_what_they_multiply_have_a_limit(tokens: int, device: torch.device) -> None:
    """With columns in one part and, for a token alone, in several."""
    made = case(tokens, 4, 2, 256, 24)
    made["x"] *= 4
    parts = [made[name] for name in ("x", "ids", "weights", "up", "down")]
    got = moe(*(x.to(device) for x in parts), limit=1.5).cpu()
    torch.testing.assert_close(got, naive_moe(*parts, limit=1.5), atol=1e-4, rtol=1e-4)
    assert (got - call(made, device)).abs().max() > 0.1  # the control: without a limit
    made["up"][:, 0] = float("nan")
    assert moe(*(x.to(device) for x in parts), limit=1.5).isnan().all(), "a limit hides no NaN"


def test_a_choice_of_pad_is_skipped_and_an_expert_that_nobody_chose_is_not_read(device: torch.device) -> None:
    made = case(5, 6, 2, 24, 16)
    made["ids"] = torch.tensor([[0, 5], [PAD, 5], [2, PAD], [PAD, PAD], [5, 2]])
    for name in ("up", "down"):
        made[name][[1, 3, 4]] = float("nan")
    made["weights"][made["ids"] == PAD] = float("nan")
    got = call(made, device)
    torch.testing.assert_close(got, twin(made), **close(torch.float32))
    assert not got[3].any()
    made["ids"][3, 0] = 4  # the control: an expert that is chosen is read
    made["weights"][3, 0] = 1.0
    assert call(made, device)[3].isnan().all()


def test_tokens_lie_on_the_grid_axis_without_a_bound(monkeypatch: pytest.MonkeyPatch) -> None:
    """The second and third axis of a CUDA grid end at 65,535, which the interpreter does not check."""
    grids: dict[str, tuple[int, ...]] = {}

    class Recorder:
        def __init__(self, name: str) -> None:
            self.name = name

        def __getitem__(self, grid: tuple[int, ...]) -> Callable[..., None]:
            grids[self.name] = grid
            return lambda *_, **__: None

    for name in ("_count", "_align", "_product", "_combine"):
        monkeypatch.setattr(triton, name, Recorder(name))
    tokens = GRID_YZ_MAX + 1
    triton.moe(
        torch.zeros(tokens, 16),
        torch.zeros(tokens, 1, dtype=torch.int64),
        torch.ones(tokens, 1),
        torch.zeros(2, 32, 16),
        torch.zeros(2, 16, 16),
    )
    assert grids["_combine"][0] == tokens
    assert len(grids) == 4
    assert max(size for grid in grids.values() for size in grid[1:]) <= GRID_YZ_MAX


def test_many_pairs_are_counted_first(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """Two launches, and the same sums."""
    made = case(600, 5, 3, 24, 16)
    monkeypatch.setattr(triton, "COUNTED_PAIRS", 1024)
    torch.testing.assert_close(call(made, device), twin(made), **close(torch.float32))


def test_company_changes_no_token(device: torch.device) -> None:
    made = case(40, 3, 2, 24, 16)
    alone = made | {name: made[name][7:9] for name in ("x", "ids", "weights")}
    together = call(made, device)
    torch.testing.assert_close(call(alone, device), together[7:9], **close(torch.float32))
    assert (together[7] - together[8]).abs().max() > 1e-2  # the control: tokens differ


@pytest.mark.parametrize(
    "chosen", [[0] * 40, [3, 1] * 20, list(range(4)) * 10, [3] * 33 + [0] * 7, [2], [-1] * 3 + [1] * 17, [-1]]
)
@pytest.mark.parametrize("counted", [False, True])
def test_tiles_hold_every_pair_once_and_never_two_experts(
    chosen: list[int], counted: bool, device: torch.device
) -> None:
    """However the pairs fall: all to one expert, none to some, one more than a tile has rows. Blocks are
    smaller than the pairs, and a program has two experts. With counts of parts as without."""
    rows, experts, pairs = 16, 4, len(chosen)
    ids = torch.tensor(chosen, device=device)
    order = torch.full((pairs,), -7, dtype=torch.int32, device=device)
    tiles = torch.full((6, 3), -7, dtype=torch.int32, device=device)
    parts = -(-pairs // 16)
    counts = torch.full((parts, 8), -7, dtype=torch.int32, device=device) if counted else None
    if counts is not None:
        triton._count[(parts,)](ids, counts, pairs, PART=16, BINS=8, BLOCK=16)
        assert counts.sum().item() == 16 * parts
    triton._align[(max(parts, 2),)](
        ids, counts, order, tiles, pairs, parts, 6, EXPERTS=experts, BINS=8, PART=16, BM=rows, BLOCK=16, ROWS=16
    )
    seen = []
    for expert, first, count in tiles.tolist():
        assert 0 <= count <= rows
        placed = order[first : first + count].tolist() if count else []
        assert all(chosen[pair] == expert for pair in placed)
        assert placed == sorted(placed), "pairs of one expert keep their order"
        seen += placed
    assert sorted(seen) == [pair for pair in range(pairs) if chosen[pair] >= 0], "PAD is in no tile"


def test_nothing_is_asked_of_the_device(device: torch.device, monkeypatch: pytest.MonkeyPatch) -> None:
    """What would bring numbers to the host, and so wait for the device, is not called."""
    made = {name: x.to(device) for name, x in case(5, 4, 2, 40, 24).items()}
    asked: list[str] = []
    for name in ("tolist", "item", "nonzero", "__bool__", "__int__"):
        monkeypatch.setattr(torch.Tensor, name, lambda *_, name=name, **__: asked.append(name))
    moe(made["x"], made["ids"], made["weights"], made["up"], made["down"])
    assert not asked
    made["ids"].tolist()  # the control: a question is noticed
    assert asked == ["tolist"]


def test_splits_follow_from_the_model_and_end_with_many_tokens() -> None:
    """An eighth of Qwen3's 235B: 192 results of 4096 channels, 8 experts a token. Then a quarter, and all."""
    assert triton.up_splits(1, 16, 8, 192, 4096, 64) == triton.up_splits(64, 16, 8, 192, 4096, 64)
    assert triton.up_splits(1, 16, 8, 192, 4096, 64) == ColumnSplits(5, 832)
    assert triton.up_splits(1, 16, 8, 384, 4096, 64) == ColumnSplits(2, 2048)
    assert triton.up_splits(1, 16, 8, 1536, 4096, 64).count == 1
    assert triton.up_splits(65, 16, 8, 192, 4096, 64).count == 1
    assert triton.up_splits(40, 32, 8, 192, 4096, 64).count == 1
    assert triton.up_splits(1, 16, 2, 24, 1000, 64).count == 1


@pytest.mark.parametrize(("gated", "bits"), [(True, 0), (False, 0), (True, 8)])
def test_split_channels_are_added_in_order(
    gated: bool, bits: int, device: torch.device, monkeypatch: pytest.MonkeyPatch
) -> None:
    """New memory is NaN: what is read was written, also with choices of PAD. A token has the same bits
    alone."""
    monkeypatch.setattr(products, "COLUMNS_MIN", 64)
    tokens, inner, width = 3, 32, 150
    assert triton.up_splits(tokens, 16, 2, inner, width, 32).count == 2
    made = case(tokens, 4, 2, width, inner, gated=gated)
    made["ids"] = torch.tensor([[0, 3], [PAD, 3], [2, PAD]])
    want = twin(made, gated=gated)
    up: torch.Tensor | QuantizedWeight = made["up"].to(device)
    if bits:
        codes = in_tiles(rounded(made["up"], bits))
        want = twin(made | {"up": codes.dense()}, gated=gated)
        up = replace(codes, codes=codes.codes.to(device), scales=codes.scales.to(device))
    empty = torch.empty
    monkeypatch.setattr(
        torch,
        "empty",
        lambda *shape, **more: (
            empty(*shape, **more).fill_(float("nan"))
            if more["dtype"].is_floating_point
            else empty(*shape, **more).fill_(-7)
        ),
    )
    on = {name: x.to(device) for name, x in made.items() if name != "up"}
    launched = call_of(on, up, slice(0, tokens), gated)
    torch.testing.assert_close(launched, want, atol=2e-5 * float(want.abs().max()), rtol=1e-4)
    assert torch.equal(call_of(on, up, slice(1, 2), gated)[0], launched[1])
    monkeypatch.setattr(triton, "SPLIT_TOKENS", 0)
    whole = call_of(on, up, slice(0, tokens), gated)
    torch.testing.assert_close(launched, whole, atol=2e-5 * float(want.abs().max()), rtol=1e-4)
    assert not torch.equal(launched, whole), "the control: sums of splits have another order"


def call_of(on: Case, up: torch.Tensor | QuantizedWeight, tokens: slice, gated: bool) -> torch.Tensor:
    return moe(on["x"][tokens], on["ids"][tokens], on["weights"][tokens], up, on["down"], gated=gated).cpu()
