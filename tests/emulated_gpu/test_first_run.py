"""What the first run on a GPU measures starts: each small model, on the emulated GPU."""

from __future__ import annotations

import argparse
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gpu_families, gpu_parts, kernels
from tests.emulated_gpu import emulated
from tests.emulated_gpu.sample import ALL
from weft.planning import geometries

CUDA = torch.device("cuda", 0)
CARD_BYTES = 512 << 20
WITHOUT_GRAPHS = ("Qwen4-Exp", "GLM-5-next")


if ALL:

    @pytest.mark.parametrize("name", gpu_families.CONFIGS)
    def test_a_small_model_answers_with_graphs_without_and_by_torch(name: str) -> None:
        with emulated(CARD_BYTES) as card:
            found = gpu_families.run(name, CUDA, "float32")
            assert bool(card.replays) is (name not in WITHOUT_GRAPHS)
        assert (found["graphs_refused"] is None) is (name not in WITHOUT_GRAPHS)
        assert found["tokens_with_graphs_are_equal"]
        assert found["equal_tokens"] == found["tokens"] == gpu_families.TOKENS * len(gpu_families.LENGTHS)
        assert found["largest_gap"] < 1e-3 * found["largest_number"]
        assert not card.reports or name in WITHOUT_GRAPHS, [str(report) for report in card.reports]

    @pytest.mark.parametrize("name", ["adapters", "sinks"])
    def test_each_kernel_is_compared_with_torch_on_the_same_card(name: str) -> None:
        geometry = SimpleNamespace(config=gpu_families.CONFIGS[name])
        with (
            emulated(CARD_BYTES) as card,
            mock.patch.object(kernels, "ARENA_BYTES", 4 << 20),
            mock.patch.object(kernels, "LIBRARY_ROWS", 20),
            mock.patch.object(gpu_parts, "GEOMETRIES", (name,)),
            mock.patch.object(geometries, "find_geometry", return_value=geometry),
        ):
            asked = argparse.Namespace(device="cuda", after=0)
            found = [one for one in gpu_parts.check(asked) if "name" in one]
        assert len(found) > 20
        assert [one for one in found if "error" in one or not one["finite"]] == []
        assert [one for one in found if one["largest_gap"] > one["largest_number"] / 16] == []
        assert not card.reports, [str(report) for report in card.reports]


def test_each_small_model_answers_on_a_cpu_too() -> None:
    """By the C++ kernels and by torch."""
    found: dict[str, dict[str, Any]] = {
        name: gpu_families.run(name, torch.device("cpu"), "float32") for name in gpu_families.CONFIGS
    }
    assert {
        name: one
        for name, one in found.items()
        if one["largest_gap"] > 1e-3 * one["largest_number"] or one["equal_tokens"] < one["tokens"]
    } == {}


def test_products_with_inputs_in_fp8_are_cases_of_a_hopper() -> None:
    from benchmarks.kernels import cases_of
    from weft.families import read_architecture
    from weft_tools.bench.kernels import Bench

    with emulated(CARD_BYTES), mock.patch.object(torch.version, "cuda", "12.9"):
        bench = Bench(CUDA, torch.bfloat16, (1,), (200,), 300)
        names = [
            case.name for case in cases_of(read_architecture(gpu_families.CONFIGS["adapters"]), bench, ("products",))
        ]
    assert {"product int4 1", "product fp8 200", "product fp8 1024", "product fp8 x fp8 1024"} <= set(names)
