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


WRONG_ONCE: tuple[tuple[str, Path_, Any, str], ...] = (
    ("axk1", ("head_dim",), 1, "refused"),
    ("gemma4", ("layer_types", 0), "full_attention", "refused"),
    ("gemma4", ("rope_parameters", "full_attention", "rope_type"), "default", "refused"),
    ("llama", ("rope_parameters", "rope_type"), "llama3", "refused"),
    ("longcat_flash", ("moe_topk",), 1, "refused"),
    ("nemotron_h_moe", ("n_group",), 8, "refused"),
    ("olmo3", ("max_position_embeddings",), 1, "followed"),
    ("phi", ("rope_parameters", "rope_type"), "proportional", "refused"),
    ("phi3_long", ("original_max_position_embeddings",), 1, "refused"),
    ("phi3_long", ("rope_parameters", "rope_type"), "dynamic", "refused"),
    ("phi3_long", ("rope_parameters", "rope_type"), "yarn", "followed"),
    ("youtu", ("head_dim",), 1, "refused"),
    ("qwen4_exp", ("seed",), 1, "refused"),
    ("smollm3_window", ("use_sliding_window",), False, "refused"),
    ("recurrent_gemma", ("rope_parameters", "rope_type"), "proportional", "refused"),
)
"""Changes that a whole run found wrong: served in another way than transformers, or where it refuses."""


@pytest.mark.parametrize(
    ("name", "path", "value", "outcome"), WRONG_ONCE, ids=[f"{c[0]}-{c[1][-1]}" for c in WRONG_ONCE]
)
def test_a_change_that_was_once_wrong_stays_right(
    name: str, path: Path_, value: Any, outcome: str, tmp_path: Path
) -> None:
    assert verdict(name, path, value, tmp_path / name)[0] == outcome


def test_a_difference_is_seen(room: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The control: a reader that takes the key's default for its value."""
    name, path, value = "granite", ("logits_scaling",), 2.6
    assert verdict(name, path, value, room / name)[0] == "followed"
    unchanged = ours(checkpoint(name))
    monkeypatch.setattr(config_fuzz, "ours", lambda directory: unchanged)
    assert "differs from transformers" in verdict(name, path, value, room / name)[1]
