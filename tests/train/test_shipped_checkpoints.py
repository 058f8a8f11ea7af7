"""What is shipped answers held-out questions, and stops answering when its memory is spoilt."""

from __future__ import annotations

import pytest
import torch

from train.batches import Chats
from train.checkpoint import load
from train.run import EMBEDDED, RECIPES
from train.score import UNDAMAGED, score

STATES_ONLY = RECIPES["states-only"].directory


@pytest.mark.parametrize(("directory", "megabytes"), [(EMBEDDED, 12), (STATES_ONLY, 2)])
def test_a_shipped_checkpoint_stays_within_its_size(directory, megabytes: int) -> None:  # type: ignore[no-untyped-def]
    sizes = [path.stat().st_size for path in directory.iterdir()]
    assert 0 < sum(sizes) < megabytes * 1_000_000


def test_the_embedded_model_recalls_and_loses_it_with_its_kv() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load(EMBEDDED)
    chats = Chats(tokenizer)
    assert score(model, chats, "recall", 512, 60, UNDAMAGED).accuracy >= 0.95
    assert score(model, chats, "recall", 512, 30, "kv zeroed").accuracy < 0.2
    assert score(model, chats, "recall", 512, 30, "kv swapped").accuracy < 0.2


def test_the_states_only_model_recalls_and_loses_it_with_its_states() -> None:
    torch.set_num_threads(1)
    model, tokenizer = load(STATES_ONLY)
    chats = Chats(tokenizer)
    assert score(model, chats, "codes", 256, 60, UNDAMAGED).accuracy >= 0.95
    assert score(model, chats, "codes", 256, 20, "state zeroed").accuracy < 0.2
    assert score(model, chats, "codes", 256, 20, "state swapped").accuracy < 0.2
