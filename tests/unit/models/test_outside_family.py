"""A family in a package of its own: ``tests/outside_family``, built and installed as pip would."""

from __future__ import annotations

import json
import subprocess
import sys
import zipfile
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
import torch.nn.functional as F
from safetensors.torch import save_file

from tests.fixtures.checkpoints import tokenizer
from tests.oracle.model_driver import ModelDriver
from tests.ranks.threads import load_ranks, logits_of
from weft.errors import CheckpointError, UnknownArchitectureError
from weft.families import all_families, find_family, read_architecture, served
from weft.models.loading import load_model
from weft.planning.weights import count_weights, form_of

PACKAGE = Path(__file__).parents[2] / "outside_family"
CONFIG = {
    "model_type": "leaky_lm",
    "architectures": ["LeakyForCausalLM"],
    "vocab_size": 512,
    "hidden_size": 64,
    "leaky_channels": 96,
    "intermediate_size": 80,
    "num_hidden_layers": 2,
    "max_position_embeddings": 4096,
    "dtype": "float32",
}
_BUILD = "import sys; from setuptools.build_meta import build_wheel; build_wheel(sys.argv[1])"


@pytest.fixture(scope="module")
def installed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder that the package's wheel was unpacked in, as pip does."""
    folder = tmp_path_factory.mktemp("installed")
    source = tmp_path_factory.mktemp("source") / "outside_family"
    subprocess.run(["cp", "-r", str(PACKAGE), str(source)], check=True)
    subprocess.run([sys.executable, "-c", _BUILD, str(folder)], cwd=source, check=True, capture_output=True)
    [wheel] = folder.glob("*.whl")
    with zipfile.ZipFile(wheel) as files:
        files.extractall(folder)
    return folder


@pytest.fixture
def on_path(installed: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(installed))
    yield
    for name in [name for name in sys.modules if name.split(".")[0] == "leaky_lm"]:
        del sys.modules[name]


def weights() -> dict[str, torch.Tensor]:
    generator, hidden, channels = torch.Generator().manual_seed(3), 64, 96

    def drawn(*shape: int) -> torch.Tensor:
        return torch.randn(shape, generator=generator) * shape[-1] ** -0.5

    tensors = {"model.embed_tokens.weight": drawn(512, hidden) * 8, "lm_head.weight": drawn(512, hidden)}
    tensors["model.norm.weight"] = 1 + drawn(hidden)
    for layer in range(2):
        at = f"model.layers.{layer}"
        for part in ("value", "gate"):
            tensors[f"{at}.leaky.{part}.weight"] = 1.5 * drawn(channels, hidden)
        tensors[f"{at}.leaky.rate"] = 3 + drawn(channels)
        tensors[f"{at}.leaky.out.weight"] = 3 * drawn(hidden, channels)
        for part in ("gate", "up"):
            tensors[f"{at}.mlp.{part}_proj.weight"] = drawn(80, hidden)
        tensors[f"{at}.mlp.down_proj.weight"] = drawn(hidden, 80)
        for norm in ("input_layernorm", "post_attention_layernorm"):
            tensors[f"{at}.{norm}.weight"] = 1 + drawn(hidden)
    return tensors


@pytest.fixture(scope="module")
def checkpoint(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("leaky")
    (folder / "config.json").write_text(json.dumps(CONFIG))
    save_file(weights(), folder / "model.safetensors")
    tokenizer().save_pretrained(folder)
    return folder


def formula(tokens: list[int]) -> torch.Tensor:
    """Return the logits [T, vocab] by the formulas of the package's page, in float64."""
    stored = {name.removeprefix("model."): tensor.double() for name, tensor in weights().items()}

    def norm(x: torch.Tensor, name: str) -> torch.Tensor:
        return x * torch.rsqrt(x.square().mean(-1, keepdim=True) + 1e-6) * stored[f"{name}.weight"]

    x = stored["embed_tokens.weight"][tokens]
    for layer in range(2):
        at = f"layers.{layer}"
        seen = norm(x, f"{at}.input_layernorm")
        value, gate = (seen @ stored[f"{at}.leaky.{part}.weight"].T for part in ("value", "gate"))
        decay, h, sums = torch.sigmoid(stored[f"{at}.leaky.rate"]), torch.zeros(96, dtype=torch.float64), []
        for row in value:
            h = decay * h + (1 - decay) * row
            sums.append(h)
        x = x + (torch.stack(sums) * F.silu(gate)) @ stored[f"{at}.leaky.out.weight"].T
        seen = norm(x, f"{at}.post_attention_layernorm")
        gate, up = (seen @ stored[f"{at}.mlp.{part}_proj.weight"].T for part in ("gate", "up"))
        x = x + (F.silu(gate) * up) @ stored[f"{at}.mlp.down_proj.weight"].T
    return norm(x, "norm") @ stored["lm_head.weight"].T


@pytest.mark.usefixtures("on_path")
def test_a_family_of_another_package_computes_its_formulas(checkpoint: Path) -> None:
    loaded, tokens = load_model(checkpoint), [(7 * i * i + 3 * i) % 500 for i in range(150)]
    driver = ModelDriver(loaded.model, sequences=1, length=160)
    rows = [*driver.step((0, tokens[:128])), *driver.step((0, tokens[128:149])), *driver.step((0, tokens[149:]))]
    truth = formula(tokens)
    torch.testing.assert_close(torch.cat(rows).double(), truth, rtol=1e-4, atol=1e-4)
    changed = formula([tokens[0] + 1, *tokens[1:]])
    assert (changed - truth)[-1].abs().max() > 1e-3, "the state carries nothing"


@pytest.mark.usefixtures("on_path")
def test_plans_and_ranks_follow_from_its_tables(checkpoint: Path) -> None:
    architecture, whole = read_architecture(CONFIG), load_model(checkpoint)
    counted = count_weights(architecture, architecture, 1, form_of(CONFIG, "float32", None))
    assert counted.rank_bytes == whole.weights_bytes
    apart = logits_of(load_ranks(checkpoint, 2))
    torch.testing.assert_close(apart, logits_of([whole]), rtol=1e-4, atol=1e-4)


@pytest.mark.usefixtures("on_path")
def test_a_family_of_another_package_is_imported_when_a_checkpoint_names_it() -> None:
    assert "leaky_lm" in served()
    assert "leaky_lm" not in sys.modules
    assert "leaky_lm" in {family.name for family in all_families()}
    with pytest.raises(UnknownArchitectureError, match="leaky_lm"):
        read_architecture({"model_type": "leakless"})


def test_without_the_package_its_model_type_is_unknown() -> None:
    assert find_family("leaky_lm") is None
    with pytest.raises(UnknownArchitectureError, match="model_type 'leaky_lm'"):
        read_architecture(CONFIG)


def test_a_package_that_cannot_be_imported_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    metadata = tmp_path / "broken-1.0.dist-info"
    metadata.mkdir()
    (metadata / "METADATA").write_text("Metadata-Version: 2.1\nName: broken\nVersion: 1.0\n")
    (metadata / "entry_points.txt").write_text("[weft.families]\nbroken_lm = no_such_module:FAMILIES\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    with pytest.raises(CheckpointError, match=r"the family broken_lm of broken \(weft.families: no_such_module"):
        read_architecture({"model_type": "broken_lm"})
    with pytest.raises(UnknownArchitectureError, match="broken_lm"):
        read_architecture({"model_type": "leakless"})


def test_start_imports_no_family_that_is_rarely_served() -> None:
    code = "import sys, weft.families; print(*(name for name in sys.modules if '.more' in name or 'metadata' in name))"
    shown = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, check=True)
    assert shown.stdout.split() == []
