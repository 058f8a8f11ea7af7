"""Putting the parts together: what is resolved, what is shrunk, and what is said about it."""

from __future__ import annotations

import shutil
import subprocess
import sys
from pathlib import Path

import msgspec
import psutil
import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from weft.assemble import ModelInfo, assemble, overlaps
from weft.assemble import room as assembly
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.request import Request, SamplingParams


def info(name: str = "granite", **fields: object) -> ModelInfo:
    made = assemble(EngineConfig(model=str(checkpoint(name)), **fields))  # type: ignore[arg-type]
    made.core.close()
    return made.info


def test_the_info_says_what_is_served_and_crosses_processes():
    made = info(memory="8MiB", max_model_len=512, threads=1)
    assert (made.name, made.family) == ("granite", "granite_hybrid")
    assert (made.dtype, made.device) == ("float32", "cpu")
    assert made.layers == "2 mamba2, 2 attention"
    assert made.sizes.max_model_len == 512
    assert made.threads == 1 == torch.get_num_threads()
    assert made.weights_bytes > 100_000
    rows = {row.name: row.size_bytes for row in made.memory}
    assert 0.9 * 2**23 < rows["arena"] <= 2**23
    assert rows["weights"] == made.weights_bytes
    assert rows["longest sequence"] == 512 * rows["a token's KV"] + rows["a sequence's state"]
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(made), type=ModelInfo) == made


def test_progress_is_told_in_lines():
    lines: list[str] = []
    config = EngineConfig(model=str(checkpoint("lfm2")), memory="4MiB")
    assemble(config, on_progress=lines.append).core.close()
    assert any("100 %" in line for line in lines)
    assert lines[-2].startswith("memory: ")
    assert lines[-1].startswith("speculation: ")


def test_what_does_not_fit_is_shrunk_and_said():
    made = info(memory="700KB")
    assert made.sizes.max_model_len < 4096
    assert any("--max-model-len 4096 shrunk to" in note for note in made.notes)
    assert info(memory="16MiB", max_model_len=256).notes == []


def test_more_memory_than_the_machine_has_is_shrunk_and_said(monkeypatch):
    monkeypatch.setattr(assembly, "free_ram_bytes", lambda: 10_000_000)
    made = info(memory="1GiB")
    assert made.sizes.memory_bytes <= 9_000_000
    assert any("--memory 1GiB shrunk to 8.6 MiB" in note for note in made.notes)


def test_a_model_without_states_says_that_it_compresses_nothing():
    assert any(
        "--no-exact compresses nothing here" in note for note in info("llama", memory="16MiB", exact=False).notes
    )
    assert not any("--no-exact" in note for note in info("qwen3_5", memory="16MiB", exact=False).notes)


def test_by_default_the_arena_is_a_share_of_the_free_ram_and_no_more_than_could_be_used(monkeypatch):
    monkeypatch.setattr(assembly, "free_ram_bytes", lambda: 20_000_000)
    assert 7_000_000 < info().sizes.memory_bytes <= 8_000_000
    monkeypatch.setattr(assembly, "free_ram_bytes", lambda: 10**12)
    small = info(max_num_seqs=2, max_model_len=64)
    assert small.sizes.memory_bytes < 10_000_000
    assert small.notes == []


def test_free_ram_is_never_more_than_the_system_has():
    assert 0 < assembly.free_ram_bytes() <= psutil.virtual_memory().total


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_every_dtype_serves(dtype):
    made = assemble(EngineConfig(model=str(checkpoint("qwen3_5")), memory="4MiB", dtype=dtype))
    assert made.info.dtype == dtype
    made.core.submit(
        Request(
            request_id="a",
            prompt_tokens=[5] * 70,
            sampling=SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
    )
    tokens = [token for _ in range(20) for event in made.core.step() for token in event.tokens]
    assert made.core.failure is None
    assert len(tokens) == 8
    made.core.close()


@pytest.mark.parametrize(
    ("asked", "on_cpu", "on_gpu"), [("auto", False, True), ("on", True, True), ("off", False, False)]
)
def test_steps_overlap_by_themselves_on_a_gpu_and_elsewhere_when_asked(asked, on_cpu, on_gpu):
    config = EngineConfig(overlap=asked)
    assert overlaps(config, torch.device("cpu")) is on_cpu
    assert overlaps(config, torch.device("cuda", 0)) is on_gpu


def test_a_wrong_word_for_overlap_is_refused_before_anything_is_loaded():
    with pytest.raises(ConfigError, match=r"debug\.overlap is 'yes'; it may be auto, on or off"):
        assemble(EngineConfig(model="nowhere", overlap="yes"))  # type: ignore[arg-type]


def test_an_engine_whose_steps_overlap_says_the_same():
    said = {}
    for overlap in ("on", "off"):
        core = assemble(EngineConfig(model=str(checkpoint("granite")), memory="8MiB", overlap=overlap)).core
        core.submit(
            Request(
                request_id="a",
                prompt_tokens=list(range(5, 90)),
                sampling=SamplingParams(temperature=0.0, max_tokens=20, ignore_eos=True),
            )
        )
        said[overlap] = []
        while core.has_work:
            said[overlap] += [token for event in core.step() for token in event.tokens]
        core.audit()
        core.close()
    assert len(said["on"]) == 20
    assert said["on"] == said["off"]


NO_TOKENIZER = """
import sys
from weft.assemble import assemble
from weft.config import EngineConfig
try:
    assemble(EngineConfig(model=sys.argv[1]))
except Exception as error:
    print(type(error).__name__, error, "torch" in sys.modules)
"""


def test_a_missing_tokenizer_ends_the_start_before_torch_is_imported(tmp_path: Path) -> None:
    directory = tmp_path / "model"
    shutil.copytree(checkpoint("lfm2"), directory)
    for file in directory.glob("tokenizer*"):
        file.unlink()
    ended = subprocess.run(
        [sys.executable, "-c", NO_TOKENIZER, str(directory)], capture_output=True, text=True, check=True
    )
    assert ended.stdout.startswith("CheckpointError")
    assert "tokenizer" in ended.stdout
    assert ended.stdout.rstrip().endswith("False")
