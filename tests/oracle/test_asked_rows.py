"""Rows that nobody asks for end in the last mixer: no other row, page or state may tell."""

from __future__ import annotations

import copy
import functools
from collections.abc import Iterator
from dataclasses import replace

import pytest
import torch

from tests.fixtures.checkpoints import CHECKPOINTS
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_models_against_transformers import loaded, prompt
from weft.tensor import native
from weft.tensor.inputs import LayerCache, OutputRows, StepInputs


@pytest.fixture
def kernels(request: pytest.FixtureRequest) -> Iterator[None]:
    native.choose(request.param)
    yield
    native.choose("auto")


@functools.lru_cache(maxsize=1)  # the tests of both kernels follow each other
def mixed_step(name: str) -> tuple[ModelDriver, StepInputs]:
    """Two decodes, a PAD row, a prompt from its beginning and a piece of another."""
    driver = ModelDriver(loaded(name).model, sequences=4, length=320)
    driver.step((0, prompt(70)), (1, prompt(9)), (3, prompt(128)))
    return driver, driver._inputs(((0, [5]), (1, [6]), (2, prompt(90)), (3, prompt(64))), 1)


def asked_for(inputs: StepInputs, runs: list[int]) -> StepInputs:
    lasts = [inputs.runs.offsets[run] + inputs.runs.lengths[run] - 1 for run in runs]
    return replace(inputs, output_rows=OutputRows(runs, torch.tensor(lasts, dtype=torch.int64)))


@torch.inference_mode()
def computed(driver: ModelDriver, inputs: StepInputs) -> tuple[torch.Tensor, list[torch.Tensor]]:
    """-> hidden, and the bytes of all pages and states after it. The driver's caches stay as they were."""
    caches, inputs = copy.deepcopy(driver.caches), replace(inputs, runs=replace(inputs.runs, memo={}))
    return driver.model.forward(inputs, caches), [bytes_ for cache in caches for bytes_ in _bytes(cache)]


def _bytes(cache: LayerCache) -> list[torch.Tensor]:
    parts = [part for part in (cache.k, cache.v, *cache.state.values()) if part is not None]
    return [part.view(torch.uint8) for part in parts]


@pytest.mark.parametrize("kernels", ["auto", "torch"], indirect=True)
@pytest.mark.parametrize("name", CHECKPOINTS)
@pytest.mark.usefixtures("kernels")
def test_the_asked_rows_and_all_memory_are_the_same(name: str) -> None:
    driver, inputs = mixed_step(name)
    whole, memory = computed(driver, inputs)
    for runs in ([0, 1, 3, 4], [1, 3], [4], []):
        asked = asked_for(inputs, runs)
        got, got_memory = computed(driver, asked)
        assert asked.output_rows is not None
        torch.testing.assert_close(got, whole[asked.output_rows.rows_X], rtol=1e-5, atol=1e-5)
        for one, other in zip(got_memory, memory, strict=True):
            assert torch.equal(one, other), runs


def test_the_rows_of_other_runs_are_others() -> None:
    driver, inputs = mixed_step("qwen3_5")
    whole, _ = computed(driver, inputs)
    got, _ = computed(driver, asked_for(inputs, [1, 3]))
    last_of_run_4 = whole[inputs.runs.offsets[4] + inputs.runs.lengths[4] - 1]
    assert not torch.allclose(got[1], last_of_run_4, rtol=1e-2, atol=1e-2)
