"""Embeddings and scores against transformers, and their bits against everything else that an engine does."""

from __future__ import annotations

import json
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import transformers

from tests.fixtures.checkpoints import checkpoint, reference
from tests.fixtures.pooled_checkpoints import INSTRUCTION, add_dense, cross_encoder, embedder, reranker
from weft import Engine
from weft.errors import CheckpointError, ContextLengthError, RequestError
from weft.schedule.sequence import Sequence

TOLERANCE = 1e-4
TEXTS = ["hello world", "b" * 701, "The quick brown fox jumps. " * 24, "x"]
SIZES = {"memory": "64MiB", "dtype": "float32"}


def hidden_of(family: str, tokens: list[int]) -> np.ndarray:
    """[tokens, width] behind the final norm, by transformers."""
    with torch.inference_mode():
        output = reference(family)(torch.tensor([tokens]), output_hidden_states=True)
    return output.hidden_states[-1][0].double().numpy()


def normed(row: np.ndarray) -> np.ndarray:
    return row / np.linalg.norm(row)


@pytest.mark.parametrize("family", ["qwen3", "qwen3_5", "lfm2", "granite", "nemotron_h"])
def test_an_embedding_is_the_last_hidden_row_of_transformers(family: str) -> None:
    with Engine(str(checkpoint(family)), **SIZES) as engine:
        vectors = engine.embed(TEXTS)
        assert vectors.dtype == np.float32
        for text, vector in zip(TEXTS, vectors, strict=True):
            expected = normed(hidden_of(family, engine.tokenizer.encode(text))[-1])
            np.testing.assert_allclose(vector, expected, atol=TOLERANCE)
        assert engine.generate("abc", max_tokens=4)[0].tokens, "and it still generates"


@pytest.fixture(scope="module")
def mean_directory(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return embedder(
        tmp_path_factory.mktemp("mean") / "embedder",
        "qwen3_5",
        pooling={"pooling_mode_mean_tokens": True, "include_prompt": False},
    )


@pytest.fixture(scope="module")
def mean_engine(mean_directory: Path) -> Iterator[Engine]:
    with Engine(str(mean_directory), **SIZES) as engine:
        yield engine


def test_a_mean_is_that_of_the_rows_behind_the_instruction(mean_engine: Engine) -> None:
    for text, vector in zip(TEXTS, mean_engine.embed(TEXTS, prompt_name="query"), strict=True):
        tokens = mean_engine.tokenizer.encode(INSTRUCTION + text)
        front = len(mean_engine.tokenizer.encode(INSTRUCTION))
        expected = normed(hidden_of("qwen3_5", tokens)[front:].mean(axis=0))
        assert np.abs(vector - expected).max() < TOLERANCE
    [plain] = mean_engine.embed(TEXTS[1])
    expected = normed(hidden_of("qwen3_5", mean_engine.tokenizer.encode(TEXTS[1])).mean(axis=0))
    assert np.abs(plain - expected).max() < TOLERANCE


def test_the_bits_of_a_mean_do_not_depend_on_hits_neighbours_and_chunks(mean_directory: Path) -> None:
    """In bfloat16: torch multiplies one or two float32 rows by such small matrices in another order."""
    settings = SIZES | {"dtype": "bfloat16"}
    with Engine(str(mean_directory), **settings) as engine:
        alone = np.concatenate([engine.embed(text, prompt_name="query") for text in TEXTS])
        cached = engine.stats().cached_tokens
        assert cached > 0, "the instruction is a prefix that is left out of the mean, so it may be a hit"
        together = engine.embed(TEXTS, prompt_name="query")
        np.testing.assert_array_equal(alone, together)
    with Engine(str(mean_directory), max_num_batched_tokens=64, **settings) as small:
        np.testing.assert_array_equal(alone, small.embed(TEXTS, prompt_name="query"))


def test_a_mean_over_a_hit_would_lack_rows(mean_engine: Engine, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control of the test above: a hit beyond the instruction."""
    text = "long enough for a state. " * 30
    [right] = mean_engine.embed(text)
    monkeypatch.setattr(Sequence, "reusable", lambda seq, known: known)
    [wrong] = mean_engine.embed(text)
    assert np.abs(right - wrong).max() > TOLERANCE


def test_the_bits_of_a_last_row_do_not_depend_on_hits_and_neighbours() -> None:
    """In bfloat16: torch multiplies one or two float32 rows by such small matrices in another order."""
    with Engine(str(checkpoint("lfm2")), **SIZES | {"dtype": "bfloat16"}) as engine:
        alone = np.concatenate([engine.embed(text) for text in TEXTS])
        for piece in engine.stream("say something long", max_tokens=40, ignore_eos=True, temperature=0.0):
            if len(piece.tokens) and not engine.stats().cached_tokens:
                again = engine.embed(TEXTS)
        np.testing.assert_array_equal(alone, again)
        assert engine.stats().cached_tokens > 500, "these were hits"


def test_a_score_is_that_of_the_score_head(tmp_path: Path) -> None:
    directory = cross_encoder(tmp_path / "cross-encoder")
    model = transformers.AutoModelForSequenceClassification.from_pretrained(directory, dtype=torch.float32)
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    pairs = [("what is weft?", text) for text in TEXTS]
    with Engine(str(directory), **SIZES) as engine, torch.inference_mode():
        scores = engine.score(pairs)
        for pair, score in zip(pairs, scores, strict=True):
            expected = torch.sigmoid(model(**tokenizer(*pair, return_tensors="pt")).logits)[0, 0]
            assert score == pytest.approx(float(expected), abs=TOLERANCE)
        ranked = engine.rerank("what is weft?", TEXTS, top_n=2)
        assert [one.score for one in ranked] == pytest.approx(sorted(scores, reverse=True)[:2], abs=1e-6)
        with pytest.raises(RequestError, match="generates none"):
            engine.generate("abc")
        with pytest.raises(RequestError, match="instruction is for generative rerankers"):
            engine.score(pairs, instruction="judge")


def test_a_generative_reranker_weighs_yes_against_no(tmp_path: Path) -> None:
    with Engine(str(reranker(tmp_path / "Tiny-Reranker")), **SIZES) as engine:
        tokenizer = engine.tokenizer
        no, yes = tokenizer.added_id("no"), tokenizer.added_id("yes")
        scores = engine.score([("where?", text) for text in TEXTS], instruction="Judge it")
        assert engine.stats().cached_tokens >= 2 * 128, "the query is a shared prefix"
        for text, score in zip(TEXTS, scores, strict=True):
            prompt = (
                "<|im_start|>system\nJudge whether the Document meets the requirements based on the Query "
                'and the Instruct provided. Note that the answer can only be "yes" or "no".<|im_end|>\n'
                "<|im_start|>user\n<Instruct>: Judge it\n<Query>: where?\n<Document>:",
                f" {text}",
                "<|im_end|>\n<|im_start|>assistant\n<think>\n\n</think>\n\n",
            )
            tokens = [token for part in prompt for token in tokenizer.encode(part, add_special_tokens=False)]
            with torch.inference_mode():
                logits = reference("lfm2")(torch.tensor([tokens])).logits[0, -1]
            expected = torch.softmax(logits[[no, yes]], dim=0)[1]
            assert score == pytest.approx(float(expected), abs=TOLERANCE)


def test_dense_modules_project_what_is_pooled(tmp_path: Path) -> None:
    """vllm 39579, llama.cpp 16367: EmbeddingGemma has two, stella one; engines that ignore them give other vectors.
    vllm 45995: the spelling of sentence-transformers 5.4."""
    directory = embedder(
        tmp_path / "dense",
        modules=("Transformer", "Pooling", "Dense", "Dense", "Normalize"),
        pooling={"pooling_mode": "mean"},
        spelling="sentence_transformers.sentence_transformer.modules.{module}.{name}",
    )
    first = add_dense(directory / "2_Dense", 64, 96)
    second = add_dense(directory / "3_Dense", 96, 32, activation="activation.Tanh", bias=True)
    with Engine(str(directory), **SIZES) as engine:
        [vector] = engine.embed(TEXTS[2])
        mean = hidden_of("qwen3", engine.tokenizer.encode(TEXTS[2])).mean(axis=0)
        np.testing.assert_allclose(vector, normed(second(first(mean))), atol=TOLERANCE)
        assert np.abs(vector - normed(first(mean))[:32]).max() > 100 * TOLERANCE
        with pytest.raises(RequestError, match="dimensions is 33; this model's embeddings have 32"):
            engine.embed("a", dimensions=33)


def test_a_dense_module_that_is_not_served_is_one_line(tmp_path: Path) -> None:
    directory = embedder(tmp_path / "dense", modules=("Transformer", "Pooling", "Dense"))
    add_dense(directory / "2_Dense", 64, 96, activation="activation.GELU")
    with pytest.raises(
        CheckpointError, match=r"2_Dense/config\.json: activation_function is .*GELU.*; Identity and Tanh"
    ):
        Engine(str(directory), **SIZES)
    add = json.loads((directory / "2_Dense" / "config.json").read_text())
    add |= {"out_features": 95, "activation_function": "torch.nn.modules.linear.Identity"}
    (directory / "2_Dense" / "config.json").write_text(json.dumps(add))
    with pytest.raises(CheckpointError, match=r"config\.json says linear\.weight \[95, 64\]"):
        Engine(str(directory), **SIZES)


def test_what_a_checkpoint_cannot_do_is_said_with_the_reason(tmp_path: Path) -> None:
    dense = embedder(tmp_path / "dense", modules=("Transformer", "Pooling", "LayerNorm"), tokens_max=16)
    with Engine(str(dense), **SIZES) as engine:
        with pytest.raises(RequestError, match=r"modules\.json has LayerNorm"):
            engine.embed("abc")
        with pytest.raises(RequestError, match="no score head"):
            engine.score([("a", "b")])
        settings = json.loads((dense / "modules.json").read_text())[:2]
        (dense / "modules.json").write_text(json.dumps(settings))
    with Engine(str(dense), **SIZES) as engine:
        raw = engine.embed("abc")[0]
        np.testing.assert_allclose(
            raw,
            hidden_of("qwen3", engine.tokenizer.encode("abc"))[-1],
            atol=TOLERANCE,
            err_msg="without Normalize it is the row as it is",
        )
        with pytest.raises(ContextLengthError, match=r"17 tokens; the limit is 16 .*max_seq_length"):
            engine.embed("a" * 17)
        np.testing.assert_array_equal(engine.embed("a" * 17, truncate_to=16), engine.embed("a" * 16))
        with pytest.raises(RequestError, match="dimensions is 65"):
            engine.embed("abc", dimensions=65)
        with pytest.raises(RequestError, match=r"inputs\[1\] is empty"):
            engine.embed(["abc", ""])
    labels = cross_encoder(tmp_path / "labels", labels=3)
    with Engine(str(labels), **SIZES) as engine, pytest.raises(RequestError, match="3 labels"):
        engine.score([("a", "b")])
