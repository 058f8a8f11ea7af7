"""Adapters over ranks: factors are cut as their matrices are, and the logits are those of one process."""

from __future__ import annotations

from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path

import pytest
import torch

from tests.fixtures.adapters import factors, written
from tests.fixtures.checkpoints import checkpoint
from tests.oracle.model_driver import ModelDriver
from tests.ranks.threads import load_ranks
from weft.adapters import Adapter, read_adapter
from weft.models.adapters import install, load_adapter
from weft.models.loading import LoadedModel, load_model
from weft.tensor.adapter_rows import StepAdapters
from weft.tensor.inputs import StepInputs

TOLERANCE = 1e-4
PROMPTS = [[3 + (7 * at + 131 * row) % 490 for at in range(20)] for row in range(2)]


class _Driver(ModelDriver):
    digest = ""

    def _inputs(self, pieces: tuple[tuple[int, list[int]], ...], pads: int) -> StepInputs:
        inputs = super()._inputs(pieces, pads)
        return replace(inputs, adapters=StepAdapters.of([self.digest, ""], inputs.runs.lengths))


def whole_adapter(model: LoadedModel, directory: Path) -> Adapter:
    """Factors of every matrix that the checkpoint stores."""
    tensors = {}
    for seed, name in enumerate(sorted(model.model.targets.stored)):
        target = model.model.targets.find(name)
        one_expert = target.experts is not None and len(target.experts) == 1
        if target.product is not None and (one_expert or target.kind in ("product", "expansion")):
            tensors |= factors(name, *target.whole_shape, seed=seed)
    return read_adapter("a", written(directory, tensors, lora_alpha=1))


def logits(models: list[LoadedModel], adapter: Adapter) -> torch.Tensor:
    """[both prompts, vocab]: the first by the adapter."""

    def of_rank(loaded: LoadedModel) -> torch.Tensor:
        install(loaded.model, load_adapter(adapter, loaded.model))
        driver = _Driver(loaded.model, sequences=2, length=64)
        driver.digest = adapter.digest
        rows = driver.step((0, PROMPTS[0]), (1, PROMPTS[1]))
        return torch.cat([*rows, *driver.step((0, [11]), (1, [12]))])

    with ThreadPoolExecutor(len(models)) as pool:
        [first, *others] = pool.map(of_rank, models)
    assert all(torch.equal(first, other) for other in others), "ranks differ in their logits"
    return first


@pytest.mark.parametrize(
    ("name", "by_expert"),
    [
        ("qwen3_5", False),
        ("qwen3_next", False),
        ("kimi_linear", False),
        ("falcon_h1", False),
        ("lfm2", False),
        ("qwen3_moe", False),
        ("qwen3_moe", True),
        ("zamba2", False),
        ("jamba", False),
    ],
)
def test_ranks_with_an_adapter_have_the_logits_of_one_process(name: str, by_expert: bool, tmp_path: Path) -> None:
    alone = load_model(checkpoint(name))
    adapter = whole_adapter(alone, tmp_path)
    truth = logits([alone], adapter)
    ranked = logits(load_ranks(checkpoint(name), 2, by_expert=by_expert), adapter)
    assert (ranked - truth).abs().max().item() < TOLERANCE
    first, tokens = len(PROMPTS[0]), 2 * len(PROMPTS[0])
    whole = ModelDriver(alone.model, sequences=2, length=64).step((0, PROMPTS[0]), (1, PROMPTS[1]))
    assert (truth[:first] - whole[0]).abs().max().item() > 0.01, "the control: the adapter changes its rows"
    assert torch.allclose(truth[first:tokens], whole[1], atol=TOLERANCE), "and no others"
