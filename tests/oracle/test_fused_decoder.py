"""All layers of a decode step in one crossing: the bits of hidden states, pages and states are those of the
layers one by one, and models that are no such stack never go this way."""

from __future__ import annotations

import functools

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.oracle.model_driver import ModelDriver
from tests.oracle.test_asked_rows import computed
from tests.oracle.test_models_against_transformers import prompt
from weft.models.fused_decoder import FusedDecoder
from weft.models.loading import LoadedModel, load_model
from weft.tensor import native
from weft.tensor.fused_block import MOST_ROWS
from weft.tensor.inputs import LayerCache, StepInputs
from weft.tensor.weights import tiles as tiled

STACKED = ("qwen3", "qwen3_tied", "qwen3_5", "lfm2", "lfm2_bias", "granite", "llama3")
APART = ("olmo3", "falcon_h1", "qwen3_next", "zamba2", "kimi_linear", "ling", "gpt_oss")
"""Norms behind a block, blocks beside each other, experts, a shared block, other mixers."""


@functools.cache
def loaded(name: str) -> LoadedModel:
    return load_model(checkpoint(name))


def decodes(name: str) -> tuple[ModelDriver, StepInputs]:
    """Three, and a PAD row."""
    driver = ModelDriver(loaded(name).model, sequences=4, length=320)
    driver.step((0, prompt(70)), (1, prompt(9)), (3, prompt(128)))
    return driver, driver._inputs(((0, [5]), (1, [6]), (3, [7])), 1)


@pytest.fixture
def stacked(monkeypatch: pytest.MonkeyPatch) -> list[bool]:
    """Whether each forward pass went in one."""
    taken: list[bool] = []
    run = FusedDecoder.run

    def seen(
        self: FusedDecoder, x_TD: torch.Tensor, inputs: StepInputs, caches: list[LayerCache], turned: object
    ) -> torch.Tensor | None:
        found = run(self, x_TD, inputs, caches, turned)  # type: ignore[arg-type]
        taken.append(found is not None)
        return found

    monkeypatch.setattr(FusedDecoder, "run", seen)
    return taken


@pytest.mark.parametrize("name", STACKED)
def test_a_stack_gives_the_bits_of_its_layers_one_by_one(
    name: str, stacked: list[bool], monkeypatch: pytest.MonkeyPatch
) -> None:
    driver, inputs = decodes(name)
    stacked.clear()
    hidden, memory = computed(driver, inputs)
    again, _ = computed(driver, inputs)  # in an arena elsewhere
    assert stacked == [tiled.serves(torch.float32)] * 2  # not where a CPU has no wide vectors
    monkeypatch.setattr(FusedDecoder, "run", lambda *_: None)
    want, want_memory = computed(driver, inputs)
    assert torch.equal(hidden, want)
    assert torch.equal(again, want)
    for one, other in zip(memory, want_memory, strict=True):
        assert torch.equal(one, other)
    other_token = driver._inputs(((0, [5]), (1, [9]), (3, [7])), 1)
    assert not torch.equal(computed(driver, other_token)[0], want)


@pytest.mark.parametrize("name", APART)
def test_other_models_go_layer_by_layer(name: str, stacked: list[bool]) -> None:
    driver, inputs = decodes(name)
    computed(driver, inputs)
    assert not any(stacked)


def test_many_rows_and_the_torch_path_go_layer_by_layer(stacked: list[bool]) -> None:
    driver = ModelDriver(loaded("lfm2").model, sequences=4, length=320)
    driver.step((0, prompt(MOST_ROWS + 1)))
    assert stacked == [False]
    native.choose("torch")
    try:
        driver.step((0, [5]))
    finally:
        native.choose("auto")
    assert stacked == [False, False]
