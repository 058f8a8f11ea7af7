"""What is asked and when it comes: functions of the seed, of the lengths that were asked for."""

from __future__ import annotations

import json
import math
from collections import Counter
from itertools import pairwise
from pathlib import Path

import pytest

from weft.errors import ConfigError
from weft_tools.bench.prompts import (
    SampleRequest,
    file_requests,
    prefix_repetition_requests,
    random_requests,
    warm_up_of,
)
from weft_tools.bench.serve import arrival_times


def test_random_prompts_share_their_prefix_and_nothing_else() -> None:
    asks = random_requests(5, input_len=40, output_len=8, prefix_len=16, vocab_size=1000, seed=3)
    assert asks == random_requests(5, input_len=40, output_len=8, prefix_len=16, vocab_size=1000, seed=3)
    assert asks != random_requests(5, input_len=40, output_len=8, prefix_len=16, vocab_size=1000, seed=4)
    assert {len(ask.prompt) for ask in asks} == {56}
    assert len({tuple(ask.prompt[:16]) for ask in asks}) == 1
    assert len({tuple(ask.prompt[16:20]) for ask in asks}) == 5
    assert all(300 <= token < 1000 for ask in asks for token in ask.prompt)  # type: ignore[operator]


def test_lengths_vary_within_their_share() -> None:
    asks = random_requests(200, input_len=100, output_len=10, range_ratio=0.5, vocab_size=1000, seed=0)
    lengths = [len(ask.prompt) for ask in asks]
    assert min(lengths) >= 50
    assert max(lengths) <= 150
    assert len(set(lengths)) > 50
    assert {ask.output_tokens for ask in asks} == set(range(5, 16))


def test_each_prefix_is_used_as_often_as_any_other() -> None:
    asks = prefix_repetition_requests(10, prefix_len=8, suffix_len=4, prefixes=3, output_len=2, vocab_size=1000, seed=0)
    uses = Counter(tuple(ask.prompt[:8]) for ask in asks)
    assert sorted(uses.values()) == [3, 3, 4]
    assert len({tuple(ask.prompt[8:]) for ask in asks}) == 10


def test_a_rehearsal_is_as_long_and_starts_otherwise() -> None:
    ask = SampleRequest(list(range(100)), 4)
    for number in (0, 1, 7):
        other = warm_up_of(ask, number)
        assert sorted(other.prompt) == ask.prompt
        assert other.output_tokens == 4
        assert other.prompt[:2] != ask.prompt[:2]
    assert warm_up_of(ask, 1) != warm_up_of(ask, 2)


def test_files_are_read_in_both_forms(tmp_path: Path) -> None:
    shared, lines = tmp_path / "shared.json", tmp_path / "lines.jsonl"
    shared.write_text(
        json.dumps(
            [
                {"conversations": [{"from": "human", "value": "ask"}, {"from": "gpt", "value": "an answer"}]},
                {"conversations": [{"from": "human", "value": "alone"}]},
                {"other": 1},
            ]
        )
    )
    assert file_requests("sharegpt", shared, 9, output_len=None, seed=0) == [SampleRequest("ask", 0, "an answer")]
    assert file_requests("sharegpt", shared, 9, output_len=7, seed=0) == [SampleRequest("ask", 7)]
    lines.write_text('{"prompt": "a", "output_tokens": 3}\n\n{"prompt": "b", "output_tokens": 4}\n')
    asks = file_requests("custom", lines, 9, output_len=None, seed=0)
    assert sorted(asks, key=str) == [SampleRequest("a", 3), SampleRequest("b", 4)]
    assert len(file_requests("custom", lines, 1, output_len=None, seed=0)) == 1


@pytest.mark.parametrize(
    ("kind", "text", "words"),
    [
        ("custom", '{"prompt": "a", "output_tokens": 3}\nno\n', "line 2"),
        ("custom", '{"prompt": 1}', "prompt"),
        ("custom", '{"prompt": "a", "output_tokens": 0}', "line 1: output_tokens is 0"),
        ("custom", '{"prompt": "a"}', "--custom-output-len"),
        ("custom", "", "nothing to ask"),
        ("sharegpt", "{", "is not JSON"),
        ("sharegpt", "{}", "a list of conversations"),
        ("sharegpt", "[1]", "nothing to ask"),
    ],
)
def test_what_is_wrong_with_a_file_is_said_with_its_place(tmp_path: Path, kind: str, text: str, words: str) -> None:
    path = tmp_path / "data"
    path.write_text(text)
    with pytest.raises(ConfigError, match=words):
        file_requests(kind, path, 9, output_len=None, seed=0)


@pytest.mark.parametrize("burstiness", [0.25, 1.0, 4.0])
def test_requests_come_at_their_rate_and_as_unevenly_as_asked(burstiness: float) -> None:
    times = arrival_times(4000, 50.0, burstiness, seed=1)
    assert times == arrival_times(4000, 50.0, burstiness, seed=1)
    assert times[0] == 0.0
    gaps = [after - before for before, after in pairwise(times)]
    mean = sum(gaps) / len(gaps)
    spread = math.sqrt(sum((gap - mean) ** 2 for gap in gaps) / len(gaps))
    assert mean == pytest.approx(1 / 50, rel=0.15)
    assert spread / mean == pytest.approx(1 / math.sqrt(burstiness), rel=0.15)


def test_without_a_rate_all_come_at_once() -> None:
    assert arrival_times(3, math.inf) == [0.0, 0.0, 0.0]
