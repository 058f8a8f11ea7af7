"""Other weights in a running engine: nothing that the old ones computed is used, in any tier.

One element of one tensor is changed. The answer that follows has no cached token, and its tokens and logprobs
are those of a fresh engine, to the bit. Each control keeps one tier as it was, and its test must fail then.
"""

from __future__ import annotations

import shutil
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from safetensors.torch import load_file, save_file

from tests.fixtures.checkpoint_families_attention import MORE_FAMILIES
from tests.fixtures.checkpoint_families_mamba import MAMBA_FAMILIES
from tests.fixtures.checkpoints import FAMILIES, checkpoint, tokenizer
from tests.fixtures.vision_checkpoints import vision_checkpoint
from tests.oracle.test_pictures import seeing
from weft.api import Engine
from weft.assemble.identity import WeightsReading
from weft.costs.restore import RestorePrices
from weft.errors import CheckpointError, EngineUnavailableError
from weft.memory.memory import Memory
from weft.request import Request, SamplingParams

ALL_FAMILIES = (*FAMILIES, *MORE_FAMILIES, *MAMBA_FAMILIES)
SUMS_BY_ADDRESS = {"zaya": 1e-5}
"""Families of which two fresh engines on the same files differ by so much: torch multiplies some of their
matrices, and where a matrix lies in memory decides how it sums."""
PROMPT = [3 + 7 * number % 251 for number in range(200)]
Answer = tuple[list[int], list[float], int]


def engine(model: Path, **settings: Any) -> Engine:
    """Return an engine that drafts only where a test says so: others would measure steps for it at their start."""
    sizes = {"memory": "24MB", "threads": 1, "max_model_len": 512}
    plain = sizes | {"device": "cpu", "dtype": "float32", "speculate": "off"}
    return Engine(str(model), **plain | settings)


def answer(one: Engine, prompt: list[int] = PROMPT) -> Answer:
    """(tokens, logprobs, cached tokens)."""
    [done] = one.generate([prompt], progress=False, max_tokens=6, temperature=0.0, ignore_eos=True, logprobs=0)
    assert done.logprobs is not None
    return done.tokens, [entry.logprob for entry in done.logprobs], done.cached_tokens


def change_one_element(model: Path, at: float = 0.5) -> None:
    """Of a matrix that every token reads: its largest value, halved."""
    [file] = model.glob("*.safetensors")
    tensors = load_file(file)
    names = sorted(name for name, tensor in tensors.items() if tensor.ndim == 2 and "embed" not in name)
    values = tensors[names[int(len(names) * at)]].reshape(-1)
    values[values.float().abs().argmax()] *= 0.5
    save_file(tensors, file, {"format": "pt"})


@pytest.fixture
def model(tmp_path: Path) -> Callable[[str], Path]:
    return lambda family: Path(shutil.copytree(checkpoint(family), tmp_path / "model"))


def fresh(directory: Path, **settings: Any) -> Answer:
    with engine(directory, **settings) as one:
        return answer(one)


@pytest.mark.parametrize("family", ALL_FAMILIES)
def test_one_element_of_one_tensor_leaves_nothing_cached(family: str, model: Callable[[str], Path]) -> None:
    directory = model(family)
    with engine(directory) as one:
        old = answer(one)
        assert answer(one)[2] > 100, "the control: a prefix is found"
        change_one_element(directory)
        one.update_weights(directory, version="next")
        assert one.stats().weights.version == "next"
        new = answer(one)
    expected = fresh(directory)
    if family in SUMS_BY_ADDRESS:
        assert new[1] == pytest.approx(expected[1], abs=SUMS_BY_ADDRESS[family])
        assert old[1] != pytest.approx(new[1], abs=SUMS_BY_ADDRESS[family])
    else:
        assert new == expected
    assert (new[0], new[2]) == (expected[0], 0)
    assert new[1] != old[1], "the change shows"


@pytest.fixture(params=["lfm2 directory", "qwen3_5 directory", "lfm2 bucket"])
def stored(
    request: pytest.FixtureRequest, model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> Iterator[tuple[Engine, Path]]:
    """An engine with a store that has a prefix, and its checkpoint. Each write and each read is worth it."""
    monkeypatch.setattr(RestorePrices, "worth_of_write_s", lambda self, *asked: 1.0)
    monkeypatch.setattr(RestorePrices, "saved_s", lambda self, *asked, **more: 1.0)
    family, place = request.param.split()
    directory = model(family)
    settings = {"store": str(tmp_path / "store"), "store_size": "64MiB", "store_reserve": "1MiB"}
    if place == "bucket":
        (tmp_path / "bucket").mkdir()
        settings |= {"store": f"file://{tmp_path}/bucket", "store_cache": str(tmp_path / "store")}
    with engine(directory, **settings) as one:
        first = answer(one)
        one.sleep(2)
        one.wake_up()
        assert answer(one) == (first[0], first[1], 192), "the control: it comes back from the store"
        yield one, directory


@pytest.mark.parametrize("way", ["sleep", "update"])
def test_a_store_has_nothing_of_other_weights(stored: tuple[Engine, Path], way: str) -> None:
    one, directory = stored
    change_one_element(directory)
    if way == "sleep":
        one.sleep(2)
        one.wake_up()
    else:
        one.update_weights(directory)
    new = answer(one)
    assert new == fresh(directory)
    assert one.stats().weights.updates == 1
    one.sleep(2)
    one.wake_up()
    assert answer(one)[2] == 192, "what the new weights computed is stored under their name"


def test_old_weights_find_what_they_stored(stored: tuple[Engine, Path], tmp_path: Path) -> None:
    one, directory = stored
    old = shutil.copytree(directory, tmp_path / "old")
    change_one_element(directory)
    one.update_weights(directory)
    answer(one)
    one.update_weights(old)
    assert answer(one)[2] == 192


def test_the_control_a_store_that_keeps_its_name_serves_old_states(
    stored: tuple[Engine, Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    one, directory = stored
    assert one._core.store is not None
    monkeypatch.setattr(one._core.store, "renew", lambda: None)
    change_one_element(directory)
    one.update_weights(directory)
    assert answer(one) != fresh(directory)


def test_the_control_a_tree_that_is_not_flushed_serves_old_states(
    model: Callable[[str], Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    """The arena keeps its bytes too: what a forgotten flush would find."""
    directory = model("lfm2")
    with engine(directory) as one:
        answer(one)
        monkeypatch.setattr(Memory, "lose", lambda self: None)
        monkeypatch.setattr(one._core.executor.arena, "release", lambda: None)  # type: ignore[attr-defined]
        monkeypatch.setattr(one._core.executor.arena, "allocate", lambda: None)  # type: ignore[attr-defined]
        change_one_element(directory)
        one.update_weights(directory)
        assert answer(one) != fresh(directory)


def test_the_weights_cache_has_nothing_of_other_weights(
    model: Callable[[str], Path], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fixtures.packed_weights import pack_small_weights, stored_in_bfloat16

    pack_small_weights(monkeypatch)
    directory = stored_in_bfloat16("qwen3_5", tmp_path / "model")
    settings = {"dtype": "bfloat16", "weights_cache": str(tmp_path / "cache")}
    with engine(directory, **settings) as one:
        old = answer(one)
        change_one_element(directory)
        one.update_weights(directory)
        new = answer(one)
    assert new == fresh(directory, dtype="bfloat16")
    assert new[1] != old[1]


def test_answers_of_old_weights_draft_nothing(model: Callable[[str], Path]) -> None:
    directory = model("qwen3_5")
    with engine(directory, speculate="suffix") as one:
        answer(one)
        library = one._core.drafter._library  # type: ignore[union-attr]
        library.add("", PROMPT)
        assert library._by_salt
        change_one_element(directory)
        one.update_weights(directory)
        assert not library._by_salt
        assert answer(one) == fresh(directory)


def test_requests_in_flight_go_on_with_the_new_weights(model: Callable[[str], Path]) -> None:
    directory = model("lfm2")
    fields: dict[str, Any] = {"max_tokens": 40, "temperature": 0.0, "ignore_eos": True}
    with engine(directory) as one:
        pieces = one.stream(PROMPT, **fields)
        tokens = [token for _ in range(5) for token in next(pieces).tokens]
        change_one_element(directory)
        one.update_weights(directory, mode="keep")
        known = [*PROMPT, *tokens]
        rest = [token for piece in pieces for token in piece.tokens]
    assert len(tokens) + len(rest) == 40
    with engine(directory) as other:
        [done] = other.generate([known], progress=False, **fields | {"max_tokens": len(rest)})
    assert rest == done.tokens


def test_requests_in_flight_end_where_the_call_says_so(model: Callable[[str], Path]) -> None:
    directory = model("lfm2")
    with engine(directory) as one:
        pieces = one.stream(PROMPT, max_tokens=40, temperature=0.0, ignore_eos=True)
        next(pieces)
        one.update_weights(directory, mode="abort")
        with pytest.raises(EngineUnavailableError, match="weights of the engine were replaced"):
            list(pieces)
        assert answer(one) == fresh(directory)


def test_weights_that_cannot_be_served_change_nothing(model: Callable[[str], Path], tmp_path: Path) -> None:
    directory = model("lfm2")
    other = shutil.copytree(checkpoint("qwen3_5"), tmp_path / "other")
    broken = shutil.copytree(directory, tmp_path / "broken")
    [file] = broken.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in tensors if name.endswith("w2.weight"))
    save_file({key: tensor for key, tensor in tensors.items() if key != name}, file, {"format": "pt"})
    nan = shutil.copytree(directory, tmp_path / "nan")
    tensors[name][0, 0] = torch.nan
    save_file(tensors, nan / file.name, {"format": "pt"})
    with engine(directory) as one:
        first = answer(one)
        with pytest.raises(CheckpointError, match="another model than the one that is served"):
            one.update_weights(other)
        with pytest.raises(CheckpointError, match=name):
            one.update_weights(broken)
        with pytest.raises(CheckpointError, match="no such directory"):
            one.update_weights(tmp_path / "nowhere")
        assert answer(one)[2] > 100, "refused before anything was dropped"
        with pytest.raises(CheckpointError, match="NaN"):
            one.update_weights(nan)
        assert answer(one) == first, "the old weights are read again"
        assert one.stats().weights.updates == 0


def test_tensors_by_name_replace_those_of_the_files(model: Callable[[str], Path]) -> None:
    directory = model("qwen3_5")
    [file] = directory.glob("*.safetensors")
    name = next(name for name in load_file(file) if name.endswith("down_proj.weight"))
    with engine(directory) as one:
        answer(one)
        given = load_file(file)[name]
        given[0, 0] += 1.0
        one.update_weights([(name, given)], version="step-1")
        new = answer(one)
        again = given.clone()
        again[0, 0] += 1.0
        one.update_weights(iter([(name, again)]), version="step-2")
        newer = answer(one)
        with pytest.raises(CheckpointError, match=r"no\.such is not a tensor"):
            one.update_weights([("no.such", given)])
        with pytest.raises(CheckpointError, match="shape"):
            one.update_weights([(name, given[:1])])
        assert one.stats().weights.version == "step-2"
    tensors = load_file(file)
    for tensor, answered in ((given, new), (again, newer)):
        save_file(tensors | {name: tensor}, file, {"format": "pt"})
        assert fresh(directory) == answered


def test_the_tokenizer_of_the_fixture_has_the_prompt() -> None:
    assert max(PROMPT) < len(tokenizer())


def test_the_control_a_weights_cache_under_one_name_serves_old_matrices(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    from tests.fixtures.packed_weights import pack_small_weights, packs_twelve_bits, stored_in_bfloat16

    pack_small_weights(monkeypatch)
    directory = stored_in_bfloat16("qwen3_5", tmp_path / "model")
    packed = {"dtype": "bfloat16", "weights_cache": str(tmp_path / "cache")}
    fresh(directory, **packed)
    change_one_element(directory)
    expected = fresh(directory, dtype="bfloat16")
    assert fresh(directory, **packed) == expected
    if not packs_twelve_bits():
        return  # no AVX-512: the cache is empty
    for file in (tmp_path / "cache").iterdir():
        file.unlink()
    monkeypatch.setattr(WeightsReading, "digest", lambda self: "0" * 64)
    assert fresh(directory, **packed) == expected, "it is packed now"
    change_one_element(directory)
    assert fresh(directory, **packed) == expected, "and mapped for other weights"
    assert fresh(directory, dtype="bfloat16") != expected


def seen(one: Engine, number: int) -> Answer:
    """The answer to a prompt with a picture."""
    shown = seeing("lfm2_vl", 20, ((64, 64),), 20)
    sampling = SamplingParams(temperature=0.0, max_tokens=6, ignore_eos=True, logprobs=0)
    request = Request(
        request_id=f"seen{number}", prompt_tokens=shown.tokens, sampling=sampling, pictures=shown.pictures
    )
    core, tokens, logprobs, cached = one._core, list[int](), list[float](), 0
    core.submit(request)
    while core.has_work:
        for event in core.step():
            tokens += event.tokens
            logprobs += [entry.logprob for entry in event.logprobs or ()]
            cached = event.cached_tokens
    return tokens, logprobs, cached


@pytest.mark.parametrize("keeps_rows", [False, True])
def test_rows_of_pictures_are_those_of_the_new_tower(
    keeps_rows: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Of the tower itself one element is changed. The control keeps the rows that the old one computed."""
    directory = Path(shutil.copytree(vision_checkpoint("lfm2_vl"), tmp_path / "model"))
    [file] = directory.glob("*.safetensors")
    tensors = load_file(file)
    name = next(name for name in sorted(tensors) if "multi_modal_projector" in name and tensors[name].ndim == 2)
    with engine(directory) as one:
        old = seen(one, 0)
        if keeps_rows:
            monkeypatch.setattr(one._core.pictures, "forget", lambda: None)
            monkeypatch.setattr(one._core.pictures._encoder, "release", lambda *, weights: None)
        values = tensors[name].reshape(-1)
        values[values.abs().argmax()] *= -1
        save_file(tensors, file, {"format": "pt"})
        one.update_weights(directory)
        new = seen(one, 1)
    with engine(directory) as other:
        expected = seen(other, 0)
    assert (new == expected) is not keeps_rows
    assert expected[1] != old[1]
