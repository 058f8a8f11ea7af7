"""Models on another device than the CPU, shown on the one that every machine has: meta, which knows shapes
and devices and no values. What reaches for a CPU tensor there would on a GPU.
"""

from __future__ import annotations

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from weft.memory.frames.plan import plan_arena
from weft.models.loading import load_model
from weft.runner.arena import DeviceArena
from weft.runner.graphs import pad_rows
from weft.runner.kv_scales import one_prompt
from weft.runner.sleep import tensors_of
from weft.tensor.inputs import StepInputs
from weft.tensor.ops.moe import moe
from weft.tensor.scratch import scratch

META = torch.device("meta")
FAMILIES = ("qwen3", "qwen3_5", "lfm2", "granite_moe", "jamba", "kimi_linear", "zamba2", "falcon_h1")


@pytest.fixture
def without_values(monkeypatch: pytest.MonkeyPatch) -> None:
    """Where torch's own path decides by values it is told "yes"; and it does not count tokens by expert."""
    monkeypatch.setattr(torch.Tensor, "__bool__", lambda self: True)
    monkeypatch.setattr(moe, "torch", lambda x_TD, *others, **more: torch.empty_like(x_TD))
    monkeypatch.setattr(scratch, "device", META)


def compute(model: object, inputs: StepInputs) -> torch.Tensor:
    caches = DeviceArena(plan_arena(model.spec, 2 << 20), META).layer_caches(len(model.spec.layers))
    with torch.inference_mode():
        return model.logits(model.forward(inputs, caches))


@pytest.mark.parametrize("family", FAMILIES)
def test_a_model_is_all_where_it_was_loaded_to_and_computes_there(family: str, without_values: None) -> None:
    model = load_model(checkpoint(family), device=META).model
    assert {tensor.device for tensor in tensors_of(model)} == {META}
    vocab = model.spec.vocab_size
    assert compute(model, one_prompt(100, vocab, META)).shape == (100, vocab)
    assert compute(model, pad_rows(3, 8, META)).shape == (3, vocab)


@pytest.mark.parametrize("quantize", ["int8", "int4"])
def test_weights_are_rounded_where_they_go(quantize: str, without_values: None) -> None:
    model = load_model(checkpoint("qwen3_5"), device=META, quantize=quantize).model
    assert {tensor.device for tensor in tensors_of(model)} == {META}
    assert compute(model, pad_rows(3, 8, META)).shape[0] == 3


def test_the_control_one_tensor_left_behind_is_noticed(without_values: None) -> None:
    model = load_model(checkpoint("qwen3"), device=META).model
    for table in model._rotary.values():
        table.frequencies = torch.zeros(table.frequencies.shape)
    with pytest.raises(RuntimeError, match="device"):
        compute(model, pad_rows(3, 8, META))
    assert len({tensor.device for tensor in tensors_of(model)}) == 2
