"""``weft simulate``: tried as a user would, on a few requests of the sample, and with what cannot work."""

from __future__ import annotations

import json
import sys
from pathlib import Path

import pytest

from weft.cli.main import main
from weft.config import Sizes
from weft.memory.frames.plan import plan_arena
from weft.rpc.recording import Fingerprints, header_line, sequence_line
from weft.spec import ModelSpec, attention, gated_delta

FEW = ["simulate", "sample", "--limit", "12"]
MODEL = ["--model", "Qwen3.5-4B"]


def run(capsys: pytest.CaptureFixture[str], *arguments: str) -> tuple[int, str, str]:
    code = main(list(arguments))
    captured = capsys.readouterr()
    return code, captured.out, captured.err


def failure(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    code, out, err = run(capsys, *arguments)
    assert code == 2
    assert out == ""
    assert err.startswith("error: ")
    assert err.count("\n") == 1
    return err


def test_the_screen_has_a_row_for_each_policy_and_size_and_fits_80_columns(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    code, out, _ = run(capsys, *FEW, *MODEL, "--memory", "4GB,8GB", "--policy", "lru,every:2048")
    assert code == 0
    head, _, tables = out.partition("\n\n")
    assert "12 requests" in head
    assert "Qwen/Qwen3.5-4B" in head
    assert "1 x H100 at 40% of FLOP/s" in head
    rows = [line.split()[:3] for line in tables.splitlines() if line.strip()]
    for row in (["4", "GB", "lru"], ["8", "GB", "lru"]):
        assert rows.count(row) == 2, f"{row}: hits, and what was lost"
    assert sum(row[0] == "every:2048" for row in rows) == 4
    assert sum(row[0] == "oracle" for row in rows) == 2
    assert sum(row[:2] == ["no", "limit"] for row in rows) == 1
    assert max(len(line.rstrip()) for line in tables.splitlines()) <= 80


def test_a_store_has_its_columns_and_its_figures(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", "120")
    asked = [*FEW, *MODEL, "--device", "L4", "--memory", "2GB", "--store", "none,1TB@20GB/s@100us", "--no-oracle"]
    code, out, _ = run(capsys, *asked)
    assert code == 0
    assert "restored" in out
    assert out.count("1TB@20GB/s@100us") == 2, "hits, and what was lost"
    without, with_store = json.loads(run(capsys, *asked, "--json")[1])["results"]
    assert "store" not in without
    assert with_store["store"]["written"] > 0
    assert with_store["net_saved_s"] == with_store["saved_s"] - with_store["store"]["fetch_s"]


def test_json_has_every_figure_and_the_same_run_has_the_same_hash(capsys: pytest.CaptureFixture[str]) -> None:
    asked = [*FEW, *MODEL, "--memory", "4GB", "--policy", "lru,prompt", "--json"]
    code, out, err = run(capsys, *asked)
    assert code == 0
    assert err == ""
    data = json.loads(out)
    assert [one["arm"] for one in data["results"]] == ["lru", "prompt"]
    assert data["requests"] == 12
    assert 0 < data["results"][0]["hit_rate"] <= data["infinite"]["states"]
    assert data["oracle"][0]["hit_rate"] <= data["infinite"]["states"]
    assert data["cost"]["kind"] == "roofline"
    assert {"ttft", "tpot", "running_max", "preemptions", "saved_s", "cache"} <= set(data["results"][0])
    again = json.loads(run(capsys, *asked)[1])
    assert [one["hash"] for one in again["results"]] == [one["hash"] for one in data["results"]]
    slower = json.loads(run(capsys, *asked, "--device", "L4")[1])
    assert slower["results"][0]["hash"] != data["results"][0]["hash"]
    assert slower["results"][0]["ttft"]["p50"] > data["results"][0]["ttft"]["p50"]


@pytest.mark.parametrize("suffix", [".png", ".svg"])
def test_a_plot_is_drawn(suffix: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / f"rates{suffix}"
    assert run(capsys, *FEW, *MODEL, "--memory", "4GB,8GB", "--no-oracle", "--plot", str(file))[0] == 0
    assert file.read_bytes()[:5] == {".png": b"\x89PNG\r", ".svg": b"<?xml"}[suffix]


def test_a_plot_that_cannot_be_drawn_is_said_before_anything_runs(
    tmp_path: Path, capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    assert ".png, .svg, .pdf" in failure(capsys, *FEW, *MODEL, "--plot", str(tmp_path / "a.gif"))
    assert "no folder" in failure(capsys, *FEW, *MODEL, "--plot", str(tmp_path / "no" / "a.png"))
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    monkeypatch.setitem(sys.modules, "matplotlib.figure", None)
    assert "pip install 'weft[plot]'" in failure(capsys, *FEW, *MODEL, "--plot", str(tmp_path / "a.png"))


@pytest.mark.parametrize(
    ("arguments", "says"),
    [
        (["simulate", "nothing.jsonl", *MODEL], "nothing.jsonl cannot be read"),
        ([*FEW], "--model"),
        ([*FEW, "--model", "Qwen3.5-5B"], "did you mean"),
        ([*FEW, *MODEL, "--memory", "10MB"], "not even one sequence"),
        ([*FEW, *MODEL, "--memory", "much"], "--memory 'much' is not a size"),
        ([*FEW, *MODEL, "--memory", "4GB,"], "empty item"),
        ([*FEW, *MODEL, "--policy", "best"], "lru"),
        ([*FEW, *MODEL, "--device", "abacus"], "H100"),
        ([*FEW, *MODEL, "--tp", "3"], "--tp"),
        ([*FEW, *MODEL, "--fit", "sample"], "only a recording"),
        ([*FEW, *MODEL, "--store", "1TB"], "--store '1TB' is not a store"),
        ([*FEW, *MODEL, "--store", "1TB@fast"], "--store 'fast' is not a rate"),
        ([*FEW, *MODEL, "--store", "0B@1GB/s"], "above 0"),
        ([*FEW, *MODEL, "--store", "1TB@1GB/s@soon"], "'soon' is not a latency"),
        ([*FEW, *MODEL, "--store", "1TB@1GB/s", "--store-write", "0B"], "--store-write"),
    ],
)
def test_what_cannot_work_is_one_sentence(arguments: list[str], says: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert says in failure(capsys, *arguments)


def write_recording(file: Path, *, steps: int) -> None:
    spec = ModelSpec("qwen3_5", 100, 64, 4096, "float32", (attention(1, 64), gated_delta(1, 1, 64, 64, 4)))
    arena = plan_arena(spec, 2_000_000)
    fingerprints = Fingerprints(bytes(32))
    lines = [
        header_line(
            model="recorded-model",
            arena=arena,
            snapshots="auto",
            sizes=Sizes(max_model_len=4096, rows_max=4, step_tokens_max=512, queue_max=4, memory_bytes=2_000_000),
        )
    ]
    for at in range(6):
        tokens = [*range(300), *range(1000 + 50 * at, 1050 + 50 * at)]
        lines.append(
            sequence_line(
                fingerprints.of(tokens, "", computed=len(tokens) - 1),
                at_s=float(at),
                number=at,
                input_length=340,
                output_length=10,
                cached=64 * (at > 0),
            )
        )
    lines.append({"steps": [[100 * at, 50 * at, at % 3, 7 * at, 0.01 + 1e-5 * at] for at in range(1, steps + 1)]})
    file.write_text("\n".join(json.dumps(line) for line in lines))


def test_a_recording_needs_no_model_and_no_device(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recording(tmp_path / "r.jsonl", steps=20)
    code, out, _ = run(capsys, "simulate", str(tmp_path / "r.jsonl"), "--policy", "value,value+compressed4")
    assert code == 0
    assert out.count("value+compressed4") == 2, "two tables"
    assert "…" not in out
    assert "recorded-model, as recorded" in out
    assert "fitted to 20 steps" in out
    assert "the engine found 15.7%" in out
    data = json.loads(run(capsys, "simulate", str(tmp_path / "r.jsonl"), "--memory", "1MB,2MB", "--json")[1])
    assert data["recorded_cached_tokens"] == 320
    assert data["cost"]["kind"] == "fitted"
    assert len(data["results"]) == 2
    assert data["results"][1]["cached_tokens"] > 0
    code, out, _ = run(capsys, *FEW, *MODEL, "--memory", "4GB", "--fit", str(tmp_path / "r.jsonl"))
    assert code == 0
    assert "fitted to 20 steps" in out


def test_a_recording_without_times_asks_for_a_model(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    write_recording(tmp_path / "r.jsonl", steps=3)
    assert "no step times" in failure(capsys, "simulate", str(tmp_path / "r.jsonl"))
    assert "8 at least" in failure(capsys, *FEW, *MODEL, "--fit", str(tmp_path / "r.jsonl"))
