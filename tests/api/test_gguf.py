"""A GGUF file through the whole engine: the answers of its checkpoint, with the prefix cache, by its path."""

from __future__ import annotations

from pathlib import Path

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.support.gguf_files import split, write_gguf
from weft.api.engine import Engine
from weft.assemble import find_model
from weft.config import EngineConfig
from weft.errors import CheckpointError, ConfigError
from weft.request import SamplingParams

PROMPT = "What is the number of the red key? " * 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=12)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answers(model: Path) -> list[tuple[list[int], int]]:
    """Of a prompt, and of the same prompt with a second turn: tokens, and how many were cached."""
    with Engine(str(model), memory="64MiB") as engine:
        return [(one.tokens, one.cached_tokens) for text in (PROMPT, PROMPT + "And then?")
                for one in engine.generate(text, GREEDY)]


@pytest.mark.parametrize("name", ["lfm2", "qwen3_5"])
def test_a_file_answers_as_its_checkpoint_does_and_caches(name: str, tmp_path: Path) -> None:
    of_file = answers(write_gguf(checkpoint(name), tmp_path / "model.gguf"))
    assert of_file == answers(checkpoint(name))
    assert of_file[1][1] > 0


def test_ranks_are_refused_with_the_flag(tmp_path: Path) -> None:
    file = write_gguf(checkpoint("lfm2"), tmp_path / "model.gguf")
    with pytest.raises(ConfigError, match=r"--tp is 2, and .*model\.gguf is a GGUF file"):
        Engine(str(file), tp=2)


def test_a_model_is_served_by_the_name_that_its_files_share(tmp_path: Path) -> None:
    parts = split(write_gguf(checkpoint("lfm2"), tmp_path / "small.gguf"), 2)
    (tmp_path / "small.gguf").unlink()
    assert find_model(EngineConfig(model=str(parts[1])), lambda text: None)[0] == "small"
    assert find_model(EngineConfig(model=str(tmp_path)), lambda text: None)[0] == tmp_path.name


def test_a_file_that_is_not_there_is_named() -> None:
    with pytest.raises(CheckpointError, match=r"nowhere\.gguf: there is no such file"):
        Engine("nowhere.gguf")
