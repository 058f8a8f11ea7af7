"""Windows in their two homes: a ring in the state slot, or pages and a mask. Both are what transformers does.

Which of the two a layer gets depends on its width (``RING_TOKENS_MAX``). The windows of the checkpoints are
short and live in rings in all other tests; here the same models are made to keep them in pages.
"""

from __future__ import annotations

import pytest
import torch

import weft.families.mixers.attention
from tests.fixtures.checkpoints import VOCAB_SIZE, checkpoint, reference
from tests.oracle.model_driver import ModelDriver, page_of
from tests.oracle.serving import DEVICE
from weft.models.loading import LoadedModel, load_model

LENGTHS = (5, 36, 190)
TOLERANCE = 1e-4


def prompt(length: int) -> list[int]:
    generator = torch.Generator().manual_seed(length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def truth(name: str, tokens: list[int]) -> torch.Tensor:
    return reference(name)(torch.tensor([tokens])).logits[0].float()


@pytest.fixture
def in_pages(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(weft.families.mixers.attention, "RING_TOKENS_MAX", 0)


def compare(name: str, loaded: LoadedModel) -> None:
    driver = ModelDriver(loaded.model, sequences=len(LENGTHS), length=max(LENGTHS) + 60)
    prompts = [prompt(length) for length in LENGTHS]
    driver.step(*((i, tokens[: len(tokens) // 2]) for i, tokens in enumerate(prompts)))
    outputs = [[rows] for rows in driver.step(*((i, t[len(t) // 2 :]) for i, t in enumerate(prompts)))]
    for _ in range(40):
        tokens = [int(rows[-1][-1].argmax()) for rows in outputs]
        for rows, made in zip(outputs, driver.step(*((i, [t]) for i, t in enumerate(tokens)), pads=1), strict=True):
            rows.append(made)
    for sequence, rows in zip(driver.sequences, outputs, strict=True):
        logits = torch.cat(rows)
        wanted = truth(name, sequence.tokens)[-len(logits) :]
        assert (logits - wanted).abs().max().item() < TOLERANCE
        assert torch.equal(logits.argmax(-1), wanted.argmax(-1))


@pytest.mark.parametrize("name", ["mistral", "olmo3", "lfm3"])
def test_a_window_in_a_ring_and_in_pages_equals_transformers(name: str, monkeypatch: pytest.MonkeyPatch) -> None:
    ring = load_model(checkpoint(name), device=DEVICE)
    assert any(layer.kind == "window_attention" for layer in ring.spec.layers)
    compare(name, ring)
    monkeypatch.setattr(weft.families.mixers.attention, "RING_TOKENS_MAX", 0)
    pages = load_model(checkpoint(name), device=DEVICE)
    assert all(layer.kind != "window_attention" for layer in pages.spec.layers)
    assert pages.spec.kv_bytes_per_token("float32") > ring.spec.kv_bytes_per_token("float32")
    compare(name, pages)


@pytest.mark.usefixtures("in_pages")
def test_a_page_behind_every_window_is_not_read_and_one_inside_is() -> None:
    """Mistral: all layers have the window, so what no window of the last token reaches is gone for good."""
    tokens, loaded = prompt(190), load_model(checkpoint("mistral"), device=DEVICE)
    wanted = truth("mistral", [*tokens, 9])[-1]
    for position, lost in ((32, False), (160, True)):  # a window of 50, the next token at 190
        driver = ModelDriver(loaded.model, sequences=1, length=200)
        driver.step((0, tokens))
        for cache in driver.caches:
            for part in (cache.k, cache.v):
                assert part is not None
                part[page_of(driver.sequences[0], position)] = 0.0 if lost else float("nan")
        [logits] = driver.step((0, [9]))
        assert ((logits[0] - wanted).abs().max().item() > 100 * TOLERANCE) == lost


def test_memory_of_a_ring_does_not_grow_with_the_text() -> None:
    spec = load_model(checkpoint("mistral")).spec
    assert spec.kv_bytes_per_token("float32") == 0
    assert spec.state_bytes_per_sequence("float32") == 4 * 2 * 2 * 50 * 16 * 4
