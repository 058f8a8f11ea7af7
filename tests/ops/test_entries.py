"""Entries of groups of tokens: read back from pages and from the state as they were, however a text is cut."""

from __future__ import annotations

import torch

from tests.ops.batches import Run, make_runs, positions_of
from tests.ops.in_pieces import LENGTH, PAGES, numbers
from weft.spec import entry_part
from weft.tensor.inputs import LayerCache
from weft.tensor.layout import k_block_shape
from weft.tensor.ops.entries import Entries, choose_entries, last_entries, whole_entries

DIM = 30
"""Numbers of an entry; the last of 4 parts has padding, and most of 20 parts are padding."""
ENTRY = numbers(LENGTH, DIM, seed=1)
CUTS = ([], [64, 128], [3, 4, 47, 48, 49, 101], list(range(136, LENGTH)))


def pages(group: int, dtype: torch.dtype) -> LayerCache:
    """Pages of NaN; those of 8 bits with the scales that they have."""
    cache = LayerCache(k=torch.zeros(PAGES, *k_block_shape(1, entry_part(DIM, group), dtype), dtype=dtype))
    if dtype == torch.int8:
        cache.token_scales = torch.full((PAGES, 1, 1, 16), torch.nan, dtype=torch.bfloat16)
    else:
        cache.k = torch.full(cache.k.shape, torch.nan).to(dtype)
    if dtype == torch.float8_e4m3fn:
        cache.head_scales = torch.full((1, 1), 2.0**-6)
    return cache


def read(
    cuts: list[int], group: int, dtype: torch.dtype, *, wrong_drafts: bool = False, lost: str = ""
) -> torch.Tensor:
    """All entries after a text in pieces. ``wrong_drafts``: each piece is first written with other entries. ``lost``:
    the page or the state that is zeros before the last piece."""
    cache, state = pages(group, dtype), torch.zeros(1, 1, DIM)
    for begin, end in zip([0, *cuts], [*cuts, LENGTH], strict=True):
        runs = make_runs([], [Run(begin, end - begin, slot=0, fresh=begin == 0)], pages=PAGES)
        if end == LENGTH and lost == "state":
            state.zero_()
        if end == LENGTH and lost == "page":
            cache.k[runs.page_table_RP[0, 2]] = 0
        before = state.clone()
        for entry in [-ENTRY] * wrong_drafts + [ENTRY]:
            state.copy_(before)
            last = last_entries(entry[begin:end], state, runs, group)
            entries = Entries(last, cache, group)
            entries.write(positions_of(runs), runs)
        seen = entries.read(runs, 0, torch.arange(entries.count(runs, 0)))
    return seen


def test_entries_are_read_as_they_were_however_a_text_is_cut() -> None:
    for group in (4, 20):
        ends = ENTRY[group - 1 :: group]
        assert all(torch.equal(read(cuts, group, torch.float32), ends) for cuts in CUTS)
        assert torch.equal(read(CUTS[2], group, torch.float32, wrong_drafts=True), ends)
        for dtype in (torch.bfloat16, torch.float8_e4m3fn, torch.int8):
            whole = read([], group, dtype)
            torch.testing.assert_close(whole, ends, rtol=0.07, atol=0.03)
            assert all(torch.equal(read(cuts, group, dtype), whole) for cuts in CUTS[2:])


def test_a_lost_page_or_state_shows() -> None:
    whole = read([101], 4, torch.float32)
    for lost in ("page", "state"):
        assert not torch.equal(read([101], 4, torch.float32, lost=lost), whole)


def test_a_token_sees_whole_entries_and_the_best_of_them() -> None:
    whole = whole_entries(torch.arange(12), 3, 4)
    assert whole.sum(1).tolist() == [0] * 3 + [1] * 4 + [2] * 4 + [3]
    queries, weights = torch.ones(12, 2, 1), torch.tensor([1.0, -0.5]).expand(12, 2)
    chosen = choose_entries(queries, weights, torch.tensor([[2.0], [2.0], [-9.0]]), whole, 1)
    assert chosen.int().argmax(1)[3:].tolist() == [0] * 9, "the earliest of equal ones"
    assert chosen.sum(1).tolist() == [0] * 3 + [1] * 9
