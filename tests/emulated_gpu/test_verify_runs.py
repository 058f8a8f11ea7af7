"""Verify runs as graphs, and models with a head of their own: the same tokens, and no wait."""

from __future__ import annotations

import collections
import gc
from pathlib import Path
from typing import Any, cast

import pytest
from msgspec import structs

from tests.emulated_gpu import emulated
from tests.emulated_gpu.card import Card
from tests.emulated_gpu.engines import (
    GREEDY,
    Started,
    answered,
    answers,
    assert_tokens_of_transformers,
    kinds,
    said_by_transformers,
    started,
)
from tests.emulated_gpu.sample import ALL, sample
from tests.fixtures.checkpoints import checkpoint
from tests.fixtures.drafters import AnswerDrafter, Kind
from tests.fixtures.mtp_heads import with_head
from tests.oracle.serving import Serving
from tests.oracle.test_mtp import EMBEDDED, FREE
from tests.oracle.test_mtp_heads import Listening as Drafting
from tests.server.scripted_engine import _FreeRows
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.costs.rows import RowCosts
from weft.models.loading import load_model
from weft.request import Request
from weft.runner import readback
from weft.runner.graph_shapes import verify_shapes
from weft.runner.head_graphs import HeadGraphs
from weft.runner.step_graphs import StepGraphs
from weft.runner.torch_executor import GRAPH, TorchExecutor
from weft.speculation.drafter import SourceName
from weft.speculation.speculator import Speculator

PROMPTS = [[300, 20, 411, 5, 123], list(range(3, 43)), [7]][: 3 if ALL else 2]
LONGER = structs.replace(GREEDY, max_tokens=12 if ALL else 7)
SHORTER = structs.replace(GREEDY, max_tokens=5)
RECORDINGS_MAX = 22
"""Of verify runs without prompts and of their states, that a start makes."""


def graphs_of(engine: Started) -> StepGraphs:
    graphs = cast(TorchExecutor, engine.core.executor).graphs
    assert graphs is not None
    return graphs


def counted(graphs: StepGraphs) -> list[Any]:
    """The replays of verify runs' states, from now on."""
    seen: list[Any] = []
    replay = graphs.replay_states

    def counting(block: Any, *rest: Any) -> None:
        seen.append(block)
        replay(block, *rest)

    graphs.replay_states = counting  # type: ignore[method-assign]
    return seen


def served(card: Card, family: str, kind: Kind, **more: Any) -> tuple[list[list[int]], list[Any]]:
    """The tokens of each prompt, and the verify runs that were replayed."""
    said = {at: said_by_transformers(family, prompt, LONGER.max_tokens) for at, prompt in enumerate(PROMPTS)}
    drafter = AnswerDrafter(kind, said, 512)
    with started(card, family, drafter=drafter, speculate="auto", **more) as engine:
        seen = []
        if "cuda_graphs" not in more:
            seen = counted(graphs_of(engine))
            graphs = graphs_of(engine)
            assert set(graphs.recorded()) == {shape for shape in graphs.shapes if shape.forward}, "some are refused"
        made = answers(engine.core, PROMPTS, LONGER)
    assert drafter.drafted
    return made, seen


@pytest.mark.parametrize(
    ("family", "kind"),
    sample(
        [
            (family, kind)
            for family in ("qwen3_5", "qwen3", "bamba", "lfm2", "kimi_linear", "jamba")
            for kind in ("perfect", "adversarial", "random")
        ],
        1,
    ),
)
def test_verify_runs_are_replayed_with_the_tokens_of_transformers(family: str, kind: Kind) -> None:
    checkpoint(family)
    for prompt in PROMPTS:
        said_by_transformers(family, prompt, LONGER.max_tokens)
    with emulated() as card:
        made, seen = served(card, family, kind)
        assert seen, "verify runs were launched from Python"
        assert not card.reports, [str(report) for report in card.reports]
    assert_tokens_of_transformers(family, PROMPTS, made)
    if not ALL:
        return
    with emulated() as card:
        eager, _ = served(card, family, kind, cuda_graphs="decodes")
    assert made == eager


@pytest.mark.parametrize("family", sample(["qwen3_5", "bamba"], 1))
def test_prompts_and_verify_runs_are_one_graph_with_the_tokens_of_transformers(family: str) -> None:
    """Each prompt comes while the others verify drafts."""
    prompts = [[300, 20, 411, 5, 123], list(range(3, 43)), [7, 9, 11]]
    checkpoint(family)
    said = {at: said_by_transformers(family, prompt, LONGER.max_tokens) for at, prompt in enumerate(prompts)}
    tokens: dict[str, list[int]] = {}
    with (
        emulated() as card,
        started(
            card, family, drafter=AnswerDrafter("perfect", said, 512, most=2), speculate="auto", overlap="off"
        ) as engine,
    ):
        core, seen = engine.core, counted(graphs_of(engine))
        left = list(enumerate(prompts))
        while left or core.has_work:
            if left:
                at, prompt = left.pop(0)
                core.submit(Request(request_id=f"{at}", prompt_tokens=prompt, sampling=LONGER))
            for event in core.step():
                tokens.setdefault(event.request_id, []).extend(event.tokens)
            assert core.failure is None, core.failure
        forms = cast(TorchExecutor, core.executor).steps_by_form
        assert any(block.shape.prompts for block in seen), "no prompt came while drafts were verified"
        assert {form for form, count in forms.items() if count} == {GRAPH}
        assert not card.reports, [str(report) for report in card.reports]
    assert tokens == {str(at): one for at, one in said.items()}


def test_a_start_records_no_more_verify_runs_than_it_says() -> None:
    for rows in (1, 2, 4, 15, 16, 256):
        shapes = verify_shapes(rows)
        assert len(shapes) <= RECORDINGS_MAX
        assert [shape.forward for shape in shapes] == [False, True] * (len(shapes) // 2)


def ordered(engine: Started, drafting: HeadGraphs, patch: pytest.MonkeyPatch) -> list[str]:
    """Return the order of launches, waits and work of the host, from now on."""
    log: list[str] = []
    inside: list[str] = []

    def noted(owner: object, name: str, what: str) -> None:
        inner = getattr(owner, name)

        def noting(*args: Any, **more: Any) -> Any:
            begins = what not in ("events", *inside)
            inside.extend(["replay"] if what in ("states", "drafts") else [])  # of graphs of their own
            if begins:
                log.append(what)
            result = inner(*args, **more)
            if what == "events":
                log.append(what)
            if what in ("states", "drafts"):
                inside.pop()
            return result

        patch.setattr(owner, name, noting)

    graphs, core = graphs_of(engine), engine.core
    noted(core.scheduler, "plan", "plan")
    noted(graphs, "replay", "replay")
    noted(graphs, "replay_states", "states")
    noted(drafting, "drafts", "drafts")
    noted(core.settlement._feed, "settled", "settled")
    noted(readback, "wait_for", "wait")
    noted(core, "step", "events")
    return log


def test_a_model_with_a_head_decodes_by_graphs(monkeypatch: pytest.MonkeyPatch) -> None:
    def speculator() -> Speculator:
        return Speculator(("mtp",), costs=RowCosts(FREE), head_seconds={1: 1e-6, 2: 2e-6, 3: 3e-6})

    expected = assemble(
        EngineConfig(model=str(EMBEDDED), device="cpu", speculate="off", threads=1, max_model_len=256)
    ).core
    wanted = answers(expected, PROMPTS[:1], SHORTER)
    expected.close()
    source = speculator()
    drafted: list[tuple[int, int, int]] = []
    """Drafts, replays, launches of kernels from Python; of each step."""
    with emulated() as card, started(card, str(EMBEDDED), drafter=source, speculate="mtp") as engine:
        seen, before, waited = counted(graphs_of(engine)), card.replays, len(card.waits)
        head = cast(TorchExecutor, engine.core.executor)._head
        assert head is not None
        assert head.graphs is not None
        drafting, drafts = head.graphs, head.graphs.drafts

        def watched(*args: Any) -> Any:
            launched, replayed = card.launches, card.replays
            found = drafts(*args)
            drafted.append((len(found), card.replays - replayed, card.launches - launched))
            return found

        drafting.drafts = watched  # type: ignore[method-assign]
        with monkeypatch.context() as patch:
            log = ordered(engine, drafting, patch)
            made = answers(engine.core, PROMPTS[:1], SHORTER)
        replays = card.replays - before
        reports = [report for report in card.reports if report.kind != "compile"]
        waits = collections.Counter(wait.place.split(":")[0] for wait in card.waits[waited:])
        assert "freed" not in kinds(card)
        # The control: what a draft begins with is freed, and its graph still has the address.
        drafting._hidden_WD = drafting._hidden_WD.clone()
        gc.collect()
        answers(engine.core, PROMPTS[:1], structs.replace(GREEDY, max_tokens=3), name="freed")
        assert "freed" in kinds(card)
    assert (3, 3, 0) in drafted
    assert all(count == replayed and launches == 0 for count, replayed, launches in drafted)
    assert source.stats().sources["mtp"].accepted
    assert seen
    assert replays > len(seen)
    # The profile run compiles what writes keys of prompts; this test has none.
    assert not reports, [str(one) for one in reports]
    assert not waits, "the host waits for events only"
    # The rest of a step waits for its tokens, and the next plan for the drafts. Events are sent, and tokens are
    # settled, while the device computes.
    step = ["plan", "replay", "events", "wait", "states", "drafts", "settled", "wait"]
    first = log.index("states") - step.index("states")
    assert log[first : first + 2 * len(step)] == 2 * step
    assert made == wanted


def test_a_head_of_latent_attention_drafts_by_graphs(tmp_path: Path) -> None:
    """Ling's, behind the last layer: the drafts and tokens of the CPU, and no launch from Python."""
    directory, prompts = with_head(tmp_path / "ling", "ling"), PROMPTS[:1]
    alone, source, launches = Drafting(2, dear=False), Drafting(2, dear=False), list[int]()
    serving = Serving("", model=load_model(directory, mtp=True), drafter=alone)
    wanted = [list(answer.tokens) for answer in serving.run(prompts, SHORTER)]
    with emulated() as card, started(card, str(directory), drafter=source, speculate="mtp") as engine:
        head = cast(TorchExecutor, engine.core.executor)._head
        assert head is not None
        assert head.graphs is not None
        drafts = head.graphs.drafts

        def watched(*args: Any) -> Any:
            before = card.launches
            numbers = drafts(*args)
            launches.append(card.launches - before)
            return numbers

        head.graphs.drafts = watched  # type: ignore[method-assign]
        assert answers(engine.core, prompts, SHORTER) == wanted
        # As above: the profile run compiles what writes what a prompt keeps.
        assert kinds(card) <= {"compile", "wait"}, [str(report) for report in card.reports]
    assert source.offered == alone.offered
    assert source.stats().drafted
    assert launches
    assert not any(launches)


if ALL:

    @pytest.mark.parametrize("source", ["prediction", "tree", "suffix"])
    def test_each_source_of_drafts_is_right_with_the_tokens_of_transformers(source: SourceName) -> None:
        """The tests above have drafts of a stand-in."""
        checkpoint("qwen3_5")
        said = said_by_transformers("qwen3_5", PROMPTS[1], LONGER.max_tokens)
        drafter = Speculator((source,), costs=_FreeRows())
        with emulated() as card, started(card, "qwen3_5", drafter=drafter, speculate="auto") as engine:
            drafter._tree = engine.core.memory.prefix_tree
            seen = counted(graphs_of(engine))
            for name in ("first", "again"):
                request = Request(
                    request_id=name,
                    prompt_tokens=PROMPTS[1],
                    sampling=LONGER,
                    prediction=said if source == "prediction" else [],
                )
                assert answered(engine.core, [request]) == [said]
        assert drafter.stats().sources[source].accepted
        assert seen, "verify runs were launched from Python"
        assert not card.reports, [str(report) for report in card.reports]
