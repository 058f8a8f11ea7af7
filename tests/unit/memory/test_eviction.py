"""What goes first, as tables: bare KV, then the oldest checkpoint, never more than is wanted."""

from __future__ import annotations

import numpy as np
import pytest

from weft.memory.eviction import EVICTIONS_PER_STEP, Eviction, Recency, choose, pages_to_drop
from weft.memory.tree import Node, NodeId, PrefixTree
from weft.units import PageId, SlotId

PAGE, SLOT = 100, 1000
LETTERS = "abcdefgh"


def forest(*paths: str) -> tuple[Recency, dict[str, Node]]:
    """Paths of letters, a page each, in order of use, oldest first. A path that ends in ``!`` has a
    checkpoint, in ``+`` also a reader, in ``-`` a reader only."""
    tree, order = PrefixTree(paged=True), Recency()
    by_path: dict[str, Node] = {}
    for number, text in enumerate(paths):
        path = text.rstrip("!+-")
        tokens = np.repeat([LETTERS.index(letter) for letter in path], 16).astype(np.int32)
        node, _ = tree.insert(tree.root(""), tokens.tobytes(), [PageId(0)] * len(path))
        by_path[path] = node
        if text[-1] in "!+":
            tree.set_slot(node, SlotId(number), 0)
        if text[-1] in "+-":
            tree.hold(node)
    for node in by_path.values():
        order.refresh(node, newest=True)
    return order, by_path


def chosen(paths: tuple[str, ...], wanted: int, *, spared: str = "", limit: int = EVICTIONS_PER_STEP,
           page_bytes: int = PAGE) -> list[str]:
    order, by_path = forest(*paths)
    names = {node.id: path for path, node in by_path.items()}
    evictions = choose(order, wanted, page_bytes=page_bytes, slot_bytes=SLOT, limit=limit,
                       spared={by_path[spared].id} if spared else ())
    return [f"{names.get(e.node, e.node)} {e.what}" + (f" {e.pages_kept}" if e.pages_kept else "")
            for e in evictions]


@pytest.mark.parametrize(("paths", "wanted", "goes"), [
    (("a!", "b"), 0, []),
    (("a!", "b"), 1, ["b kv"]),                             # bare KV before an older checkpoint
    (("b", "c", "a!"), 1, ["b kv"]),                        # the oldest of a class
    (("b", "c", "a!"), 101, ["b kv", "c kv"]),              # as many as it takes
    (("bbbb", "c"), 150, ["bbbb kv 2"]),                    # cut from the end, no more than is wanted
    (("a!", "b!"), 1, ["a state"]),                         # a checkpoint alone: its KV may find another use
    (("a!", "b!"), 1001, ["a state", "a kv"]),              # then what it leaves bare
    (("a!", "ab!"), 1, ["a state"]),                        # inside the tree: the state goes, the KV stays
    (("a!", "ab!"), 1001, ["a state", "ab state"]),
    (("a!", "ab!"), 2101, ["a state", "ab state", "ab kv", "a kv"]),
    (("a", "ab!"), 1101, ["ab state", "ab kv", "a kv"]),    # a parent that becomes bare
    (("a+", "b!"), 1, ["a state"]),                         # a reader holds KV, not the checkpoint
    (("a+", "b!"), 9999, ["a state", "b state", "b kv"]),
    (("a-", "ab!"), 9999, ["ab state", "ab kv"]),           # what is read stays
    ((), 9999, []),
])
def test_what_goes(paths: tuple[str, ...], wanted: int, goes: list[str]) -> None:
    assert chosen(paths, wanted) == goes


def test_what_a_draft_uses_is_spared() -> None:
    assert chosen(("a!", "b!"), 1, spared="a") == ["b state"]
    assert chosen(("a", "b"), 9999, spared="a") == ["b kv"]
    assert chosen(("a", "ab!"), 9999, spared="a") == ["ab state", "ab kv"]


def test_a_choice_is_bounded_and_changes_nothing() -> None:
    paths = tuple(first + second + "!" for first in LETTERS for second in LETTERS)
    assert len(chosen(paths, 10**9, limit=5)) == 5
    order, _ = forest(*paths)
    before = list(order.states), list(order.bare)
    assert choose(order, 10**9, page_bytes=PAGE, slot_bytes=SLOT) == choose(
        order, 10**9, page_bytes=PAGE, slot_bytes=SLOT)
    assert (list(order.states), list(order.bare)) == before


def test_the_work_of_a_choice_does_not_grow_with_the_tree() -> None:
    """It looks at as many nodes as it chooses, and at those it must spare."""
    looked: list[NodeId] = []

    class Watching(dict[NodeId, None]):
        def __contains__(self, node: object) -> bool:
            looked.append(node)  # type: ignore[arg-type]
            return False

    order, _ = forest(*(first + second + "!" for first in LETTERS for second in LETTERS))
    choose(order, 3 * SLOT, page_bytes=PAGE, slot_bytes=SLOT, spared=Watching())
    assert len(looked) < 10


def test_using_a_checkpoint_makes_it_the_last_to_go() -> None:
    order, by_path = forest("a!", "b!")
    order.touch(by_path["a"])
    assert choose(order, 1, page_bytes=PAGE, slot_bytes=SLOT) == [Eviction(by_path["b"].id, "state")]


def test_kv_that_lost_its_checkpoint_goes_before_kv_that_was_just_left() -> None:
    order, by_path = forest("a!", "b")
    by_path["a"].slot = SlotId(-1)
    order.refresh(by_path["a"], newest=False)
    assert choose(order, 1, page_bytes=PAGE, slot_bytes=SLOT)[0].node == by_path["a"].id


def test_a_tail_goes_whole_and_counts_its_page() -> None:
    tree = PrefixTree(paged=True)
    front, _ = tree.insert(tree.root(""), b"\0" * 64, [PageId(0)])
    tail = tree.add_tail(front, b"\0" * 8, [PageId(1)])
    assert tail is not None
    tree.set_slot(tail, SlotId(7), 0)
    order = Recency()
    order.refresh(tail, newest=True)
    assert choose(order, SLOT + PAGE, page_bytes=PAGE, slot_bytes=SLOT) == [Eviction(tail.id, "state")]
    assert choose(order, SLOT + PAGE + 1, page_bytes=PAGE, slot_bytes=SLOT) == [
        Eviction(tail.id, "state"), Eviction(front.id, "kv")]


def test_without_attention_only_checkpoints_are_chosen() -> None:
    assert chosen(("a!", "ab!"), 9999, page_bytes=0) == ["a state", "ab state"]


@pytest.mark.parametrize(("wanted", "held", "dropped"), [(1, 5, 1), (100, 5, 1), (101, 5, 2), (10**6, 5, 5)])
def test_pages_to_drop(wanted: int, held: int, dropped: int) -> None:
    assert pages_to_drop(wanted, PAGE, held) == dropped
