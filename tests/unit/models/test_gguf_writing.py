"""``weft quantize --form q4_k``: the file is the one that llama.cpp's converter would make, and is whole."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
from dataclasses import replace
from pathlib import Path

import gguf
import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType
from gguf.quants import dequantize

from tests.fixtures.checkpoints import checkpoint, copy_checkpoint, made_once, make_checkpoint
from tests.support.gguf_files import write_gguf as converted
from tests.unit.models.test_gguf_models import logits, original
from weft.cli.main import main
from weft.errors import CheckpointError
from weft.models.hub import resolve_model
from weft.models.loading import load_model
from weft.tensor.weights.rounded import rounded
from weft_tools.quantize.gguf_pack import q4_k
from weft_tools.quantize.gguf_writing import write_gguf

FAMILIES = [
    "lfm2_moe",
    "qwen3_5_moe",
    "qwen3_next",
    "granite_moe",
    "granite_attention",
    "nemotron_h_moe",
    "falcon_h1",
    "jamba",
    "falcon_mamba",
    "mamba2",
    "qwen3_tied",
    "llama_scaled",
    "gpt_oss",
]
FIRST_KEYS = ("attention.head_count_kv", "feed_forward_length", "ssm.inner_size", "attention.key_length")
"""Keys that the fixture writes in another form, or of layers that the model lacks."""


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


@pytest.mark.parametrize("name", FAMILIES)
def test_the_file_has_the_names_shapes_and_values_of_a_converted_one(name: str, tmp_path: Path) -> None:
    """By gguf's reader, beside a file whose changes are written from the converter's description."""
    write_gguf(original(name), tmp_path / "own.gguf")
    converted(original(name), tmp_path / "converted.gguf")
    own, truth = (gguf.GGUFReader(tmp_path / f"{file}.gguf") for file in ("own", "converted"))
    wanted = {tensor.name: tensor for tensor in truth.tensors}
    assert {tensor.name for tensor in own.tensors} == wanted.keys()
    for tensor in own.tensors:
        values = np.asarray(wanted[tensor.name].data, dtype=np.float32)
        assert tensor.shape.tolist() == wanted[tensor.name].shape.tolist()
        found = dequantize(tensor.data, tensor.tensor_type).reshape(values.shape)
        most = {"F32": 2e-7, "Q8_0": 0.01, "Q4_K": 0.09}[tensor.tensor_type.name]
        assert np.linalg.norm(found - values) <= most * max(np.linalg.norm(values), 1e-9), tensor.name
    for key, field in truth.fields.items():
        if not key.startswith("GGUF.") and not key.endswith(FIRST_KEYS):
            assert own.fields[key].contents() == field.contents(), key
    assert "not used" not in str(load_model(resolve_model(tmp_path / "own.gguf"), "float32").warnings)


@pytest.fixture(scope="module")
def wide() -> Path:
    """Rows of whole blocks."""
    return made_once("wide_qwen3_5", "qwen3_5", hidden_size=256, intermediate_size=512)


def test_the_model_of_the_file_is_near_and_the_report_says_how_near(wide: Path, tmp_path: Path) -> None:
    errors = write_gguf(wide, tmp_path / "out.gguf")
    kinds = {tensor.name: tensor.tensor_type for tensor in gguf.GGUFReader(tmp_path / "out.gguf").tensors}
    assert kinds["blk.0.ffn_gate.weight"] == GGMLQuantizationType.Q4_K
    assert kinds["token_embd.weight"] == GGMLQuantizationType.Q8_0
    assert kinds["blk.0.ssm_alpha.weight"] == GGMLQuantizationType.F32, "decay is steered in full"
    assert all(0.05 < one.error < 0.09 for one in errors if kinds[one.name] == GGMLQuantizationType.Q4_K)
    assert sum(one.copied_bytes for one in errors) < sum(one.stored_bytes for one in errors) / 5
    found, truth = (logits(load_model(path, "float32")) for path in (resolve_model(tmp_path / "out.gguf"), wide))
    rounded_too = logits(load_model(wide, "float32", quantize="int4"))
    assert (found - truth).norm() < (rounded_too - truth).norm()


def test_the_packer_means_what_gguf_reads_and_errs_less_than_int4() -> None:
    generator = torch.Generator().manual_seed(3)
    normal = torch.randn(64, 1024, generator=generator)
    for rows in (
        normal,
        normal**3,
        normal + 2,
        torch.zeros(2, 256),
        torch.full((1, 256), 0.3),
        torch.full((1, 256), -0.3),
    ):
        blocks, values = q4_k(rows)
        assert np.array_equal(dequantize(blocks.numpy(), GGMLQuantizationType.Q4_K), values.numpy())
        assert float((values - rows).norm()) <= 0.9 * float((rounded(rows, 4).dense() - rows).norm()) + 1e-2


_KILLED = """
import os, signal, sys
from pathlib import Path
from weft_tools.quantize.gguf_writing import write_gguf
from weft_tools.quantize import gguf_writing as writing
writing._SYNCED_BYTES = 1 << 16
seen = []
def on_matrix(one):
    seen.append(one)
    if len(seen) == 8:
        os.kill(os.getpid(), signal.SIGKILL)
write_gguf(Path(sys.argv[1]), Path(sys.argv[2]), on_matrix)
"""


def test_kill_9_in_the_middle_leaves_no_file_and_the_next_run_goes_on(wide: Path, tmp_path: Path) -> None:
    out = tmp_path / "out.gguf"
    killed = subprocess.run([sys.executable, "-c", _KILLED, str(wide), str(out)], check=False)
    assert killed.returncode == -signal.SIGKILL
    assert not out.exists()
    done = tmp_path / "out.gguf.partial" / "done.json"
    assert '"count": 0' not in done.read_text(), "some tensors are on disk"
    seen: list[str] = []
    errors = write_gguf(wide, out, lambda one: seen.append(one.name))
    assert 0 < len(seen) < len(errors), "what was on disk is not written again"
    again = write_gguf(wide, tmp_path / "again.gguf")
    named = gguf.GGUFReader(out).fields["general.name"].contents()
    assert out.read_bytes() == (tmp_path / "again.gguf").read_bytes()
    assert named == "wide_qwen3_5"
    assert [replace(one, error=0.0) for one in errors] == [replace(one, error=0.0) for one in again]
    # Written by two processes: torch adds up a norm in another order where it has another number of threads.
    assert [one.error for one in errors] == pytest.approx([one.error for one in again], rel=1e-5)
    assert not (tmp_path / "out.gguf.partial").exists()


def test_what_cannot_be_written_is_one_line(wide: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    out = tmp_path / "out.gguf"
    with pytest.raises(CheckpointError, match=r"name ends in \.gguf"):
        write_gguf(wide, tmp_path / "out")
    with pytest.raises(CheckpointError, match="GGUF files are written of lfm2"):
        write_gguf(checkpoint("zamba2"), out)
    pieces = copy_checkpoint(wide, tmp_path / "pieces")
    content = json.loads((pieces / "tokenizer.json").read_text())
    fallback = content | {"model": content["model"] | {"byte_fallback": True}}
    (pieces / "tokenizer.json").write_text(json.dumps(fallback))
    with pytest.raises(CheckpointError, match="byte-level BPE is written"):
        write_gguf(pieces, out)
    cut = content | {"pre_tokenizer": {"type": "Split", "pattern": {"Regex": "x+"}}}
    (pieces / "tokenizer.json").write_text(json.dumps(cut))
    with pytest.raises(CheckpointError, match=r"cuts text by 'x\+'"):
        write_gguf(pieces, out)
    assert not out.exists()
    assert main(["quantize", str(wide), str(out), "--form", "q4_k"]) == 0
    assert "matrices in q4_k" in capsys.readouterr().out
    assert main(["quantize", str(wide), str(out), "--form", "q4_k"]) == 2
    assert "exists already" in capsys.readouterr().err


def test_only_the_kernel_of_a_short_convolution_stays_in_32_bits(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "lfm2", "lfm2", hidden_size=256, intermediate_size=512)
    write_gguf(source, tmp_path / "out.gguf")
    tensors = gguf.GGUFReader(tmp_path / "out.gguf").tensors
    kinds = {tensor.name: tensor.tensor_type.name for tensor in tensors}
    layer = next(name.split(".")[1] for name in kinds if "shortconv" in name)
    assert [kinds[f"blk.{layer}.shortconv.{part}.weight"] for part in ("conv", "in_proj", "out_proj")] == [
        "F32",
        "Q4_K",
        "Q4_K",
    ]
