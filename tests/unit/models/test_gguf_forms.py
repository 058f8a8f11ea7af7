"""ggml's blocks: values to the bit, and a model in blocks is the model of their values."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from gguf import GGMLQuantizationType

from tests.fixtures.checkpoints import VOCAB_SIZE, checkpoint, make_checkpoint
from tests.oracle.model_driver import ModelDriver
from tests.support.gguf_files import random_blocks, values_of, write_gguf
from weft.errors import CheckpointError
from weft.models.forms.gguf_blocks import BLOCK_FORMS
from weft.models.hub import resolve_model
from weft.models.loading import load_model
from weft.planning.weights import GGUF_BITS
from weft.tensor.weights.quantized import in_tiles

FORMS = tuple(name for name in BLOCK_FORMS if name != "MXFP4")
WIDE: dict[str, Any] = {"hidden_size": 256, "intermediate_size": 768}
"""Rows that are whole blocks of 256."""


@pytest.mark.parametrize("name", BLOCK_FORMS)
def test_values_are_those_of_the_library_to_the_bit(name: str) -> None:
    made = random_blocks(name, 37, 512)
    values = torch.from_numpy(values_of(made, GGMLQuantizationType[name]))
    codes = BLOCK_FORMS[name].codes(torch.from_numpy(made))
    assert torch.equal(codes.dense(), values)
    assert torch.equal(in_tiles(codes).dense(), values)
    # Tiles are of 16 rows; MXFP4 has one more number for each.
    held = in_tiles(codes).nbytes - (4 * 48 if name == "MXFP4" else 0)
    assert held * 8 == pytest.approx(GGUF_BITS[name] * 48 * 512)


@pytest.mark.parametrize("name", FORMS)
def test_a_model_in_blocks_gives_the_logits_of_its_values(
    name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """float32, inputs as they are: kept forms and widened ones are the same model."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = make_checkpoint(tmp_path / "wide", "lfm2", **WIDE)
    kind = {"blk.": GGMLQuantizationType[name]}
    loaded = load_model(
        resolve_model(write_gguf(source, tmp_path / "a.gguf", types=kind)), "float32", quantize_inputs=False
    )
    values = load_model(resolve_model(write_gguf(source, tmp_path / "b.gguf", types=kind, widened=True)), "float32")
    kept = name in BLOCK_FORMS
    assert kept == any("int" in form for form in loaded.weights_form.split(", "))
    assert kept != any("widened" in warning for warning in loaded.warnings)
    assert (logits(loaded.model) - logits(values.model)).abs().max().item() < 1e-4


def logits(model: Any) -> torch.Tensor:
    tokens = torch.randint(3, VOCAB_SIZE, (30,), generator=torch.Generator().manual_seed(5)).tolist()
    with torch.inference_mode():
        return ModelDriver(model, sequences=1, length=32).step((0, tokens))[0].clone()


@pytest.mark.parametrize("types", [{"blk.": "Q4_K", "token_embd": "Q6_K"}, {"": "Q8_0"}])
def test_a_tied_embedding_and_moved_columns_are_served_in_blocks(
    types: dict[str, str], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Qwen3.5 with V heads of 64 columns in tiled order, whose output projection has its columns moved."""
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    kinds = {begin: GGMLQuantizationType[name] for begin, name in types.items()}
    source = make_checkpoint(
        tmp_path / "wide",
        "qwen3_5",
        hidden_size=256,
        intermediate_size=512,
        linear_value_head_dim=64,
        tie_word_embeddings=True,
    )
    loaded = load_model(
        resolve_model(write_gguf(source, tmp_path / "a.gguf", types=kinds)), "float32", quantize_inputs=False
    )
    values = load_model(resolve_model(write_gguf(source, tmp_path / "b.gguf", types=kinds, widened=True)), "float32")
    assert (logits(loaded.model) - logits(values.model)).abs().max().item() < 1e-4


def test_scales_that_are_no_numbers_are_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    file = write_gguf(checkpoint("lfm2"), tmp_path / "a.gguf", types={"blk.": GGMLQuantizationType.Q8_0})
    from weft.models.gguf.header import read_header

    tensor = read_header(file).tensors["blk.0.ffn_up.weight"]
    content = bytearray(file.read_bytes())
    content[tensor.begin : tensor.begin + 2] = np.float16(np.nan).tobytes()
    file.write_bytes(content)
    with pytest.raises(CheckpointError, match=r"feed_forward.w3.weight has scales that are not finite"):
        load_model(resolve_model(file), "float32")


def test_a_form_of_inputs_is_refused_with_the_name_of_the_tensor(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    source = make_checkpoint(tmp_path / "wide", "lfm2", **WIDE)
    file = write_gguf(source, tmp_path / "a.gguf", types={"blk.": GGMLQuantizationType.Q8_K})
    with pytest.raises(CheckpointError, match="is stored as Q8_K, which is not a form of weights"):
        load_model(resolve_model(file), "float32")


def test_the_check_of_headers_does_not_import_torchs_compiler() -> None:
    """It takes five seconds. Bit operations and joins of meta tensors do that."""
    program = """
import sys
from weft.models.forms.gguf_blocks import BLOCK_FORMS
from weft.tensor.weights.quantized import in_tiles
for name, form in BLOCK_FORMS.items():
    one = form.empty(48, 512)
    both = in_tiles(one.above(one))
    assert (both.codes.shape[0], both.scales.shape[0]) == (6, 6), name
assert "torch._dynamo" not in sys.modules
import torch
torch.cat([one.codes, one.codes], dim=-2)
assert "torch._dynamo" in sys.modules, "the control: nothing is to be avoided any more"
"""
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr
