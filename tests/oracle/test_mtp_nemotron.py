"""The head of Nemotron 3: its drafts are those of transformers' own layers, and it changes no token."""

from __future__ import annotations

import functools
import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoints import checkpoint, reference
from tests.oracle.serving import Serving
from weft.costs.rows import RowCosts
from weft.models.loading import LoadedModel, load_model
from weft.request import SamplingParams
from weft.speculation.speculator import Speculator

NAME = "nemotron_h_moe"
EXPERTS, ATTENTION = 1, 2
"""The layers of the trunk whose weights the head has too."""
PROMPT = [(7 * at * at + 3) % 500 + 4 for at in range(40)]
NORMS = ("layers.0.enorm", "layers.0.hnorm", "layers.0.norm", "layers.1.norm", "layers.1.final_layernorm")


@pytest.fixture(scope="module")
def directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A checkpoint with a head of its own norms and join, and of copies of the trunk's layers."""
    made = tmp_path_factory.mktemp("nemotron") / "model"
    shutil.copytree(checkpoint(NAME), made)
    config = json.loads((made / "config.json").read_text())
    config |= {"num_nextn_predict_layers": 1, "mtp_layers_block_type": ["attention", "moe"]}
    (made / "config.json").write_text(json.dumps(config))
    noise = torch.Generator().manual_seed(4)
    tensors: dict[str, torch.Tensor] = {}
    [file] = made.glob("*.safetensors")
    trunk = load_file(file)
    for name, tensor in trunk.items():
        for layer, at in ((ATTENTION, 0), (EXPERTS, 1)):
            mark = f"layers.{layer}.mixer."
            if mark in name:
                tensors[f"mtp.layers.{at}.mixer.{name.split(mark)[1]}"] = tensor.clone()
    width = config["hidden_size"]
    for name in NORMS:
        tensors[f"mtp.{name}.weight"] = 1 + 0.3 * torch.randn(width, generator=noise)
    tensors["mtp.layers.0.eh_proj.weight"] = torch.randn(width, 2 * width, generator=noise) * width**-0.5
    save_file(trunk | tensors, file, metadata={"format": "pt"})
    return made


def normed(x: torch.Tensor, weight: torch.Tensor, eps: float) -> torch.Tensor:
    return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + eps) * weight


def first_drafts(directory: Path, tokens: list[int]) -> list[int]:
    """What the head drafts behind each token but the last, by the layers of transformers."""
    model: Any = reference(NAME)
    [file] = directory.glob("*.safetensors")
    head = {name.removeprefix("mtp."): tensor for name, tensor in load_file(file).items()}
    eps = model.config.layer_norm_epsilon
    norm = functools.partial(normed, eps=eps)
    enorm, hnorm, attends, chooses, last = (head[f"{name}.weight"] for name in NORMS)
    with torch.no_grad():
        ids = torch.tensor([tokens])
        hidden = model.model(ids).last_hidden_state[:, :-1]
        embedded = model.get_input_embeddings()(ids[:, 1:])
        x = torch.cat((norm(embedded, enorm), norm(hidden, hnorm)), -1) @ head["layers.0.eh_proj.weight"].T
        layers = model.model.layers
        count = x.shape[1]
        mask = torch.full((count, count), float("-inf")).triu(1)[None, None]
        attended = layers[ATTENTION].mixer(norm(x, attends), attention_mask=mask)
        x = x + (attended[0] if isinstance(attended, tuple) else attended)
        x = x + layers[EXPERTS].mixer(norm(x, chooses))
        return model.lm_head(norm(x, last))[0].argmax(-1).tolist()


def served(model: LoadedModel, source: Speculator | None) -> list[int]:
    sampling = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)
    return list(Serving("", model=model, drafter=source).run([PROMPT], sampling)[0].tokens)


def test_its_drafts_are_those_of_transformers_layers_and_change_no_token(directory: Path) -> None:
    offered: list[tuple[int, ...]] = []

    class Listening(Speculator):
        def offer(self, key: int, tokens: Any, chances: Any) -> None:
            offered.append(tuple(tokens))
            super().offer(key, tokens, chances)

    loaded = load_model(directory, mtp=True)
    assert loaded.model.mtp is not None
    dear = Listening(("mtp",), costs=RowCosts({1: 1.0, 2: 100.0}))   # no draft is worth a window
    assert dear._head is not None
    dear._head.drafts = lambda sequences, costs: 1   # type: ignore[method-assign]
    tokens = served(loaded, dear)
    assert tokens == served(load_model(directory), None)
    expected = first_drafts(directory, [*PROMPT, *tokens])[len(PROMPT) - 1:]
    assert [draft[0] for draft in offered] == expected[:len(offered)]
    assert len(offered) >= 20
    assert len(set(expected)) > 3   # the control: it says more than one thing

    free = Speculator(("mtp",), costs=RowCosts({1: 1.0, 64: 1.001}),
                      head_seconds={1: 1e-6, 2: 2e-6, 3: 3e-6})
    assert free._head is not None   # its weights are noise, and noise is rarely right: drafts count as likely
    free._head.drafts = lambda sequences, costs: 3   # type: ignore[method-assign]
    free._head.chances.of("").survivals = lambda proposal: [0.9] * len(proposal.tokens)   # type: ignore[method-assign]
    assert served(loaded, free) == tokens
    assert free.stats().drafted > 10


def test_a_head_of_other_layers_is_left_out(directory: Path, tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(directory, other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(
        config | {"mtp_layers_block_type": ["attention", "moe", "moe"]}))
    loaded = load_model(other, mtp=True)
    assert loaded.model.mtp is None
    assert any("multi-token prediction" in warning for warning in loaded.warnings)
