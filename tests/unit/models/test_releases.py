"""Tensor names and shapes at the size of the real releases, without their weights.

transformers builds each release's model on the meta device from the release's own configuration; the names
and shapes of its parameters stand in for the files. Building weft's model against them must find every
tensor with the right shape and leave none unused.
"""

from __future__ import annotations

import copy
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
import transformers

from tests.fixtures import checkpoints  # noqa: F401  registers classes that transformers lacks
from tests.unit.models.releases_dense import DENSE_RELEASES, SMALLER_DENSE
from tests.unit.models.releases_gemma import GEMMA_RELEASES, SMALLER_GEMMA
from tests.unit.models.releases_mamba import MAMBA_RELEASES, SMALLER_MAMBA
from tests.unit.models.test_families import RELEASES, changed
from tests.unit.models.test_families_attention import RELEASES_MORE, SMALLER_MORE
from weft.errors import CheckpointError
from weft.families import read_architecture
from weft.models.checkpoint_files import CheckpointFiles, _prefix, tensors_here
from weft.models.families import build
from weft.models.reader import TensorCheck
from weft.models.safetensors_header import StoredTensor

SMALLER: dict[str, dict[str, Any]] = (
    {  # as many layers as show each kind: names repeat after that
        "qwen3_next": {"num_hidden_layers": 8},
        "qwen3": {"num_hidden_layers": 4},
        "qwen3_5": {},
        "lfm2": {},
        "granite_hybrid": {},
    }
    | SMALLER_MORE
    | SMALLER_MAMBA
    | SMALLER_GEMMA
    | SMALLER_DENSE
)
ALL = RELEASES | RELEASES_MORE | MAMBA_RELEASES | GEMMA_RELEASES | DENSE_RELEASES


def stand_in(config: dict[str, Any]) -> CheckpointFiles:
    """A checkpoint as transformers would save it, with headers only."""
    text = copy.deepcopy(config.get("text_config", config))
    with torch.device("meta"):
        whole = text["model_type"] == "glm5_next"  # without a class of text alone
        auto = transformers.AutoModelForImageTextToText if whole else transformers.AutoModelForCausalLM
        model = auto.from_config(transformers.AutoConfig.for_model(**text), dtype=torch.bfloat16)
    file = Path("model.safetensors")
    stored = {name for name, _ in (*model.named_parameters(), *model.named_buffers())}  # shared ones once
    tensors = {
        name: StoredTensor(
            file,
            name,
            "BF16" if value.is_floating_point() else "I64",
            tuple(value.shape),
            value.numel() * value.itemsize,
        )
        for name, value in model.state_dict().items()
        if name in stored and ".visual." not in name
    }
    if text["model_type"] == "longcat_flash":  # whose save has matrices of experts that multiply nothing
        for name, value in tensors.items():
            if name.endswith("experts.gate_up_proj"):
                tensors[name] = replace(value, shape=(text["n_routed_experts"], *value.shape[1:]))
    tensors = tensors_here(config, tensors)
    return CheckpointFiles(Path(), config, tensors, _prefix(tensors), file)


def check(config: dict[str, Any], checkpoint: CheckpointFiles) -> TensorCheck:
    architecture = read_architecture(config)
    source = TensorCheck(checkpoint, torch.bfloat16)
    build(architecture, source)
    return source


@pytest.mark.parametrize("name", ALL)
def test_every_tensor_of_the_release_is_asked_for_with_its_shape(name: str) -> None:
    config = changed(ALL[name], **SMALLER[name])
    checkpoint = stand_in(config)
    source = check(config, checkpoint)
    source.raise_problems()
    assert checkpoint.unused(source.used) == []
    distinct = {n: t.stored_bytes for n, t in checkpoint.tensors.items() if n in source.used - source.left}
    assert source.read_bytes == sum(distinct.values())


def test_a_release_of_another_width_is_noticed() -> None:
    config = changed(RELEASES["qwen3"], **SMALLER["qwen3"])
    with pytest.raises(CheckpointError, match="12288"):
        check(changed(config, intermediate_size=12000), stand_in(config)).raise_problems()
