"""Packed records: fewer bytes on the disk, and the same bytes for the engine."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import numpy as np
import pytest

from tests.unit.store import contents, page_reader
from tests.unit.store.contents import (
    STATE_BYTES,
    STORED_PAGE_BYTES,
    assert_hit,
    event_of,
    fetched,
    kv_of,
    opened,
    prompt,
    put,
    state_of,
    written,
)
from weft.memory.prefix_store import EXACT_FORM, PACKED, StagingBuffers
from weft.store.packed_store import PackedStore, threads_for
from weft.store.packing import WORDS_2, WORDS_4, PackingError, join_parts, pack_part, unpack


def packed(payload: bytes) -> bytes:
    return join_parts(memoryview(payload), [pack_part(memoryview(payload))])


def unpacked(content: bytes, size: int) -> bytes:
    into = bytearray(size)
    unpack(memoryview(content), memoryview(into))
    return bytes(into)


def floats(count: int, dtype: str, seed: int = 0) -> bytes:
    values = np.random.default_rng(seed).standard_normal(count).astype(np.float32)
    if dtype == "bfloat16":
        return (values.view(np.uint32) >> 16).astype("<u2").tobytes()
    return values.astype(dtype).tobytes()


@pytest.mark.parametrize(
    ("name", "payload", "share"),
    [
        ("bfloat16", floats(700_000, "bfloat16"), 0.69),
        ("float32", floats(400_000, "float32"), 0.86),
        ("float16", floats(700_000, "float16"), 0.86),
        ("noise", np.random.default_rng(1).bytes(1_500_001), 1.001),
        ("zeros", bytes(1 << 20), 0.51),
        ("all bits", np.arange(1 << 16, dtype="<u2").tobytes(), 1.001),
        ("special", np.asarray([np.nan, np.inf, -np.inf, 0.0, -0.0, 1e-45, -3e38] * 500, "<f4").tobytes(), 1.0),
        ("short", b"abc", 8.0),
        ("nothing", b"", 99.0),
    ],
)
def test_packed_bytes_come_back_bit_for_bit(name: str, payload: bytes, share: float) -> None:
    content = packed(payload)
    assert unpacked(content, len(payload)) == payload, name
    assert len(content) <= max(16, share * len(payload)), len(content) / max(1, len(payload))


def test_bytes_that_nobody_packed_are_an_error() -> None:
    payload = floats(3000, "float32")
    content = packed(payload)
    for at in range(0, len(content), 7):
        wrong = bytearray(content)
        wrong[at] ^= 4
        with pytest.raises(PackingError):
            unpacked(bytes(wrong), len(payload))
    for end in (0, 10, 16, 19, 400, len(content) - 1):
        with pytest.raises(PackingError):
            unpacked(content[:end], len(payload))
    with pytest.raises(PackingError):
        unpacked(content, len(payload) - 4)
    with pytest.raises(PackingError):
        unpacked(content + b"\0", len(payload))


@pytest.fixture
def _numbers(monkeypatch: pytest.MonkeyPatch) -> None:
    """KV and states are floats, as an engine has them."""

    def number(text: object) -> int:
        return hash(text) & 0xFFFF_FFFF

    monkeypatch.setattr(
        contents,
        "page_of",
        lambda tokens, page, salt=None: floats(
            STORED_PAGE_BYTES // 2, "bfloat16", number((tuple(tokens[: 16 * page + 16]), salt))
        ),
    )


def over(path: Path, *, packs: bool = True, queue_bytes: int = 1 << 30) -> PackedStore:
    return PackedStore(opened(path), STORED_PAGE_BYTES, STATE_BYTES, queue_bytes=queue_bytes, packs=packs, threads=2)


@pytest.mark.usefixtures("_numbers")
def test_a_packed_prefix_is_smaller_and_the_same(tmp_path: Path) -> None:
    store, tokens = over(tmp_path), prompt(600)
    written(store, tokens)
    written(store, [*tokens[:592], *prompt(70, 1)])
    written(store, prompt(500, 2), salt="tenant")
    share = store.stats().packed_bytes / store.stats().raw_bytes
    assert 0.65 < share < 0.85
    assert store.stored_share == share
    prefix = store.match(None, tokens, 0)
    assert prefix is not None
    assert prefix.bytes_from(0) < 0.85 * (38 * STORED_PAGE_BYTES + STATE_BYTES)
    store.close()
    again = over(tmp_path, packs=False)
    for start in (0, 16, 256, 272, 592):
        assert_hit(again, tokens, 600, start=start)
    assert_hit(again, [*tokens[:592], *prompt(70, 1)], 662, start=48)
    assert_hit(again, prompt(500, 2), 500, salt="tenant")
    again.close()


@pytest.mark.usefixtures("_numbers")
def test_a_put_behind_one_that_is_being_packed_writes_its_own_kv_alone(tmp_path: Path) -> None:
    store, tokens = over(tmp_path), prompt(900)
    first, second = put(store, tokens[:512]), put(store, tokens)
    assert put(store, tokens) is None, "it is on its way"
    assert first is not None
    assert second is not None
    assert event_of(store, second).kind == "written"
    assert store.stats().kv_records == 4
    assert_hit(store, tokens, 900)
    assert_hit(store, tokens[:520], 512)
    store.close()


@pytest.mark.usefixtures("_numbers")
def test_kv_that_was_stored_before_packing_goes_on_packed(tmp_path: Path) -> None:
    plain, tokens = over(tmp_path, packs=False), prompt(900)
    written(plain, tokens[:512])
    plain.close()
    store = over(tmp_path)
    written(store, tokens)
    prefix = store.store.match(None, tokens, 0)
    assert prefix is not None
    assert [span.form for span in prefix.spans] == [EXACT_FORM, EXACT_FORM, PACKED, PACKED]
    for start in (0, 32, 512, 720):
        assert_hit(store, tokens, 900, start=start)
    store.close()


@pytest.mark.parametrize("encoding", [WORDS_2, WORDS_4, 3])
def test_a_chunk_that_says_words_which_it_cannot_have_is_refused(encoding: int) -> None:
    payload = memoryview(bytes(7))
    content = bytearray(join_parts(payload, [pack_part(payload)]))
    content[19] |= encoding << 6
    with pytest.raises(PackingError, match="unknown encoding"):
        unpacked(bytes(content), len(payload))


@pytest.mark.parametrize("size", [*range(1, 9), 2047, 2049, 16_385, 99_998, 99_999, 100_002])
def test_payloads_of_any_length_are_packed_and_come_back(size: int) -> None:
    payload = np.random.default_rng(size).normal(size=size).astype(np.float32).tobytes()[:size]
    assert unpacked(join_parts(memoryview(payload), [pack_part(memoryview(payload))]), size) == payload


@pytest.mark.usefixtures("_numbers")
def test_the_seconds_of_a_fetch_are_those_until_its_bytes_are_unpacked(tmp_path: Path) -> None:
    """The price of a read counts them."""
    now_s = iter(range(0, 10_000, 7))
    store = PackedStore(
        opened(tmp_path), STORED_PAGE_BYTES, STATE_BYTES, queue_bytes=1 << 30, threads=1, clock=lambda: next(now_s)
    )
    tokens = prompt(200)
    written(store, tokens)
    prefix = store.match(None, tokens, 0)
    assert prefix is not None
    into = StagingBuffers(memoryview(bytearray(13 * STORED_PAGE_BYTES)), memoryview(bytearray(STATE_BYTES)))
    event = event_of(store, store.fetch(prefix, 0, into))
    assert event.kind == "fetched"
    assert event.seconds == 14, "the begin, one record of KV, and the state"
    store.close()


@pytest.mark.usefixtures("_numbers")
def test_a_flipped_bit_in_a_packed_record_is_damage(tmp_path: Path) -> None:
    store, tokens = over(tmp_path), prompt(300)
    written(store, tokens)
    store.close()
    volume = tmp_path / "volumes" / "volume-00000"
    content = bytearray(volume.read_bytes())
    content[4096 + 500] ^= 1
    volume.write_bytes(content)
    again = over(tmp_path)
    answer = fetched(again, tokens)
    assert not isinstance(answer, tuple)
    assert answer is not None
    assert (answer.kind, answer.reason) == ("damaged", "checksum")
    assert again.match(None, tokens, 0) is None
    again.close()


@pytest.mark.usefixtures("_numbers")
def test_bytes_that_unpack_to_others_are_never_handed_out(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """The checksum of the record is right, and its decoded bytes are not those that were packed."""
    store, tokens = over(tmp_path), prompt(300)
    monkeypatch.setattr(
        "weft.store.packed_store.join_parts", lambda payload, parts: join_parts(memoryview(bytes(len(payload))), parts)
    )
    written(store, tokens)
    answer = fetched(store, tokens)
    assert not isinstance(answer, tuple)
    assert answer is not None
    assert (answer.kind, answer.reason) == ("damaged", "packing")
    assert store.stats().damaged == {"packing": 1}
    store.close()


@pytest.mark.usefixtures("_numbers")
def test_puts_beyond_the_queue_are_refused(tmp_path: Path) -> None:
    store = over(tmp_path, queue_bytes=30_000)
    tickets = [put(store, prompt(512, seed)) for seed in range(3)]
    assert [ticket is None for ticket in tickets] == [False, True, True]
    store.close()
    again = over(tmp_path)
    assert_hit(again, prompt(512, 0), 512)
    assert again.match(None, prompt(512, 1), 0) is None
    again.close()


@pytest.mark.usefixtures("_numbers")
def test_a_packer_that_runs_out_of_memory_leaves_the_record_as_it_is(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    def fails(part: memoryview) -> bytes:
        raise MemoryError

    monkeypatch.setattr("weft.store.packed_store.pack_part", fails)
    store, tokens = over(tmp_path), prompt(300)
    written(store, tokens)
    assert store.stored_share == 1.0
    assert_hit(store, tokens, 300)
    store.close()


@pytest.mark.usefixtures("_numbers")
def test_a_reader_written_from_the_page_unpacks(tmp_path: Path) -> None:
    store, tokens = over(tmp_path), prompt(600)
    written(store, tokens)
    store.close()
    [prefix] = page_reader.read_store(tmp_path)
    assert prefix.tokens == tuple(tokens)
    assert prefix.kv == kv_of(tokens, 0, 600)
    assert prefix.state == state_of(tokens)


def test_a_small_host_packs_with_one_thread() -> None:
    table: list[tuple[int | None, int]] = [(None, 1), (1, 1), (2, 1), (8, 2), (64, 16), (384, 16)]
    counts: Callable[[int | None], int] = threads_for
    assert [counts(cpus) for cpus, _ in table] == [count for _, count in table]
