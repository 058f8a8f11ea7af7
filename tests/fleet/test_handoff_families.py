"""Prefill apart from decode with models: the tokens of one engine, for every family."""

from __future__ import annotations

import pytest

from tests.fixtures.checkpoints import asked, checkpoint
from tests.support.split_fleet import SplitFleet
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.engine.engine import EngineCore
from weft.request import Request, SamplingParams

USUAL = ("qwen3", "qwen3_5", "granite_moe", "lfm2", "mamba", "falcon_h1", "recurrent_gemma", "minimax")
"""Each kind of layer. ``tests.oracle.compositions`` asks for the others."""


def requests() -> list[Request]:
    return [Request(request_id=f"r{length}",
                    prompt_tokens=[(7 * at * at + 3 * at) % 200 for at in range(length)],
                    sampling=SamplingParams(max_tokens=12, seed=length, temperature=0.9, ignore_eos=True,
                                            n=1 + length % 2))
            for length in (3, 64, 131, 210)]


@pytest.mark.parametrize("name", asked(*USUAL))
def test_a_split_answer_is_that_of_one_engine(name: str) -> None:
    def core(handoffs: bool = True) -> EngineCore:
        return assemble(EngineConfig(model=str(checkpoint(name)), memory="16MB", threads=1, max_model_len=256,
                                     max_num_batched_tokens=64, max_num_seqs=8, handoffs=handoffs)).core

    whole, answers = core(handoffs=False), {}
    for request in requests():
        whole.submit(request)
    while whole.has_work:
        for event in whole.step():
            answers.setdefault((event.request_id, event.index), []).extend(event.tokens)
    fleet = SplitFleet(None, ("prefill", "decode"), 0, new_core=core)
    assert fleet.run(requests()) == answers
    assert fleet.placement.handoff_count == len(requests())
    for engine in (whole, *(replica.engine.core for replica in fleet.replicas)):
        engine.close()
