"""Memory for weights: the same numbers, wherever they lie."""

from __future__ import annotations

import gc
import weakref

import pytest
import torch

from tests.ops.quantised import noise
from weft.tensor.weights import large_pages
from weft.tensor.weights.quantized import in_tiles
from weft.tensor.weights.rounded import rounded


@pytest.fixture
def small(monkeypatch: pytest.MonkeyPatch) -> None:
    """Every weight is worth it, and a slab is full after a few."""
    monkeypatch.setattr(large_pages, "LARGE_PAGES_BYTES_MIN", 1)
    monkeypatch.setattr(large_pages, "_SLAB_BYTES", 3 << 12)
    monkeypatch.setattr(large_pages, "_PAGE_BYTES", 1 << 12)
    monkeypatch.setattr(large_pages, "_slabs", large_pages._Slabs())


def test_a_copy_is_dense_and_shares_no_byte_with_its_neighbours(small: None) -> None:
    wanted = [noise(seed, 40 + seed, 33).T for seed in range(9)]
    made = [large_pages.copied(x) for x in wanted]
    for x, copy in zip(wanted, made, strict=True):
        assert copy.is_contiguous()
        assert torch.equal(copy, x)
    made[3].zero_()
    assert all(torch.equal(copy, x) for at, (x, copy) in enumerate(zip(wanted, made, strict=True)) if at != 3)
    large = large_pages.empty((5, 1 << 13), torch.bfloat16)
    assert large.shape == (5, 1 << 13)
    assert large.dtype == torch.bfloat16


def test_a_slab_is_given_back_with_the_last_tensor_in_it(small: None) -> None:
    first = large_pages.empty((1024,), torch.float32)
    slab = weakref.ref(large_pages._slabs._memory)
    second = large_pages.empty((4096,), torch.float32)  # in the next one
    assert slab() is not None
    del first
    gc.collect()
    assert slab() is None
    second.fill_(1.0)


def test_memory_that_is_given_back_goes_to_the_next_tensor_unless_another_came_between(small: None) -> None:
    first = large_pages.empty((512,), torch.float32)
    large_pages.give_back(first)
    second = large_pages.empty((512,), torch.float32)
    assert second.data_ptr() == first.data_ptr()
    third = large_pages.empty((512,), torch.float32)
    large_pages.give_back(second)
    assert large_pages.empty((512,), torch.float32).data_ptr() not in (second.data_ptr(), third.data_ptr())


def test_what_is_small_or_elsewhere_stays_as_torch_makes_it(monkeypatch: pytest.MonkeyPatch) -> None:
    def never(*_: object) -> torch.Tensor:
        raise AssertionError("asked for a slab")

    monkeypatch.setattr(large_pages._slabs, "take", never)
    assert large_pages.empty((4, 4), torch.float32).shape == (4, 4)
    assert large_pages.copied(torch.empty(4, 1 << 20, device="meta").T).is_contiguous()
    with pytest.raises(AssertionError, match="asked for a slab"):
        large_pages.empty((1 << 20,), torch.float32)


def test_quantised_weights_are_the_same_there(small: None, monkeypatch: pytest.MonkeyPatch) -> None:
    codes = rounded(noise(1, 48, 96), 8)
    there = in_tiles(codes)
    monkeypatch.setattr(large_pages, "LARGE_PAGES_BYTES_MIN", 1 << 40)
    assert torch.equal(there.codes, in_tiles(codes).codes)
