"""Prefixes with names: what a name costs, what goes last, and what gives way all the same."""

from __future__ import annotations

from dataclasses import replace

import numpy as np

from tests.unit.memory.geometry import small_arena
from tests.unit.memory.prefix.test_cache import hit, in_one, remember, tokens_of
from weft.memory.memory import Memory
from weft.units import SeqId

ONE = SeqId(1)


def memory_of(frames: int = 16, share: float = 1.0) -> Memory:
    return Memory(small_arena(4, 2, frames), cache=True, pins_share=share)


def name(memory: Memory, name: str, tokens: np.ndarray) -> None:
    memory.pins.add(name, "", tokens.astype(np.int32).tobytes())
    memory.audit()


def test_a_hundred_names_of_a_prefix_take_no_page_and_no_slot() -> None:
    memory, tokens = memory_of(), tokens_of(1, 2, 3, rest=5)
    remember(memory, tokens)
    before = memory.usage()
    for number in range(100):
        name(memory, f"fork-{number}", tokens)
    assert replace(memory.usage(), pinned_bytes=0) == before
    assert memory.usage().pinned_bytes > 0
    assert len(memory.pins.last) == 1
    assert memory.pins.usage == (4, 1)
    for number in range(100):
        assert memory.pins.drop(f"fork-{number}")
    assert memory.pins.last == ()
    assert not memory.pins.drop("fork-0")


def test_a_pinned_snapshot_stays_while_others_are_evicted() -> None:
    for pinned in (True, False):
        memory, kept = memory_of(6), tokens_of(1, 2)
        remember(memory, kept)
        if pinned:
            name(memory, "kept", kept)
        for letter in range(10, 40):
            need = tokens_of(letter, letter, letter)
            while not _opened(memory, need):
                pass
            in_one(memory, lambda one, need=need: one.close(ONE, keep=need))
        assert (hit(memory, np.append(kept, 0)) == 32) == pinned


def _opened(memory: Memory, tokens: np.ndarray) -> bool:
    """Whether a sequence of ``tokens`` opens; else memory made room for it."""
    transaction = memory.transaction()
    opens = transaction.open(ONE, memory.match(tokens, salt=""), len(tokens))
    if not opens:
        assert transaction.reclaim(pages=-(-len(tokens) // 16), slots=1)
    memory.commit(transaction.seal())
    memory.audit()
    return opens


def test_a_pinned_snapshot_gives_way_to_a_request_that_needs_all_of_memory() -> None:
    memory, kept = memory_of(3), tokens_of(1, 2)
    remember(memory, kept)
    name(memory, "kept", kept)
    long = np.arange(100, 100 + 8 * 16, dtype=np.int32)
    for _ in range(8):
        if _opened(memory, long):
            break
    else:
        raise AssertionError("a pin blocked admission")
    assert memory.pins.of("kept").position < 32


def test_the_oldest_names_leave_a_budget_that_is_full() -> None:
    memory = memory_of(16, share=0.25)
    prompts = [tokens_of(letter, letter, letter) for letter in range(1, 7)]
    for number, tokens in enumerate(prompts):
        remember(memory, tokens)
        name(memory, f"s{number}", tokens)
    fitting = len(memory.pins.last)
    assert 0 < fitting < len(prompts)
    newest = [memory.pins.of(f"s{number}").node for number in range(5, 5 - fitting, -1)]
    assert list(memory.pins.last) == newest
    name(memory, "s0", prompts[0])
    assert memory.pins.last[0] == memory.pins.of("s0").node


def test_a_snapshot_that_comes_back_is_pinned_again() -> None:
    memory, tokens = memory_of(), tokens_of(1, 2)
    name(memory, "s", tokens)
    assert memory.pins.last == ()
    remember(memory, tokens)
    assert memory.pins.of("s").position == 32
    memory.flush()
    memory.audit()
    assert memory.pins.of("s").position == 0
    remember(memory, tokens)
    assert memory.pins.last == (memory.pins.of("s").node,)


def test_a_name_under_another_salt_finds_nothing() -> None:
    memory, tokens = memory_of(), tokens_of(1, 2)
    remember(memory, tokens, salt="a")
    name(memory, "s", tokens)
    assert memory.pins.of("s").position == 0
