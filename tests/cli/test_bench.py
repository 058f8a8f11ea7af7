"""``weft bench`` as its users call it: against a server, offline, on kernels; what wrong calls are told."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, running_server
from tests.server.scripted_engine import write_model_directory
from weft.cli.main import main
from weft.tensor import native
from weft_tools.bench import machine


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    engine = {"model": str(write_model_directory(tmp_path_factory.mktemp("scripted")))}
    with running_server("build_paced", engine=engine) as running:
        yield running


@pytest.fixture(autouse=True)
def _kernels_as_before() -> Iterator[None]:
    before = native.in_use()
    yield
    native.choose("auto" if before else "torch")


def run(*arguments: str) -> int:
    return main(["bench", *arguments])


def test_a_load_on_a_server_is_bounded_and_told_with_the_names_of_the_field(
    server: RunningServer, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    code = run(
        "serve",
        "--base-url",
        server.url,
        "--num-prompts",
        "7",
        "--random-input-len",
        "20",
        "--random-output-len",
        "5",
        "--random-prefix-len",
        "16",
        "--request-rate",
        "500",
        "--burstiness",
        "0.5",
        "--max-concurrency",
        "3",
        "--num-warmups",
        "2",
        "--goodput",
        "ttft:60000 e2el:60000",
        "--metric-percentiles",
        "50,99",
        "--save-result",
        "--save-detailed",
        "--result-dir",
        str(tmp_path),
        "--result-filename",
        "r.json",
        "--metadata",
        "run=first",
    )
    shown = capsys.readouterr().out
    assert code == 0
    for words in ("request throughput", "request goodput", "TTFT", "TPOT", "ITL", "E2EL", "p99 (ms)"):
        assert words in shown
    assert [line.split(":")[0] for line in shown.splitlines()[-4:-1]] == ["limited by", "faster with", "ceilings"]
    result = json.loads((tmp_path / "r.json").read_text())
    assert (result["completed"], result["failed"], result["num_prompts"]) == (7, 0, 7)
    assert (result["total_input_tokens"], result["total_output_tokens"]) == (7 * 36, 7 * 5)
    assert result["request_rate"] == 500
    assert result["model_id"] == "scripted"
    assert result["run"] == "first"
    assert 1 <= result["max_concurrent_requests"] <= 3
    assert result["request_throughput"] == pytest.approx(7 / result["duration"])
    assert result["request_goodput"] == pytest.approx(result["request_throughput"])
    for name in ("ttft", "tpot", "itl", "e2el"):
        assert {f"{kind}_{name}_ms" for kind in ("mean", "median", "std", "p50", "p99")} <= result.keys()
    assert result["output_lens"] == [5] * 7
    assert all(len(gaps) <= 4 for gaps in result["itls"]), "fewer where a first chunk has several tokens"


@pytest.mark.parametrize(
    "rows", ['{"prompt": "say:abc", "output_tokens": 3}', '{"prompt": "say:abc", "completion": "abc"}']
)
def test_a_file_is_asked_as_it_says(server: RunningServer, tmp_path: Path, rows: str) -> None:
    data = tmp_path / "data.jsonl"
    data.write_text(rows)
    for backend in ("openai", "openai-chat"):
        assert (
            run(
                "serve",
                "--base-url",
                server.url,
                "--backend",
                backend,
                "--dataset-name",
                "custom",
                "--dataset-path",
                str(data),
                "--save-result",
                "--result-dir",
                str(tmp_path),
                "--result-filename",
                backend,
            )
            == 0
        )
        result = json.loads((tmp_path / backend).read_text())
        assert result["request_rate"] == "inf"
        assert result["completed"] == 1
        assert result["total_output_tokens"] == 3


def test_requests_that_fail_are_counted_and_told(
    server: RunningServer, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    data = tmp_path / "data.jsonl"
    lines = [json.dumps({"prompt": prompt, "output_tokens": 3}) for prompt in ("say:abc", "say:" + "abc " * 50_000)]
    data.write_text("\n".join(lines))
    codes = {
        run(
            "serve",
            "--base-url",
            server.url,
            "--dataset-name",
            "custom",
            "--dataset-path",
            str(data),
            "--seed",
            str(seed),
        )
        for seed in range(4)
    }
    out = capsys.readouterr()
    assert codes == {1, 2}, "2 where the long one goes ahead: then nothing is measured"
    assert "requests failed" in out.out
    assert "failed: 400" in out.err
    assert "no load was put on it: 400" in out.err
    assert "--max-model-len" in out.err


@pytest.mark.parametrize(
    ("flags", "words"),
    [
        (["--request-rate", "0"], "'--request-rate': 0.0 is not in the range 0<x<=inf"),
        (["--request-rate", "-2"], "'--request-rate': -2.0 is not in the range"),
        (["--request-rate", "nan"], "'--request-rate': nan is not in the range"),
        (["--burstiness", "0"], "'--burstiness': 0.0 is not in the range 0<x<=1000000"),
        (["--burstiness", "inf"], "'--burstiness': inf is not in the range"),
        (["--request-timeout", "0"], "'--request-timeout': 0.0 is not in the range 0<x<=86400"),
        (["--model", "nobody"], "'nobody', and http"),
        (["--random-input-len", "5000"], "5128; the server takes 2048"),
        (["--goodput", "itl:3"], "--goodput"),
        (["--percentile-metrics", "x"], "--percentile-metrics"),
        (["--dataset-name", "sharegpt"], "--dataset-path"),
        (["--save-result", "--result-dir", "/nowhere"], "--result-dir"),
        (["--extra-body", "[]"], "--extra-body"),
        (["--metadata", "x"], "--metadata"),
        (["--num-prompt", "3"], "did you mean --num-prompts"),
    ],
)
def test_wrong_calls_name_the_flag(
    server: RunningServer, capsys: pytest.CaptureFixture[str], flags: list[str], words: str
) -> None:
    assert run("serve", "--base-url", server.url, *flags) == 2
    said = capsys.readouterr().err
    assert words in said
    assert said.count("\n") == 1


def test_nobody_there_is_said_in_one_line(capsys: pytest.CaptureFixture[str]) -> None:
    assert run("serve", "--base-url", "http://127.0.0.1:1") == 2
    assert "--base-url" in capsys.readouterr().err
    assert run("kernel") == 2
    assert "weft bench kernels" in capsys.readouterr().err


TINY = ("--memory", "16MiB", "--max-model-len", "256", "--threads", "1")


def test_a_batch_is_timed_without_a_server(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_ceilings(monkeypatch)
    out = tmp_path / "latency.json"
    model = str(checkpoint("qwen3_5"))
    assert (
        run(
            "latency",
            model,
            *TINY,
            "--batch-size",
            "2",
            "--input-len",
            "9",
            "--output-len",
            "3",
            "--num-iters",
            "3",
            "--num-iters-warmup",
            "1",
            "--output-json",
            str(out),
        )
        == 0
    )
    result = json.loads(out.read_text())
    assert len(result["latencies"]) == 3
    assert result["avg_latency"] == pytest.approx(sum(result["latencies"]) / 3)
    assert result["percentiles"]["50"] == sorted(result["latencies"])[1]
    assert run("latency", model, *TINY, "--input-len", "300") == 2
    assert "--max-model-len" in capsys.readouterr().err


TINY_PARAMETERS = 207600
"""Of the checkpoint, without the embedding, which no token passes."""


def test_the_machine_s_ceilings_stand_beside_a_batch(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    small_ceilings(monkeypatch)
    out = tmp_path / "latency.json"
    assert (
        run(
            "latency",
            str(checkpoint("qwen3_5")),
            *TINY,
            "--batch-size",
            "2",
            "--input-len",
            "64",
            "--output-len",
            "3",
            "--num-iters",
            "1",
            "--num-iters-warmup",
            "0",
            "--dtype",
            "bfloat16",
            "--output-json",
            str(out),
        )
        == 0
    )
    result = json.loads(out.read_text())
    ceilings = result["ceilings"]
    read = ceilings["ceiling: memory read (GB/s)"] * 1e9
    rate = ceilings["ceiling: bfloat16 products (TFLOP/s)"] * 1e12
    least = ceilings["least seconds at the ceilings"]
    assert read > 1e8
    assert ceilings["share of the ceilings (%)"] == pytest.approx(100 * least / result["avg_latency"])
    token_s = 2 * TINY_PARAMETERS / rate
    assert 128 * token_s < least < 128 * token_s + 2 * (4 * TINY_PARAMETERS / read + 2 * token_s)
    shown = capsys.readouterr().out
    assert "share of the ceilings" in shown
    assert [line.split(":")[0] for line in shown.splitlines()[-3:]] == ["limited by", "faster with", "ceilings"]
    assert result["diagnosis"]["limited by"] in shown


def small_ceilings(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(machine, "MATRIX_SIDE", {"cpu": 64})
    monkeypatch.setattr(machine, "READ_BYTES", {"cpu": 1 << 20})


def test_many_prompts_are_counted_without_a_server(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    small_ceilings(monkeypatch)
    out = tmp_path / "throughput.json"
    assert (
        run(
            "throughput",
            str(checkpoint("qwen3_5")),
            *TINY,
            "--num-prompts",
            "5",
            "--input-len",
            "70",
            "--output-len",
            "4",
            "--prefix-len",
            "64",
            "--n",
            "2",
            "--num-warmups",
            "1",
            "--output-json",
            str(out),
        )
        == 0
    )
    result = json.loads(out.read_text())
    assert result["num_requests"] == 5
    assert result["total_input_tokens"] == 5 * 134
    assert result["total_output_tokens"] == 5 * 2 * 4
    assert result["total_num_tokens"] == 5 * 134 + 40
    assert result["tokens_per_second"] == pytest.approx(result["total_num_tokens"] / result["elapsed_time"])


def test_kernels_are_shown_beside_torch_and_the_ceiling(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(machine, "COPY_BYTES", {"cpu": 1 << 20})
    monkeypatch.setattr(machine, "MATRIX_SIDE", {"cpu": 64})
    out = tmp_path / "kernels.json"
    assert (
        run(
            "kernels",
            "--device",
            "cpu",
            "--geometry",
            "LFM2-350M",
            "--only",
            "conv",
            "--batch-size",
            "2",
            "--prefill-len",
            "8",
            "--context-len",
            "32",
            "--rounds",
            "1",
            "--threads",
            "1",
            "--output-json",
            str(out),
        )
        == 0
    )
    shown = capsys.readouterr().out
    assert "of ceiling" in shown
    assert "short conv decode 2 x 1" in shown
    result = json.loads(out.read_text())
    assert result["facts"]["copy_gb_per_s"] > 0
    assert {"native", "torch"} == set(result["results"][0]["seconds"])
    assert all(row["ceiling_share"] > 0 for row in result["results"])
    assert run("kernels", "--geometry", "nothing-like-it") == 2
    assert "--geometry" in capsys.readouterr().err
