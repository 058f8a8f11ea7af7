"""What is told of the prefix tree: sizes, uses and ages, bounded, and nothing that was said."""

from __future__ import annotations

import msgspec

from tests.unit.engine.rig import VOCAB_SIZE, Rig
from tests.unit.memory.geometry import small_memory
from tests.unit.memory.prefix.test_cache import remember, roomy, tokens_of
from weft.memory.memory import Memory
from weft.memory.prefix import readings as shape
from weft.memory.prefix.cache import SALTS_MAX
from weft.memory.usage import CacheShape, PrefixShape
from weft.memory.values import Lost
from weft.schedule.snapshots import parse_snapshots


def text(name: int, length: int) -> list[int]:
    return [(name * 13 + at * (name + 3)) % VOCAB_SIZE for at in range(length)]


def served(*requests: tuple[list[int], str], count_salt: bool = False) -> Rig:
    rig = Rig(cache=True, frame_count=120, snapshots=parse_snapshots("boundaries,prompt-end,request-end"))
    if count_salt:
        rig.core.memory.counts_salt = True
    for number, (prompt, salt) in enumerate(requests):
        rig.submit(f"r{number}", prompt, salt=salt, max_tokens=1, boundaries=(128,))
        rig.run()
    return rig


SHARED = [(text(1, 128) + text(name, 60), "") for name in (2, 3, 4, 5)]


def test_the_shape_says_how_much_is_kept_how_deep_and_how_often_it_was_used() -> None:
    rig = served(*SHARED)
    found = rig.core.cache_shape()
    usage = rig.core.memory.usage()
    [only] = found.salts
    assert (only.number, only.salted, found.salt_count) == (1, False, 1)
    assert only.total.pages == usage.pages_cached
    assert only.total.snapshots == usage.slots_cached
    assert only.total.bytes == usage.cached_bytes
    assert only.total.hits == usage.cache.hits == 3
    for classes in (found.depths, found.lengths):
        assert sum(one.total.nodes for one in classes) == only.total.nodes == usage.cache_nodes - 1
        assert sum(one.total.bytes for one in classes) == usage.cached_bytes
        assert [one.tokens_max for one in classes] == sorted({one.tokens_max for one in classes})
    assert max(found.prefixes, key=lambda one: one.hits).tokens == 128
    shared = max(found.prefixes, key=lambda one: one.hits)
    assert (shared.hits, shared.branches, shared.snapshot) == (3, 4, True)
    assert not found.cut_off


def test_a_prefix_has_a_label_a_head_and_what_it_saved() -> None:
    rig = served(*SHARED)
    places = rig.core.cache_shape().prefixes
    shared = next(place for place in places if place.tokens == 128)
    assert shared.head == text(1, 128)[: shape.HEAD_TOKENS]
    assert shared.tokens_saved == 3 * 128
    assert shared.bytes == rig.core.memory.usage().cached_bytes
    assert len({place.digest for place in places}) == len(places)
    again = next(place for place in served(*SHARED).core.cache_shape().prefixes if place.tokens == 128)
    assert again.digest == shared.digest
    other = served(*[(text(7, 128) + prompt[128:], salt) for prompt, salt in SHARED]).core.cache_shape()
    assert shared.digest not in {place.digest for place in other.prefixes}


def test_hits_below_a_place_count_for_it_too() -> None:
    turn = text(1, 128) + text(2, 60)
    rig = served(*SHARED, (turn + text(9, 20), ""), (turn + text(8, 20), ""))
    by_tokens: dict[int, PrefixShape] = {}
    for place in rig.core.cache_shape().prefixes:
        by_tokens.setdefault(place.tokens, place)
    assert by_tokens[128].hits == 5


def test_a_place_was_last_used_when_anything_below_it_was() -> None:
    turn = text(1, 128) + text(2, 60)
    rig = served(*SHARED, (turn + text(9, 20), ""), (turn + text(8, 20), ""))
    ages = {place.tokens: place.age_s for place in rig.core.cache_shape().prefixes}
    assert max(ages) > 128
    assert ages[128] == min(ages.values())


def test_ages_are_seconds_since_something_was_made_or_used() -> None:
    rig = served(*SHARED[:2])
    rig.clock.advance(100.0)
    rig.submit("again", SHARED[0][0], max_tokens=1, boundaries=(128,))
    rig.run()
    [depths] = [rig.core.cache_shape().salts[0].total]
    assert depths.youngest_s < 10
    assert 100 <= depths.oldest_s < 120


def test_tenants_are_told_apart_by_number_and_never_named() -> None:
    rig = served((text(1, 200), "a secret"), (text(1, 150), "another"), (text(1, 300), ""))
    found = rig.core.cache_shape()
    assert [(one.number, one.salted) for one in found.salts] == [(1, False), (2, True), (3, True)]
    assert "secret" not in msgspec.json.encode(found).decode()


def test_it_crosses_processes_unchanged() -> None:
    found = served(*SHARED).core.cache_shape()
    assert msgspec.msgpack.decode(msgspec.msgpack.encode(found), type=CacheShape) == found


def test_a_large_tree_is_looked_at_in_part_and_that_is_said(monkeypatch: object) -> None:
    rig = served(*SHARED, (text(1, 90), "a"), (text(1, 90), "b"))
    whole = rig.core.cache_shape()
    limits = {"NODES_MAX": 5, "SALTS_MAX": 2, "PREFIXES_MAX": 1}
    before = {name: getattr(shape, name) for name in limits}
    try:
        for name, value in limits.items():
            setattr(shape, name, value)
        found = rig.core.cache_shape()
    finally:
        for name, value in before.items():
            setattr(shape, name, value)
    assert found.cut_off
    assert not whole.cut_off
    assert len(found.salts) <= 2 < len(whole.salts)
    assert found.salt_count == 3
    assert len(found.prefixes) <= 1


# ---------------------------------------------------------------------- lost to a salt


def test_what_only_another_salt_has_is_counted_where_that_was_asked_for_and_told_to_nobody() -> None:
    requests = [(text(1, 200), "a"), (text(1, 200), "b")]
    rig = served(*requests, count_salt=True)
    assert rig.core.memory.usage().cache.lost.salt == 192
    assert all(event.lost is None for answer in rig.answers.values() for event in answer.events)
    quiet = served(*requests)
    assert quiet.core.memory.usage().cache.lost.salt == 0
    assert [opening.match.lost for plan in quiet.plans for opening in plan.reservation.opened] == [Lost()] * 2


def test_what_the_own_salt_has_or_lost_is_not_lost_to_another() -> None:
    rig = served((text(1, 200), "a"), (text(1, 200), "b"), (text(1, 200), "b"), count_salt=True)
    counts = rig.core.memory.usage().cache
    assert (counts.lost.salt, counts.hit_tokens) == (192, 192)


def test_a_bounded_number_of_other_salts_is_looked_at() -> None:
    rig = Rig(cache=True, frame_count=400, max_model_len=400, snapshots=parse_snapshots("prompt-end"))
    memory: Memory = rig.core.memory
    memory.counts_salt = True
    for number in range(SALTS_MAX + 1):
        prompt = text(2 + number % 3, 70) if number < SALTS_MAX else text(1, 70)
        rig.submit(f"r{number}", prompt, salt=f"s{number}", max_tokens=1)
        rig.run()
    before = memory.usage().cache.lost.salt
    rig.submit("asks", text(1, 70), salt="mine", max_tokens=1)
    rig.run()
    assert memory.usage().cache.lost.salt == before, "the one that has it is beyond the bound"


def test_a_prefix_is_as_old_as_the_commit_that_used_it_last() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2, 3))
    version = memory.version
    remember(memory, tokens_of(4, 5))
    asked: list[int] = []
    memory.cache_shape(lambda used_at: float(asked.append(used_at) is None))
    assert sorted(set(asked)) == [version, memory.version]


def test_a_memory_says_whether_it_caches_and_counts_its_commits() -> None:
    memory = roomy()
    remember(memory, tokens_of(1, 2))
    assert (memory.caches, memory.version) == (True, 2)
    assert small_memory(4, 2, 4).caches is False
