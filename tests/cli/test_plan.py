"""`weft plan` as a user meets it: the screen, the JSON, the file, and what it says to bad input."""

from __future__ import annotations

import json
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
from huggingface_hub import constants

from tests.fixtures.checkpoint_families_attention import ON_CPUS
from tests.fixtures.checkpoints import checkpoint
from weft.cli.main import main
from weft.cli.serve import command as serve_command
from weft.planning.geometries import GEOMETRIES, find_geometry
from weft.units import parse_bytes


@pytest.fixture(autouse=True)
def terminal(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)


def directory_of(name: str, directory: Path, **changes: Any) -> Path:
    """A directory with the config.json of a known model, and nothing else."""
    geometry = find_geometry(name)
    assert geometry is not None
    (directory / "config.json").write_text(json.dumps({**geometry.config, **changes}))
    return directory


def said(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> str:
    assert main(["plan", *arguments]) == code
    return capsys.readouterr().out


def refusal(capsys: pytest.CaptureFixture[str], *arguments: str) -> str:
    assert main(["plan", *arguments]) == 2
    error = capsys.readouterr().err
    assert error.count("\n") == 1
    return error


def data(capsys: pytest.CaptureFixture[str], *arguments: str, code: int = 0) -> Any:
    return json.loads(said(capsys, *arguments, "--json", code=code))


def test_one_screen_says_whether_it_fits_how_many_and_what_a_snapshot_costs(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "qwen3-next-80b-a3b", "--memory", "80GiB", "--tp", "4")
    for words in (
        "Qwen/Qwen3-Next-80B-A3B",
        "79.7B parameters",
        "one of 4 devices",
        "weights 37.2 GiB",
        "12,288 bytes in 12 layers",
        "99 KV pages or 1 state",
        "the KV of 1,584 tokens",
        "131,072",
        "the model's longest",
        "fits: up to 262,144 tokens",
    ):
        assert words in shown
    lines = shown.splitlines()
    assert len(lines) <= 25
    assert max(len(line) for line in lines) <= 80


@pytest.mark.parametrize("columns", [80, 120])
def test_the_comparison_shows_every_layout_with_and_without_speculation_in_any_width(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch, columns: int
) -> None:
    monkeypatch.setenv("COLUMNS", str(columns))
    shown = said(capsys, "Qwen3.5-4B", "--memory", "24GiB", "--compare")
    wide = said(capsys, "LFM2-1.2B", "--memory", "80GiB", "--compare", "--max-model-len", "500")
    assert sum("weft: frames" in line for line in wide.splitlines()) == 2  # no label is broken over lines
    assert max(len(line) for line in wide.splitlines()) <= columns
    lines = shown.splitlines()
    assert max(len(line) for line in lines) <= columns
    assert "…" not in shown
    for layout in ("weft: frames", "padded pages", "8 layers a page", "static pools"):
        assert sum(layout in line for line in lines) >= 1 + 3  # the table, and a bar for each length
    assert sum("3 drafts" in line for line in lines) == 4 * 2 + 1
    assert "each with 3 drafts" in shown
    [padded] = [line for line in lines if line.startswith("padded pages ")]
    assert padded.split()[2] == "528"


def test_bars_are_as_long_as_their_numbers(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "Qwen3.5-4B", "--memory", "24GiB", "--compare", "--max-model-len", "4096")
    picture = shown.split("4,096 tokens\n")[1].splitlines()[:4]
    numbers = [[int(word) for word in line.split() if word.isdecimal()] for line in picture]
    numbers[2] = numbers[2][1:]  # the name "8 layers a page" has one too
    cells = [(line.count("█"), line.count("█") + line.count("░")) for line in picture]
    scale = max(cells)[1] / max(numbers)[-1]
    for (full, whole), counts in zip(cells, numbers, strict=True):
        assert (full, whole) == (round(scale * counts[0]), round(scale * counts[-1]))
    assert max(cells)[1] > 40 > min(cells)[0]


def test_the_json_has_every_figure_of_the_screen(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "Qwen3.5-397B-A17B", "--arena", "40GiB", "--tp", "2", "--compare")
    assert found["model"] == "Qwen/Qwen3.5-397B-A17B"
    assert (found["kv_bytes_per_token"], found["state_bytes_per_sequence"]) == (15360, 96030720)
    assert found["snapshot"] == {"bytes": 96092160, "tokens": 6256, "compressed_bytes": 26050560}
    assert found["arena"]["frame_bytes"] == found["arena"]["pages_per_frame"] * found["arena"]["page_bytes"]
    assert [row["tokens"] for row in found["lengths"]] == [4096, 32768, 131072, 262144]
    layouts = {row["layout"]: row for row in found["layouts"]}
    assert layouts["padded pages"]["block_tokens"] == 2096
    bare, speculating, _ = layouts["padded pages"]["loads"]
    assert bare["lengths"][0] == {"tokens": 100, "request_bytes": 128778240, "sequences": 332}
    assert speculating["drafts"] == 3
    assert [row["sequences"] for row in layouts["weft: frames"]["loads"][0]["lengths"][1:]] == [
        row["sequences"] for row in found["lengths"]
    ]
    assert "layouts" not in data(capsys, "Qwen3.5-397B-A17B", "--arena", "40GiB")


def test_what_does_not_fit_says_what_is_needed_and_that_is_enough(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys, "Qwen3.5-397B-A17B", "--memory", "80GiB", "--tp", "2", "--compare", code=1)
    assert "does not fit" in shown
    assert "--memory 370GiB at --tp 2, or --tp 16 with this memory" in " ".join(shown.split())
    assert "2,096" in shown
    assert data(capsys, "Qwen3.5-397B-A17B", "--memory", "370GiB", "--tp", "2")["enough"]
    assert data(capsys, "Qwen3.5-397B-A17B", "--memory", "80GiB", "--tp", "16")["enough"]
    need = data(capsys, "Qwen3.5-397B-A17B", "--memory", "80GiB", "--tp", "2", code=1)["need_bytes"]
    for memory, enough in ((need, True), (need - (1 << 30), False)):
        found = data(capsys, "Qwen3.5-397B-A17B", "--memory", str(memory), "--tp", "2", code=1 - enough)
        assert found["enough"] == enough


def test_the_memory_of_a_device_is_weights_arena_and_a_tenth_of_the_rest(capsys: pytest.CaptureFixture[str]) -> None:
    found = data(capsys, "Qwen3.5-9B", "--memory", "48GiB")
    weights, kept, arena = found["weights"]["bytes"], found["workspace_bytes"], found["arena"]
    assert kept == (found["memory_bytes"] - weights) // 10
    left = found["memory_bytes"] - weights - kept - arena["bytes"]
    assert 0 <= left < arena["frame_bytes"]
    apart = data(capsys, "Qwen3.5-9B", "--arena", str(arena["bytes"]))
    assert (apart["arena"], apart["lengths"]) == (arena, found["lengths"])


def test_dtypes_are_told_by_short_and_long_names(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ("granite-4.0-h-small", "--memory", "80GiB")
    plain = data(capsys, *asked)
    short = data(capsys, *asked, "--kv-dtype", "fp8", "--state-dtype", "bf16")
    assert (short["kv_dtype"], short["state_dtype"]) == ("float8_e4m3", "bfloat16")
    assert short == data(capsys, *asked, "--kv-dtype", "float8_e4m3", "--state-dtype", "bfloat16")
    assert 2 * short["kv_bytes_per_token"] == plain["kv_bytes_per_token"] == 16384
    assert short["state_bytes_per_sequence"] == 77322240
    assert plain["state_bytes_per_sequence"] == 152819712
    int4 = data(capsys, *asked, "--quantize", "int4")
    assert int4["weights"]["bytes"] < 0.3 * plain["weights"]["bytes"]


def test_a_directory_is_planned_from_its_config_alone(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    found = data(capsys, str(directory_of("granite-4.0-h-tiny", tmp_path)), "--arena", "8GiB")
    assert found["longest_tokens"] == 131072
    assert (found.pop("model"), found["family"]) == (tmp_path.name, "granite_hybrid")
    known = data(capsys, "granite-4.0-h-tiny", "--arena", "8GiB")
    assert found.pop("serve") == f"weft serve {tmp_path} --memory 8192MiB"
    assert found == {key: value for key, value in known.items() if key not in ("model", "serve")}
    assert data(capsys, "weft-recall", "--memory", "64MiB")["family"] == "qwen3_5"


@pytest.mark.parametrize("name", ["lfm2_vl", "qwen3_5_vl", "lfm3_vl"])
def test_a_tower_that_is_not_on_disk_is_not_counted(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, name: str
) -> None:
    import shutil

    from safetensors.torch import load_file, save_file

    from tests.fixtures.vision_checkpoints import vision_checkpoint

    shutil.copytree(vision_checkpoint(name), tmp_path, dirs_exist_ok=True)
    asked = (str(tmp_path), "--arena", "1GiB")
    whole = data(capsys, *asked)["weights"]
    file = tmp_path / "model.safetensors"
    save_file(
        {
            tensor: values
            for tensor, values in load_file(file).items()
            if not any(part in tensor for part in ("visual", "vision", "projector"))
        },
        file,
    )
    alone = data(capsys, *asked)["weights"]
    assert alone["parts"].keys() ^ whole["parts"].keys() == {"vision"}
    assert whole["bytes"] - alone["bytes"] == whole["parts"]["vision"] > 0
    file.unlink()
    assert data(capsys, *asked)["weights"] == whole, "of config.json alone"


def test_a_quantised_checkpoint_is_planned_in_its_form(capsys: pytest.CaptureFixture[str], tmp_path: Path) -> None:
    quantized = {"quant_method": "fp8", "weight_block_size": [128, 128]}
    directory = directory_of("Qwen3.5-4B", tmp_path, quantization_config=quantized)
    found = data(capsys, str(directory), "--arena", "8GiB")
    assert found["weights"]["form"] == "fp8"
    plain = data(capsys, "Qwen3.5-4B", "--arena", "8GiB")
    assert found["weights"]["parts"]["feed-forward"] < 0.501 * plain["weights"]["parts"]["feed-forward"]
    assert found["arena"] == plain["arena"]


@pytest.mark.parametrize("apart", [True, False])
def test_a_form_that_modelopt_states_elsewhere_is_planned(
    apart: bool, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    """In a file of its own, or in config.json as that file has it."""
    settings = {"producer": {"name": "modelopt"}, "quantization": {"quant_algo": "NVFP4"}}
    inside = {} if apart else {"quantization_config": {"quant_method": "modelopt", **settings}}
    directory = directory_of("Qwen3.5-4B", tmp_path, **inside)
    if apart:
        (directory / "hf_quant_config.json").write_text(json.dumps(settings))
    assert data(capsys, str(directory), "--arena", "8GiB", "--twelve-bit")["weights"]["form"] == "nvfp4 as int4 codes"


@pytest.mark.parametrize(
    ("settings", "on_a_cpu", "on_a_gpu"),
    [
        ({"quant_method": "bitsandbytes", "load_in_4bit": True}, "nf4 or fp4", "nf4 or fp4, widened to bfloat16"),
        ({"quant_method": "modelopt", "quant_algo": "NVFP4"}, "nvfp4 as int4 codes", "nvfp4, widened to bfloat16"),
        ({"quant_method": "mxfp4"}, "mxfp4 as int4 codes", "mxfp4 as int8 codes"),
        ({"quant_method": "gptq", "bits": 4, "group_size": 128}, "gptq 4-bit", "gptq 4-bit"),
    ],
)
def test_a_plan_says_which_forms_stay_and_which_are_widened(
    settings: dict[str, Any], on_a_cpu: str, on_a_gpu: str, capsys: pytest.CaptureFixture[str], tmp_path: Path
) -> None:
    directory = directory_of("Qwen3.5-4B", tmp_path, quantization_config=settings)
    asked = str(directory), "--arena", "8GiB"
    assert data(capsys, *asked, "--twelve-bit")["weights"]["form"] == on_a_cpu
    assert data(capsys, *asked, "--no-twelve-bit")["weights"]["form"] == on_a_gpu
    assert on_a_gpu in " ".join(said(capsys, *asked, "--no-twelve-bit").split())


def test_without_a_model_the_ones_that_are_known_are_listed(capsys: pytest.CaptureFixture[str]) -> None:
    shown = said(capsys)
    assert all(geometry.short_name in shown for geometry in GEOMETRIES)
    assert max(len(line) for line in shown.splitlines()) <= 80
    assert len(data(capsys)) == len(GEOMETRIES)


@pytest.mark.parametrize("name", ["qwen3.5-397b", "QWEN/qwen3.5-397B-A17B", "Qwen3.5-397B-A17B-Instruct"])
def test_a_known_model_may_be_named_loosely(capsys: pytest.CaptureFixture[str], name: str) -> None:
    assert data(capsys, name, "--arena", "40GiB")["model"] == "Qwen/Qwen3.5-397B-A17B"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["qwen3.5-39b"], ["no directory 'qwen3.5-39b'", "did you mean Qwen3.5-9B", "config.json", "owner/name"]),
        (["granite"], ["did you mean granite-4.0-h-"]),
        (["zzzz"], ["`weft plan` lists those it knows"]),
        (["Qwen/Qwen3.5-5B"], ["'Qwen/Qwen3.5-5B'", "hub", "weft knows Qwen3.5-"]),
        (["./nowhere"], ["no such directory"]),
        (["lfm2-1.2b", "--tp", "3"], ["--tp is 3", "32 heads of attention", "it may be 1, 2, 4, 8, 16, 32"]),
        (["lfm2-1.2b", "--tp", "0"], ["--tp"]),
        (["lfm2-1.2b", "--memory", "lots"], ["--memory 'lots' is not a size"]),
        (["lfm2-1.2b", "--memory", "0"], ["--memory is '0'; it must be at least 1 B"]),
        (["lfm2-1.2b", "--memory", "1GiB", "--arena", "1GiB"], ["--memory and --arena"]),
        (["lfm2-1.2b", "--kv-dtype", "fp7"], ["--kv-dtype", "'fp7' is not one of 'auto', 'float32', 'bfloat16'"]),
        (["lfm2-1.2b", "--max-model-len", "999999"], ["--max-model-len 999999", "128000"]),
        (["lfm2-1.2b", "--plot", "bars.png"], ["--plot bars.png", ".svg or .html"]),
        (["lfm2-1.2b", "--plot", "/nope/bars.svg"], ["--plot /nope/bars.svg: there is no folder /nope"]),
        (["lfm2-1.2b", "--memmory", "1GiB"], ["did you mean --memory?"]),
    ],
)
def test_bad_input_is_answered_with_what_to_type_instead(
    capsys: pytest.CaptureFixture[str], arguments: list[str], words: list[str]
) -> None:
    error = refusal(capsys, *arguments)
    assert all(word in error for word in words), error


@pytest.mark.parametrize("text", ["{", "[1]", '{"model_type": "ctrl"}'])
def test_a_config_that_cannot_be_read_is_named(capsys: pytest.CaptureFixture[str], tmp_path: Path, text: str) -> None:
    (tmp_path / "config.json").write_text(text)
    assert "config.json" in refusal(capsys, str(tmp_path))


@pytest.mark.parametrize("suffix", [".svg", ".html"])
def test_the_screen_is_written_to_a_file_when_asked(
    capsys: pytest.CaptureFixture[str], tmp_path: Path, suffix: str
) -> None:
    file = tmp_path / f"plan{suffix}"
    arguments = ("lfm2-1.2b", "--memory", "8GiB", "--compare", "--plot", str(file))
    assert "padded" in said(capsys, *arguments)
    assert "padded" in file.read_text()
    file.unlink()
    json.loads(said(capsys, *arguments, "--json"))  # nothing but JSON on stdout
    assert "█" in file.read_text()


def test_a_plan_without_memory_is_of_this_machine(
    capsys: pytest.CaptureFixture[str], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.host.free_ram_bytes", lambda: 4 << 30)
    assert "4.0 GiB RAM free on this machine" in said(capsys, "lfm2-350m")


def test_a_plan_imports_no_torch_and_no_server() -> None:
    code = (
        "from weft.cli.main import main\nmain(['plan', 'lfm2-1.2b', '--memory', '4GiB', '--compare'])\n"
        "import sys\nprint('LOADED', *sys.modules)"
    )
    answer = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    loaded = set(answer.stdout.rsplit("LOADED", 1)[1].split())
    assert "weft.planning.model_plan" in loaded
    assert not loaded & {"torch", "transformers", "numpy", "httpx", "starlette", "huggingface_hub"}


@pytest.mark.parametrize(
    ("arguments", "line"),
    [
        (("Qwen3.5-9B", "--memory", "48GiB"), "weft serve Qwen/Qwen3.5-9B --memory "),
        (("Qwen3.5-9B", "--memory", "48GiB", "--tp", "2"), "weft serve Qwen/Qwen3.5-9B --tp 2 --memory "),
        (("Qwen3.5-9B", "--memory", "16GiB"), "weft serve Qwen/Qwen3.5-9B --quantize int8 --memory "),
        (
            (
                "Qwen3.5-9B",
                "--arena",
                "8GiB",
                "--quantize",
                "int4",
                "--kv-dtype",
                "fp8",
                "--state-dtype",
                "fp16",
                "--max-model-len",
                "4096",
            ),
            "weft serve Qwen/Qwen3.5-9B --quantize int4 --kv-dtype fp8 --state-dtype float16 --memory 8192MiB "
            "--max-model-len 4096",
        ),
        (("weft-recall", "--memory", "64MiB"), "weft serve --memory "),
        (
            ("Qwen3.5-397B-A17B", "--memory", "141GiB", "--tp", "8", "--ep"),
            "weft serve Qwen/Qwen3.5-397B-A17B --tp 8 --ep --memory ",
        ),
        (("Qwen3.5-397B-A17B", "--memory", "141GiB"), "no `weft serve` line fits in this memory; try --tp"),
    ],
)
def test_a_plan_ends_with_the_line_that_serves_it(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], line: str
) -> None:
    assert main(["plan", *arguments]) in (0, 1)
    shown = " ".join(capsys.readouterr().out.replace("\\\n", "").split())
    start = shown.rfind(line)
    assert start >= 0, shown[-200:]
    words = shown[start:].split()
    assert main(["plan", *arguments, "--json"]) in (0, 1)
    serve = json.loads(capsys.readouterr().out)["serve"]
    assert serve == (" ".join(words) if words[0] == "weft" else None)
    if words[0] == "weft":
        command = serve_command.make_context("serve", words[2:])
        size = parse_bytes(command.params["memory"], flag="--memory")
        assert 0 < size <= 48 << 30


@pytest.mark.parametrize(
    ("arguments", "split"),
    [
        (
            ("Qwen3.5-9B", "--memory", "48GiB"),
            "of 48.0 GiB: 16.7 GiB weights, 3.1 GiB kept free, 28.2 GiB for --memory",
        ),
        (
            ("Qwen3.5-9B", "--memory", "16GiB"),
            "of 16.0 GiB: 10.3 GiB int8 weights, 598 MiB kept free, 5.1 GiB for --memory",
        ),
        (
            ("Qwen3.5-397B-A17B", "--memory", "141GiB", "--tp", "8"),
            "of 141 GiB: 92.5 GiB weights, 4.9 GiB kept free, 43.6 GiB for --memory",
        ),
        (("Qwen3.5-9B", "--arena", "8GiB"), "16.7 GiB weights, and apart from them 8.0 GiB for --memory"),
    ],
)
def test_above_the_line_that_serves_stands_what_becomes_of_the_memory(
    capsys: pytest.CaptureFixture[str], arguments: tuple[str, ...], split: str
) -> None:
    assert main(["plan", *arguments]) in (0, 1)
    above, command = capsys.readouterr().out.split("weft serve ")
    assert above.splitlines()[-1] == split
    assert command.startswith("Qwen/")


@pytest.mark.parametrize("name", [*ON_CPUS, "qwen3_5"])
def test_a_plan_says_which_models_no_gpu_computes(capsys: pytest.CaptureFixture[str], name: str) -> None:
    arguments = (str(checkpoint(name)), "--memory", "2GiB")
    shown, found = " ".join(said(capsys, *arguments).split()), data(capsys, *arguments)
    refused = name in ON_CPUS
    assert (f"only on CPUs: it {ON_CPUS.get(name)}" in shown) is refused
    assert found["why_no_gpu"] == ON_CPUS.get(name, "")
    assert ("--device cpu" in found["serve"]) is refused


@pytest.mark.parametrize(
    ("command", "words"),
    [
        (
            "plan",
            [
                "Memory of one device, weights included",
                "The --memory of `weft serve` is a part of it",
                "the memory for KV pages and states without weights, as `weft serve --memory` takes it",
            ],
        ),
        ("serve", ["Memory for KV pages and recurrent states, weights apart"]),
    ],
)
def test_the_help_says_which_memory_a_flag_is(
    capsys: pytest.CaptureFixture[str], command: str, words: list[str]
) -> None:
    assert main([command, "--help"]) == 0
    said = " ".join(capsys.readouterr().out.split())
    assert all(word in said for word in words), said


def test_a_store_is_compared_with_computing(capsys: pytest.CaptureFixture[str]) -> None:
    asked = ["plan", "Qwen3.5-397B-A17B", "--memory", "141GiB", "--tp", "8", "--quantize", "fp8"]
    assert main([*asked, "--store", "3GB/s@2ms"]) == 0
    out = capsys.readouterr().out
    assert "restored in" in out
    assert "computed at the roofline of 8 x H100" in out
    assert main([*asked, "--store", "3GB/s@2ms", "--json"]) == 0
    first = json.loads(capsys.readouterr().out)["store"]["prefixes"][0]
    assert first["bytes"] == 4096 * 30_720 + 192_061_440, "whole records, not those of one rank"
    assert first["restore_s"] == pytest.approx(0.002 + first["bytes"] / 3e9)
    assert 0.02 < first["compute_s"] < 0.025
    assert main([*asked, "--json"]) == 0
    assert "store" not in json.loads(capsys.readouterr().out)


def test_a_measured_prefill_rate_stands_in_for_a_device(capsys: pytest.CaptureFixture[str]) -> None:
    assert (
        main(
            [
                "plan",
                "LFM2-350M",
                "--arena",
                "1GiB",
                "--store",
                "500MB/s",
                "--prefill-rate",
                "450",
                "--max-model-len",
                "900",
                "--json",
            ]
        )
        == 0
    )
    [one] = json.loads(capsys.readouterr().out)["store"]["prefixes"]
    assert one["compute_s"] == 2.0
    assert one["restore_s"] < 0.05


@pytest.mark.parametrize(
    ("flags", "says"),
    [
        (["--store", "fast"], "--store 'fast' is not a rate"),
        (["--store", "3GB/s@soon"], "not a latency"),
        (["--store", "3GB/s", "--device", "abacus"], "--device 'abacus'"),
    ],
)
def test_a_store_or_device_that_cannot_be_read_is_named(
    flags: list[str], says: str, capsys: pytest.CaptureFixture[str]
) -> None:
    assert main(["plan", "LFM2-350M", "--arena", "1GiB", *flags]) == 2
    assert says in capsys.readouterr().err
