"""What the first run on a GPU measures starts: each small model, on the emulated GPU."""

from __future__ import annotations

import argparse
import json
import sys
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch

from benchmarks import gpu_decode, gpu_families, gpu_parts, kernels
from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import quick_start
from tests.emulated_gpu.sample import ALL
from tests.oracle.test_mtp import EMBEDDED
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
            mock.patch.object(geometries, "find_geometry", return_value=geometry),
        ):
            asked = argparse.Namespace(device="cuda", after=0, geometries=(name,), groups=())
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


def test_steps_with_drafts_and_the_head_are_timed_as_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_decode, "DECODED", 2)
    monkeypatch.setattr(gpu_decode, "BEGINNING", 1)
    config = json.loads((EMBEDDED / "config.json").read_text())
    with emulated(CARD_BYTES) as card, quick_start(card):
        model = gpu_decode.noise_model(config, CUDA, head=True)
        card.values = False
        found = gpu_decode.timed_drafts(model, CUDA, True, True, 48, 3, 3)
    assert found["step_ms"] > 0 < found["head_ms"]
    assert set(found["steps_by_form"]) == {"graph"}


def test_a_sum_over_one_rank_is_captured_and_right(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(gpu_parts, "SUMMED_ROWS", (1, 3))
    monkeypatch.setattr(gpu_parts, "SUMS", 1)
    with emulated(CARD_BYTES) as card:
        found = list(gpu_parts.nccl(argparse.Namespace(device="cuda")))
        assert all(one["launched_is_right"] and one["recorded_is_right"] for one in found)
        assert card.replays == 2 * len(found)


def test_each_library_gets_the_numbers_in_its_own_form(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: dict[str, tuple[tuple[Any, ...], dict[str, Any]]] = {}
    for module in ("fla.ops.gated_delta_rule", "flash_qla", "flashinfer.gdn_prefill"):

        def call(*args: Any, module: str = module, **more: Any) -> None:
            seen[module] = args, more

        monkeypatch.setitem(sys.modules, module, SimpleNamespace(chunk_gated_delta_rule=call))  # type: ignore[arg-type]
    monkeypatch.setattr(kernels, "installed", lambda name: True)
    with emulated(CARD_BYTES):
        q, k = (torch.randn(12, 2, 8, device=CUDA).bfloat16() for _ in range(2))
        v, g, beta = torch.randn(12, 4, 16, device=CUDA).bfloat16(), -torch.rand(12, 4, device=CUDA), q[:, :, 0]
        state = torch.randn(2, 4, 8, 16, device=CUDA)
        rivals = kernels.delta_rivals(q, k, v, g, beta, state, rows=2, tokens=6)
        assert list(rivals) == ["fla", "flash_qla", "flashinfer"]
        for rival in rivals.values():
            rival()
        fla, flash_qla, flashinfer = (seen[module][0] for module in seen)
        assert [tuple(x.shape) for x in fla] == [(2, 6, 4, 8), (2, 6, 4, 8), (2, 6, 4, 16), (2, 6, 4), (2, 6, 2)]
        assert [tuple(x.shape) for x in flash_qla[:3]] == [(2, 6, 2, 8), (2, 6, 2, 8), (2, 6, 4, 16)]
        assert seen["flash_qla"][1]["auto_cp"] is False
        unit, _, _, decay, _, scale, turned = flashinfer
        assert (unit.float().norm(dim=-1) - 1).abs().max().item() < 0.01
        assert torch.equal(decay.log().cpu().round(decimals=4), g.cpu().round(decimals=4))
        assert (scale, tuple(turned.shape)) == (8**-0.5, (2, 4, 16, 8))
        assert seen["flashinfer.gdn_prefill"][1]["cu_seqlens"].tolist() == [0, 6, 12]
