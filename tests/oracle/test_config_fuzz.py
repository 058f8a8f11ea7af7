"""One key of config.json is changed: the logits follow transformers, or the start refuses in one line.

A sample of what ``tests.oracle.config_fuzz`` changes, of the seed that ``WEFT_CONFIG_FUZZ`` names; ``make fuzz-config``
runs every change of every family.
"""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests.fixtures.checkpoints import checkpoint
from tests.oracle import config_fuzz
from tests.oracle.config_fuzz import OF_TRANSFORMERS, Path_, changes, config_of, ours, verdict

FAMILIES_SAMPLED, CHANGES_SAMPLED = 12, 6


def cases() -> Iterator[tuple[str, Path_, Any]]:
    chance = random.Random(os.environ.get("WEFT_CONFIG_FUZZ", "0"))
    for name in chance.sample(OF_TRANSFORMERS, FAMILIES_SAMPLED):
        for path, value in chance.sample(list(changes(config_of(name))), CHANGES_SAMPLED):
            yield name, path, value


@pytest.fixture(scope="module")
def room(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("fuzz")


def test_a_changed_key_is_followed_as_transformers_follows_it_or_refused(room: Path) -> None:
    found = [verdict(name, path, value, room / name) for name, path, value in cases()]
    wrong = [said for outcome, said in found if outcome == "wrong"]
    assert not wrong, "\n".join(wrong)


def test_a_difference_is_seen(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a reader that takes the key's default for its value."""
    name, path, value = "granite", ("logits_scaling",), 2.6
    assert verdict(name, path, value, room / name)[0] == "followed"
    unchanged = ours(checkpoint(name))
    monkeypatch.setattr(config_fuzz, "ours", lambda directory: unchanged)
    assert "differs from transformers" in verdict(name, path, value, room / name)[1]
