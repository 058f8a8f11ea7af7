"""``weft simulate --speculate``: what a recording lets us replay, and what it does not."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.speculation.texts import edited, prose
from weft.cli.main import main
from weft.config import Sizes
from weft.memory.frames.plan import plan_arena
from weft.schedule.work import Work
from weft.sim.cost import Fitted
from weft.sim.recording import Fingerprints, Recording, header_line, read_recording, sequence_line, token_text
from weft.sim.speculation import replay_speculation, step_costs
from weft.spec import ModelSpec, attention, gated_delta
from weft.speculation.proposal import SOURCES

COST = Fitted(fixed_s=0.024, token_s=0.0006, pair_s=0.0, decode_s=0.002, context_s=0.0)
FILE = prose(1, 600)
REQUESTS = [(prose(2, 100), FILE, "a"), (prose(2, 100), FILE, "a"), (prose(2, 100), FILE, "b"),
            (FILE + prose(3, 20), edited(FILE, 0.03, 4), "a"), (prose(5, 50), [7], "")]


def lines(*, with_tokens: bool, times: bool = True) -> list[dict[str, object]]:
    spec = ModelSpec(family="toy", vocab_size=9000, hidden_size=64, max_positions=4096, dtype="bfloat16",
                     layers=(attention(kv_heads=1, head_dim=32),
                             gated_delta(v_heads=2, k_heads=2, k_dim=16, v_dim=16, conv_kernel=4)))
    header = header_line(model="toy", arena=plan_arena(spec, 1 << 24), checkpoints="auto",
                         sizes=Sizes(4096, 8, 1024, 64, 1 << 24))
    marks = Fingerprints(b"k" * 32)
    rows: list[dict[str, object]] = [header]
    for at, (prompt, answer, salt) in enumerate(REQUESTS):
        tokens = [*prompt, *answer]
        rows.append(sequence_line(
            marks.of(tokens, salt, computed=len(tokens) - 1), at_s=float(at), input_length=len(prompt),
            output_length=len(answer), salt=marks.salt(salt), number=at,
            tokens=token_text(tokens) if with_tokens else ""))
    if times:
        rows.append({"steps": [[100 * step, 50 * step, step, 10 * step, 0.01 * step]
                               for step in range(1, 13)]})
    return rows


def recorded(*, with_tokens: bool) -> Recording:
    return read_recording(lines(with_tokens=with_tokens))


def test_with_tokens_repeats_and_rewrites_are_accepted() -> None:
    recording = recorded(with_tokens=True)
    report = replay_speculation(recording.traffic, recording, SOURCES, COST)
    assert report.requests == 4
    assert report.tokens == sum(len(answer) - 1 for _, answer, _ in REQUESTS)
    assert report.sources["tree"].accepted > 400, "the second request repeats the first"
    assert report.sources["suffix"].accepted > 350, "the fourth edits its prompt"
    assert report.tokens_per_step > 1.8
    assert report.speedup > 1.6
    assert set(report.left_out) == {"prediction", "grammar"}


def test_without_tokens_the_tree_alone_is_replayed_and_salts_stay_apart() -> None:
    recording = recorded(with_tokens=False)
    report = replay_speculation(recording.traffic, recording, SOURCES, COST)
    assert set(report.sources) == {"tree"}
    assert "--record-tokens" in report.left_out["suffix"]
    assert 400 < report.sources["tree"].accepted < 600


def test_the_cost_of_drafts_is_that_of_the_model() -> None:
    recording = recorded(with_tokens=False)
    costs = step_costs(COST, recording.traffic)
    assert costs[1] == pytest.approx(COST.step_s(Work(0, 0, 1, 430)), rel=0.01)
    assert costs[8] == pytest.approx(costs[1] + 7 * 0.0006)
    dear = Fitted(fixed_s=0.0, token_s=0.002, pair_s=0.0, decode_s=0.002, context_s=0.0)
    report = replay_speculation(recording.traffic, recording, SOURCES, dear)
    assert (report.steps, report.sources["tree"].drafted) == (report.tokens, 0)


def test_the_command_shows_it_and_says_what_is_missing(tmp_path: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    file = tmp_path / "r.jsonl"
    file.write_text("\n".join(map(json.dumps, lines(with_tokens=True))))
    asked = ["simulate", str(file), "--no-oracle", "--policy", "lru"]
    assert main([*asked, "--speculate", "auto", "--json"]) == 0
    data = json.loads(capsys.readouterr().out)["speculation"]
    assert data["sources"]["suffix"]["accepted"] > 0
    assert main([*asked, "--json"]) == 0
    assert "speculation" not in json.loads(capsys.readouterr().out)
    assert main([*asked, "--speculate", "tree,prediction"]) == 0
    shown = capsys.readouterr().out
    assert "tokens a step" in shown
    assert "a recording has no predictions" in shown
    for wrong, words in (([*asked, "--speculate", "eagle"], "prediction, grammar, tree, suffix"),
                         (["simulate", "sample", "--model", "Qwen3.5-4B", "--speculate", "auto"],
                          "no answers")):
        assert main(wrong) == 2
        assert words in capsys.readouterr().err


def test_a_line_with_tokens_of_another_length_is_refused() -> None:
    rows = lines(with_tokens=True)
    rows[1]["tokens"] = token_text([1, 2, 3])
    with pytest.raises(Exception, match=r"line 2: .*3 tokens in a sequence of 700"):
        read_recording(rows)
