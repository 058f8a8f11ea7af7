"""The prefix tree's promises, one by one; tests/property has it beside a dictionary."""

from __future__ import annotations

import numpy as np
import pytest

from weft.memory.prefix.edge import Edge, Node, common_pages, path_pages
from weft.memory.prefix.tree import PrefixTree
from weft.units import PAD, PAGE_TOKENS, PageId, SlotId

A, B, C = ([letter] * PAGE_TOKENS for letter in (1, 2, 3))


def data_of(tokens: list[int]) -> bytes:
    return np.asarray(tokens, dtype=np.int32).tobytes()


def put(tree: PrefixTree, tokens: list[int], pages: list[int], slot: int = PAD, salt: str = "") -> Node:
    node, _ = tree.insert(tree.root(salt), data_of(tokens), [PageId(page) for page in pages])
    if slot != PAD:
        tree.set_slot(node, SlotId(slot), 0)
    return node


def hit(tree: PrefixTree, tokens: list[int], salt: str = "") -> tuple[int, int]:
    """(tokens up to the deepest snapshot, tokens up to where KV matches)"""
    found = tree.find(salt, data_of(tokens))
    if found is None:
        return 0, 0
    return found.anchor.end if found.anchor else 0, found.kv_tokens


def test_a_hit_is_the_deepest_snapshot_and_not_the_deepest_page() -> None:
    tree = PrefixTree(paged=True)
    put(tree, A + B + C, [1, 2, 3])
    put(tree, A, [9], slot=5)
    assert hit(tree, A + B + C) == (16, 48)
    assert hit(tree, A + B + B) == (16, 32), "it matches inside an edge"
    assert hit(tree, B) == (0, 0)


def test_a_path_that_ends_inside_an_edge_names_the_node_that_it_ends_in() -> None:
    tree = PrefixTree(paged=True)
    long = A + B + C + A + B + C
    put(tree, long, [1, 2, 3, 4, 5, 6])
    for pages in (2, 4):
        put(tree, long[: 16 * pages], list(range(10, 10 + pages)), slot=pages)
    for pages, end in ((1, 32), (3, 64), (5, 96)):
        found = tree.find("", data_of(long[: 16 * pages]))
        assert found is not None
        assert found.partly is not None
        assert (found.kv_tokens, found.partly.end) == (16 * pages, end)


def test_pages_that_are_there_stay_and_the_others_are_taken_over() -> None:
    tree = PrefixTree(paged=True)
    put(tree, A + B, [1, 2])
    node, there = tree.insert(tree.root(""), data_of(A + B + C), [PageId(page) for page in (7, 8, 3)])
    assert there == 32
    assert path_pages(node, 0, 48) == [1, 2, 3]
    assert tree.page_count == 3


def test_an_edge_is_cut_where_paths_part_and_its_owner_keeps_the_lower_part() -> None:
    tree = PrefixTree(paged=True)
    first = put(tree, A + B + C, [1, 2, 3], slot=4)
    tree.hold(first)
    second = put(tree, A + C, [1, 5])
    assert (first.start, first.end, first.slot, first.pages) == (16, 48, 4, [2, 3])
    assert second.parent is first.parent
    assert second.parent is not None
    assert second.parent.pages == [1]
    assert second.parent.holds == 1, "who reads the lower part reads the upper one"
    assert (tree.page_count, tree.held_page_count, len(tree.by_id)) == (4, 3, 4)


def test_a_tail_is_a_hit_inside_a_page() -> None:
    tree = PrefixTree(paged=True)
    node = put(tree, A, [1])
    for length, slot in ((3, 6), (5, 7)):
        tail = tree.add_tail(node, data_of([2] * length), [PageId(slot)])
        assert tail is not None
        tree.set_slot(tail, SlotId(slot), 0)
    assert hit(tree, A + [2] * 4) == (19, 19)
    assert hit(tree, A + [2] * 9) == (21, 21), "the longest of them"
    assert hit(tree, A + [3] * 9) == (0, 16)
    assert hit(tree, A + [2] * 2) == (0, 16)
    assert tree.add_tail(node, data_of([2] * 3), [PageId(9)]) is None, "it is there"


def test_a_tail_is_not_taken_for_a_page_that_begins_like_it() -> None:
    tree = PrefixTree(paged=True)
    node = put(tree, A, [1], slot=3)
    tail = tree.add_tail(node, data_of(B[:15]), [PageId(2)])
    assert tail is not None
    tree.set_slot(tail, SlotId(4), 0)
    assert put(tree, A + B, [1, 5]) is not tail
    assert hit(tree, A + B) == (31, 32)


def test_equal_fronts_of_a_page_are_not_equal_pages() -> None:
    odd = [*A[:15], 7]
    tree = PrefixTree(paged=True)
    put(tree, A + A, [1, 2], slot=1)
    assert hit(tree, A + odd) == (0, 16)
    assert common_pages(data_of(A + A), data_of(A + odd)) == 1
    assert common_pages(data_of(A), data_of(A + A)) == 1
    assert common_pages(data_of(odd), data_of(A)) == common_pages(b"", data_of(A)) == 0


def test_namespaces_never_share_a_node() -> None:
    tree = PrefixTree(paged=True)
    put(tree, A, [1], slot=1, salt="a")
    assert hit(tree, A, salt="a") == (16, 16)
    assert hit(tree, A, salt="b") == hit(tree, A) == (0, 0)


def test_a_namespace_goes_with_its_last_node() -> None:
    """Salts are the clients' to choose: what they leave behind must be bounded."""
    tree = PrefixTree(paged=True)
    for number in range(1000):
        tree.remove(put(tree, A, [1], salt=f"client {number}"))
    assert not tree.roots
    assert not tree.by_id


def test_pages_below_a_hold_are_counted_once_whoever_else_holds() -> None:
    tree = PrefixTree(paged=True)
    upper, lower = put(tree, A, [1]), put(tree, A + B + C, [1, 2, 3])
    tree.hold(lower)
    tree.hold(upper)
    assert tree.held_page_count == 3
    tree.release(lower)
    assert tree.held_page_count == 1
    tree.release(upper)
    assert tree.held_page_count == 0
    with pytest.raises(AssertionError, match="is released more often than held"):
        tree.release(upper)


def test_a_miss_says_whether_a_state_or_kv_was_evicted() -> None:
    tree = PrefixTree(paged=True)
    node = put(tree, A + B + C, [1, 2, 3], slot=1)
    found = tree.find("", data_of(A + B + C + A))
    assert found is not None
    assert (found.state_lost_at, found.kv_lost_tokens) == (0, 0)
    tree.take_slot(node)
    found = tree.find("", data_of(A + B + C + A))
    assert found is not None
    assert (found.anchor, found.state_lost_at, found.kv_tokens) == (None, 48, 48)
    assert tree.trim(node, 1) == [2, 3]
    found = tree.find("", data_of(A + B + C + A))
    assert found is not None
    assert (found.kv_tokens, found.kv_lost_tokens, found.state_lost_at) == (16, 32, 0)
    found = tree.find("", data_of(A + C))
    assert found is not None
    assert found.kv_lost_tokens == 0, "another branch was not lost"


@pytest.mark.parametrize("trim", [True, False])
def test_what_was_evicted_piece_by_piece_is_counted_in_full(trim: bool) -> None:
    tree = PrefixTree(paged=True)
    front = put(tree, A + B if trim else A, [1, 2] if trim else [1])
    middle = front if trim else put(tree, A + B, [1, 2])
    tree.remove(put(tree, A + B + C, [1, 2, 3]))
    assert tree.trim(front, 1) if trim else tree.remove(middle)
    found = tree.find("", data_of(A + B + C))
    assert found is not None
    assert (found.kv_tokens, found.kv_lost_tokens) == (16, 32)
    found = tree.find("", data_of(A + C))
    assert found is not None
    assert found.kv_lost_tokens == 0, "that was never there"


def test_what_was_evicted_elsewhere_is_not_lost_here() -> None:
    tree = PrefixTree(paged=True)
    put(tree, A, [1], slot=1)
    tree.remove(put(tree, A + B, [1, 2]))
    put(tree, A + C + C, [1, 2, 3])
    found = tree.find("", data_of(A + C + B))
    assert found is not None
    assert (found.kv_tokens, found.kv_lost_tokens) == (32, 0)


def test_a_tail_that_was_evicted_is_a_lost_state() -> None:
    tree = PrefixTree(paged=True)
    tail = tree.add_tail(put(tree, A, [1]), data_of(B[:5]), [PageId(2)])
    assert tail is not None
    tree.set_slot(tail, SlotId(1), 0)
    tree.take_slot(tail)
    tree.remove(tail)
    found = tree.find("", data_of(A + B))
    assert found is not None
    assert found.state_lost_at == 16


def test_what_was_evicted_is_remembered_within_bounds() -> None:
    tree = PrefixTree(paged=True)
    put(tree, A, [1], slot=1)
    for number in range(50):
        tree.remove(put(tree, A + [number] * 16, [1, 2]))
    [front] = tree.root("").children.values()
    assert len(front.ghosts) == 8
    put(tree, A + [49] * 16, [1, 2])
    assert len(front.ghosts) == 7, "what is back is not lost"


def test_a_node_can_be_cut_out_where_a_reader_stops() -> None:
    tree = PrefixTree(paged=True)
    node = put(tree, A + B + C, [1, 2, 3])
    middle = tree.node_ending(node, 32)
    assert (middle.start, middle.end, node.start) == (0, 32, 32)
    assert tree.node_ending(node, 32) is middle
    assert tree.node_ending(node, 16).end == 16
    assert path_pages(node, 16, 48) == [2, 3]
    assert path_pages(node, 0, 32) == [1, 2]


def test_a_thousand_snapshots_along_a_prompt_cost_a_lookup_one_comparison(monkeypatch: pytest.MonkeyPatch) -> None:
    tree = PrefixTree(paged=True)
    tokens = list(range(1000 * PAGE_TOKENS))
    node = put(tree, tokens, list(range(1000)), slot=0)
    for page in range(1, 1000):
        tree.set_slot(tree.node_ending(node, page * PAGE_TOKENS), SlotId(page), 0)
    put(tree, tokens[: 500 * PAGE_TOKENS] + A, list(range(501)))
    compared: list[int] = []
    matches_until = Edge.matches_until

    def watching(self: Edge, position: int, data: bytes, at: int) -> int:
        compared.append(position)
        return matches_until(self, position, data, at)

    monkeypatch.setattr(Edge, "matches_until", watching)
    assert hit(tree, tokens) == (16_000, 16_000)
    assert compared == [0]
    assert hit(tree, tokens[: 500 * PAGE_TOKENS] + A + B) == (8000, 8016)
    assert compared == [0, 0, 8000], "and one more where it goes on elsewhere"
    assert hit(tree, tokens[:7000]) == (6992, 6992)
    assert path_pages(node, 160, 16_000) == list(range(10, 1000))


def test_a_edge_that_is_evicted_from_its_end_gives_back_what_it_took() -> None:
    tree = PrefixTree(paged=True)
    node = put(tree, A * 8, list(range(8)))
    for page in range(1, 8):
        tree.node_ending(node, page * PAGE_TOKENS)
    edge = node.edge
    assert [one.pages for one in edge.nodes] == [[page] for page in range(8)]
    for left in range(7, 0, -1):
        assert tree.remove(edge.nodes[-1]) == [left]
        assert len(edge.pages) == len(edge.nodes) == left
        assert len(edge.tokens) < 2 * left * len(data_of(A)) + 1
        assert hit(tree, A * 8) == (0, 16 * left)
    tree.remove(edge.nodes[-1])
    assert not tree.edges


def test_a_model_without_attention_has_edges_without_pages() -> None:
    tree = PrefixTree(paged=False)
    node = put(tree, A + B, [], slot=1)
    assert hit(tree, A + B + C) == (32, 32)
    assert (tree.page_count, path_pages(node, 0, 32)) == (0, [])
    assert tree.node_ending(node, 16).pages == []
