"""Vectors of tokens, max-sim and labels, against transformers' classes and small references over the same files."""

from __future__ import annotations

import json
import string
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import torch.nn.functional as F
import transformers
from safetensors.torch import load_file, save_file
from transformers.models.lfm2 import modeling_lfm2

from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.pooled_checkpoints import add_tokens, colbert, cross_encoder, embedder
from tests.oracle.test_both_ways import LFM2, centred, with_config
from weft import Engine
from weft.errors import CheckpointError, ContextLengthError, RequestError
from weft.request import Pooling
from weft.text.pooling import Pooler
from weft.text.tokenizer import Tokenizer

TOLERANCE = 1e-4
QUERIES = ["what is it?", "where"]
DOCUMENTS = ["Hello, world! This is it.", "b" * 301, "x, y; z.", "A lazy dog. " * 6]
SIZES = {"memory": "64MiB", "dtype": "float32"}


class Reference:
    """PyLate's encoding: [Q] or [D], expansions that attention does not see, Dense, lengths of 1, no punctuation."""

    def __init__(self, directory: Path) -> None:
        config = transformers.AutoConfig.from_pretrained(directory)
        config.is_causal = False
        self._model = transformers.AutoModel.from_pretrained(
            directory, config=config, dtype=torch.float32, attn_implementation="eager"
        ).eval()
        self._dense = load_file(directory / "1_Dense" / "model.safetensors")["linear.weight"]
        self._tokenizer = transformers.AutoTokenizer.from_pretrained(directory)

    @torch.inference_mode()
    def vectors(self, text: str, role: str) -> np.ndarray:
        marker = {"query": "[Q] ", "document": "[D] "}[role]
        tokens = self._tokenizer(marker + text)["input_ids"]
        added = max(0, 32 - len(tokens)) if role == "query" else 0
        ids = torch.tensor([tokens + [self._tokenizer.eos_token_id] * added])
        seen = torch.tensor([[1] * len(tokens) + [0] * added])
        rows = F.normalize(self._model(ids, attention_mask=seen).last_hidden_state[0] @ self._dense.T, dim=1)
        skipped = self._tokenizer.convert_tokens_to_ids(list(string.punctuation)) if role == "document" else []
        return rows[~torch.isin(ids[0], torch.tensor(skipped, dtype=torch.int64))].numpy()


@pytest.mark.parametrize("family", ["qwen3", "lfm2"])
def test_vectors_of_tokens_and_max_sim(family: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The second as LFM2.5-ColBERT is released: its convolutions are centred, and read expansions."""
    directory = colbert(tmp_path / "colbert", family)
    if family == "lfm2":
        with_config(directory, **LFM2)
        monkeypatch.setattr(modeling_lfm2.Lfm2ShortConv, "forward", centred)
    reference = Reference(directory)
    expected = [[reference.vectors(text, role) for text in texts] for role, texts in _by_role()]
    with Engine(str(directory), **SIZES) as engine:
        mine = [engine.token_vectors(texts, prompt_name=role) for role, texts in _by_role()]
        assert list(map(len, mine)) == [2, 4]
        for vectors, truth in zip((*mine[0], *mine[1]), (*expected[0], *expected[1]), strict=True):
            assert vectors.shape == truth.shape
            np.testing.assert_allclose(vectors, truth, atol=TOLERANCE)
        sums = [[(query @ document.T).max(axis=1).sum() for document in expected[1]] for query in expected[0]]
        for query, truth in zip(QUERIES, sums, strict=True):
            scores = engine.score([(query, document) for document in DOCUMENTS])
            np.testing.assert_allclose(scores, truth, atol=32 * TOLERANCE)
            assert [one.index for one in engine.rerank(query, DOCUMENTS)] == np.argsort(truth)[::-1].tolist()
        [short] = engine.token_vectors(QUERIES[0], prompt_name="query", dimensions=5)
        np.testing.assert_allclose(
            short, mine[0][0][:, :5] / np.linalg.norm(mine[0][0][:, :5], axis=1)[:, None], atol=1e-6
        )
        with pytest.raises(RequestError, match="it gives a vector for each token"):
            engine.embed("abc")
        with pytest.raises(ContextLengthError, match=r"query has 41 tokens; the limit is 32 \(query_length"):
            engine.score([("q" * 40, "d")])
        with pytest.raises(RequestError, match="instruction is for generative rerankers"):
            engine.score([("q", "d")], instruction="judge")
        monkeypatch.setattr("weft.text.pooling.Pooling", lambda **fields: Pooling(**fields | {"unseen": 0}))
        [seen] = engine.token_vectors(QUERIES[:1], prompt_name="query")
        assert np.abs(seen - expected[0][0]).max() > 100 * TOLERANCE, "the control: expansions that attention sees"


def _by_role() -> tuple[tuple[str, list[str]], ...]:
    return ("query", QUERIES), ("document", DOCUMENTS)


def test_settings_of_either_library(tmp_path: Path) -> None:
    """PyLate's file against the files that sentence-transformers 6.2 writes of the same model."""
    directory = colbert(tmp_path / "colbert")
    tokenizer = Tokenizer.load(directory)

    def made(**more: Any) -> Pooler:
        return Pooler(directory, tokenizer, name="c", score_labels=0, causal=False, **more)

    by_pylate = made()
    modules = json.loads((directory / "modules.json").read_text())
    for name in ("MultiVectorMask", "Normalize"):
        modules.append({"path": name, "type": f"sentence_transformers.multi_vector_encoder.modules.x.{name}"})
        (directory / name).mkdir()
    (directory / "modules.json").write_text(json.dumps(modules))
    mask = {"skiplist_words": list(string.punctuation), "skiplist_tasks": ["document"], "keep_only_token_ids": None}
    (directory / "MultiVectorMask" / "config.json").write_text(json.dumps(mask))
    expansion = {"strategy": "fixed", "attend": False, "token": None, "length": 32}
    transformer = {"document_length": 900, "query_expansion": expansion}
    (directory / "sentence_bert_config.json").write_text(json.dumps(transformer))
    saved = {"model_type": "MultiVectorEncoder", "prompts": {"query": "[Q] ", "document": "[D] "}}
    (directory / "config_sentence_transformers.json").write_text(json.dumps(saved))
    assert made().settings.late == by_pylate.settings.late
    for text, role in (("what, is it?", "query"), ("what, is it?", "document")):
        ours, theirs = (
            pooler.embedding(text, limit=512, prompt_name=role, per_token=True) for pooler in (made(), by_pylate)
        )
        assert ours == theirs
        assert ours.positions == (None if role == "query" else [0, 1, 2, 3, 5, 6, 7])  # without "," and "?"
        assert (len(ours.tokens), ours.pooling.unseen) == ((32, 23) if role == "query" else (9, 0))
    with pytest.raises(CheckpointError, match=r"attention does not see .* not causal"):
        Pooler(directory, tokenizer, name="c", score_labels=0, causal=True)
    (directory / "sentence_bert_config.json").write_text(json.dumps({"query_expansion": expansion | {"length": "x"}}))
    with pytest.raises(CheckpointError, match=r"query_expansion\.length is 'x'"):
        made()


def test_an_embedder_gives_vectors_of_tokens_too(tmp_path: Path) -> None:
    """In pieces of 64 tokens: the rows of all of them are joined in order, and none comes from the cache."""
    with Engine(str(checkpoint("qwen3_5")), max_num_batched_tokens=64, **SIZES) as engine, torch.inference_mode():
        text = DOCUMENTS[1]
        engine.generate(text, max_tokens=1)
        [vectors] = engine.token_vectors(text)
        model = transformers.AutoModel.from_pretrained(checkpoint("qwen3_5"), dtype=torch.float32).eval()
        rows = model(torch.tensor([engine.tokenizer.encode(text)])).last_hidden_state[0]
        np.testing.assert_allclose(vectors, F.normalize(rows, dim=1).numpy(), atol=TOLERANCE)


@pytest.mark.parametrize(
    ("problem", "activation"),
    [
        (None, lambda logits: logits.softmax(-1)),
        ("multi_label_classification", torch.sigmoid),
        ("regression", lambda logits: logits),
    ],
)
def test_labels_of_a_text_and_of_its_tokens(problem: str | None, activation: Any, tmp_path: Path) -> None:
    kind = "TokenClassification" if problem is None else "SequenceClassification"
    directory = cross_encoder(tmp_path / "labels", 3, kind=kind, problem_type=problem)
    model = getattr(transformers, f"AutoModelFor{kind}").from_pretrained(directory, dtype=torch.float32).eval()
    with Engine(str(directory), **SIZES) as engine, torch.inference_mode():
        for text, found in zip(DOCUMENTS, engine.classify(DOCUMENTS), strict=True):
            logits = model(torch.tensor([engine.tokenizer.encode(text)])).logits[0]
            np.testing.assert_allclose(found, activation(logits).numpy(), atol=TOLERANCE)
            np.testing.assert_allclose(engine.classify(text, raw=True)[0], logits.numpy(), atol=10 * TOLERANCE)
        if problem is None:
            assert np.abs(found[0] - found[-1]).max() > 100 * TOLERANCE, "each token has its own"


def reward_model(directory: Path, labels: int, **config: Any) -> torch.nn.Sequential:
    """Return the head of a checkpoint in Qwen's form: a Linear, a ReLU and a Linear."""
    embedder(directory, "qwen2")
    for name in ("modules.json", "config_sentence_transformers.json"):
        (directory / name).unlink()
    with_config(directory, num_labels=labels, **config)
    torch.manual_seed(0)
    head = torch.nn.Sequential(torch.nn.Linear(64, 64), torch.nn.ReLU(), torch.nn.Linear(64, labels))
    tensors = load_file(directory / "model.safetensors")
    tensors = {f"model.{name}": value for name, value in tensors.items()}
    tensors |= {f"score.{name}": value.detach() * 3 for name, value in head.state_dict().items()}
    save_file(tensors, directory / "model.safetensors", {"format": "pt"})
    head.load_state_dict({name: value * 3 for name, value in head.state_dict().items()})
    return head


def test_a_reward_head_has_two_products(tmp_path: Path) -> None:
    """Qwen2.5-Math-RM: one label, whose logit is the reward."""
    directory = tmp_path / "reward"
    head = reward_model(directory, 1, architectures=["Qwen2ForRewardModel"], problem_type="regression")
    model = transformers.AutoModel.from_pretrained(checkpoint("qwen2"), dtype=torch.float32).eval()
    with Engine(str(directory), **SIZES) as engine, torch.inference_mode():
        for text, [reward] in zip(DOCUMENTS, engine.classify(DOCUMENTS), strict=True):
            row = model(torch.tensor([engine.tokenizer.encode(text)])).last_hidden_state[0, -1]
            assert reward == pytest.approx(float(head(row)), abs=TOLERANCE)
            assert abs(reward - float(head[2](head[0](row)))) > 100 * TOLERANCE, "the control: no ReLU"


def test_steps_are_rewarded_at_their_tags(tmp_path: Path) -> None:
    """Qwen2.5-Math-PRM: two labels, read at each special token <extra_0>, which a text of the client may spell."""
    directory = tmp_path / "process"
    head = reward_model(directory, 2, architectures=["Qwen2ForProcessRewardModel"])
    add_tokens(directory / "tokenizer.json", ("<extra_0>", "<other>"), special=True)
    model = transformers.AutoModel.from_pretrained(checkpoint("qwen2"), dtype=torch.float32).eval()
    tokenizer = transformers.AutoTokenizer.from_pretrained(directory)
    texts = ["One.<extra_0> Two.<extra_0>", "Three.<extra_0>"]
    with Engine(str(directory), **SIZES) as engine, torch.inference_mode():
        for text, rewards in zip(texts, engine.classify(texts), strict=True):
            ids = torch.tensor(tokenizer(text)["input_ids"])
            rows = model(ids[None]).last_hidden_state[0][ids == tokenizer.convert_tokens_to_ids("<extra_0>")]
            np.testing.assert_allclose(rewards, head(rows).softmax(-1).numpy(), atol=TOLERANCE)
            assert len(rewards) == text.count("<extra_0>")
        assert engine.classify(texts, per_token=False)[0].shape == (2,)
        with pytest.raises(RequestError, match="has no <extra_0>: this model rewards steps"):
            engine.classify("One.<other>")
