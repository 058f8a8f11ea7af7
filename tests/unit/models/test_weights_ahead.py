"""How much memory is touched ahead: what the weights will take, and nothing where they lie elsewhere."""

from __future__ import annotations

import json
from pathlib import Path
from typing import Any

import pytest

from weft.assemble import weights_ahead
from weft.assemble.weights_ahead import bytes_ahead
from weft.config import EngineConfig

SHAPES = {"model.layers.0.q_proj.weight": ("BF16", (64, 32)), "model.experts": ("BF16", (2, 16, 32)),
          "model.norm.weight": ("BF16", (32,)), "model.router": ("F32", (4, 32)),
          "model.visual.proj": ("BF16", (64, 32))}
MATRICES = 64 * 32 + 2 * 16 * 32


def write_headers(directory: Path) -> None:
    header: dict[str, Any] = {}
    end = 0
    for name, (dtype, shape) in SHAPES.items():
        size = {"BF16": 2, "F32": 4}[dtype]
        for extent in shape:
            size *= extent
        header[name] = {"dtype": dtype, "shape": shape, "data_offsets": [end, end + size]}
        end += size
    text = json.dumps(header).encode()
    (directory / "model.safetensors").write_bytes(len(text).to_bytes(8, "little") + text + bytes(end))


def test_matrices_of_the_language_model_count_in_12_bits(tmp_path: Path) -> None:
    write_headers(tmp_path)
    assert bytes_ahead(EngineConfig(device="cpu"), tmp_path) == MATRICES * 3 // 2


def test_at_most_half_of_a_containers_memory_is_touched(tmp_path: Path,
                                                        monkeypatch: pytest.MonkeyPatch) -> None:
    write_headers(tmp_path)
    monkeypatch.setattr(weights_ahead, "container_memory_limit_bytes", lambda: MATRICES)
    assert bytes_ahead(EngineConfig(device="cpu"), tmp_path) == MATRICES // 2


@pytest.mark.parametrize("config", [{"device": "cuda"}, {"quantize": "int8"}, {"weights_cache": "cache"},
                                    {"tp": 2}, {"cpu_kernels": "torch"}, {"dtype": "float32"}])
def test_nothing_is_touched_for_weights_that_lie_elsewhere(tmp_path: Path, config: dict[str, Any]) -> None:
    write_headers(tmp_path)
    assert bytes_ahead(EngineConfig(**{"device": "cpu", **config}), tmp_path) == 0


def test_files_that_cannot_be_read_are_left_to_the_reader_of_weights(tmp_path: Path) -> None:
    assert bytes_ahead(EngineConfig(device="cpu"), tmp_path) == 0
    (tmp_path / "model.safetensors").write_bytes(b"no header")
    assert bytes_ahead(EngineConfig(device="cpu"), tmp_path) == 0
