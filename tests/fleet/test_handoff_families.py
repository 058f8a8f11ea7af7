"""Prefill apart from decode with models: the tokens of one engine, for every family."""

from __future__ import annotations

from collections.abc import Sequence
from pathlib import Path
from typing import Any

import msgspec
import pytest

from tests.fixtures.checkpoints import asked, checkpoint
from tests.support.split_fleet import SplitFleet
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.request import Request, SamplingParams
from weft.tensor import native
from weft.units import PAGE_TOKENS

USUAL = ("qwen3", "qwen3_5", "granite_moe", "lfm2", "mamba", "falcon_h1", "recurrent_gemma", "minimax")
"""Each kind of layer. ``tests.oracle.compositions`` asks for the others."""


def requests() -> list[Request]:
    return [
        Request(
            request_id=f"r{length}",
            prompt_tokens=[(7 * at * at + 3 * at) % 200 for at in range(length)],
            sampling=SamplingParams(max_tokens=12, seed=length, temperature=0.9, ignore_eos=True, n=1 + length % 2),
        )
        for length in (3, 64, 131, 210)
    ]


def assert_split_as_whole(directory: Path, asked: Sequence[Request], *, is_cut: bool = False, **form: Any) -> None:
    """The first of both engines answers alone before that, under a salt of its own."""
    config = EngineConfig(
        **{
            "model": str(directory),
            "memory": "16MB",
            "threads": 1,
            "max_model_len": 512,
            "handoffs": True,
            "max_num_batched_tokens": 72,
            "max_num_seqs": 8,
            "device": "cpu",
            "speculate": "off",
            **form,
        }
    )
    cores = [assemble(config).core for _ in range(2)]
    answers: dict[tuple[str, int], list[int]] = {}
    for request in asked:
        cores[0].submit(msgspec.structs.replace(request, cache_salt="alone"))
    while cores[0].has_work:
        for event in cores[0].step():
            answers.setdefault((event.request_id, event.index), []).extend(event.tokens)
    waiting = list(cores)
    fleet = SplitFleet(None, ("prefill", "decode"), 0, new_core=lambda: waiting.pop(0), is_cut=is_cut)
    assert fleet.run(list(asked)) == answers
    assert fleet.placement.handoff_count == len(asked), "handoffs"
    generated = sum(len(tokens) - 1 for tokens in answers.values())
    if config.speculate == "off" and not is_cut:  # drafts are computed too
        assert cores[1].computed_tokens <= generated + PAGE_TOKENS * len(answers), "more than the last page"
    for core in cores:
        core.close()
    native.choose("auto")


@pytest.mark.parametrize("name", asked(*USUAL))
def test_a_split_answer_is_that_of_one_engine(name: str) -> None:
    assert_split_as_whole(checkpoint(name), requests())
