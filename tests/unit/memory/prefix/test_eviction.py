"""What goes first, as tables: bare KV, then the oldest snapshot, never more than is wanted."""

from __future__ import annotations

import numpy as np
import pytest

from weft.memory.prefix.edge import Node
from weft.memory.prefix.eviction import EVICTIONS_PER_STEP, UNMEETABLE, Demand, Recency, choose
from weft.memory.prefix.tree import PrefixTree
from weft.memory.values import Eviction, NodeId
from weft.units import PageId, SlotId

LETTERS = "abcdefgh"


def forest(*paths: str, paged: bool = True) -> tuple[Recency, dict[str, Node]]:
    """Paths of letters, a page each, in order of use, oldest first. A path that ends in ``!`` has a
    snapshot, in ``+`` also a reader, in ``-`` a reader only."""
    tree, order = PrefixTree(paged=paged), Recency()
    by_path: dict[str, Node] = {}
    for number, text in enumerate(paths):
        path = text.rstrip("!+-")
        tokens = np.repeat([LETTERS.index(letter) for letter in path], 16).astype(np.int32)
        node, _ = tree.insert(tree.root(""), tokens.tobytes(), [PageId(0)] * len(path) * paged)
        by_path[path] = node
        if text[-1] in "!+":
            tree.set_slot(node, SlotId(number), 0)
        if text[-1] in "+-":
            tree.hold(node)
    for node in by_path.values():
        order.refresh(node, newest=True)
    return order, by_path


def chosen(
    paths: tuple[str, ...],
    wanted: int | Demand,
    *,
    spared: str = "",
    last: tuple[str, ...] = (),
    limit: int = EVICTIONS_PER_STEP,
) -> list[str]:
    order, by_path = forest(*paths)
    names = {node.id: path for path, node in by_path.items()}
    demand = wanted if isinstance(wanted, Demand) else held(order, wanted)
    evictions = choose(
        order,
        demand,
        limit=limit,
        spared={by_path[spared].id} if spared else (),
        last=[by_path[path].id for path in last],
    )
    return [f"{names.get(e.node, e.node)} {e.what}" + (f" {e.pages_left}" if e.pages_left else "") for e in evictions]


def held(order: Recency, wanted: int) -> Demand:
    """Frames of ten pages or one slot, all taken, the snapshots among them: ``wanted`` pages do not fit."""
    return Demand(1000, 10, 1, (1000 - len(order.states)) * 10 + wanted, len(order.states))


@pytest.mark.parametrize(
    ("paths", "wanted", "goes"),
    [
        (("a!", "b"), 0, []),
        (("a!", "b"), 1, ["b kv"]),  # bare KV before an older snapshot
        (("b", "c", "a!"), 1, ["b kv"]),  # the oldest of a class
        (("b", "c", "a!"), 2, ["b kv", "c kv"]),  # as many as it takes
        (("bbbb", "c"), 2, ["bbbb kv 2"]),  # cut from the end, no more than is wanted
        (("a!", "b!"), 1, ["a state"]),  # a snapshot alone: its KV may find another use
        (("a!", "b!"), 11, ["a state", "a kv"]),  # then what it leaves bare
        (("a!", "ab!"), 1, ["a state"]),  # inside the tree: the state goes, the KV stays
        (("a!", "ab!"), 11, ["a state", "ab state"]),
        (("a!", "ab!"), 22, ["a state", "ab state", "ab kv", "a kv"]),
        (("a", "ab!"), 12, ["ab state", "ab kv", "a kv"]),  # a parent that becomes bare
        (("a+", "b!"), 1, ["a state"]),  # a reader holds KV, not the snapshot
        (("a+", "b!"), 999, ["a state", "b state", "b kv"]),
        (("a-", "ab!"), 999, ["ab state", "ab kv"]),  # what is read stays
        ((), 999, []),
    ],
)
def test_what_goes(paths: tuple[str, ...], wanted: int, goes: list[str]) -> None:
    assert chosen(paths, wanted) == goes


def shared_frames(pages: int, slots: int, *, per_frame: int = 4) -> Demand:
    """Frames of ten pages or ``per_frame`` slots. ``slots`` are held, and ``pages`` do not fit."""
    frames_of_slots = -(-slots // per_frame)
    return Demand(1000, 10, per_frame, (1000 - frames_of_slots) * 10 + pages, slots)


TRUNK = ("a!", "ab!", "abc!", "abcd!", "abcdefgh!")


@pytest.mark.parametrize(
    ("paths", "pages", "slots", "goes"),
    [
        (TRUNK, 3, 8, ["a state", "ab state", "abc state", "abcd state"]),  # together they empty a frame
        (TRUNK, 3, 5, ["a state"]),  # the one that empties a frame
        (TRUNK[1:], 3, 8, ["abcdefgh state", "abcdefgh kv 1"]),  # a leaf among them
        (("a!", "ab!", "c!"), 1, 7, ["ab state", "ab kv"]),  # the oldest of the leaves
        (("c!", *TRUNK), 1, 8, ["c state", "c kv"]),
        (("c+", *TRUNK), 1, 8, ["c state", "a state", "ab state", "abc state"]),  # what is read is no leaf
    ],
)
def test_where_states_share_a_frame_a_leaf_goes_before_states_that_free_nothing(
    paths: tuple[str, ...], pages: int, slots: int, goes: list[str]
) -> None:
    assert chosen(paths, shared_frames(pages, slots)) == goes


def test_what_a_transaction_uses_is_spared() -> None:
    assert chosen(("a!", "b!"), 1, spared="a") == ["b state"]
    assert chosen(("a", "b"), 999, spared="a") == ["b kv"]
    assert chosen(("a", "ab!"), 999, spared="a") == ["ab state", "ab kv"]


@pytest.mark.parametrize(
    ("paths", "wanted", "last", "goes"),
    [
        (("a!", "b!"), 1, ("a",), ["b state"]),  # older, and goes after
        (("a!", "b!"), 12, ("a",), ["b state", "b kv", "a state"]),  # put off, not held
        (("a!", "b!"), 22, ("a",), ["b state", "b kv", "a state", "a kv"]),  # and its KV with it
        (("a!", "b!", "c!"), 33, ("c", "a"), ["b state", "b kv", "a state", "a kv", "c state", "c kv"]),
        (("a!", "ab!", "c!"), 12, ("ab",), ["a state", "c state"]),  # what it needs is not bare
        (("a", "b", "c!"), 2, ("a",), ["b kv", "a kv"]),  # without states: KV, the same way
    ],
)
def test_what_somebody_is_sure_to_come_for_goes_when_nothing_else_is_left(
    paths: tuple[str, ...], wanted: int, last: tuple[str, ...], goes: list[str]
) -> None:
    assert chosen(paths, wanted, last=last) == goes
    assert chosen(paths, wanted) != goes, "this table would be the same without it"


def test_where_states_share_a_frame_what_goes_last_is_not_taken_for_being_a_leaf() -> None:
    demand = shared_frames(3, 8)
    assert chosen(TRUNK[1:], demand) == ["abcdefgh state", "abcdefgh kv 1"]
    assert chosen(TRUNK[1:], demand, last=("abcdefgh",))[:3] == ["ab state", "abc state", "abcd state"]


def test_a_choice_is_bounded_and_changes_nothing() -> None:
    paths = tuple(first + second + "!" for first in LETTERS for second in LETTERS)
    assert len(chosen(paths, 10**6, limit=5)) == 5
    order, _ = forest(*paths)
    before = list(order.states), list(order.bare)
    assert choose(order, UNMEETABLE) == choose(order, UNMEETABLE)
    assert len(choose(order, UNMEETABLE)) == EVICTIONS_PER_STEP
    assert (list(order.states), list(order.bare)) == before


def test_the_work_of_a_choice_does_not_grow_with_the_tree() -> None:
    """It looks at as many nodes as it chooses, and at those it must spare."""
    looked: list[NodeId] = []

    class Watching(dict[NodeId, None]):
        def __contains__(self, node: object) -> bool:
            looked.append(node)  # type: ignore[arg-type]
            return False

    order, _ = forest(*(first + second + "!" for first in LETTERS for second in LETTERS))
    choose(order, held(order, 30), spared=Watching())
    assert len(looked) < 10


def test_using_a_snapshot_makes_it_the_last_to_go() -> None:
    order, by_path = forest("a!", "b!")
    order.touch(by_path["a"])
    assert choose(order, held(order, 1)) == [Eviction(by_path["b"].id, "state")]


def test_kv_that_lost_its_snapshot_goes_before_kv_that_was_just_left() -> None:
    order, by_path = forest("a!", "b")
    by_path["a"].slot = SlotId(-1)
    order.refresh(by_path["a"], newest=False)
    assert choose(order, held(order, 1))[0].node == by_path["a"].id


def test_a_tail_goes_whole_and_counts_its_page() -> None:
    tree = PrefixTree(paged=True)
    front, _ = tree.insert(tree.root(""), b"\0" * 64, [PageId(0)])
    tail = tree.add_tail(front, b"\0" * 8, [PageId(1)])
    assert tail is not None
    tree.set_slot(tail, SlotId(7), 0)
    order = Recency()
    order.refresh(tail, newest=True)
    assert choose(order, held(order, 11)) == [Eviction(tail.id, "state")]
    assert choose(order, held(order, 12)) == [Eviction(tail.id, "state"), Eviction(front.id, "kv")]


def test_without_attention_only_snapshots_are_chosen() -> None:
    order, by_path = forest("a!", "ab!", paged=False)
    assert [e.what for e in choose(order, Demand(10, 0, 1, 0, 11))] == ["state"]
    assert choose(order, UNMEETABLE) == [Eviction(by_path[path].id, "state") for path in ("a", "ab")]
