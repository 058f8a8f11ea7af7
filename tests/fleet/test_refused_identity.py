"""Engines that cannot share bits are refused when they join, and the line names what differs."""

from __future__ import annotations

import json
import shutil
from collections.abc import Iterator
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.oracle.test_store_other_models import other_weights
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.stats import WeightsState
from weft.errors import ConfigError
from weft.fleet.joined import check_identity
from weft.tensor import native


def identity(model: Path, **changes: Any) -> dict[str, str]:
    built = assemble(
        EngineConfig(
            **{
                "model": str(model),
                "memory": "16MB",
                "threads": 1,
                "max_model_len": 256,
                "device": "cpu",
                "dtype": "float32",
                "handoffs": True,
                **changes,
            }
        )
    )
    built.core.close()
    return built.info.identity


def refusal(there: dict[str, str], here: dict[str, str]) -> str:
    engine: Any = SimpleNamespace(info=SimpleNamespace(identity=there), weights=WeightsState())
    with pytest.raises(ConfigError) as caught:
        check_identity(engine, here, "far")
    return caught.value.message.removeprefix("the replica of far would give other answers: ")


@pytest.fixture(scope="module")
def served() -> Iterator[dict[str, str]]:
    yield identity(checkpoint("lfm2"))
    native.choose("auto")


def test_an_engine_like_the_others_is_let_in(served: dict[str, str]) -> None:
    """The control."""
    there = identity(checkpoint("lfm2"))
    assert there == served
    check_identity(SimpleNamespace(info=SimpleNamespace(identity=there), weights=WeightsState()), served, "far")  # type: ignore[arg-type]


@pytest.mark.parametrize(
    ("changes", "said"),
    [
        ({"threads": 2}, "threads is 2 there and 1 here"),
        (
            {"dtype": "bfloat16"},
            "dtype is bfloat16 there and float32 here; kv_dtype is bfloat16 there and "
            "float32 here; quantize is bfloat16 there and float32 here",
        ),
        ({"kv_dtype": "int8"}, "kv_dtype is int8 there and float32 here"),
        ({"state_dtype": "bfloat16"}, "state_dtype is bfloat16 there and float32 here"),
        ({"quantize": "int8"}, "quantize is int8, float32 there and float32 here"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, dict) else "",
)
def test_an_engine_of_another_form_is_refused(changes: dict[str, Any], said: str, served: dict[str, str]) -> None:
    assert refusal(identity(checkpoint("lfm2"), **changes), served) == said


def test_an_engine_with_the_kernels_of_another_cpu_is_refused(served: dict[str, str]) -> None:
    line = refusal(identity(checkpoint("lfm2"), cpu_kernels="torch"), served)
    assert line.startswith("kernels is torch ")
    assert f"there and {served['kernels']} here" in line


def test_an_engine_with_other_weights_is_refused(served: dict[str, str], tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint("lfm2"), tmp_path / "model")
    other_weights(model)
    assert refusal(identity(model), served).startswith("weights is ")


def test_an_engine_with_another_configuration_is_refused(served: dict[str, str], tmp_path: Path) -> None:
    model = shutil.copytree(checkpoint("lfm2"), tmp_path / "model")
    config = json.loads((model / "config.json").read_text())
    (model / "config.json").write_text(json.dumps(config | {"rope_theta": 5.0}))
    assert refusal(identity(model), served).startswith("config is ")


@pytest.mark.parametrize(
    ("name", "value"),
    [("tp", "2"), ("page layout", "rows"), ("version", "0.0.1"), ("tokenizer", "another"), ("records", "another")],
)
def test_each_fact_alone_is_a_reason(name: str, value: str, served: dict[str, str]) -> None:
    """What takes another machine, or another weft."""
    assert refusal(served | {name: value}, served) == f"{name} is {value} there and {served[name]} here"
