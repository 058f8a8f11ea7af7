"""The kernel bench: every group runs on small sizes, shares follow from the ceiling, refusals are kept."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from benchmarks.kernels import GROUPS, cases_of
from weft.errors import ConfigError
from weft.families import read_architecture
from weft.families.mixers.feed_forward import Experts
from weft.planning.geometries import find_geometry
from weft.tensor import native
from weft_tools.bench import kernels
from weft_tools.bench.kernels import Bench, Case, _experts
from weft_tools.bench.machine import Ceiling

SMALL = Bench(torch.device("cpu"), torch.bfloat16, (1, 3), (20,), 40)


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Iterator[None]:
    before = native.in_use()
    yield
    native.choose("auto" if before else "torch")


@pytest.mark.parametrize(
    ("name", "groups"),
    [
        ("Qwen3.5-0.8B", {"attention", "gated delta", "conv", "norm", "rotary", "write k, v", "silu x up"}),
        ("granite-4.0-h-350m", {"attention", "Mamba-2", "conv", "norm", "write k, v"}),
        ("LFM2-350M", {"attention", "short conv", "rotary", "zero 1 x", "copy 16 x state", "copy 16 x page"}),
    ],
)
def test_every_kind_of_layer_of_a_model_is_called_and_counted(name: str, groups: set[str]) -> None:
    geometry = find_geometry(name)
    assert geometry is not None
    torch.manual_seed(0)
    seen = set()
    with torch.inference_mode():
        for case in cases_of(read_architecture(geometry.config), SMALL, GROUPS):
            case.call()
            assert case.bytes_moved > 0
            seen.add(next((group for group in groups if case.name.startswith(group)), case.name))
    assert groups <= seen


def test_experts_move_what_those_that_are_awake_weigh() -> None:
    of = Experts(count=8, per_token=2, width=16, normalized=True)
    torch.manual_seed(0)
    with torch.inference_mode():
        one = next(_experts(of, 32, SMALL))
        one.call()
    assert one.name == "experts decode 1 x 1"
    assert one.bytes_moved == 2 * (3 * 16 * 32 * 2) + 2 * 32 * 2 + 2 * 4, "two experts of three matrices"
    assert one.flops == 2 * 2 * 3 * 16 * 32


def test_what_attention_moves_and_computes_is_worked_out_by_hand() -> None:
    geometry = find_geometry("LFM2-350M")  # 16 heads, 8 with keys, of 64
    assert geometry is not None
    with torch.inference_mode():
        decode = next(cases_of(read_architecture(geometry.config), SMALL, ("attention",)))
    assert decode.name == "attention decode 1 x 1 at 40"
    assert decode.bytes_moved == 2 * 40 * 8 * 64 * 2 + 2 * 16 * 64 * 2
    assert decode.flops == 4 * 40 * 16 * 64


@pytest.mark.parametrize(("bytes_moved", "flops", "least"), [(100, 0, 10.0), (0, 100, 1.0), (10, 500, 5.0)])
def test_the_ceiling_is_whichever_takes_longer(bytes_moved: int, flops: int, least: float) -> None:
    assert Ceiling(10.0, 100.0).least_s(bytes_moved, flops) == least


def test_a_side_that_refuses_has_no_time_and_says_why() -> None:
    def broken() -> object:
        raise RuntimeError("no such kernel\nat all")

    chosen: list[str] = []
    case = Case("one", lambda: None, bytes_moved=1000, rivals={"other": broken})
    found = kernels.measure("model", case, SMALL, kernels.Sides("own", chosen.append), Ceiling(1e9, 1e9), 2)
    assert found.seconds["other"] is None
    assert found.refusals == {"other": "RuntimeError: no such kernel"}
    assert found.seconds["own"] is not None
    assert found.ceiling_share == pytest.approx(1e-6 / found.seconds["own"])
    assert chosen[-1] == "own", "whoever comes next computes with the own kernels"
    assert {"own", "torch"} <= set(chosen)


def test_a_model_that_nobody_knows_is_named_with_those_near_it() -> None:
    sides = kernels.Sides("own", lambda side: None)
    with pytest.raises(ConfigError, match=r"LFM2-1\.2C.*LFM2-1\.2B"):
        next(kernels.run(SMALL, sides, Ceiling(1, 1), ["LFM2-1.2C"], GROUPS, 1))
