"""One key of config.json is changed: the logits follow transformers, or the start refuses in one line.

Each number, switch and name of each family's config.json, also inside of rope_parameters and such, gets another
value, and nothing else changes. transformers reads the same directory. A sample runs here, of the seed that
``WEFT_CONFIG_FUZZ`` names; ``all`` (``make fuzz-config``) runs every change of every family.
"""

from __future__ import annotations

import json
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.fixtures.checkpoints import CHECKPOINTS, _class_of, checkpoint
from tests.oracle.model_driver import ModelDriver
from weft.errors import WeftError
from weft.families.known_keys import OF_FAMILY
from weft.models.loading import load_model

TOKENS = torch.randint(3, 500, (90,), generator=torch.Generator().manual_seed(5)).tolist()
TOLERANCE = 1e-3
TIES = 2
"""Positions at which a router of many experts may choose by the last bit of a sum; settings change most of them."""
FAMILIES_SAMPLED, CHANGES_SAMPLED = 12, 6
OF_TRANSFORMERS = tuple(
    name
    for name, (kind, _) in CHECKPOINTS.items()
    if kind not in ("bailing_moe_v2_5", "gigachat3_5", "jet_nemotron", "minicpm_sala", "rwkv7")
)
"""Families whose class is transformers' own, with its own reading of the configuration."""
NOT_COMPARED = (
    "output_router_logits",
    "rescale_prenorm_residual",
    "time_step_min",
    "block_size",
    "number_of_conv_states",
    *OF_FAMILY["xlstm"],
)
"""Keys of training: transformers' forward pass fails at one value (``output_router_logits``), its initialisation
changes weights that were read (``rescale_prenorm_residual``), or its plain code does what its kernels do not
(``time_step_min``), or they choose code
(xLSTM, ``block_size`` of MiniMax, the cache that ``number_of_conv_states`` sizes)."""
LEFT_OUT = ("id2label", "label2id", "vision_config")
"""Names of labels, and towers that are not read with these checkpoints."""
Path_ = tuple[str, ...]


def changes(config: dict[str, Any], path: Path_ = ()) -> Iterator[tuple[Path_, Any]]:
    for key, value in config.items():
        here = (*path, key)
        if isinstance(value, bool):
            yield here, not value
        elif isinstance(value, int):
            yield from ((here, other) for other in (value + 1, 2 * value or 2, 1) if other != value)
        elif isinstance(value, float):
            yield here, value * 1.5 + 0.25
        elif isinstance(value, str):
            yield here, f"another_{value}"
        elif isinstance(value, dict) and value and key not in LEFT_OUT:
            yield from changes(value, here)


def changed(config: dict[str, Any], path: Path_, value: Any) -> dict[str, Any]:
    inner = changed(config[path[0]], path[1:], value) if len(path) > 1 else value
    return config | {path[0]: inner}


def theirs(directory: Path) -> torch.Tensor | None:
    """None where transformers cannot load it whole."""
    transformers.utils.logging.set_verbosity_error()
    model_type = json.loads((directory / "config.json").read_text())["model_type"]
    try:
        model, told = _class_of(model_type).from_pretrained(
            directory, dtype=torch.float32, attn_implementation="eager", output_loading_info=True
        )
        if told["missing_keys"] or told["mismatched_keys"] or told["unexpected_keys"]:
            return None
        with torch.inference_mode():
            return model.eval()(torch.tensor([TOKENS])).logits[0]
    except Exception:
        return None


def ours(directory: Path) -> torch.Tensor | str:
    try:
        model = load_model(directory, "float32").model
    except WeftError as error:
        return error.message
    if len(TOKENS) > model.spec.max_positions:
        return "config.json: the context is shorter than the text"
    return ModelDriver(model, sequences=1, length=96).step((0, TOKENS))[0]


def verdict(name: str, path: Path_, value: Any, directory: Path) -> str | None:
    """What is wrong; None where the law holds."""
    source = checkpoint(name)
    if not directory.exists():
        directory.mkdir()
        for file in source.iterdir():
            shutil.copy(file, directory / file.name)
    config = json.loads((source / "config.json").read_text())
    (directory / "config.json").write_text(json.dumps(changed(config, path, value)))
    said = f"{name}: {'.'.join(path)} = {value!r}"
    mine = ours(directory)
    if isinstance(mine, str):
        # The key, one that contradicts it now, or a tensor whose shape does.
        named = path[-1] in mine or mine.startswith("config.json: ") or ".safetensors" in mine
        return None if named and "\n" not in mine else f"{said}: refused without the key: {mine}"
    if path[-1] in NOT_COMPARED:
        return None
    other = theirs(directory)
    if other is None:
        return f"{said}: served, and transformers refuses"
    if mine.shape != other.shape or ((mine - other).abs().amax(-1) > TOLERANCE).sum() > TIES:
        return f"{said}: served, and differs from transformers"
    return None


def cases() -> Iterator[tuple[str, Path_, Any]]:
    asked = os.environ.get("WEFT_CONFIG_FUZZ", "0")
    chance = random.Random(asked)
    for name in OF_TRANSFORMERS if asked == "all" else chance.sample(OF_TRANSFORMERS, FAMILIES_SAMPLED):
        every = list(changes(json.loads((checkpoint(name) / "config.json").read_text())))
        for path, value in every if asked == "all" else chance.sample(every, CHANGES_SAMPLED):
            yield name, path, value


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_a_changed_key_is_followed_as_transformers_follows_it_or_refused(room: Path) -> None:
    wrong = [said for name, path, value in cases() if (said := verdict(name, path, value, room / name))]
    assert not wrong, "\n".join(wrong)


def test_a_difference_is_seen(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a reader that takes the key's default for its value."""
    name, path, value = "granite", ("logits_scaling",), 2.6
    assert verdict(name, path, value, room / name) is None
    unchanged = ours(checkpoint(name))
    monkeypatch.setattr("tests.oracle.test_config_fuzz.ours", lambda directory: unchanged)
    assert "differs from transformers" in str(verdict(name, path, value, room / name))
