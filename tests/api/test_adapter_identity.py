"""An adapter's identity is the digest of its files. Under one name and path come other files: whatever was
learned, recorded, reported or kept of the first ones is found by no request of the second ones.

Each test has its control: the same engine with the name in place of the digest finds what is stale.
"""

from __future__ import annotations

import json
from dataclasses import dataclass
from pathlib import Path

import numpy as np
import pytest

from tests.fixtures.adapters import lfm2_adapter
from tests.fixtures.checkpoints import make_checkpoint
from tests.oracle.test_mtp import FREE
from weft.adapters import Adapter, read_adapter
from weft.assemble import assemble, assembly
from weft.config import EngineConfig
from weft.costs.rows import RowCosts
from weft.costs.step import StepCost
from weft.engine.engine import EngineCore
from weft.fleet.live_request import LiveRequest
from weft.request import Request, SamplingParams
from weft.router.protocol import ReplicaLoad
from weft.router.seconds import Seconds
from weft.rpc.recorder import Recorder
from weft.speculation.choice import ByAdapter, Chances
from weft.speculation.mtp import HeadPlan
from weft.speculation.speculator import Speculator
from weft.speculation.text_index import Context
from weft.speculation.tree import TreeFollower
from weft_tools.sim.recording import read_recording

PROMPT = list(range(3, 90))


@dataclass
class Finds:
    """What a request of the second files finds, before one of them ran."""

    routed_tokens: int
    suffix: object
    tree: object
    chances: list[float]
    common_blocks: int


def request_of(adapter: Adapter, name: str) -> Request:
    return Request(
        request_id=name,
        prompt_tokens=PROMPT,
        adapter=adapter,
        sampling=SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True, seed=0),
    )


def answered(core: EngineCore, recorder: Recorder, request: Request) -> list[int]:
    core.submit(request)
    recorder.accepted(request)
    tokens: list[int] = []
    while core.has_work:
        events = core.step()
        recorder.events(events)
        tokens += [token for event in events for token in event.tokens]
    return tokens


def routed_tokens(core: EngineCore, request: Request) -> int:
    """Of its prompt, how many a router expects to find cached."""
    router = Seconds(lambda: 0.0)
    router.joined(0)
    router.reported(0, core.memory.follow_snapshots(pages=False).full_report())
    load = ReplicaLoad(0, 0, 0, rows=8, costs=StepCost(fixed_s=0.01, token_s=1e-3))
    return router.choose(LiveRequest(request, 0).routed(), [load]).predicted_tokens


def finds(home: Path, patch: pytest.MonkeyPatch) -> Finds:
    drafter = Speculator(("tree", "suffix"), costs=RowCosts(FREE))
    patch.setattr(assembly, "make_drafter", lambda *more: drafter)
    core = assemble(
        EngineConfig(model=str(make_checkpoint(home / "base", "lfm2", hidden_size=256)), memory="64MiB", threads=1)
    ).core
    drafter._tree = core.memory.prefix_tree
    recorder = Recorder(home / "r.jsonl", core, model="m", snapshots="auto", limit_bytes=10**6, clock=lambda: 0.0)
    first = read_adapter("same", lfm2_adapter(home / "same", 500))
    answer = answered(core, recorder, request_of(first, "first"))
    answered(core, recorder, request_of(first, "again"))  # the tree drafts, and all of it is right
    second = read_adapter("same", lfm2_adapter(home / "same", 900))
    assert (second.name, second.directory) == (first.name, first.directory)
    request = request_of(second, "second")
    known = np.asarray([*PROMPT, *answer[:8]], np.int32)
    routed = routed_tokens(core, request)
    suffix = drafter._library.lookup(request.salt, Context(answer[:8]))
    tree = TreeFollower(core.memory.prefix_tree, request.salt, known).propose(4)
    chances = list(drafter._chances.of(second.digest).values["tree"])
    answered(core, recorder, request)
    recorder.close()
    core.close()
    lines = [json.loads(line) for line in (home / "r.jsonl").read_text().splitlines()]
    before, again, after = read_recording(lines).traffic.requests
    assert set(before.blocks) & set(again.blocks), "prompts of one adapter have blocks in common"
    return Finds(routed, suffix, tree, chances, len(set(again.blocks) & set(after.blocks)))


@pytest.fixture(scope="module")
def by_digest(tmp_path_factory: pytest.TempPathFactory) -> Finds:
    with pytest.MonkeyPatch.context() as patch:
        return finds(tmp_path_factory.mktemp("digest"), patch)


@pytest.fixture(scope="module")
def by_name(tmp_path_factory: pytest.TempPathFactory) -> Finds:
    """The control."""
    of = ByAdapter.of
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(Adapter, "salt", lambda self, cache_salt: f"\0{self.name}\0{cache_salt}")
        patch.setattr(ByAdapter, "of", lambda self, adapter: of(self, ""))
        return finds(tmp_path_factory.mktemp("name"), patch)


def test_a_router_expects_no_prefix_of_the_files_before(by_digest: Finds, by_name: Finds) -> None:
    assert by_digest.routed_tokens == 0
    assert by_name.routed_tokens >= 64


def test_no_answer_of_the_files_before_is_drafted(by_digest: Finds, by_name: Finds) -> None:
    assert by_digest.suffix is None
    assert by_digest.tree is None
    assert by_name.suffix is not None
    assert by_name.tree is not None


def test_chances_of_drafts_begin_anew_with_other_files(by_digest: Finds, by_name: Finds) -> None:
    assert by_digest.chances == Chances().values["tree"]
    assert by_name.chances != by_digest.chances


def test_a_recording_has_no_block_in_common_between_them(by_digest: Finds, by_name: Finds) -> None:
    assert by_digest.common_blocks == 0
    assert by_name.common_blocks > 0


def test_the_head_is_planned_by_the_adapters_that_run() -> None:
    """Its drafts are wrong for one adapter, and go on for the model alone."""
    free, head = RowCosts(FREE), HeadPlan({}, 3, prompt_share=0.1)
    head.begin(1, "wrong")._place_right = [0.0] * 3
    assert head.drafts(1, free) is None
    head.begin(2, "")
    assert 0.3 < head.expected()[0] < 0.45, "the average of both"
    head.end(1)
    assert head.drafts(1, free) == 3
    head.end(2)
    head.begin(3, "wrong")
    assert head.drafts(1, free) is None, "what was learned stays"


def test_no_more_adapters_are_learned_of_than_the_limit() -> None:
    table = ByAdapter(Chances)
    kept = table.of("kept")
    for number in range(2000):
        table.of(str(number))
        assert table.of("kept") is kept
    assert len(table._learned) <= 256
