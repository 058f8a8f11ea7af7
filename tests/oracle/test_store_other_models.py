"""Another model, dtype, quantisation or rope at the same path: no hit, its own right tokens, and a line."""

from __future__ import annotations

import json
import re
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.store_life import answer
from tests.support.given_costs import GIVEN_COSTS
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.runner import kv_scales


def life(model: Path, store: Path | None, **changes: Any) -> tuple[list[int], int, list[str]]:
    """(tokens of prompt 0, cached tokens, what the start says of the store)."""
    settings: dict[str, Any] = {
        "memory": "64MiB",
        "device": "cpu",
        "dtype": "float32",
        "threads": 1,
        "max_model_len": 1024,
    }
    if store is not None:
        settings |= {"store": str(store), "store_size": "256MiB", "store_reserve": "1MiB", "step_costs": GIVEN_COSTS}
    said: list[str] = []
    built = assemble(EngineConfig(model=str(model), **settings | changes), on_progress=said.append)
    tokens, cached = answer(built.core, 0)
    built.core.close()
    notes = [note for note in built.info.notes if str(store) in note]
    assert store is None or notes[0] in [f"{line}." for line in said], "the log says what is there as well"
    return tokens, cached, notes


@pytest.fixture(scope="module")
def place(tmp_path_factory: pytest.TempPathFactory) -> tuple[Path, Path, list[int]]:
    """A model, a store that has prompt 0 of it, and the answer."""
    folder = tmp_path_factory.mktemp("others")
    model = shutil.copytree(checkpoint("lfm2"), folder / "model")
    tokens, cached, notes = life(model, folder / "store")
    assert cached == 0
    assert f"store {folder / 'store'}: nothing of this model" in notes[0]
    return model, folder / "store", tokens


def test_the_same_model_hits(place: tuple[Path, Path, list[int]]) -> None:
    """The control."""
    model, store, cold = place
    tokens, cached, notes = life(model, store)
    assert (tokens, cached) == (cold, 384)
    assert "snapshots of this model" in notes[0]


def another_rope(model: Path) -> None:
    config = json.loads((model / "config.json").read_text())
    config["rope_parameters"]["rope_theta"] = 10_000.0
    (model / "config.json").write_text(json.dumps(config))


def other_weights(model: Path) -> None:
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[-4096:] = content[-8192:-4096]
    file.write_bytes(content)


def one_element(model: Path) -> None:
    """The sign of one value in the middle of the file."""
    file = model / "model.safetensors"
    content = bytearray(file.read_bytes())
    content[len(content) // 2 | 3] ^= 0x80
    file.write_bytes(content)


def another_model(model: Path) -> None:
    shutil.rmtree(model)
    shutil.copytree(checkpoint("granite"), model)


@pytest.mark.parametrize(
    ("change", "settings"),
    [
        (another_rope, {}),
        (other_weights, {}),
        (one_element, {}),
        (another_model, {}),
        (None, {"dtype": "bfloat16"}),
        (None, {"quantize": "int8"}),
        (None, {"kv_dtype": "int8"}),
    ],
)
def test_another_one_at_the_same_path_never_hits(
    change: Callable[[Path], None] | None, settings: dict[str, str], place: tuple[Path, Path, list[int]], tmp_path: Path
) -> None:
    model, store, _ = place
    if change is not None:
        moved = shutil.copytree(model, tmp_path / "before")
        try:
            change(model)
            right, other = life(model, None, **settings), life(model, store, **settings)
        finally:
            shutil.rmtree(model)
            shutil.copytree(moved, model)
    else:
        right, other = life(model, None, **settings), life(model, store, **settings)
    assert other[:2] == (right[0], 0)
    assert re.search(r"nothing of this model, [0-9]+ snapshots of others", other[2][0])


@pytest.mark.parametrize("target", ["weft.store.identity.ARITHMETIC_VERSION", "torch.__version__"])
def test_another_version_of_the_arithmetic_never_hits(
    target: str, place: tuple[Path, Path, list[int]], monkeypatch: pytest.MonkeyPatch
) -> None:
    """After an update a state of before is not the one that this version computes."""
    model, store, cold = place
    monkeypatch.setattr(target, "999")
    tokens, cached, notes = life(model, store)
    assert (tokens, cached) == (cold, 0)
    assert re.search(r"nothing of this model, [0-9]+ snapshots of others", notes[0])


def test_pages_in_fp8_never_meet_other_scales(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Scales lie outside of the pages: with others, each number would be read as twice what it was."""
    model, store = checkpoint("lfm2"), tmp_path / "store"
    cold, *_ = life(model, store, kv_dtype="fp8")
    assert life(model, store, kv_dtype="fp8")[:2] == (cold, 384), "the control: the same scales hit"
    monkeypatch.setattr(kv_scales, "HEADROOM", 2 * kv_scales.HEADROOM)
    right, other = life(model, None, kv_dtype="fp8"), life(model, store, kv_dtype="fp8")
    assert other[:2] == (right[0], 0)
    assert re.search(r"nothing of this model, [0-9]+ snapshots of others", other[2][0])
