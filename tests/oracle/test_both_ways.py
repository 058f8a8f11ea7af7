"""Embedders whose tokens see later ones: hidden rows as transformers has them, whole prompts, no kept prefix."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from transformers.models.lfm2 import modeling_lfm2

from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.pooled_checkpoints import embedder
from tests.oracle.config_fuzz import ours, theirs
from weft import Engine
from weft.errors import ConfigError, ContextLengthError, RequestError
from weft.schedule import scheduler
from weft.schedule.budget import Budget

TOLERANCE = 1e-4
TEXTS = ["hello world", "b" * 301, "The quick brown fox jumps. " * 20, "x"]
SIZES = {"memory": "64MiB", "dtype": "float32"}
LFM2 = {"architectures": ["Lfm2BidirectionalModel"]}


def with_config(directory: Path, **changes: Any) -> Path:
    path = directory / "config.json"
    path.write_text(json.dumps(json.loads(path.read_text()) | changes))
    return directory


@pytest.mark.parametrize(
    ("family", "changes"),
    [
        ("qwen3", {}),
        ("llama", {}),
        ("olmo3", {"sliding_window": 12}),
        ("gpt_oss", {"sliding_window": 12}),
        ("qwen3_5", {}),
        ("lfm2", {}),
        ("granite_rope", {}),
        ("gemma3", {"use_bidirectional_attention": True, "is_causal": True, "sliding_window": 24}),
    ],
)
def test_rows_are_those_of_transformers(family: str, changes: dict[str, Any], tmp_path: Path) -> None:
    directory = with_config(shutil.copytree(checkpoint(family), tmp_path / family), **({"is_causal": False} | changes))
    mine, truth, causal = ours(directory), theirs(directory), theirs(checkpoint(family))
    assert truth is not None
    assert causal is not None
    assert isinstance(mine, torch.Tensor), mine
    assert (mine - truth).abs().max() < TOLERANCE
    assert (truth - causal).abs().max() > 100 * TOLERANCE, "the control: causal rows are others"


@pytest.fixture(scope="module")
def lfm2(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """As LFM2.5-Embedding is released: CLS, and convolutions that are centred."""
    directory = embedder(tmp_path_factory.mktemp("both") / "lfm2", "lfm2", pooling={"pooling_mode_cls_token": True})
    return with_config(directory, **LFM2)


@pytest.fixture(scope="module")
def engine(lfm2: Path) -> Iterator[Engine]:
    with Engine(str(lfm2), **SIZES) as running:
        yield running


def centred(self: Any, hidden_states: torch.Tensor, **_: Any) -> torch.Tensor:
    b, c, x = self.in_proj(hidden_states).transpose(-1, -2).chunk(3, dim=-2)
    weight = self.conv.weight
    mixed = F.conv1d(b * x, weight, self.conv.bias, padding=weight.shape[-1] // 2, groups=weight.shape[0])
    return self.out_proj((c * mixed[..., : x.shape[-1]]).transpose(-1, -2))


def expected(directory: Path, tokens: list[int], monkeypatch: pytest.MonkeyPatch) -> np.ndarray:
    """[tokens, width] of a class as the release has it: transformers' LFM2 with its two changes."""
    monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", centred)
    config = transformers.AutoConfig.from_pretrained(directory)
    config.is_causal = False
    model = modeling_lfm2.Lfm2Model.from_pretrained(
        directory, config=config, dtype=torch.float32, attn_implementation="eager"
    )
    with torch.inference_mode():
        return model.eval()(torch.tensor([tokens])).last_hidden_state[0].double().numpy()


def test_an_embedding_of_lfm2_is_the_first_row(lfm2: Path, engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    for text, vector in zip(TEXTS, engine.embed(TEXTS), strict=True):
        rows = expected(lfm2, engine.tokenizer.encode(text), monkeypatch)
        np.testing.assert_allclose(vector, rows[0] / np.linalg.norm(rows[0]), atol=TOLERANCE)


def test_bits_depend_on_no_neighbour_and_nothing_is_kept(engine: Engine) -> None:
    together = engine.embed(TEXTS)
    np.testing.assert_array_equal(together, np.concatenate([engine.embed(text) for text in TEXTS]))
    assert engine.stats().cached_tokens == 0


def test_a_prompt_that_is_cut_would_be_another_embedding(lfm2: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of whole prompts: a budget that cuts them."""
    settings = SIZES | {"max_num_batched_tokens": 400, "max_model_len": 400}
    with Engine(str(lfm2), **settings) as engine:
        assert engine.info.sizes.whole_prompts
        whole = engine.embed([TEXTS[1]] * 2)
        monkeypatch.setattr(scheduler, "Budget", lambda *arguments, whole: Budget(*arguments))
        cut = engine.embed([TEXTS[1]] * 2)
    np.testing.assert_array_equal(whole[0], whole[1])
    assert np.abs(whole - cut).max() > 10 * TOLERANCE


def test_what_it_cannot_do_is_one_line(lfm2: Path, engine: Engine, tmp_path: Path) -> None:
    with pytest.raises(RequestError, match="embeds or scores text and generates none"):
        engine.generate("abc")
    with pytest.raises(ConfigError, match=r"--store needs a causal model: .*is_causal false"):
        Engine(str(lfm2), store=str(tmp_path / "store"), **SIZES)
    with Engine(str(lfm2), max_num_batched_tokens=100, **SIZES) as small:
        assert any("--max-model-len" in note and "not causal" in note for note in small.info.notes)
        with pytest.raises(ContextLengthError, match="301 tokens; the limit is 100"):
            small.embed(TEXTS[1])


def test_a_generator_that_is_not_causal_embeds_and_generates_nothing(tmp_path: Path) -> None:
    """Qwen3 with a head, and without the files of sentence-transformers: the last row."""
    directory = with_config(shutil.copytree(checkpoint("qwen3"), tmp_path / "qwen3"), is_causal=False)
    model = partial(transformers.AutoModel.from_pretrained, attn_implementation="eager", dtype=torch.float32)
    with Engine(str(directory), **SIZES) as engine, torch.inference_mode():
        tokens = engine.tokenizer.encode(TEXTS[2])
        row = model(directory)(torch.tensor([tokens])).last_hidden_state[0, -1].double().numpy()
        np.testing.assert_allclose(engine.embed(TEXTS[2])[0], row / np.linalg.norm(row), atol=TOLERANCE)
        with pytest.raises(RequestError, match="generates none"):
            engine.generate("abc")
