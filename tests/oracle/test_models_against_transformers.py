"""Every family against transformers, model to model: prefill and decode logits, and the greedy tokens.

transformers sees prompt and answer in one forward; weft computes the prompts (several in one step) and then
decodes token by token. Equal logits at every position mean that every greedy choice is the same too, so the
texts are equal by induction; one prompt per family also runs some steps of transformers' own cached decoding.
"""

from __future__ import annotations

import functools
from collections.abc import Iterable, Iterator, Sequence

import pytest
import torch

from tests.fixtures.checkpoints import CHECKPOINTS, VOCAB_SIZE, asked, checkpoint, exact_reference
from tests.oracle.model_driver import ModelDriver, page_of
from weft.models.loading import LoadedModel, load_model
from weft.tensor.inputs import LayerCache

LENGTHS = (1, 5, 26, 48, 316, 636)
DECODE_STEPS = 24
"""Each number at which a checkpoint changes what it does is passed by a prompt and by decodes: the end of a window, a
chunk, a page. Decodes go from 1 to 25, from 5 to 29, from 26 to 50 and from 48 to 72, past windows of 16 to 70, and
past 320, 336 and 640, ends of chunks of 64 and of 112. The window of 200 is full in the last two, and a prompt passes
the rotary table's 512. ``tests.oracle.table`` compares 64 steps after 900 tokens."""
GENERATED_STEPS = 8
"""Of transformers' own cache, which is not what is tested here: twice a convolution's window."""
SHORT = 100
"""A text of fewer tokens takes transformers as long as one of a single token."""
TOLERANCE = 1e-4


@functools.cache
def loaded(name: str) -> LoadedModel:
    return load_model(checkpoint(name))


def prompt(length: int, seed: int = 0) -> list[int]:
    generator = torch.Generator().manual_seed(1000 * seed + length)
    return torch.randint(3, VOCAB_SIZE, (length,), generator=generator).tolist()


@torch.inference_mode()
def expected(name: str, tokens: list[int]) -> torch.Tensor:
    """[tokens, vocab] of one forward of transformers, in float64."""
    return exact_reference(name)(torch.tensor([tokens])).logits[0].float()


@torch.inference_mode()
def expected_of_all(name: str, texts: Sequence[list[int]]) -> list[torch.Tensor]:
    """``expected`` of each. Short texts share a forward, where tokens after an end change nothing before it."""
    model = exact_reference(name)
    rope = getattr(model.config, "rope_parameters", None) or {}
    if rope.get("rope_type") in ("dynamic", "longrope"):  # of transformers go by the longest text of a forward
        return [expected(name, tokens) for tokens in texts]
    short = [tokens for tokens in texts if len(tokens) < SHORT]
    width = max(map(len, short), default=0)
    rows = iter(model(torch.tensor([tokens + [0] * (width - len(tokens)) for tokens in short])).logits if short else ())
    return [next(rows)[: len(text)].float() if len(text) < SHORT else expected(name, text) for text in texts]


def prefill_and_decode(driver: ModelDriver, prompts: list[list[int]], steps: int) -> list[torch.Tensor]:
    """Greedy; -> per sequence, logits [prompt + steps, vocab]."""
    outputs = [[piece] for piece in driver.step(*enumerate(prompts))]
    for _ in range(steps):
        tokens = [int(rows[-1][-1].argmax()) for rows in outputs]
        for rows, piece in zip(outputs, driver.step(*((i, [t]) for i, t in enumerate(tokens))), strict=True):
            rows.append(piece)
    return [torch.cat(rows) for rows in outputs]


@pytest.mark.parametrize("name", asked(*CHECKPOINTS))
def test_prefill_and_24_decode_steps_equal_transformers(name: str) -> None:
    driver = ModelDriver(loaded(name).model, sequences=len(LENGTHS), length=max(LENGTHS) + DECODE_STEPS)
    outputs = prefill_and_decode(driver, [prompt(n) for n in LENGTHS], DECODE_STEPS)
    greedy: set[int] = set()
    truths = expected_of_all(name, [sequence.tokens for sequence in driver.sequences])
    for truth, logits, length in zip(truths, outputs, LENGTHS, strict=True):
        assert (logits - truth).abs().max().item() < TOLERANCE
        assert torch.equal(logits.argmax(-1)[length - 1 :], truth.argmax(-1)[length - 1 :])
        greedy.update(truth.argmax(-1)[length - 1 :].tolist())
    assert len(greedy) > 12, "a checkpoint that repeats itself shows nothing"


@pytest.mark.parametrize("name", CHECKPOINTS)
@torch.inference_mode()
def test_greedy_text_equals_cached_generation_of_transformers(name: str) -> None:
    tokens = prompt(37, seed=1)
    driver = ModelDriver(loaded(name).model, sequences=1, length=37 + GENERATED_STEPS)
    [logits] = prefill_and_decode(driver, [tokens], GENERATED_STEPS - 1)
    text = exact_reference(name).generate(
        torch.tensor([tokens]),
        attention_mask=torch.ones(1, 37, dtype=torch.long),
        max_new_tokens=GENERATED_STEPS,
        min_new_tokens=GENERATED_STEPS,
        do_sample=False,
        eos_token_id=None,
        temperature=None,
        top_p=None,
        top_k=None,
    )
    assert logits.argmax(-1)[36:].tolist() == text[0, 37:].tolist()


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_pieces_company_and_padding_change_no_logit(name: str) -> None:
    """One prompt in uneven pieces on the chunk grid, beside decodes of another and PAD rows."""
    first, second = prompt(200, seed=2), prompt(40, seed=3)
    driver = ModelDriver(loaded(name).model, sequences=2, length=256)
    driver.step((1, second[:30]))
    rows = []
    for decoded, (begin, end) in enumerate([(0, 64), (64, 192), (192, 200)]):
        beside, piece = driver.step((1, [second[30 + decoded]]), (0, first[begin:end]), pads=2)
        rows.append(piece)
    assert (torch.cat(rows) - expected(name, first)).abs().max().item() < TOLERANCE
    assert (beside[0] - expected(name, second[:33])[-1]).abs().max().item() < TOLERANCE


def tensors_of(caches: Iterable[LayerCache]) -> Iterator[torch.Tensor]:
    for cache in caches:
        yield from (part for part in (cache.k, cache.v, *cache.state.values()) if part is not None)
        yield from tensors_of([cache.index] if cache.index is not None else [])


@pytest.mark.parametrize("name", CHECKPOINTS)
def test_a_corrupted_state_or_page_is_noticed(name: str) -> None:
    """The control of all of the above: each kind of memory that a model has carries the answer."""
    tokens = prompt(100, seed=4)
    spec = loaded(name).spec
    # The sums of an entry show where its group ends, and the entry before where it does not.
    first = 94 if any(part.name == "waiting" for layer in spec.layers for part in layer.state) else 99
    truth = expected(name, tokens)[first:]
    driver = ModelDriver(loaded(name).model, sequences=1, length=112)
    driver.step((0, tokens[:first]))
    owner, memory = driver.sequences[0], list(tensors_of(driver.caches))
    computed = [tensor.clone() for tensor in memory]
    for layer in range(len(spec.layers)):
        for part in ("k", "v", *(part.name for part in spec.layers[layer].state)):
            owner.tokens = tokens[:first]
            for tensor, before in zip(memory, computed, strict=True):  # in place: kernels keep the addresses of caches
                tensor.copy_(before)
            cache = driver.caches[layer]
            if part in cache.state:
                cache.state[part][owner.slot].zero_()
            elif (pages := getattr(cache, part)) is not None:
                pages[page_of(owner, 50)].zero_()
            else:
                continue
            last = torch.cat([driver.step((0, [token]))[0] for token in tokens[first:]])
            assert (last - truth).abs().max().item() > 100 * TOLERANCE, (layer, part)


@pytest.mark.parametrize(
    "name", ["qwen3_5", "qwen3_next", "lfm2", "granite_moe", "olmo3", "olmo_hybrid", "lfm3", "kimi_linear"]
)
def test_bfloat16_weights_stay_near_float32(name: str) -> None:
    small = load_model(checkpoint(name), "bfloat16")
    assert small.spec.dtype == "bfloat16"
    assert small.weights_bytes < 0.52 * loaded(name).weights_bytes
    tokens = prompt(48, seed=5)
    driver = ModelDriver(small.model, sequences=1, length=64)
    [logits] = driver.step((0, tokens))
    truth = expected(name, tokens)
    similarity = torch.nn.functional.cosine_similarity(logits, truth, dim=-1)
    assert similarity.median().item() > 0.99
