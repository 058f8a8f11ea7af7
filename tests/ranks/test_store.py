"""A store below two ranks: one record has the parts of both, and a damaged part is no hit."""

from __future__ import annotations

import json
import os
import shutil
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures import store_life
from tests.fixtures.checkpoints import checkpoint
from tests.ranks.engines import GREEDY, Story, engine, prompt, run
from tests.support.given_costs import GIVEN_COSTS
from weft.assemble.assembly import Assembled
from weft.ranks.executor import RankedExecutor, StepFence
from weft.ranks.messages import RankBuffer, RankBufferFreed
from weft.ranks.peers import Peers
from weft.ranks.shared_buffers import SharedBuffers
from weft.store.ledger import ROW_BYTES
from weft.store.survey import verify
from weft.tensor.gpu.host_memory import HostBuffer, HostRoom
from weft.units import BufferId

PROMPT = prompt(200, 1)
FAMILIES = ("qwen3_5", "granite")
"""Two ranks divide the KV heads of both."""


def stored(family: str, peers: Peers | None, store: Path, **changes: Any) -> Assembled:
    """Computing is said to be slow: a model of this size is computed sooner than read."""
    return engine(
        checkpoint(family),
        peers=peers,
        store=str(store),
        store_size="64MiB",
        store_reserve="1MiB",
        dtype="float32",
        speculate="off",
        step_costs=GIVEN_COSTS,
        **changes,
    )


def ask(assembled: Assembled, name: str = "a") -> Story:
    return run(assembled, {name: (PROMPT, GREEDY)}, Story())


@pytest.mark.parametrize("overlap", ["off", "on"])
@pytest.mark.parametrize("family", FAMILIES)
def test_after_a_restart_the_prefix_of_both_ranks_is_a_hit(
    family: str, overlap: str, two: Peers, tmp_path: Path
) -> None:
    """The restored logits are those of a prefix in memory, bit for bit."""
    before = stored(family, two, tmp_path / "store", overlap=overlap)
    cold, warm = ask(before), ask(before)
    before.core.close()
    after = stored(family, two, tmp_path / "store", overlap=overlap)
    again = ask(after)
    buffers = after.core.store.buffers if after.core.store is not None else None
    after.core.close()
    assert cold.cached_tokens["a"] == 0
    assert again.cached_tokens == warm.cached_tokens
    assert again.cached_tokens["a"] >= 128
    assert again.tokens == warm.tokens == cold.tokens
    assert again.distance(warm) == 0.0
    assert buffers is not None
    assert len(buffers) == 0, "a transfer buffer outlived its load"


def test_a_damaged_part_of_one_rank_is_computed_by_both(two: Peers, tmp_path: Path) -> None:
    """Each record is checked as a whole: a flipped bit in the part of rank 1 alone makes it no hit."""
    store = tmp_path / "store"
    before = stored("qwen3_5", two, store)
    cold = ask(before)
    assert before.core.store is not None
    state_bytes = before.core.store.buffers.slot_bytes
    before.core.close()
    for volume in (store / "volumes").iterdir():
        content = bytearray(volume.read_bytes())
        # A page of rank 1 follows one of rank 0, and its state ends the record: flip late bits of all blocks.
        for at in range(4096 + state_bytes - 8, len(content), 512):
            content[at] ^= 1
        volume.write_bytes(content)
    after = stored("qwen3_5", two, store)
    again = ask(after)
    assert after.core.store is not None
    damaged = after.core.store.restores.counts.damaged
    after.core.close()
    assert damaged > 0
    assert again.cached_tokens["a"] == 0
    assert again.tokens == cold.tokens


def test_a_part_that_a_rank_does_not_load_shows(two: Peers, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: if rank 1 never sees its buffers' bytes, the logits differ."""
    before = stored("qwen3_5", two, tmp_path / "store")
    ask(before)
    warm = ask(before)
    before.core.close()
    after = stored("qwen3_5", two, tmp_path / "store")
    assert isinstance(after.core.executor, RankedExecutor)
    share = two.share

    def other_memory(message: RankBuffer, descriptor: int | None) -> None:
        assert descriptor is not None
        empty = os.memfd_create("empty")
        os.ftruncate(empty, os.fstat(descriptor).st_size)
        share(message, empty)
        os.close(empty)

    assert after.core.store is not None
    monkeypatch.setattr(after.core.store.buffers, "_share", other_memory)
    again = ask(after)
    after.core.close()
    assert again.cached_tokens == warm.cached_tokens
    assert again.distance(warm) > 0.0


def test_one_rank_and_two_have_records_of_their_own(two: Peers, tmp_path: Path) -> None:
    alone = stored("qwen3_5", None, tmp_path / "store")
    expected = ask(alone)
    alone.core.close()
    ranked = stored("qwen3_5", two, tmp_path / "store")
    story = ask(ranked)
    ranked.core.close()
    assert story.cached_tokens["a"] == 0
    assert story.tokens == expected.tokens


def test_kill_9_of_both_ranks_loses_nothing_that_was_durable(two: Peers, tmp_path: Path) -> None:
    store = tmp_path / "store"
    command = [sys.executable, "-m", "tests.fixtures.store_life", str(checkpoint("lfm2")), str(store), "2"]
    with subprocess.Popen(command, stdout=subprocess.PIPE, text=True) as process:
        end = time.monotonic() + 120
        while _rows(store) < 12 and time.monotonic() < end:
            assert process.poll() is None, "the engine ended by itself"
            time.sleep(0.002)
        process.send_signal(signal.SIGKILL)
        lines = process.stdout.read().splitlines() if process.stdout is not None else []
    assert process.returncode == -signal.SIGKILL
    assert verify(store, lambda done, total: None).good
    answers = dict(map(json.loads, lines))
    core = store_life.engine(checkpoint("lfm2"), shutil.copytree(store, tmp_path / "copy"), ranks=2, peers=two)
    tokens, cached = store_life.answer(core, 0)
    core.close()
    assert cached >= 384, "the first prompt was durable when the processes died"
    assert tokens == answers[0]


@dataclass
class Steps:
    """Of rank 0."""

    begun: int = 0
    steps_computed: int = 0

    def fence(self) -> StepFence:
        return StepFence(self, self.begun + 1)  # type: ignore[arg-type]


def test_a_piece_is_used_again_only_behind_a_step_that_every_rank_began_after_it_was_freed() -> None:
    steps, said = Steps(), []
    room = HostRoom(HostBuffer(64 << 10, None), steps.fence)
    buffers = SharedBuffers(
        4096,
        4096,
        limit_bytes=64 << 10,
        ranks=2,
        room=room,
        tell=said.append,
        share=lambda message, descriptor: said.append((message, descriptor is None)),
    )
    first = buffers.add(3)
    assert said == [(RankBuffer(first, 3, 0), True)]
    steps.begun = 7
    buffers.free(first)
    assert said[1:] == [RankBufferFreed(first)]
    second = buffers.add(3)
    assert said[2:] == [(RankBuffer(second, 3, 32 << 10), True)], "a rank may still read the first piece"
    steps.steps_computed = 7
    third = buffers.add(0)
    assert said[3:] == [(RankBuffer(third, 0, None), False)], "no gap: memory of its own"
    steps.steps_computed = 8
    assert said[4:] == []
    assert buffers.add(0) == third + 1
    assert said[4:] == [(RankBuffer(BufferId(third + 1), 0, 0), True)]


def _rows(store: Path) -> int:
    return sum(file.stat().st_size for file in store.glob("ledger-*.rows")) // ROW_BYTES
