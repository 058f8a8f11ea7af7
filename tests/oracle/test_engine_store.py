"""A prefix from the store changes nothing: after a restart the same tokens, and the very same logits.

Each test serves prompts on an engine with a real store in a directory, ends it, and asks another engine on
the same directory. The second engine has to find the prefix, and its logits have to equal those of an engine
that kept the prefix in memory, bit for bit. Memory is full of NaN (see ``serving``). Controls: a store whose
bytes are wrong is noticed, and another salt finds nothing."""

from __future__ import annotations

from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch

from tests.fixtures.checkpoints import asked
from tests.fixtures.memory_store import Contents, MemoryStore
from tests.oracle.serving import Answer, Serving, directory, loaded
from tests.support.given_costs import GIVEN_COSTS
from weft.assemble import assemble
from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.memory.prefix_store import Store
from weft.models.loading import LoadedModel, load_model
from weft.request import Request, SamplingParams
from weft.store.identity import NamespaceIdentity
from weft.store.opening import StoreOptions
from weft.store.packed_store import PackedStore
from weft.store.renewable_store import RenewableStore
from weft.store.tiered_store import open_store

KINDS = asked("qwen3", "qwen3_5", "lfm2", "granite", "jamba", "kimi_linear", "falcon_mamba")
"""Attention alone; delta net, short convolution, Mamba-2 and Mamba-1 beside attention; latent attention
beside a delta net with gates by channel; Mamba-1 alone."""
SHORT = SamplingParams(temperature=0.0, max_tokens=10, ignore_eos=True)


def text(name: int, length: int) -> list[int]:
    return np.random.default_rng(name).integers(3, 400, length).tolist()


PROMPT = text(1, 330)
NEXT_TURN = text(2, 40)


def disk_store(path: Path, serving: Serving) -> Store:
    identity = NamespaceIdentity(
        "model", "weights", {}, {}, "", "", "", "", serving.arena.page_bytes, serving.arena.slot_bytes
    )
    return open_store(path, identity, StoreOptions(capacity_bytes=64 << 20, reserve_bytes=0, volume_bytes=8 << 20))


def serving(family: str, path: Path, model: LoadedModel | None = None) -> Serving:
    return Serving(family, cache=True, model=model, store=lambda one: disk_store(path, one))


def packed_serving(family: str, path: Path, model: LoadedModel, *, packs: bool) -> Serving:
    return Serving(
        family,
        cache=True,
        model=model,
        store=lambda one: PackedStore(
            disk_store(path, one), one.arena.page_bytes, one.arena.slot_bytes, queue_bytes=1 << 30, packs=packs
        ),
    )


def first_and_next(engine: Serving, salt: str = "") -> list[Answer]:
    """The prompt, and then the next turn of its conversation."""
    [answer] = engine.run([PROMPT], SHORT, salt=salt)
    [follow_up] = engine.run([[*PROMPT, *answer.tokens, *NEXT_TURN]], SHORT, salt=salt)
    return [answer, follow_up]


def same(left: Answer, right: Answer) -> bool:
    return left.tokens == right.tokens and torch.equal(left.logits, right.logits)


@pytest.mark.parametrize("family", KINDS)
def test_a_restart_finds_the_prefix_and_changes_nothing(family: str, tmp_path: Path) -> None:
    before = serving(family, tmp_path)
    cold, cold_next = first_and_next(before)
    [warm] = before.run([PROMPT], SHORT)
    before.core.close()
    after = serving(family, tmp_path)
    again, again_next = first_and_next(after)
    after.core.close()
    assert cold.cached_tokens == 0
    assert again.cached_tokens == warm.cached_tokens >= 300
    assert same(again, warm)
    assert again.tokens == cold.tokens
    assert again_next.cached_tokens >= cold_next.cached_tokens
    assert again_next.tokens == cold_next.tokens


@pytest.mark.parametrize("family", ["qwen3_5", "granite"])
def test_bfloat16_comes_back_bit_for_bit(family: str, tmp_path: Path) -> None:
    model = load_model(directory(family), dtype="bfloat16")
    before = serving(family, tmp_path, model)
    before.run([PROMPT], SHORT)
    [warm] = before.run([PROMPT], SHORT)
    before.core.close()
    after = serving(family, tmp_path, model)
    [again] = after.run([PROMPT], SHORT)
    after.core.close()
    assert again.cached_tokens == warm.cached_tokens > 0
    assert same(again, warm)


@pytest.mark.parametrize(
    ("family", "dtype"),
    [("qwen3", "bfloat16"), ("qwen3_5", "bfloat16"), ("granite", "float32"), ("falcon_mamba", "float32")],
)
def test_packed_records_come_back_bit_for_bit(family: str, dtype: str, tmp_path: Path) -> None:
    """A packed life, and one that goes on from it with plain records."""
    model = load_model(directory(family), dtype=dtype)
    before = packed_serving(family, tmp_path, model, packs=True)
    before.run([PROMPT], SHORT)
    [warm] = before.run([PROMPT], SHORT)
    before.core.close()
    assert before.core.store is not None
    stats = before.core.store.store.stats()
    assert 0 < stats.packed_bytes < 0.95 * stats.raw_bytes
    after = packed_serving(family, tmp_path, model, packs=False)
    [again] = after.run([PROMPT], SHORT)
    [longer] = after.run([[*PROMPT, *NEXT_TURN]], SHORT)
    after.core.close()
    assert again.cached_tokens == warm.cached_tokens > 0
    assert same(again, warm)
    last = packed_serving(family, tmp_path, model, packs=True)
    [longer_again] = last.run([[*PROMPT, *NEXT_TURN]], SHORT)
    last.core.close()
    assert longer_again.cached_tokens > longer.cached_tokens - len(NEXT_TURN)
    assert longer_again.tokens == longer.tokens


def test_the_flag_packs_and_auto_reads_what_it_packed(tmp_path: Path) -> None:
    prompt = Request(request_id="one", prompt_tokens=PROMPT, sampling=SHORT)
    for pack, restored in (("on", 0), ("auto", 1)):
        core = assemble(
            EngineConfig(
                model=str(directory("lfm2")),
                store=str(tmp_path),
                memory="64MiB",
                store_pack=pack,
                store_size="64MiB",
                store_reserve="0",
                step_costs=GIVEN_COSTS,
                device="cpu",
            )
        ).core
        core.submit(prompt)
        while core.has_work:
            core.step()
        core.write_all(20.0)
        assert core.store is not None
        stats, counts = core.store.stats(), core.store.restores.counts
        core.close()
        assert counts.restores == restored
        assert (stats.store.packed_bytes < stats.store.raw_bytes) == (pack == "on")


def test_packing_without_its_package_is_named(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("weft.store.packing.is_available", lambda: False)
    config = EngineConfig(
        model=str(directory("lfm2")),
        store=str(tmp_path),
        memory="64MiB",
        device="cpu",
        store_size="64MiB",
        store_reserve="0",
    )
    with pytest.raises(ConfigError, match=r"debug\.store_pack on needs .*weft\[store\]"):
        assemble(replace(config, store_pack="on"))
    core = assemble(config).core
    assert core.store is not None
    assert isinstance(core.store.store, RenewableStore)
    assert not isinstance(core.store.store.below, PackedStore)
    core.close()


def test_another_salt_finds_nothing_in_the_store(tmp_path: Path) -> None:
    before = serving("lfm2", tmp_path)
    [cold] = before.run([PROMPT], SHORT, salt="a")
    before.core.close()
    after = serving("lfm2", tmp_path)
    [other] = after.run([PROMPT], SHORT, salt="b")
    [unsalted] = after.run([PROMPT], SHORT)
    [own] = after.run([PROMPT], SHORT, salt="a")
    after.core.close()
    assert other.cached_tokens == unsalted.cached_tokens == 0
    assert own.cached_tokens > 300
    assert own.tokens == cold.tokens


@pytest.mark.parametrize("overlap", [False, True])
def test_a_store_that_lies_is_noticed(overlap: bool) -> None:
    """The control: one wrong byte of a state, called right, shows in the logits."""
    outcomes = []
    for fault in (None, "lies"):
        kept: list[Contents] = []

        def store(one: Serving, fault: str | None = fault, kept: list[Contents] = kept) -> MemoryStore:
            kept[:] = kept or [Contents(one.arena.page_bytes)]
            return MemoryStore(kept[0], fault=lambda: fault)

        before = Serving("qwen3_5", cache=True, store=store, overlap=overlap)
        before.run([PROMPT], SHORT)
        [warm] = before.run([PROMPT], SHORT)
        before.core.close()
        after = Serving("qwen3_5", cache=True, store=store, overlap=overlap)
        [again] = after.run([PROMPT], SHORT)
        after.core.close()
        assert again.cached_tokens > 0
        outcomes.append(same(again, warm))
    assert outcomes == [True, False]


def test_a_device_transfer_moves_the_same_bytes() -> None:
    """Pages and a state out of one arena and into another, in rooms that hold a part of the pages: every
    byte, by torch's copies as by numpy's."""
    from weft.memory.arena_work import WorkKind
    from weft.memory.prefix_store import TransferBuffers
    from weft.runner.staging import Staging
    from weft.runner.transfers import DeviceTransfers, HostTransfers

    plan = Serving("qwen3_5").arena
    assert loaded("qwen3_5").spec.attention_layers
    filled = torch.randint(0, 256, (plan.arena_bytes,), dtype=torch.uint8)
    buffers = TransferBuffers(plan.page_bytes, plan.slot_bytes, limit_bytes=1 << 24)
    one, two = buffers.add(7), buffers.add(7)
    pages, slot = np.array([7, 3, 9, 4, 5, 11, 10]), plan.slot_count - 1

    def work(buffer: int, kinds: tuple[WorkKind, WorkKind]) -> list[tuple[WorkKind, np.ndarray]]:
        return [
            (kinds[0], np.stack([pages, np.full(7, buffer), np.arange(7)], axis=1)),
            (kinds[1], np.array([[slot, buffer]])),
        ]

    def staged(buffer: int, kinds: tuple[WorkKind, WorkKind]) -> list[tuple[WorkKind, Any]]:
        staging = Staging(torch.device("cpu"))
        staging.begin()
        made = [(kind, staging.add(ids)) for kind, ids in work(buffer, kinds)]
        staging.send()
        return made

    stores = (WorkKind.STORE_PAGES, WorkKind.STORE_STATES)
    loads = (WorkKind.LOAD_PAGES, WorkKind.LOAD_STATES)
    for kind, ids in work(one, stores):
        HostTransfers(plan, filled, buffers).perform(kind, ids)
    rooms_bytes = 8 * plan.page_bytes  # two pages of a store at once, and four of a load
    DeviceTransfers(plan, filled, buffers, rooms_bytes=rooms_bytes).store(1, staged(two, stores))
    assert np.array_equal(buffers[one].pages_PB, buffers[two].pages_PB)
    assert np.array_equal(buffers[one].state_B, buffers[two].state_B)
    pages_NP = filled[: plan.page_count * plan.page_bytes].view(plan.page_count, plan.page_bytes)
    assert np.array_equal(buffers[one].pages_PB, pages_NP.numpy()[pages])
    targets = [torch.zeros_like(filled) for _ in range(2)]
    for kind, ids in work(one, loads):
        HostTransfers(plan, targets[0], buffers).perform(kind, ids)
    transfers = DeviceTransfers(plan, targets[1], buffers, rooms_bytes=rooms_bytes)
    transfers.load(1, ["key"], staged(one, loads), ())
    assert transfers.are_done(1)
    assert torch.equal(targets[0], targets[1])
    changed = (targets[0] != 0).nonzero().flatten() // plan.page_bytes
    in_slot = range(
        slot * plan.slot_stride_bytes // plan.page_bytes,
        ((slot + 1) * plan.slot_stride_bytes - 1) // plan.page_bytes + 1,
    )
    assert set(changed.tolist()) == {*pages.tolist(), *in_slot}
