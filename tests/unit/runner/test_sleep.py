"""Weights on their way to the host and back, by storages; the executor without its memory."""

from __future__ import annotations

import gc
import mmap
import shutil
import threading
import weakref
from collections.abc import Callable
from dataclasses import dataclass
from pathlib import Path

import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.support.arena_fills import fill_frames
from weft.assemble import Assembled, assemble
from weft.config import EngineConfig
from weft.engine.sleeper import Sleeper
from weft.errors import CheckpointError
from weft.models.blocks.linear import Linear
from weft.models.loading import load_model
from weft.request import Request, SamplingParams
from weft.runner.arena import NAN_BYTE
from weft.runner.sleep import DroppedModel, HostWeights, storages_of, storages_on_devices, tensors_of
from weft.runner.torch_executor import TorchExecutor
from weft.tensor.gpu import host_memory


@dataclass
class Tied:
    """As a model is made: a matrix, a view of its rows, the same tensor as the head."""

    embedding: torch.Tensor
    layers: list[dict[str, Linear]]
    head: Linear


def tied() -> Tied:
    Tied.__module__ = "weft.models.made_up"
    embedding = torch.arange(12.0).view(4, 3)
    return Tied(
        embedding, [{"a": Linear(embedding[1:3])}, {"b": Linear(torch.ones(2, 3), torch.zeros(2))}], Linear(embedding)
    )


def test_what_shares_bytes_is_moved_once_and_is_whole_again() -> None:
    model = tied()
    view = model.layers[0]["a"].weight
    assert isinstance(view, torch.Tensor)
    assert len(list(tensors_of(model))) == 4
    assert len(storages_of(model)) == 3
    kept = HostWeights(storages_of(model))
    assert kept.bytes == 12 * 4 + 6 * 4 + 2 * 4
    assert all(storage.nbytes() == 0 for storage in storages_of(model))
    kept.restore()
    assert model.embedding.tolist() == torch.arange(12.0).view(4, 3).tolist()
    assert view.tolist() == [[3.0, 4.0, 5.0], [6.0, 7.0, 8.0]]
    model.embedding[1, 0] = 30.0
    assert view[0, 0] == 30.0, "they still share their bytes"


def test_weights_that_are_on_the_host_stay_there() -> None:
    model = tied()
    assert storages_of(model)
    assert HostWeights(storages_on_devices(model)).bytes == 0
    assert model.embedding.untyped_storage().nbytes() == 48


@pytest.mark.parametrize("family", ["qwen3_5", "granite", "lfm2"])
def test_the_walk_finds_all_that_was_loaded(family: str) -> None:
    """Matrices in the matrix library's order are too small to be made here; all others have storages."""
    loaded = load_model(checkpoint(family))
    assert sum(storage.nbytes() for storage in storages_of(loaded.model)) >= loaded.weights_bytes > 0


def small_engine(directory: Path, **more: object) -> Assembled:
    return assemble(EngineConfig(model=str(directory), memory="16MiB", max_model_len=512, threads=1, **more))  # type: ignore[arg-type]


def answer(made: Assembled, name: str) -> list[int]:
    made.core.submit(
        Request(
            request_id=name,
            prompt_tokens=list(range(3, 133)),
            sampling=SamplingParams(temperature=0.0, max_tokens=8, ignore_eos=True),
        )
    )
    tokens: list[int] = []
    while made.core.has_work:
        for event in made.core.step():
            assert event.error is None, event.error
            tokens += event.tokens
    return tokens


def step_threads() -> set[threading.Thread]:
    return {thread for thread in threading.enumerate() if thread.name.startswith("steps")}


@pytest.mark.parametrize("level", [1, 2])
@pytest.mark.parametrize(("kv_dtype", "overlap"), [("auto", "off"), ("fp8", "off"), ("auto", "on")])
def test_the_arena_goes_and_the_answers_stay(level: int, kv_dtype: str, overlap: str) -> None:
    others = step_threads()
    made = small_engine(checkpoint("qwen3_5"), kv_dtype=kv_dtype, overlap=overlap)
    executor = made.core.executor
    assert isinstance(executor, TorchExecutor)
    arena_bytes = executor.arena.buffer.numel()
    before = answer(made, "before")
    if overlap == "on":  # with "off" a GPU has one too: the start warms it
        assert step_threads() - others
    sleeper = Sleeper(made.core)
    sleeper.sleep(level)
    assert not step_threads() - others, "a thread keeps step buffers of its own"
    assert executor.arena.buffer.numel() == 0
    assert isinstance(executor.model, DroppedModel) == (level == 2)
    sleeper.wake_up(["kv_cache"])
    fill_frames(executor.arena, range(executor.arena.plan.frame_count), NAN_BYTE)  # where nothing is written
    assert executor.arena.buffer.numel() == arena_bytes
    sleeper.wake_up()
    assert answer(made, "after") == before


def test_weights_that_come_back_wrong_show() -> None:
    """The negative control of the test above."""
    made = small_engine(checkpoint("qwen3_5"))
    before = answer(made, "before")
    sleeper = Sleeper(made.core)
    sleeper.sleep()
    executor = made.core.executor
    assert isinstance(executor, TorchExecutor)
    embedding = executor.model.embedding  # type: ignore[attr-defined]
    # On a GPU the storage has no bytes now: they are on the host.
    copies = (
        {}
        if executor._on_host is None
        else {storage._cdata: buffer.tensor for storage, buffer, _ in executor._on_host._copies}
    )
    asleep = copies.get(embedding.untyped_storage()._cdata)
    assert (asleep is None) == (embedding.device.type == "cpu")
    with torch.inference_mode():
        (embedding if asleep is None else asleep.view(embedding.dtype)).neg_()
    sleeper.wake_up()
    assert answer(made, "after") != before


def test_a_checkpoint_that_is_gone_is_said_and_waking_is_tried_again(tmp_path: Path) -> None:
    away, here = tmp_path / "away", tmp_path / "here"
    shutil.copytree(checkpoint("qwen3_5"), here)
    made = small_engine(here)
    before = answer(made, "before")
    sleeper = Sleeper(made.core)
    sleeper.sleep(2)
    here.rename(away)
    with pytest.raises(CheckpointError, match=r"no model\.safetensors"):
        sleeper.wake_up()
    assert sleeper.state.missing == ("weights", "kv_cache")
    shutil.copytree(checkpoint("lfm2"), here)
    with pytest.raises(CheckpointError, match="has changed while the engine slept"):
        sleeper.wake_up()
    shutil.rmtree(here)
    away.rename(here)
    sleeper.wake_up()
    assert answer(made, "after") == before


class LockedPages:
    """Host memory as a driver sees it: locked by address, and never more than ``limit`` bytes."""

    def __init__(self, limit: int = 1 << 30) -> None:
        self.limit = limit
        self.sizes: dict[int, int] = {}

    def register(self, address: int, size: int) -> bool:
        if sum(self.sizes.values()) + size > self.limit:
            return False
        assert address not in self.sizes
        self.sizes[address] = size
        return True

    def unregister(self, address: int) -> None:
        del self.sizes[address]


def test_copies_on_the_host_have_the_size_of_the_weights_and_are_given_back(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's host allocator would round 48, 24 and 8 bytes up, and keep them."""
    monkeypatch.setattr(torch, "empty", without_pinning(torch.empty))
    model, pages = tied(), LockedPages()
    mappings: list[weakref.ref[mmap.mmap]] = []

    class Watched(mmap.mmap):
        def __init__(self, *arguments: object) -> None:
            mappings.append(weakref.ref(self))

    monkeypatch.setattr(host_memory.mmap, "mmap", Watched)
    weights = HostWeights(storages_of(model), pin=pages)
    assert sorted(pages.sizes.values()) == [8, 24, 48]
    assert [mapping() is None for mapping in mappings] == [False] * 3
    weights.restore()
    assert not pages.sizes
    gc.collect()
    assert [mapping() is None for mapping in mappings] == [True] * 3
    assert model.embedding.tolist() == torch.arange(12.0).view(4, 3).tolist()


def test_weights_that_are_dropped_unlock_their_pages() -> None:
    pages = LockedPages()
    HostWeights(storages_of(tied()), pin=pages).drop()
    assert not pages.sizes


def test_a_limit_on_locked_memory_costs_speed_alone(caplog: pytest.LogCaptureFixture) -> None:
    model, pages = tied(), LockedPages(limit=60)
    weights = HostWeights(storages_of(model), pin=pages)
    assert sum(pages.sizes.values()) <= 60
    assert "could not be pinned" in caplog.text
    weights.restore()
    assert not pages.sizes
    assert model.embedding.tolist() == torch.arange(12.0).view(4, 3).tolist()


def without_pinning(empty: Callable[..., torch.Tensor]) -> Callable[..., torch.Tensor]:
    def checked(*shape: object, pin_memory: bool = False, **options: object) -> torch.Tensor:
        assert not pin_memory, "this comes from torch's host allocator"
        return empty(*shape, **options)

    return checked
