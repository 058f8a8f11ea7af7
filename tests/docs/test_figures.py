"""The README's table is that of the measured results, and ``make figures`` reads the benchmarks' JSON right."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest

from benchmarks.figures import __main__ as figures
from benchmarks.figures import table
from benchmarks.figures.parts import PARTS, Part, Row
from tests.arch.rules import ROOT

PAGE = (ROOT / "README.md").read_text(encoding="utf-8")
RESULTS = ROOT / "benchmarks" / "results"
BY_NAME = {part.name: part for part in PARTS}


def result(name: str) -> Any:
    return json.loads((RESULTS / name).read_text(encoding="utf-8"))


def test_the_readme_has_the_figures_of_the_results() -> None:
    assert table.write_table(PAGE) == PAGE, "run: make figures ARGS=--table"
    assert table.reports(), "no figures were measured"


def test_a_changed_result_changes_the_readme(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    report = table.reports()[0]
    report["parts"]["prefix"]["figures"]["less_time"] += 1
    (tmp_path / "figures-a.json").write_text(json.dumps(report))
    monkeypatch.setattr(table, "RESULTS", tmp_path)
    assert table.write_table(PAGE) != PAGE
    with pytest.raises(ValueError, match="has no table between"):
        table.write_table("# weft")


def test_a_kind_without_a_part_has_an_empty_cell() -> None:
    one = {"kind": "A", "cores": 2, "torch": "2", "parts": {}}
    run = {"commit": "abc", "day": "2026-01-02", "others": 0.2}
    one["parts"] = {"restart": run | {"figures": {"of_cold": 0.061}}}
    other = one | {"kind": "B", "parts": {"recall": run | {"figures": {"accuracy": 0.5}, "others": 0.01}}}
    shown = table.figures_table([one, other])
    assert "| measured | A | B | how to repeat it |" in shown
    assert "| 0.06 of the cold one | | `python" in shown
    assert "exact answers | | 50.0 % |" in shown
    assert "A: 2 cores, other programs used up to 20 % of it, torch 2, commit abc (2026-01-02)." in shown
    assert "B: 2 cores, no other load" in shown
    assert "GGUF" not in shown


@pytest.mark.parametrize(
    ("name", "file", "least"),
    [
        ("prefix", "prefix-embedded.json", {"fewer_tokens": 10.25, "turn_least": 9.1}),
        ("serve", "serve-lfm2-350m-bf16-2core.json", {"burst_weft": 118.7, "single_transformers": 9.4}),
        ("peers", "peers-lfm2-350m-2core-ab.json", {"lfm2_a_output_tokens_per_s_vllm": 110.9}),
        ("real", "peers-smollm2-amx-2core.json", {"b_decode_tokens_per_s_llama": 43.3, "f_second_turn_ms_weft": 99.2}),
    ],
)
def test_a_part_reads_what_its_benchmark_writes(name: str, file: str, least: dict[str, float]) -> None:
    read = BY_NAME[name].read(result(file))
    for key, value in least.items():
        assert read[key] == pytest.approx(value, rel=0.01), key


def test_every_part_runs_a_benchmark_that_exists() -> None:
    for part in PARTS:
        module = part.words.split()[0]
        place = ROOT / module.replace(".", "/")
        assert module == "weft" or place.with_suffix(".py").exists() or (place / "__main__.py").exists()


AMD = "processor : 0\nvendor_id : AuthenticAMD\ncpu family : {}\nmodel name : AMD EPYC\nflags : fpu {}\n"
INTEL = "processor : 0\nvendor_id : GenuineIntel\ncpu family : 6\nmodel name : Xeon\nflags : fpu {}\n"


@pytest.mark.parametrize(
    ("cpuinfo", "kind"),
    [
        (AMD.format(25, "avx512f"), "AMD Zen 4"),
        (AMD.format(25, "avx2"), "AMD Zen 3"),
        (AMD.format(26, "avx512f") + "\n" + AMD.format(26, "avx512f"), "AMD Zen 5"),
        (INTEL.format("avx512f amx_tile"), "Intel with AMX"),
        (INTEL.format("avx512f"), "Intel without AMX"),
        ("processor : 0\nmodel name : Neoverse-V2\n", "Neoverse-V2"),
    ],
)
def test_the_kind_of_a_cpu(cpuinfo: str, kind: str) -> None:
    assert figures.cpu_kind(cpuinfo) == kind


def test_an_unknown_part_is_named(capsys: pytest.CaptureFixture[str]) -> None:
    with pytest.raises(SystemExit):
        figures.main(["--only", "prefix,nothing"])
    assert "--only nothing: the parts are prefix, memory" in capsys.readouterr().err


def test_a_part_without_the_figures_of_an_engine_fails_by_name(tmp_path: Path) -> None:
    """llama.cpp's server may not start: the result of the benchmark lacks its figures then."""
    file = tmp_path / "half.json"
    file.write_text('{"weft": 1.0}', encoding="utf-8")
    whole = Part("half", f"json.tool {file}", dict, (Row("speed", lambda f: f"{f['weft']:.2f}", ""),))
    half = replace(whole, rows=(Row("ratio", lambda f: f"{f['weft'] / f['llama']:.2f} x", ""),))
    assert figures.measured(whole, tmp_path, "commit")["figures"] == {"weft": 1.0}
    with pytest.raises(figures.Failed, match="half has no figure 'llama'"):
        figures.measured(half, tmp_path, "commit")
