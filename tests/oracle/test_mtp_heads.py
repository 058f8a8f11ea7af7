"""Heads of other families than the embedded model's: their logits are those of transformers' own layers.

They change no token. Latent attention (Ling), an index (GLM 5), several streams (Qwen4), experts (Nemotron).
"""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch

from tests.fixtures.mtp_heads import HEADS, ReferenceHead, with_head
from tests.oracle.serving import TOLERANCE, Answer, Serving
from tests.server.scripted_engine import _FreeRows
from weft.costs.rows import RowCosts
from weft.memory.frames.plan import plan_arena
from weft.models.loading import LoadedModel, load_model
from weft.models.mtp import MtpHead
from weft.planning.model_plan import PlanOptions, make_plan
from weft.request import SamplingParams
from weft.speculation.speculator import Speculator

PROMPT = [(7 * at * at + 3) % 500 + 4 for at in range(75)]
"""Longer than what an index chooses, and than a chunk."""
GREEDY = SamplingParams(temperature=0.0, max_tokens=24, ignore_eos=True)


@pytest.fixture(scope="module")
def directories(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Path]:
    return {name: with_head(tmp_path_factory.mktemp("heads") / name, name) for name in HEADS}


class _Rows(_FreeRows):
    """Of fixed costs. ``dear``: no draft is worth a window."""

    def __init__(self, *, dear: bool) -> None:
        RowCosts.__init__(self, {1: 1.0, 2: 100.0} if dear else {1: 1.0, 1024: 1.001})

    def measured(self, rows: int) -> bool:
        return True


class Listening(Speculator):
    """Drafts ``drafts`` in each step, and finds them worth a window or not. No measured time decides."""

    def __init__(self, drafts: int, *, dear: bool) -> None:
        super().__init__(("mtp",), costs=_Rows(dear=dear), head_seconds={1: 1e-6, 2: 2e-6, 3: 3e-6})
        self._clock = lambda: 0.0
        assert self._head is not None  # its weights are noise, and noise is rarely right
        self._head.drafts = lambda sequences, costs: drafts  # type: ignore[method-assign]
        if not dear:
            self._head.chances.of("").survivals = (  # type: ignore[method-assign]
                lambda proposal: [0.9] * len(proposal.tokens)
            )
        self.offered: list[tuple[int, ...]] = []

    def offer(self, key: int, tokens: Any, chances: Any) -> None:
        self.offered.append(tuple(tokens))
        super().offer(key, tokens, chances)


def served(model: LoadedModel, source: Speculator | None, rounds: int = 1, **engine: Any) -> list[Answer]:
    serving = Serving("", model=model, drafter=source, **engine)
    return [answer for _ in range(rounds) for answer in serving.run([PROMPT], GREEDY)]


@pytest.mark.parametrize("name", HEADS)
def test_its_logits_are_those_of_transformers_layers(
    name: str, directories: dict[str, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """First drafts of every step, beside prompts in chunks; and further ones, from the head's own state."""
    logits: list[torch.Tensor] = []
    best = MtpHead.best

    def watched(self: MtpHead, hidden_XN: torch.Tensor) -> tuple[torch.Tensor, torch.Tensor]:
        one = hidden_XN if self.collapse is None else self.collapse.enter(hidden_XN)[0]
        logits.append(self.head(one).clone())
        return best(self, hidden_XN)

    monkeypatch.setattr(MtpHead, "best", watched)
    loaded = load_model(directories[name], mtp=True)
    assert loaded.model.mtp is not None, loaded.warnings
    plan = make_plan(
        "", json.loads((directories[name] / "config.json").read_text()), PlanOptions(arena_bytes=3 << 20, mtp=True)
    )
    assert (loaded.weights_bytes, plan_arena(loaded.spec, 3 << 20)) == (plan.weights.rank_bytes, plan.arena)
    source = Listening(1, dear=True)
    [answer] = served(loaded, source, step_tokens=48)
    text, reference = [*PROMPT, *answer.tokens], ReferenceHead(name, directories[name])
    expected = reference.logits(text)[len(PROMPT) - 1 :]
    own = torch.cat(logits)[: len(expected)]
    assert len(own) >= 20
    assert float((own - expected[: len(own)]).abs().max()) < TOLERANCE
    assert [draft[0] for draft in source.offered] == expected[: len(source.offered)].argmax(-1).tolist()
    assert len(set(expected.argmax(-1).tolist())) > 3  # it says more than one thing
    swapped = ReferenceHead(name, directories[name], swapped=True)  # the control
    assert float((swapped.logits(text)[len(PROMPT) - 1 :] - expected).abs().max()) > 100 * TOLERANCE

    logits.clear()
    served(loaded, Listening(3, dear=True))
    begins = len(PROMPT) + 1
    behind = reference.further(text[:begins], 3)
    assert float((torch.cat(logits[:3]) - behind).abs().max()) < TOLERANCE


@pytest.mark.parametrize("name", HEADS)
def test_its_drafts_change_no_token(name: str, directories: dict[str, Path]) -> None:
    """Beside a prefix hit, too: the head's keys are in the pages of the first answer. What a model
    says without its head is the truth of all."""
    plain, loaded = (load_model(directories[name], mtp=mtp) for mtp in (False, True))
    [one] = served(plain, None)
    for rounds, engine in ((1, {}), (2, {"cache": True, "snapshots": "every:64", "grid_tokens": 16})):
        source = Listening(3, dear=False)
        answers = served(loaded, source, rounds, **engine)
        assert len(answers) == rounds
        for answer in answers:
            assert answer.tokens == one.tokens
            assert float((answer.logits - one.logits).abs().max()) < TOLERANCE
        assert source.stats().drafted > 10
        assert {len(tokens) for tokens in source.offered} >= {3}
    assert answers[1].cached_tokens >= 64
    hit, first = source.offered[len(source.offered) // 2 :], source.offered[: len(source.offered) // 2]
    assert hit[1:] == first[1:]  # but the first: the last position of a hit is computed again


@pytest.mark.parametrize("name", HEADS)
def test_a_head_that_knows_the_trunk_is_right(name: str, tmp_path: Path) -> None:
    """All drafts are verified and accepted, three a step: what it makes of its own state too."""
    source, directory = Listening(3, dear=False), with_head(tmp_path / name, name, right=True)
    [answer] = served(load_model(directory, mtp=True), source)
    stats = source.stats()
    assert len(set(answer.tokens)) > 3
    assert stats.accepted == stats.drafted >= 15
    assert stats.steps <= 7


def test_a_second_head_is_left_with_a_line(directories: dict[str, Path]) -> None:
    assert any(
        "Of 2 heads for multi-token prediction, the first" in line
        for line in load_model(directories["ling"], mtp=True).warnings
    )
    assert not load_model(directories["ling"]).warnings  # no tensor of a head is an unused one


def test_a_head_of_other_layers_is_left_out(directories: dict[str, Path], tmp_path: Path) -> None:
    other = tmp_path / "other"
    shutil.copytree(directories["nemotron_h_moe"], other)
    config = json.loads((other / "config.json").read_text())
    (other / "config.json").write_text(json.dumps(config | {"mtp_layers_block_type": ["attention", "moe", "moe"]}))
    loaded = load_model(other, mtp=True)
    assert loaded.model.mtp is None
    assert any("multi-token prediction" in warning for warning in loaded.warnings)
