"""Embeddings and scores of two ranks, and of an adapter: those of transformers, within the tolerance."""

from __future__ import annotations

from pathlib import Path

import numpy as np
import torch

from tests.fixtures.adapters import peft_adapter
from tests.fixtures.checkpoints import checkpoint, reference
from tests.fixtures.pooled_checkpoints import cross_encoder, embedder
from tests.oracle.test_both_ways import LFM2, with_config
from tests.oracle.test_pooling import TOLERANCE, hidden_of, normed
from weft import Engine

TEXTS = ["hello world", "b" * 301, "x"]
SIZES = {"memory": "32MiB", "dtype": "float32"}


def test_two_ranks_with_an_adapter_embed_as_transformers_and_peft_do(tmp_path: Path) -> None:
    adapted = peft_adapter(reference("qwen3"), tmp_path / "adapter")
    with Engine(str(checkpoint("qwen3")), tp=2, lora=(f"a={tmp_path / 'adapter'}",), **SIZES) as engine:
        plain, tuned = engine.embed(TEXTS), engine.embed(TEXTS, lora="a")
        for text, row, other in zip(TEXTS, plain, tuned, strict=True):
            tokens = engine.tokenizer.encode(text)
            with torch.inference_mode():
                output = adapted(torch.tensor([tokens]), output_hidden_states=True)
            assert np.abs(row - normed(hidden_of("qwen3", tokens)[-1])).max() < TOLERANCE
            assert np.abs(other - normed(output.hidden_states[-1][0, -1].double().numpy())).max() < TOLERANCE
    assert np.abs(plain - tuned).max() > 0.01, "the control: the adapter changes embeddings"


def test_two_ranks_have_the_means_and_scores_of_one_process(tmp_path: Path) -> None:
    mean = embedder(tmp_path / "mean", "qwen3_5", pooling={"pooling_mode_mean_tokens": True})
    with Engine(str(mean), tp=2, **SIZES) as engine:
        for text, row in zip(TEXTS, engine.embed(TEXTS), strict=True):
            expected = normed(hidden_of("qwen3_5", engine.tokenizer.encode(text)).mean(axis=0))
            assert np.abs(row - expected).max() < TOLERANCE
    pairs, judge = [("q", text) for text in TEXTS], str(cross_encoder(tmp_path / "judge"))
    with Engine(judge, **SIZES) as alone, Engine(judge, tp=2, **SIZES) as ranked:
        assert np.abs(np.array(alone.score(pairs)) - ranked.score(pairs)).max() < TOLERANCE


def test_two_ranks_embed_with_a_model_that_is_not_causal(tmp_path: Path) -> None:
    """LFM2.5-Embedding: attention both ways, and centred convolutions."""
    directory = embedder(tmp_path / "both", "lfm2", pooling={"pooling_mode_cls_token": True})
    with Engine(str(directory), **SIZES) as causal:
        plain = causal.embed(TEXTS)
    with_config(directory, **LFM2)
    with Engine(str(directory), **SIZES) as alone, Engine(str(directory), tp=2, **SIZES) as ranked:
        expected = alone.embed(TEXTS)
        assert np.abs(expected - ranked.embed(TEXTS)).max() < TOLERANCE
        assert ranked.stats().cached_tokens == 0
    assert np.abs(expected - plain)[:2].max() > 100 * TOLERANCE, "the control: causal embeddings are others"
