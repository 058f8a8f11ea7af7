"""A GGUF file through the whole engine: the answers of its checkpoint, with the prefix cache, by its path."""

from __future__ import annotations

import json
import signal
import subprocess
import sys
import time
from pathlib import Path
from typing import Any

import numpy as np
import pytest
from gguf import GGMLQuantizationType, PoolingType
from safetensors.torch import load_file

from tests.fixtures import store_life
from tests.fixtures.checkpoints import checkpoint, make_checkpoint
from tests.fixtures.drafters import KINDS, AnswerDrafter
from tests.fixtures.pooled_checkpoints import embedder
from tests.oracle.serving import Serving
from tests.oracle.test_engine_prefix_cache import text
from tests.support.gguf_files import split, write_gguf
from weft.api.engine import Engine
from weft.assemble import find_model
from weft.cli.main import main
from weft.config import EngineConfig
from weft.errors import CheckpointError, ConfigError
from weft.models.gguf.header import read_header
from weft.models.hub import resolve_model
from weft.models.loading import load_model
from weft.request import SamplingParams

PROMPT = "What is the number of the red key? " * 12
GREEDY = SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True)


@pytest.fixture(autouse=True)
def _own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))


def answers(model: Path) -> list[tuple[list[int], int]]:
    """Of a prompt, and of the same prompt with a second turn: tokens, and how many were cached."""
    with Engine(str(model), memory="64MiB") as engine:
        return [
            (one.tokens, one.cached_tokens)
            for text in (PROMPT, PROMPT + "And then?")
            for one in engine.generate(text, GREEDY)
        ]


def test_a_file_says_how_it_embeds(tmp_path: Path) -> None:
    def file(kind: PoolingType) -> Path:
        return write_gguf(
            checkpoint("lfm2"), tmp_path / f"{kind.name}.gguf", change=lambda writer: writer.add_pooling_type(kind)
        )

    def embedded(model: Path) -> np.ndarray[Any, Any]:
        with Engine(str(model), memory="16MiB", dtype="float32") as engine:
            return engine.embed(["The red key", "is here."])

    mean = embedder(tmp_path / "mean", "lfm2", pooling={"pooling_mode_mean_tokens": True})
    last = embedded(file(PoolingType.LAST))
    assert np.array_equal(embedded(file(PoolingType.MEAN)), embedded(mean))
    assert np.array_equal(last, embedded(checkpoint("lfm2"))), "what is not said is the last token"
    assert np.abs(last - embedded(mean)).max() > 0.01, "the control: they differ"
    first = embedder(tmp_path / "first", "lfm2", pooling={"pooling_mode_cls_token": True})
    assert np.array_equal(embedded(file(PoolingType.CLS)), embedded(first))
    view = resolve_model(file(PoolingType.RANK))
    assert json.loads((view / "config.json").read_text())["classifier_from_token"] == ["no", "yes"]


def test_an_embedder_without_a_head_embeds_alike_in_what_quantize_writes(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    def embedded(model: Path) -> np.ndarray[Any, Any]:
        with Engine(str(model), memory="16MiB", dtype="float32") as engine:
            return engine.embed(["The red key", "is here."])

    source = embedder(tmp_path / "source", pooling={"pooling_mode_mean_tokens": True})
    assert not any("lm_head" in name for name in load_file(source / "model.safetensors"))
    truth = embedded(source)
    for form, out in (("w8a8", tmp_path / "copy"), ("q4_k", tmp_path / "copy.gguf")):
        unfinished = out.with_name(f"{out.name}.partial") / "1_Pooling"
        unfinished.mkdir(parents=True)  # as another form left it
        assert main(["quantize", str(source), str(out), "--form", form]) == 0
        assert (embedded(out) * truth).sum(1).min() > 0.995, "cosines"
    (source / "modules.json").unlink()
    assert (embedded(source) * truth).sum(1).max() < 0.99, "the control: what is not said is the last token"
    assert main(["quantize", str(source), str(tmp_path / "last.gguf"), "--form", "q4_k"]) == 0
    assert read_header(tmp_path / "last.gguf").keys["qwen3.pooling_type"] == PoolingType.LAST
    (source / "modules.json").write_text('[{"type": "sentence_transformers.models.LayerNorm"}]')
    assert main(["quantize", str(source), str(tmp_path / "dense.gguf"), "--form", "q4_k"]) == 2
    assert "its modules.json has LayerNorm" in capsys.readouterr().err


@pytest.mark.parametrize(
    ("name", "more"),
    [
        ("lfm2", {}),
        ("qwen3_5", {}),
        ("kimi_linear", {}),
        ("ling", {}),
        ("qwen4_exp", {"ple_layer_ids": [1]}),
        ("gemma3", {"tie_word_embeddings": True, "query_pre_attn_scalar": 32}),
        ("gemma4", {"tie_word_embeddings": True}),
    ],
)
def test_a_file_answers_as_its_checkpoint_does_and_caches(name: str, more: dict[str, Any], tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "source", name, **more) if more else checkpoint(name)
    of_file = answers(write_gguf(source, tmp_path / "model.gguf"))
    assert of_file == answers(source)
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


def test_guessed_tokens_change_no_answer_of_a_file_in_blocks(tmp_path: Path) -> None:
    source = make_checkpoint(tmp_path / "wide", "lfm2", hidden_size=256, intermediate_size=768)
    types = {"blk.": GGMLQuantizationType.Q4_K, "token_embd": GGMLQuantizationType.Q6_K}
    model = load_model(resolve_model(write_gguf(source, tmp_path / "model.gguf", types=types)))
    prompts, drafter = [text(40, 1), text(90, 2)], AnswerDrafter("empty", {}, model.spec.vocab_size)
    truth = Serving("lfm2", model=model).run(prompts, GREEDY)
    speculating = Serving("lfm2", model=model, drafter=drafter)
    for number, kind in enumerate(KINDS):
        drafter.kind = kind
        drafter.answers = {2 * number + place: one.tokens for place, one in enumerate(truth)}
        answers = speculating.run(prompts, GREEDY)
        assert [one.tokens for one in answers] == [one.tokens for one in truth], kind
    assert drafter.drafted > drafter.accepted > 0, "the control: right and wrong tokens were guessed"


def test_a_store_of_a_file_outlives_kill_9_and_is_that_files_alone(tmp_path: Path) -> None:
    file, store = write_gguf(checkpoint("lfm2"), tmp_path / "model.gguf"), tmp_path / "store"
    command = [sys.executable, "-m", "tests.fixtures.store_life", str(file), str(store), "1"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        assert process.stdout is not None
        said = [json.loads(process.stdout.readline()) for _ in range(4)]
        end = time.monotonic() + 120
        while 384 not in store_life.stored_snapshots(store):
            assert process.poll() is None
            assert time.monotonic() < end, "no prompt came into the store"
            said.append(json.loads(process.stdout.readline()))
        process.send_signal(signal.SIGKILL)
        said += map(json.loads, process.stdout)
    core = store_life.engine(file, store)
    again = [store_life.answer(core, number) for number, _ in said]
    assert [tokens for tokens, _ in again] == [tokens for _, tokens in said]
    [number, *_] = [number for (number, _), (_, cached) in zip(said, again, strict=True) if cached == 384]
    core.close()
    other = write_gguf(checkpoint("lfm2"), tmp_path / "other.gguf", types={"blk.": GGMLQuantizationType.Q8_0})
    core = store_life.engine(other, store)
    assert store_life.answer(core, number)[1] == 0
    core.close()
