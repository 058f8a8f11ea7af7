"""The prefix tree beside a dull dictionary: token tuples with a snapshot, and token tuples with KV."""

from __future__ import annotations

from collections.abc import Callable

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from weft.memory.prefix import edge as edge_module
from weft.memory.prefix import edge as lookup
from weft.memory.prefix.edge import PAGE_KEY_BYTES, Node, path_pages
from weft.memory.prefix.tree import PrefixTree
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId

Tokens = tuple[int, ...]

SMALL = settings(max_examples=150, deadline=None)

# A page is one letter sixteen times, but for an odd token in its middle now and then: pages that share a
# front and differ after it are what a careless comparison takes for equal.
pages_of_tokens = st.tuples(st.integers(0, 1), st.sampled_from((0, 0, 0, 1))).map(
    lambda letter_odd: (letter_odd[0],) * 9 + (letter_odd[0] + letter_odd[1],) + (letter_odd[0],) * 6
)
paths = st.lists(pages_of_tokens, max_size=5).map(lambda pages: tuple(t for page in pages for t in page))
rests = st.lists(st.integers(0, 1), max_size=15).map(tuple)
salts = st.sampled_from(("", "a"))
inserts = st.tuples(st.just("insert"), salts, paths, rests)
finds = st.tuples(st.just("find"), salts, paths, rests)
losses = st.tuples(st.sampled_from(("lose", "cut", "trim")), salts, st.integers(0, 30), st.just(()))
operations = st.lists(st.one_of(inserts, inserts, finds, losses), max_size=25)


def data_of(tokens: Tokens) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


def tokens_to(node: Node) -> Tokens:
    """Tokens from the root to the end of ``node``."""
    pieces: list[Tokens] = []
    at: Node | None = node
    while at is not None:
        pieces.append(tuple(np.frombuffer(at.tokens, dtype=np.int32).tolist()))
        at = at.parent
    return tuple(token for piece in reversed(pieces) for token in piece)


class Beside:
    """The tree, and two dictionaries: (salt, tokens) -> slot, and (salt, tokens) -> page."""

    def __init__(self) -> None:
        self.tree = PrefixTree(paged=True)
        self.slots: dict[tuple[str, Tokens], int] = {}
        self.pages: dict[tuple[str, Tokens], int] = {}
        self.next_id = 0

    def fresh(self) -> int:
        self.next_id += 1
        return self.next_id

    def insert(self, salt: str, path: Tokens, rest: Tokens) -> None:
        """A snapshot after ``path + rest``, as a request that ends there leaves it."""
        if not path and not rest:
            return
        own = [PageId(self.fresh()) for _ in range(len(path) // PAGE_TOKENS)]
        node, there = self.tree.insert(self.tree.root(salt), data_of(path), own)
        ends = range(PAGE_TOKENS, len(path) + 1, PAGE_TOKENS)
        known = [(salt, path[:end]) in self.pages for end in ends]
        assert there == sum(known) * PAGE_TOKENS, "what was there is a front of the path"
        for end, page in zip(ends, own, strict=True):
            self.pages.setdefault((salt, path[:end]), page)
        assert node.end == len(path)
        where: Node | None = node
        if rest:
            where = self.tree.add_tail(node, data_of(rest), [PageId(self.fresh())])
            assert (where is None) == ((salt, path + rest) in self.slots), "a tail has a snapshot"
        if where is not None and where.slot == PAD:
            slot = self.slots[salt, path + rest] = self.fresh()
            self.tree.set_slot(where, SlotId(slot), 0)
            if rest:
                assert where.pages == [PageId(slot - 1)]

    def find(self, salt: str, tokens: Tokens) -> None:
        found = self.tree.find(salt, data_of(tokens))
        fronts = [tokens[:end] for end in range(len(tokens) + 1)]
        kv = max((len(front) for front in fronts if (salt, front) in self.pages), default=0)
        hit = max((len(front) for front in fronts if (salt, front) in self.slots), default=0)
        if found is None:
            assert not kv
            assert not hit
            return
        assert found.kv_tokens == max(kv, hit)
        assert (found.anchor.end if found.anchor else 0) == hit
        if found.anchor is not None:
            assert found.anchor.slot == self.slots[salt, tokens[:hit]]
            whole = hit // PAGE_TOKENS * PAGE_TOKENS
            expected = [self.pages[salt, tokens[:end]] for end in range(PAGE_TOKENS, whole + 1, PAGE_TOKENS)]
            assert path_pages(found.anchor, 0, whole) == expected

    def some_node(self, number: int, choose: Callable[[Node], bool]) -> Node | None:
        nodes = sorted((node for node in self.tree.nodes() if node.parent and choose(node)), key=lambda node: node.id)
        return nodes[number % len(nodes)] if nodes else None

    def salt_of(self, node: Node) -> str:
        while node.parent is not None:
            node = node.parent
        return next(salt for salt, root in self.tree.roots.items() if root is node)

    def lose(self, number: int) -> None:
        """A snapshot is evicted; a tail goes with it."""
        node = self.some_node(number, lambda node: node.slot != PAD)
        if node is None:
            return
        key = self.salt_of(node), tokens_to(node)
        slot, _ = self.tree.take_slot(node)
        assert slot == self.slots.pop(key)
        if node.is_tail:
            self.tree.remove(node)

    def cut(self, number: int, *, trim: bool = False) -> None:
        """A leaf that nothing needs goes, or loses its last pages."""
        node = self.some_node(number, lambda node: node.bare)
        if node is None:
            return
        salt, path, kept = self.salt_of(node), tokens_to(node), node.page_count // 2 if trim else 0
        first = node.start + kept * PAGE_TOKENS
        gone = self.tree.trim(node, kept) if kept else self.tree.remove(node)
        assert gone == [
            self.pages.pop((salt, path[:end])) for end in range(first + PAGE_TOKENS, len(path) + 1, PAGE_TOKENS)
        ]

    def check(self) -> None:
        tree = self.tree
        nodes = list(tree.nodes())
        assert {node.id for node in nodes} == set(tree.by_id)
        assert tree.page_count - sum(node.is_tail for node in nodes) == len(self.pages)
        assert tree.slot_count == len(self.slots)
        kept = {(self.salt_of(node), tokens_to(node)) for node in nodes if node.slot != PAD}
        assert kept == set(self.slots)
        for node in nodes:
            assert node.is_tail or len(node.tokens) % PAGE_KEY_BYTES == 0
            for child in node.children.values():
                assert child.parent is node
                assert child.start == node.end


def run(steps: list[tuple[str, str, Tokens | int, Tokens]]) -> Beside:
    beside = Beside()
    for verb, salt, what, rest in steps:
        if verb == "insert":
            beside.insert(salt, what, rest)  # type: ignore[arg-type]
        elif verb == "find":
            beside.find(salt, what + rest)  # type: ignore[operator]
        elif verb == "lose":
            beside.lose(what)  # type: ignore[arg-type]
        else:
            beside.cut(what, trim=verb == "trim")  # type: ignore[arg-type]
        beside.check()
    for salt in ("", "a"):
        for _, tokens in {**beside.slots, **beside.pages}:
            beside.find(salt, tokens)
            beside.find(salt, tokens[:-1])
            beside.find(salt, (*tokens, 1, 0))
    return beside


@SMALL
@given(operations)
def test_the_tree_finds_what_a_dictionary_finds(steps: list[tuple[str, str, Tokens | int, Tokens]]) -> None:
    run(steps)


A, B = (0,) * 16, (1,) * 16
ODD = (0,) * 9 + (1,) + (0,) * 6
EVENTFUL: list[tuple[str, str, Tokens | int, Tokens]] = [
    ("insert", "", A + B + A, ()),
    ("insert", "", A + B + B, (1, 0)),
    ("insert", "", A + ODD, ()),
    ("insert", "a", A + B, (0,)),
    ("find", "a", A + B + A, ()),
    ("lose", "", 1, ()),
    ("find", "", A + B + B, ()),
    ("insert", "", (), (0, 1)),
    ("cut", "", 0, ()),
    ("insert", "", A, ()),
    ("lose", "", 0, ()),
    ("trim", "", 0, ()),
    ("find", "", A + B + A, ()),
    ("insert", "", A + B + A + B, ()),
]


def test_an_eventful_life_passes() -> None:
    assert len(run(EVENTFUL).slots) >= 4


def a_page_is_compared_by_its_first_token(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(edge_module, "common_pages", lambda left, right: min(len(left), len(right)) // PAGE_KEY_BYTES)


def a_split_loses_a_page(patch: pytest.MonkeyPatch) -> None:
    split = PrefixTree.split

    def splitting(self: PrefixTree, node: Node, at: int) -> Node:
        upper = split(self, node, at)
        node.edge.pages.pop()
        return upper

    patch.setattr(PrefixTree, "split", splitting)


def a_split_moves_the_snapshot_up(patch: pytest.MonkeyPatch) -> None:
    split = PrefixTree.split

    def splitting(self: PrefixTree, node: Node, at: int) -> Node:
        upper = split(self, node, at)
        upper.slot, node.slot = node.slot, SlotId(PAD)
        return upper

    patch.setattr(PrefixTree, "split", splitting)


def salts_share_a_root(patch: pytest.MonkeyPatch) -> None:
    root, find = PrefixTree.root, PrefixTree.find
    patch.setattr(PrefixTree, "root", lambda self, salt: root(self, ""))
    patch.setattr(PrefixTree, "find", lambda self, salt, data: find(self, "", data))


def tails_are_not_looked_for(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(lookup, "_tail_along", lambda node, data: None)


def the_hit_is_the_kv(patch: pytest.MonkeyPatch) -> None:
    find = PrefixTree.find

    def finding(self: PrefixTree, salt: str, data: bytes) -> lookup.PrefixMatch | None:
        match = find(self, salt, data)
        if match is None:
            return None
        return lookup.PrefixMatch(match.node, None, match.kv_tokens, match.partly or match.node, 0, 0)

    patch.setattr(PrefixTree, "find", finding)


BROKEN = [
    a_page_is_compared_by_its_first_token,
    a_split_loses_a_page,
    a_split_moves_the_snapshot_up,
    salts_share_a_root,
    tails_are_not_looked_for,
    the_hit_is_the_kv,
]


@pytest.mark.parametrize("broken", BROKEN, ids=[b.__name__ for b in BROKEN])
def test_the_dictionary_notices_when(
    broken: Callable[[pytest.MonkeyPatch], None], monkeypatch: pytest.MonkeyPatch
) -> None:
    broken(monkeypatch)
    with pytest.raises((AssertionError, KeyError, AttributeError, StopIteration)):
        run(EVENTFUL)
