"""A step waits for the device once, when its tokens come home: whatever its rows ask for, for every kind of
layer, prompts and decodes alike. Without a GPU its memory is one that nobody looks at (``remote``), and
whoever looks is noticed (``waits``)."""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from msgspec import structs

from tests.fixtures.memory_store import Contents, MemoryStore
from tests.gpu.waits import noticed
from tests.oracle.serving import DEVICE, Serving, directory
from tests.oracle.test_engine_store_compressed import NEVER_S, store_of
from tests.support.forced_compression import compress_all
from weft.config import QuantizeChoice
from weft.engine.grammars import GrammarCompiler
from weft.models.loading import LoadedModel, load_model
from weft.request import SamplingParams
from weft.schedule.plan import StepPlan, StepResult
from weft.tensor import gpu, native
from weft.text.grammars import regex_grammar

SHORT = SamplingParams(temperature=0.0, max_tokens=2, ignore_eos=True)
CONSTRAINED = structs.replace(SHORT, ignore_eos=False, grammar=regex_grammar("[a-f]{9}", field="f"))
DRAWN = structs.replace(
    SHORT,
    temperature=1.1,
    top_k=40,
    top_p=0.9,
    min_p=0.01,
    seed=4,
    logprobs=2,
    prompt_logprobs=1,
    frequency_penalty=0.5,
    repetition_penalty=1.2,
    logit_bias={7: 2.0},
    min_tokens=1,
)
ASKED = [DRAWN, CONSTRAINED, SHORT]
PROMPTS = [[300, 20, 411, 5, 123], [9, 8], [7]]


@pytest.fixture(autouse=True)
def no_native_kernels() -> Iterator[None]:
    """They take tensors of a CPU, which those of this test only are because there is no GPU."""
    native.choose("torch")
    yield
    native.choose("auto")


@functools.cache
def model_of(family: str, quantize: QuantizeChoice) -> LoadedModel:
    return load_model(directory(family), quantize=quantize, device=DEVICE)


def serving(family: str, quantize: QuantizeChoice = "none", **more: Any) -> Serving:
    made = Serving(family, max_num_seqs=len(PROMPTS), max_model_len=128, model=model_of(family, quantize), **more)
    tokenizer = directory(family) / "tokenizer.json"
    made.core.grammars = GrammarCompiler(tokenizer.read_text, made.core.eos_ids, made.core.vocab_size)
    return made


def watched(made: Serving) -> list[str]:
    """What steps of ``made`` wait for, from now on."""
    found: list[str] = []
    execute: Callable[[StepPlan], StepResult] = made.executor.execute

    def executed(plan: StepPlan) -> StepResult:
        with noticed(found):
            return execute(plan)

    made.executor.execute = executed  # type: ignore[method-assign]
    return found


@pytest.mark.parametrize(
    ("family", "quantize"),
    [
        ("qwen3_5", "int4"),
        ("qwen3_5_moe", "int8"),
        ("bamba", "none"),
        ("jamba", "none"),
        ("lfm2", "none"),
        ("kimi_linear", "none"),
    ],
)
def test_nothing_in_a_step_waits_for_the_device(family: str, quantize: QuantizeChoice) -> None:
    """A row with everything, for some a constrained one, for one a greedy one too."""
    rows = {"qwen3_5": 2, "lfm2": 3}.get(family, 1)
    prompts, asked = PROMPTS[:rows], ASKED[:rows]
    made = serving(family, quantize, remote=True)
    found = watched(made)
    answers = made.run(prompts, asked)
    assert found == []
    gpu.choose("torch")
    plain = serving(family, quantize).run(prompts, asked)
    assert [answer.tokens for answer in answers] == [answer.tokens for answer in plain]
    for one, other in zip(
        answers[0].prompt_logprobs[1:] + answers[0].logprobs,
        plain[0].prompt_logprobs[1:] + plain[0].logprobs,
        strict=True,
    ):
        assert one is not None
        assert other is not None
        assert (one.token, one.rank) == (other.token, other.rank)
        assert one.logprob == pytest.approx(other.logprob, abs=1e-3)


def test_loads_and_stores_wait_for_nothing_either() -> None:
    """Snapshots go to a store and come back. What a step does not wait for ends beside it."""
    prompt = [(7 * at * at + 3) % 400 + 4 for at in range(80)]
    kept: list[Contents] = []
    tokens, restored = [], 0

    def store(one: Serving) -> MemoryStore:
        kept[:] = kept or [Contents(one.arena.page_bytes)]
        return MemoryStore(kept[0])

    for _ in range(2):
        made = serving("qwen3_5", remote=True, cache=True, compress=True, compress_kv="int8", store=store)
        found = watched(made)
        [answer] = made.run([prompt], SHORT)
        made.core.write_all(10.0)
        assert found == []
        assert made.core.store is not None
        restored = made.core.store.stats().restores.restored_tokens
        tokens.append(answer.tokens)
        made.core.close()
    assert restored >= 64
    assert tokens[0] == tokens[1]


def test_what_was_compressed_goes_to_a_store_and_comes_back_without_a_wait(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    prompt = [(7 * at * at + 3) % 400 + 4 for at in range(80)]
    compress_all(monkeypatch)
    counts = []
    for _ in range(2):
        made = serving(
            "qwen3_5",
            remote=True,
            cache=True,
            compress=True,
            compress_kv="int8",
            store=lambda one: store_of(one, tmp_path, "int8"),
        )
        assert made.core.store is not None
        made.core.store.writes._paced_until_s = NEVER_S  # until all of it is compressed
        found = watched(made)
        made.run([prompt], SHORT)
        made.run([[9, 8, 7]], SHORT)
        counts.append(made.core.memory.usage().cache)
        made.core.write_all(10.0)
        assert found == []
        made.core.close()
    assert counts[0].compressed_pages
    assert counts[0].compressed
    assert counts[1].loaded_tokens >= 64
    assert counts[1].hits_inexact


def test_the_control_a_host_that_may_look_is_seen_to_look() -> None:
    gpu.choose("torch")
    made = serving("qwen3_5")
    found = watched(made)
    made.run(PROMPTS, ASKED)
    assert {one.split()[0] for one in found} >= {"__bool__", "aten.lift_fresh.default"}, (
        "torch's forms look at a mask, and make tensors of lists, on any device"
    )


@pytest.mark.parametrize(
    "asked",
    [
        lambda x: x[x > 0],
        lambda x: x.sum().item(),
        lambda x: torch.tensor([1, 2]),
        lambda x: x.nonzero(),
        lambda x: bool(x.any()),
        lambda x: x.tolist(),
        lambda x: x.numpy(),
        lambda x: int(x.sum()),
        lambda x: x.cpu(),
        lambda x: torch.masked_select(x, x > 0),
        lambda _: torch.from_numpy(np.ones(2)),
    ],
)
def test_the_control_each_way_to_wait_is_noticed(asked: Callable[[torch.Tensor], Any]) -> None:
    found: list[str] = []
    x = torch.ones(3)
    with noticed(found):
        asked(x)
    assert found
    found.clear()
    with noticed(found):
        x.index_select(0, torch.arange(2)).masked_fill_(x[:2] > 0, 1.0).sum()
    assert not found
