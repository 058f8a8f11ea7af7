"""Prefill apart from decode beside everything else that changes what a record or a request is: the tokens of
one engine. Two engines in one thread; those with ranks have their processes."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fixtures.adapters import factors, written
from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.vision_checkpoints import vision_checkpoint
from tests.fleet.test_handoff_families import assert_split_as_whole, requests
from tests.oracle.test_mtp import EMBEDDED
from tests.oracle.test_pictures import BIG, SMALL, seeing
from tests.support.given_costs import GIVEN_COSTS
from weft.adapters import read_adapter
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.request import Request, SamplingParams


@pytest.mark.parametrize(
    "form",
    [
        {"quantize": "int8", "kv_dtype": "int8"},
        {"quantize": "int4", "speculate": "suffix,tree"},
        {"dtype": "bfloat16", "state_dtype": "bfloat16", "overlap": "on"},
        {"cpu_kernels": "torch"},
    ],
    ids=lambda form: " ".join(form.values()),
)
def test_a_split_answer_is_that_of_one_engine_in_each_form(form: dict[str, Any]) -> None:
    assert_split_as_whole(checkpoint("qwen3_5"), requests(), **form)


def test_a_split_answer_of_a_model_with_a_head_is_that_of_one_engine() -> None:
    assert_split_as_whole(EMBEDDED, requests(), speculate="mtp")


def test_a_split_answer_about_pictures_is_that_of_one_engine() -> None:
    asked = [
        Request(
            request_id=f"seen{number}",
            prompt_tokens=one.tokens,
            pictures=one.pictures,
            sampling=SamplingParams(temperature=0.0, max_tokens=12, ignore_eos=True, seed=0),
        )
        for number, one in enumerate(
            (seeing("qwen3_5_vl", 70, (BIG,), 9, seed=1), seeing("qwen3_5_vl", 3, (SMALL,), 60, seed=2))
        )
    ]
    assert_split_as_whole(vision_checkpoint("qwen3_5_vl"), asked)


def test_a_split_answer_by_an_adapter_is_that_of_one_engine(tmp_path: Path) -> None:
    folder = written(tmp_path / "a", factors("model.layers.0.conv.in_proj", 192, 64), lora_alpha=64)
    adapter = read_adapter("a", folder)
    asked = [
        msgspec.structs.replace(request, adapter=adapter if number % 2 else None)
        for number, request in enumerate(requests())
    ]
    assert_split_as_whole(checkpoint("lfm2"), asked, lora=(f"a={folder}",))


def test_a_split_answer_of_two_ranks_is_that_of_one_engine_of_two_ranks() -> None:
    assert_split_as_whole(checkpoint("qwen3_5"), requests()[::2], tp=2)


def test_records_that_no_link_carries_are_in_the_store_before_the_answer_goes_on(tmp_path: Path) -> None:
    """The engine for prompts writes it. Readers look every 10 s, so one that opens it now is asked."""
    asked = requests()[2:]
    form: dict[str, Any] = {
        "store": str(tmp_path / "store"),
        "store_size": "64MB",
        "store_reserve": "1MB",
        "step_costs": GIVEN_COSTS,
    }
    assert_split_as_whole(checkpoint("qwen3_5"), asked, is_cut=True, **form)
    reader = assemble(
        EngineConfig(
            model=str(checkpoint("qwen3_5")),
            memory="16MB",
            threads=1,
            device="cpu",
            max_model_len=512,
            handoffs=True,
            **form,
        )
    ).core
    assert reader.store is not None
    for request in asked:
        found = reader.store.store.match(None, request.prompt_tokens, 0)
        assert found is not None
        assert found.position == len(request.prompt_tokens)
    reader.close()


def test_records_that_nothing_carries_are_computed_again() -> None:
    """The control: without a store."""
    with pytest.raises(AssertionError, match="handoffs"):
        assert_split_as_whole(checkpoint("qwen3_5"), requests()[2:], is_cut=True)
