"""The doctor's judgements, with facts of machines that are not here."""

from __future__ import annotations

import copy
import json
from pathlib import Path
from typing import Any

import pytest

from weft.cli.doctor import CPU_FLAGS, THREAD_VARIABLES, Finding, cpu_facts, findings, machine_facts
from weft.cli.main import main
from weft.tensor import native

GOOD: dict[str, Any] = {
    "system": {"os": "Linux", "python": "3.12.1", "executable": "python"},
    "cpu": {"model": "A CPU", "cores": 8, "usable_cores": 8,
            "numa_nodes": {"0": [0, 1]},
            "features": {flag: flag in ("avx2", "avx512f", "avx512_bf16") for flag in CPU_FLAGS}},
    "memory": {"total_bytes": 16 << 30, "available_bytes": 12 << 30, "container_limit_bytes": None,
               "swap_bytes": 0},
    "threads": dict.fromkeys(THREAD_VARIABLES),
    "torch": {"version": "2.13.0", "path": "site-packages/torch", "threads": 8, "capability": "AVX512",
              "mkldnn": True, "cuda_version": None, "kernels": True, "matrix_unit": "no matrix unit",
              "kernels_missing": None, "kernels_stale": False, "triton": None, "flashinfer": False,
              "gpus": []},
    "models": {"directory": "share/models", "whole": 2, "bytes": 3 << 30, "partial": [], "damaged": [],
               "writable": True, "disk_free_bytes": 90 << 30},
    "hub": {"cache": "cache/hub", "cached_models": 2, "writable": True, "disk_free_bytes": 90 << 30,
            "disk_total_bytes": 100 << 30, "endpoint": "https://example.com", "offline": False,
            "reachable": True, "variables": {}},
}  # fmt: skip

A_GPU = {"name": "A GPU", "capability": [9, 0], "free_bytes": 70 << 30, "total_bytes": 80 << 30}


def _judged(*changes: tuple[str, str, Any]) -> dict[str, Finding]:
    facts = copy.deepcopy(GOOD)
    for group, name, value in changes:
        facts[group][name] = value
    return {finding.about: finding for finding in findings(facts)}


def test_what_is_computed_in_fewer_bits_is_named() -> None:
    gpu = (("torch", "gpus", [A_GPU]), ("torch", "triton", "3.5"))

    def cpu(*flags: str) -> tuple[tuple[str, str, Any], ...]:
        return (("cpu", "features", {flag: flag in flags for flag in CPU_FLAGS}),)

    zen, skylake, cooper, plain, there, without = (
        _judged(*changes)["quantised weights"]
        for changes in (
            cpu("avx2", "avx512f", "avx512_bf16", "avx512vbmi"),
            cpu("avx2", "avx512f"),
            cpu("avx2", "avx512f", "avx512_bf16"),
            cpu("avx2"),
            gpu,
            (("torch", "kernels", False),),
        )
    )
    assert all("fp8, MXFP8, MXFP4, NVFP4, nf4, fp4" in one.fact for one in (zen, skylake))
    assert all("NVFP4" in one.fact and "fp8 and nf4 take 16 bits" in one.advice for one in (cooper, plain))
    assert "fp8" in there.fact
    assert "NVFP4" in there.advice
    assert [one.verdict for one in (zen, plain, there, without)] == ["good", "good", "good", "note"]


def test_flashinfer_is_named_where_there_is_a_gpu_to_run_it() -> None:
    assert "attention" not in _judged(("torch", "gpus", [A_GPU]))
    assert "attention" not in _judged(("torch", "flashinfer", True))
    found = _judged(("torch", "gpus", [A_GPU]), ("torch", "flashinfer", True))["attention"]
    assert "debug.attention_backend flashinfer" in found.advice


def test_a_good_machine_has_nothing_to_mend() -> None:
    assert {finding.verdict for finding in _judged().values()} == {"good"}


@pytest.mark.parametrize(
    ("about", "change", "verdict", "words"),
    [
        ("cores", ("cpu", "usable_cores", 2), "note", "quota"),
        ("NUMA", ("cpu", "numa_nodes", {"0": [0, 2], "1": [1, 3]}), "note", "--replicas 2 keeps each step on one node"),
        ("CPU features", ("cpu", "features", {flag: flag == "avx2" for flag in CPU_FLAGS}), "note", "float32"),
        ("CPU features", ("cpu", "features", None), "note", ""),
        ("CPU features", ("cpu", "features", dict.fromkeys(CPU_FLAGS, False)), "note", "low speed"),
        ("RAM", ("memory", "available_bytes", 100 << 20), "note", "--memory"),
        ("OMP policy", ("threads", "OMP_WAIT_POLICY", "active"), "note", "unset OMP_WAIT_POLICY"),
        ("OMP policy", ("threads", "OMP_WAIT_POLICY", "PASSIVE"), "good", ""),
        ("oneDNN", ("torch", "mkldnn", False), "note", "bfloat16"),
        ("kernels", ("torch", "kernels", False), "note", "compiler"),
        ("kernels", ("torch", "kernels", False), "note", "--no-binary weft weft"),
        ("GPU", ("torch", "cuda_version", "13.0"), "note", "pip install --force-reinstall torch==2.13.0 --index-url"),
        ("GPU", ("torch", "gpus", [A_GPU]), "good", "--device auto"),
        ("GPU", ("torch", "gpus", [A_GPU | {"capability": [7, 5]}]), "note", "older"),
        ("GPU kernels", ("torch", "gpus", [A_GPU]), "note", "weft[gpu]"),
        ("models", ("models", "writable", False), "note", "WEFT_MODEL_DIR"),
        ("models", ("models", "partial", ["a/b"]), "note", "half pulled: a/b"),
        ("models", ("models", "damaged", ["a/b (x is missing)"]), "note", "damaged: a/b (x is missing)"),
        ("hub cache", ("hub", "writable", False), "note", "HF_HOME"),
        ("hub cache", ("hub", "disk_free_bytes", 1 << 20), "note", "HF_HOME"),
        ("hub", ("hub", "reachable", False), "note", "embedded"),
        ("hub", ("hub", "offline", True), "note", "cached"),
        ("hub", ("hub", "reachable", None), "good", ""),
    ],
)
def test_what_differs_from_a_good_machine_is_said(
    about: str, change: tuple[str, str, Any], verdict: str, words: str
) -> None:
    finding = _judged(change)[about]
    assert finding.verdict == verdict
    assert words in finding.advice


def test_kernels_of_other_sources_are_named_with_the_command_that_builds_them_anew(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\nsys.modules['weft._native'] = types.SimpleNamespace(INTERFACE=0)\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch = machine_facts(ask_hub=False)["torch"]
    kernels = [("torch", name, torch[name]) for name in torch if name.startswith("kernels")]
    finding = _judged(*kernels)["kernels"]
    assert finding.verdict == "note"
    assert "other sources" in finding.fact
    assert "older sources (interface 0" in finding.advice
    assert native.REBUILD in finding.advice


def test_a_build_for_cuda_is_good_where_a_gpu_uses_it(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with_gpu = (("torch", "cuda_version", "13.0"), ("torch", "gpus", [A_GPU]))
    assert _judged(*with_gpu)["GPU"].verdict == "good"
    (tmp_path / "sitecustomize.py").write_text(
        "import sys, types\n"
        "class Finder:\n"
        "    def find_spec(self, name, path=None, target=None):\n"
        "        if name == 'weft.tensor':\n"
        "            import torch\n"
        "            torch.version.cuda, torch.__version__ = '13.0', '2.13.0+cu130'\n"
        "sys.meta_path.insert(0, Finder())\n"
    )
    monkeypatch.setenv("PYTHONPATH", str(tmp_path))
    torch = machine_facts(ask_hub=False)["torch"]
    found = _judged(*[("torch", name, torch[name]) for name in torch])["GPU"]
    assert found.verdict == "note"
    assert "build for CUDA 13.0" in found.fact
    assert "torch==2.13.0 --index-url" in found.advice


def test_a_torch_that_cannot_be_imported_is_bad_and_named() -> None:
    facts = copy.deepcopy(GOOD)
    facts["torch"] = {"error": "torch is not installed"}
    [bad] = [finding for finding in findings(facts) if finding.verdict == "bad"]
    assert (bad.about, bad.fact) == ("torch", "torch is not installed")


def test_an_unreadable_cpuinfo_is_unknown_not_absent(tmp_path: Path) -> None:
    assert cpu_facts(tmp_path / "nothing")["features"] is None
    arm = tmp_path / "cpuinfo"
    arm.write_text("processor : 0\nFeatures : fp asimd bf16 i8mm\n")
    features = cpu_facts(arm)["features"]
    assert {name for name, there in features.items() if there} == {"asimd", "bf16", "i8mm"}


def test_the_command_prints_the_same_facts_as_json_and_asks_no_hub_when_told_not_to(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    facts = copy.deepcopy(GOOD)
    asked: list[bool] = []

    def here(*, ask_hub: bool) -> dict[str, Any]:
        asked.append(ask_hub)
        return facts

    monkeypatch.setattr("weft.cli.doctor.machine_facts", here)
    assert main(["doctor", "--json", "--offline"]) == 0
    said = json.loads(capsys.readouterr().out)
    assert said["torch"] == GOOD["torch"]
    assert asked == [False]
    facts["torch"] = {"error": "torch is not installed"}
    assert main(["doctor"]) == 1
    assert "torch is not installed" in capsys.readouterr().out


def test_this_machine_can_be_described() -> None:
    facts = machine_facts(ask_hub=False)
    assert set(facts) == set(GOOD)
    assert set(facts["torch"]) == set(GOOD["torch"])
    assert facts["cpu"]["usable_cores"] >= 1
    json.dumps(facts)
