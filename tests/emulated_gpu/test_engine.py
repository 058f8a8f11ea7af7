"""The engine as a user starts it, with ``--device cuda``: tokens of transformers, and no report."""

from __future__ import annotations

import threading
from collections.abc import Callable
from typing import Any, cast

import pytest
import torch

from tests.emulated_gpu import emulated
from tests.emulated_gpu.engines import GREEDY, answers, assert_tokens_of_transformers, kinds, started
from tests.emulated_gpu.sample import ALL, sample
from tests.fixtures.checkpoint_families_attention import MORE_FAMILIES, ON_CPUS, WITHOUT_GRAPHS
from tests.fixtures.checkpoint_families_mamba import MAMBA_FAMILIES
from tests.fixtures.checkpoints import FAMILIES, checkpoint
from tests.support.forced_compression import compress_kv, compress_states, plan_small_states
from tests.support.refused_growth import refuse_growth
from weft.engine.engine import EngineCore
from weft.engine.stats import EngineStats
from weft.errors import CheckpointError
from weft.request import SamplingParams
from weft.runner import product_choice
from weft.runner.torch_executor import TorchExecutor
from weft.tensor.gpu import few_rows

PROMPTS = [[7], [300, 20, 411, 5, 123], list(range(3, 43)), list(range(70, 136))]
"""A server answers more of them (``test_serve.py``)."""


@pytest.mark.parametrize(
    "family",
    sample(
        [*FAMILIES, *(name for name in MORE_FAMILIES if name not in (*ON_CPUS, *WITHOUT_GRAPHS)), *MAMBA_FAMILIES], 1
    ),
)
def test_every_family_answers_as_transformers_does_and_nothing_is_reported(family: str) -> None:
    prompts = PROMPTS if ALL else PROMPTS[:2]
    checkpoint(family)
    with emulated() as card, started(card, family) as engine:
        assert engine.info.device == "cuda:0 (emulated)"
        assert any("CUDA graphs" in note for note in engine.info.notes)
        assert set(card.compiled_alone) <= {"_copy_kernel"}, "all others compile side by side"
        made = answers(engine.core, prompts)
        assert card.replays
    assert not card.reports, [str(report) for report in card.reports]
    assert_tokens_of_transformers(family, prompts, made)


def test_own_products_of_few_rows_are_recorded_and_in_order(monkeypatch: pytest.MonkeyPatch) -> None:
    """Partial sums pass from a product to the norm after it, in memory that others take next."""
    monkeypatch.setattr(product_choice, "COLUMNS_MIN", 16)  # of a tiny model
    checkpoint("qwen3_5")
    own = {"dtype": "bfloat16", "few_row_products": "on"}
    with emulated() as card, started(card, "qwen3_5", **own) as engine:
        made = answers(engine.core, PROMPTS[:2])
        assert card.replays
        assert few_rows._shapes
    assert not card.reports, [str(report) for report in card.reports]
    assert [len(tokens) for tokens in made] == [GREEDY.max_tokens] * 2
    few_rows.use(())


@pytest.mark.parametrize("family", sample(WITHOUT_GRAPHS, 1))
def test_attention_without_kernels_answers_as_transformers_does_and_the_start_says_so(family: str) -> None:
    """130 tokens have more blocks than an index chooses, and more than a chunk or a window."""
    prompts = [*PROMPTS[:2], list(range(3, 133))]
    checkpoint(family)
    with emulated() as card, started(card, family) as engine:
        assert any("some steps are not recorded as CUDA graphs" in note for note in engine.info.notes)
        made = answers(engine.core, prompts)
    assert kinds(card) <= {"wait", "compile"}, [str(report) for report in card.reports]
    assert_tokens_of_transformers(family, prompts, made)


@pytest.mark.parametrize("kernels", ["triton", "torch"] if ALL else ["torch"])
def test_a_start_that_computes_all_that_it_asks_for_is_in_order(kernels: str) -> None:
    """Other starts compute nothing here. By torch each recording is refused on its way, and what it has
    launched by then must not meet the next one."""
    checkpoint("qwen3_5")
    with emulated() as card, started(card, "qwen3_5", quick=False, gpu_kernels=kernels) as engine:
        refused = any("which a graph would freeze" in note for note in engine.info.notes)
        made = answers(engine.core, PROMPTS[:2])
    assert refused is (kernels == "torch")
    assert kinds(card) <= ({"wait"} if refused else set()), [str(report) for report in card.reports]
    assert_tokens_of_transformers("qwen3_5", PROMPTS[:2], made)


@pytest.mark.parametrize("family", ON_CPUS)
def test_a_family_that_no_gpu_computes_is_refused_in_one_line_before_a_weight_is_read(family: str) -> None:
    """All others start: the test above."""
    checkpoint(family)
    with emulated() as card, pytest.raises(CheckpointError) as refused, started(card, family):
        pass
    assert refused.value.message == (
        f"{family} {ON_CPUS[family]}, which weft computes only on CPUs; this is cuda:0. Use --device cpu"
    )
    assert card.allocator.allocated == 0


WAYS: dict[str, dict[str, Any]] = {
    "without overlap": {"overlap": "off"},
    "without graphs": {"cuda_graphs": "off"},
    "states in 8 bits": {"exact": False},
    "KV in 8 bits": {"exact": False, "compress_kv": "int8"},
    "preemptions": {},
    "quantised": {"quantize": "int4"},
    "pages in fp8": {"kv_dtype": "fp8"},
}
FORCED: dict[str, Callable[[pytest.MonkeyPatch, EngineCore], object]] = {
    "states in 8 bits": lambda patch, core: compress_states(patch),
    "KV in 8 bits": lambda patch, core: compress_kv(patch),
    "preemptions": lambda patch, core: refuse_growth(patch, lambda: core.scheduler.running),
}
"""What tiny prompts do not bring about by themselves."""
HAPPENED: dict[str, Callable[[EngineStats], int]] = {
    "states in 8 bits": lambda stats: stats.memory.cache.restored,
    "KV in 8 bits": lambda stats: stats.memory.cache.restored_pages,
    "preemptions": lambda stats: stats.preemptions,
}
ROUNDED = {"states in 8 bits", "KV in 8 bits", "quantised", "pages in fp8"}


@pytest.mark.parametrize("way", sample(WAYS, 1))
def test_every_way_to_serve_reports_nothing(way: str, monkeypatch: pytest.MonkeyPatch) -> None:
    prompts = [list(range(3, 66)), *PROMPTS[:2], list(range(3, 66))]  # the first one grows as it decodes
    checkpoint("qwen3_5")
    plan_small_states(monkeypatch)
    with emulated() as card, started(card, "qwen3_5", **WAYS[way]) as engine:
        threads = [one for one in threading.enumerate() if one.name.startswith("steps")]
        assert bool(threads) is (way != "without overlap"), "a thread that nothing uses"
        FORCED.get(way, lambda patch, core: None)(monkeypatch, engine.core)
        made = answers(engine.core, prompts)
        answers(engine.core, [[400, 401, 402]], name="between")  # what is cached may be compressed
        prompts += [[*prompt, *tokens, 9] for prompt, tokens in zip(prompts[:2], made, strict=False)]
        made += answers(engine.core, prompts[4:], name="on")
        stats = engine.core.stats()
    assert not card.reports, [str(report) for report in card.reports]
    assert stats.memory.cache.hits
    assert HAPPENED.get(way, lambda stats: 1)(stats), "it was not served in that way"
    if way not in ROUNDED:
        assert_tokens_of_transformers("qwen3_5", prompts, made)


@pytest.mark.parametrize("level", sample([1, 2], 1))
def test_an_engine_that_slept_answers_as_before(level: int) -> None:
    checkpoint("qwen3_5")
    with emulated() as card, started(card, "qwen3_5") as engine:
        before = answers(engine.core, PROMPTS[:2])
        executor = cast(TorchExecutor, engine.core.executor)
        card.serving = False
        used = torch.cuda.mem_get_info()[0]
        parts = executor.sleep(level)
        assert torch.cuda.mem_get_info()[0] > used + (32 << 20), "the arena is given back"
        for part in parts:
            executor.wake(part)
        card.begin_serving()
        assert answers(engine.core, PROMPTS[:2], name="awake") == before
    assert not card.reports, [str(report) for report in card.reports]


def test_everything_that_a_row_may_ask_for_reports_nothing() -> None:
    drawn = SamplingParams(
        temperature=1.1,
        top_k=40,
        top_p=0.9,
        min_p=0.01,
        seed=4,
        logprobs=2,
        frequency_penalty=0.5,
        repetition_penalty=1.2,
        logit_bias={7: 2.0},
        min_tokens=1,
        max_tokens=4,
        ignore_eos=True,
    )
    checkpoint("qwen3")
    with emulated() as card, started(card, "qwen3") as engine:
        made = answers(engine.core, PROMPTS[:2] * 2, [drawn, drawn, GREEDY, GREEDY])
        again = answers(engine.core, PROMPTS[:2] * 2, [drawn, drawn, GREEDY, GREEDY], name="again")
    assert made == again, "a function of the seed, whatever is cached"
    assert not card.reports, [str(report) for report in card.reports]
