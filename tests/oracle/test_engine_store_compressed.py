"""Compressed KV and states go to a store as they are, and come back bit for bit; an exact engine passes them
by.

All that no sequence reads is compressed before anything is written. The engine that follows has to find the
prefix, and its logits have to equal those of the engine that kept the compressed prefix in memory. Memory is
full of NaN (see ``serving``). Controls: an exact engine finds nothing, and so does an engine of another form.
An engine that ignores the mark has other logits than a cold run.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from tests.oracle.serving import Answer, Serving
from tests.oracle.test_engine_prefix_cache import cold, gap, text
from tests.support.forced_compression import compress_all
from weft.memory.prefix_store import EXACT_FORM, INT4_KV, INT8_KV, INT8_STATE, Store
from weft.request import SamplingParams
from weft.spec import CompressedKvName
from weft.store.identity import NamespaceIdentity
from weft.store.opening import StoreOptions
from weft.store.tiered_store import open_store

FAMILIES = ("qwen3_5", "granite")
ONE = SamplingParams(temperature=0.0, max_tokens=4, ignore_eos=True)
PROMPT, NEXT_TURN = text(3, 330), text(4, 40)
FORMS = {"int8": frozenset({EXACT_FORM, INT8_KV, INT8_STATE}), "int4": frozenset({EXACT_FORM, INT4_KV, INT8_STATE})}
NEVER_S = 1e12


@pytest.fixture
def all_is_compressed(monkeypatch: pytest.MonkeyPatch) -> None:
    compress_all(monkeypatch)


def store_of(one: Serving, path: Path, dtype: CompressedKvName | None) -> Store:
    """Of an engine that compresses; ``dtype`` None: of an exact one."""
    identity = NamespaceIdentity("model", "weights", {}, {}, "", "", "", "", one.arena.page_bytes, one.arena.slot_bytes)
    forms = frozenset({EXACT_FORM}) if dtype is None else FORMS[dtype]
    return open_store(
        path,
        identity,
        StoreOptions(
            capacity_bytes=64 << 20,
            reserve_bytes=0,
            volume_bytes=8 << 20,
            forms=forms,
            accept_inexact=dtype is not None,
        ),
    )


def serving(family: str, path: Path, dtype: CompressedKvName | None) -> Serving:
    """``dtype`` None: an exact engine."""
    return Serving(
        family, cache=True, compress=dtype is not None, compress_kv=dtype, store=lambda one: store_of(one, path, dtype)
    )


def written(family: str, path: Path, dtype: CompressedKvName) -> Answer:
    """The next turn of a conversation whose first turn was compressed, and then written, by an engine that
    still has it in memory."""
    engine = serving(family, path, dtype)
    tier = engine.core.store
    assert tier is not None
    tier.writes._paced_until_s = NEVER_S  # until all of it is compressed
    engine.run([PROMPT], ONE)
    engine.run([text(9, 4)], ONE)  # some steps in which what was left is compressed
    usage = engine.core.memory.usage()
    assert usage.pages_compressed >= 16
    assert usage.states_compressed >= 1
    engine.core.write_all(20.0)
    memory = tier.store.records  # type: ignore[attr-defined]
    assert {*memory.index.c["form"][: memory.index.length].tolist()} & {INT8_KV, INT4_KV}
    assert INT8_STATE in memory.index.c["form"]
    [answer] = engine.run([[*PROMPT, *NEXT_TURN]], ONE)
    engine.core.close(write_s=0.0)
    assert answer.cached_tokens > 256
    return answer


def next_turn(engine: Serving) -> Answer:
    [answer] = engine.run([[*PROMPT, *NEXT_TURN]], ONE)
    engine.core.close(write_s=0.0)
    return answer


@pytest.mark.parametrize("dtype", ["int8", "int4"])
@pytest.mark.parametrize("family", FAMILIES)
def test_what_was_compressed_comes_back_bit_for_bit(
    family: str, dtype: CompressedKvName, tmp_path: Path, all_is_compressed: None
) -> None:
    in_memory = written(family, tmp_path, dtype)
    after = serving(family, tmp_path, dtype)
    assert after.core.store is not None
    again = next_turn(after)
    assert again.cached_tokens == in_memory.cached_tokens
    assert after.core.store.restores.counts.restored_tokens >= 256
    assert torch.equal(again.logits, in_memory.logits)
    assert again.tokens == in_memory.tokens
    assert gap(again, cold(family, [*PROMPT, *NEXT_TURN], ONE)) > 1e-5, "nothing was compressed"


def test_an_exact_engine_never_loads_them(tmp_path: Path, all_is_compressed: None) -> None:
    written("qwen3_5", tmp_path, "int8")
    exact = next_turn(serving("qwen3_5", tmp_path, None))
    assert exact.cached_tokens == 0
    assert torch.equal(exact.logits, cold("qwen3_5", [*PROMPT, *NEXT_TURN], ONE).logits)


def test_codes_of_another_form_are_no_hit(tmp_path: Path, all_is_compressed: None) -> None:
    written("qwen3_5", tmp_path, "int8")
    assert next_turn(serving("qwen3_5", tmp_path, "int4")).cached_tokens == 0


@pytest.mark.parametrize("exact", [True, False])
def test_the_mark_alone_keeps_an_exact_engine_away(exact: bool, tmp_path: Path, all_is_compressed: None) -> None:
    """The control: the same store offers the same prefix, and only an engine that reads the mark computes."""
    written("qwen3_5", tmp_path, "int8")
    engine = serving("qwen3_5", tmp_path, "int8")
    assert engine.core.store is not None
    engine.core.store.restores._exact = exact
    answer, truth = next_turn(engine), cold("qwen3_5", [*PROMPT, *NEXT_TURN], ONE)
    assert (answer.cached_tokens == 0) == exact
    assert torch.equal(answer.logits, truth.logits) == exact


def test_a_part_in_memory_is_not_read_again(tmp_path: Path, all_is_compressed: None) -> None:
    """A load that begins inside of compressed records: codes before it are passed over."""
    in_memory = written("qwen3_5", tmp_path, "int8")
    after = serving("qwen3_5", tmp_path, "int8")
    tier = after.core.store
    assert tier is not None
    tier.store.match, match = lambda *asked: None, tier.store.match  # type: ignore[method-assign]
    after.run([PROMPT[:150]], ONE)
    tier.store.match = match  # type: ignore[method-assign]
    again = next_turn(after)
    assert 0 < tier.restores.counts.restored_tokens < 256
    assert again.cached_tokens == in_memory.cached_tokens
    assert again.tokens == in_memory.tokens
