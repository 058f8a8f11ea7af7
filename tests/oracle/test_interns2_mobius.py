"""Intern-S2-Mobius against transformers' own Qwen3.5, whose layers have a copy of the bank each: the same model."""

from __future__ import annotations

import json
from pathlib import Path

import torch
import transformers
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint
from tests.oracle.model_driver import ModelDriver
from weft.models.loading import load_model

TOKENS = [(7 * place * place + 3 * place) % 500 for place in range(150)]


def copied(config: dict[str, object], directory: Path, shift: int = 0) -> Path:
    """Write the checkpoint with each layer's experts under the name of the layer. ``shift``: banks later."""
    stored, layers, banks = {}, config["num_hidden_layers"], config["num_blocks"]
    assert isinstance(layers, int)
    assert isinstance(banks, int)
    for name, tensor in load_file(checkpoint("interns2_mobius") / "model.safetensors").items():
        _, _, of_bank = name.partition("model.meta_mlp.")
        number, _, role = of_bank.partition(".")
        names = [
            f"model.layers.{layer}.mlp.{role}" for layer in range(layers) if str((layer + shift) % banks) == number
        ]
        stored |= {new: tensor.clone() for new in (names if of_bank else [name])}
    save_file(stored, directory / "model.safetensors", metadata={"format": "pt"})
    (directory / "config.json").write_text(json.dumps(config | {"model_type": "qwen3_5_moe_text"}))
    return directory


def difference(shift: int, directory: Path) -> float:
    config = json.loads((checkpoint("interns2_mobius") / "config.json").read_text())
    theirs = transformers.Qwen3_5MoeForCausalLM.from_pretrained(
        copied(config, directory, shift), dtype=torch.float64, experts_implementation="eager"
    )
    with torch.no_grad():
        truth = theirs(torch.tensor([TOKENS])).logits[0]
    driver = ModelDriver(load_model(checkpoint("interns2_mobius")).model, sequences=1, length=160)
    return float((torch.cat(driver.step((0, TOKENS))).double() - truth).abs().max())


def test_layers_with_copies_of_their_bank_compute_the_same(tmp_path: Path) -> None:
    assert difference(0, tmp_path) < 1e-4


def test_the_next_bank_shows(tmp_path: Path) -> None:
    """Negative control."""
    assert difference(1, tmp_path) > 0.1
