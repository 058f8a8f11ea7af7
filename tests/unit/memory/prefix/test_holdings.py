"""What a snapshot holds alone and what it begins behind, on small trees."""

from __future__ import annotations

import numpy as np
import pytest

from weft.memory.prefix.edge import Node
from weft.memory.prefix.policy import only_snapshot_below, pages_alone, snapshot_above, snapshot_at_or_above
from weft.memory.prefix.tree import PrefixTree
from weft.units import PAGE_TOKENS, PageId, SlotId


def tree_of(*paths: str) -> dict[str, Node]:
    """Paths of letters, a page each; ``!`` keeps a state at the end, ``+`` is read there, a digit makes a
    tail of so many tokens of the last letter."""
    tree, found = PrefixTree(paged=True), {}
    for number, text in enumerate(paths):
        path = text.rstrip("!+")
        letters = [letter for letter in path if letter.isalpha()]
        tokens = np.repeat([ord(letter) for letter in letters], PAGE_TOKENS).astype(np.int32)
        tail = int(path[-1]) if path[-1].isdigit() else 0
        whole = tokens[:-PAGE_TOKENS] if tail else tokens
        node, _ = tree.insert(tree.root(""), whole.tobytes(), [PageId(number)] * (len(whole) // PAGE_TOKENS))
        if tail:
            added = tree.add_tail(node, tokens[len(whole) : len(whole) + tail].tobytes(), [PageId(number)])
            assert added is not None
            node = added
        found[path] = node
        if "!" in text:
            tree.set_slot(node, SlotId(number), 0)
        if "+" in text:
            tree.hold(node)
    return found


@pytest.mark.parametrize(
    ("paths", "node", "expected"),
    [
        (["ab!", "abcd!"], "abcd", "ab"),
        (["ab", "abcd!"], "abcd", None),
        (["a!", "ab", "abcd!"], "abcd", "a"),
        (["ab!", "abcd!", "abce!"], "abce", "ab"),
        (["abcd!"], "abcd", None),
        (["ab!", "abc5!", "abcd!"], "abcd", "abc5"),  # a tail that its tokens go through
        (["ab!", "abx5!", "abcd!"], "abcd", "ab"),  # one of another way
        (["ab!", "abc5!", "abc9!"], "abc9", "abc5"),
        (["ab!", "abc5!", "abc9!", "abcd!"], "abcd", "abc9"),
    ],
)
def test_the_state_before_is_the_nearest_on_the_way(paths: list[str], node: str, expected: str | None) -> None:
    nodes = tree_of(*paths)
    assert snapshot_above(nodes[node]) is (nodes[expected] if expected else None)
    assert snapshot_at_or_above(nodes[node]) is nodes[node]


@pytest.mark.parametrize(
    ("paths", "node", "pages"),
    [
        (["abcd!"], "abcd", 4),
        (["ab!", "abcd!"], "abcd", 2),
        (["ab!", "abcd!"], "ab", 0),  # what goes on needs it too
        (["abcd!", "abce!"], "abcd", 1),  # two ways on: each its own
        (["ab", "abcd!"], "abcd", 4),  # a cut is no border
        (["ab+", "abcd!"], "abcd", 2),  # somebody reads the front
        (["abcd!+"], "abcd", 0),  # somebody reads all of it
        (["abcd5!"], "abcd5", 4),  # a tail has a page of its own
        (["abc!", "abcd5!"], "abcd5", 1),
    ],
)
def test_what_a_state_holds_alone_ends_where_somebody_else_begins(paths: list[str], node: str, pages: int) -> None:
    assert pages_alone(tree_of(*paths)[node]) == pages


@pytest.mark.parametrize(
    ("paths", "node", "expected"),
    [
        (["ab", "abcd!"], "ab", "abcd"),
        (["ab", "abc", "abcd!"], "ab", "abcd"),
        (["ab", "abc!", "abd!"], "ab", None),
        (["ab!"], "ab", None),
    ],
)
def test_the_only_thing_below_is_found_where_there_is_one_way_down(
    paths: list[str], node: str, expected: str | None
) -> None:
    nodes = tree_of(*paths)
    assert only_snapshot_below(nodes[node]) is (nodes[expected] if expected else None)
