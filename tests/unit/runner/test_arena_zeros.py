"""Frames are zero before their first use (law L6), and those that nobody wrote are not written for it."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
import torch

from tests.fixtures.checkpoints import checkpoint
from tests.support.arena_fills import fill_frames, fill_pages, fill_slots
from weft.config import Sizes
from weft.engine.engine import EngineCore
from weft.memory.frames.plan import plan_arena
from weft.memory.memory import Memory
from weft.models.loading import load_model
from weft.request import Request, SamplingParams
from weft.runner.arena import NAN_BYTE, DeviceArena, Items, note_written
from weft.runner.torch_executor import TorchExecutor
from weft.spec import ModelSpec, attention, short_conv

SPEC = ModelSpec("tiny", 32, 16, 512, "float32", (attention(2, 16), short_conv(32, 3)))


@pytest.fixture
def arena() -> DeviceArena:
    return DeviceArena(plan_arena(SPEC, 200_000), torch.device("cpu"))


def frames_of(arena: DeviceArena) -> torch.Tensor:
    """The live bytes by frame: what is written through this the arena knows nothing of."""
    return arena.buffer.view(arena.plan.frame_count, arena.plan.frame_bytes)


def test_an_arena_begins_as_zeros(arena: DeviceArena) -> None:
    assert not arena.buffer.any()
    fill_frames(arena, range(arena.plan.frame_count), NAN_BYTE)
    arena.release()
    arena.allocate()
    assert not arena.buffer.any(), "and does again where what it had was given back"


def test_a_frame_is_written_only_when_it_is_named_again(arena: DeviceArena) -> None:
    frames_of(arena).fill_(7)  # what no plan does; it shows where the arena writes
    arena.zero_frames([1, 3])
    assert (frames_of(arena) == 7).all()
    arena.zero_frames([3, 2])
    assert not frames_of(arena)[3].any(), "somebody may have used it"
    assert (frames_of(arena)[[0, 1, 2]] == 7).all()
    arena.zero_frames([1, 2, 3])
    assert not frames_of(arena)[1:4].any()


@pytest.mark.parametrize("fill", [fill_frames, fill_pages, fill_slots])
def test_nothing_counts_as_never_written_once_something_was_filled(
    arena: DeviceArena, fill: Callable[[DeviceArena, list[int], int], None]
) -> None:
    fill(arena, [0], NAN_BYTE)
    frames_of(arena).fill_(7)
    arena.zero_frames([1])
    assert not frames_of(arena)[1].any()


def test_an_arena_that_was_made_anew_counts_anew(arena: DeviceArena) -> None:
    arena.zero_frames([1])
    arena.release()
    arena.allocate()
    frames_of(arena).fill_(7)
    arena.zero_frames([1])
    assert (frames_of(arena)[1] == 7).all()
    arena.zero_frames([1])
    assert not frames_of(arena)[1].any()


def test_memory_that_the_system_has_not_got_is_a_runtime_error() -> None:
    plan = plan_arena(ModelSpec("huge", 32, 16, 512, "float32", (attention(1 << 20, 1 << 20),)), 1 << 60)
    with pytest.raises(RuntimeError, match="of memory for the arena"):
        DeviceArena(plan, torch.device("cpu"))


def test_pad_and_frames_outside_the_arena_are_bugs(arena: DeviceArena) -> None:
    with pytest.raises(AssertionError):
        arena.zero_frames([-1])
    with pytest.raises(IndexError):
        arena.zero_frames([arena.plan.frame_count])


class RemoteArena(DeviceArena):
    """As on a GPU: its memory comes from torch's allocator, and the host does not write it. ``filled``: the
    items of each launch."""

    def __init__(self) -> None:
        self.filled: list[list[int]] = []
        super().__init__(plan_arena(SPEC, 200_000), torch.device("meta"))
        self.buffer = torch.zeros(self.plan.arena_bytes, dtype=torch.uint8)

    def _fill(self, items: Items, stride_bytes: int, byte: int) -> None:
        self.filled.append(np.asarray(items).tolist())
        frames = self.buffer.view(-1, stride_bytes)
        frames[self.filled[-1]] = byte


def test_on_a_device_the_first_use_of_a_frame_launches_nothing_and_every_later_one_does() -> None:
    arena = RemoteArena()
    arena.zero_frames([1, 3])
    assert arena.filled == []
    frames_of(arena)[[1, 3]] = NAN_BYTE
    arena.zero_frames([3, 2])
    assert arena.filled == [[3, 2]], "one launch for all, with the ids that are on the device"
    assert not frames_of(arena)[[2, 3]].any()
    assert (frames_of(arena)[1] == NAN_BYTE).all()
    arena.zero_frames([1])
    assert not arena.buffer.any()


def test_memory_of_a_device_is_zeroed_when_it_is_allocated(monkeypatch: pytest.MonkeyPatch) -> None:
    """Torch's allocator hands out what others wrote."""
    zeros, zeroed = torch.zeros, []

    def noted(size: int, **of: object) -> torch.Tensor:
        zeroed.append((size, str(of["device"])))
        return zeros(size, **of)  # type: ignore[call-overload, no-any-return]

    monkeypatch.setattr(torch, "zeros", noted)
    arena = DeviceArena(plan_arena(SPEC, 200_000), torch.device("meta"))
    arena.release()
    arena.allocate()
    assert zeroed == [(arena.plan.arena_bytes, "meta")] * 2


def test_frames_that_the_warm_runs_wrote_are_zeroed_at_their_first_use() -> None:
    arena = RemoteArena()
    note_written(arena, arena.plan.frame_bytes + 1)
    frames_of(arena)[:2] = NAN_BYTE
    arena.zero_frames([0, 1, 2])
    assert not arena.buffer.any()
    arena.zero_frames([3])
    assert len(arena.filled) == 1, "the control: others count as never written"


class Watched:
    """An engine with little memory, and what its arena was asked to make zero: what lay there before."""

    def __init__(self, *, clears: bool = True) -> None:
        model = load_model(checkpoint("granite"))
        plan = plan_arena(model.spec, 400_000)
        sizes = Sizes(max_model_len=512, rows_max=24, step_tokens_max=256, queue_max=64, memory_bytes=plan.arena_bytes)
        self.executor = TorchExecutor(model.model, plan, sizes)
        self.core = EngineCore(
            vocab_size=model.spec.vocab_size,
            sizes=sizes,
            memory=Memory(plan, cache=True),
            executor=self.executor,
            clock=lambda: 0.0,
            seed=0,
            eos_ids=(),
        )
        self.named = self.were_zero = 0
        self.dirty_after: list[int] = []
        zero_frames = self.executor.arena.zero_frames

        def watching(frames: Items) -> None:
            assert isinstance(frames, np.ndarray), "on the host the plan's own ids are used"
            ids, held = frames.tolist(), frames_of(self.executor.arena)
            self.named += len(ids)
            self.were_zero += sum(not held[frame].any() for frame in ids)
            if clears:
                zero_frames(frames)
            self.dirty_after += [frame for frame in ids if held[frame].any()]

        self.executor.arena.zero_frames = watching  # type: ignore[method-assign]

    def run(self) -> None:
        """Few long prompts and many short ones in turn, none of which begins like another: frames are wanted
        for pages, for slots, and for pages again."""
        random = np.random.default_rng(0)
        for turn in range(6):
            for number in range(2 if turn % 2 == 0 else 24):
                tokens = random.integers(3, 200, 400 if turn % 2 == 0 else 20).tolist()
                sampling = SamplingParams(temperature=0.0, max_tokens=3, ignore_eos=True)
                self.core.submit(Request(request_id=f"{turn}-{number}", prompt_tokens=tokens, sampling=sampling))
            while self.core.has_work:
                self.core.step()
                assert self.core.failure is None, self.core.failure


def test_every_frame_that_a_plan_names_is_zero_when_the_step_computes() -> None:
    watched = Watched()
    watched.run()
    assert watched.dirty_after == []
    assert 0 < watched.were_zero < watched.named, "some were never used, some held the other kind"


def test_frames_that_changed_kind_are_seen_where_nobody_clears_them() -> None:
    """The negative control of the test above."""
    watched = Watched(clears=False)
    watched.run()
    assert watched.dirty_after
