"""The packed page layout, its inverse, and the views of the arena."""

from __future__ import annotations

from dataclasses import dataclass

import pytest
import torch

from tests.support.page_packing import pack_k, pack_v
from weft.tensor.layout import k_block_shape, k_rows, pack_of, unpack_k, unpack_v, v_block_shape, v_rows
from weft.tensor.views import build_layer_caches, strided_view


@dataclass(frozen=True)
class Kv:
    layer: int
    k_offset_bytes: int
    v_offset_bytes: int
    kv_heads: int
    head_dim: int
    scale_offset_bytes: int | None = None


@dataclass(frozen=True)
class State:
    layer: int
    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: str


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float16, torch.float8_e4m3fn])
def test_packing_puts_each_number_where_the_layout_says_and_unpacking_finds_it(dtype: torch.dtype) -> None:
    k = torch.randn(32, 3, 8).to(dtype)
    pack = pack_of(dtype)
    assert pack * dtype.itemsize == 4
    pages_k, pages_v = pack_k(k), pack_v(k)
    assert pages_k.shape == (2, *k_block_shape(3, 8, dtype))
    assert pages_v.shape == (2, *v_block_shape(3, 8, dtype))
    token, head, dim = 21, 2, 5
    assert pages_k[1, head, dim // pack, 5, dim % pack] == k[token, head, dim]
    assert pages_v[1, head, 5 // pack, dim, 5 % pack] == k[token, head, dim]
    assert torch.equal(unpack_k(pages_k).float(), k.float())
    assert torch.equal(unpack_v(pages_v).float(), k.float())


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn])
def test_rows_are_one_dense_row_for_each_token_and_unpacking_finds_them(dtype: torch.dtype) -> None:
    x = torch.randn(32, 3, 8).to(dtype)
    for pack, shape, unpack, rows_of in (
        (pack_k, k_block_shape, unpack_k, k_rows),
        (pack_v, v_block_shape, unpack_v, v_rows),
    ):
        pages = torch.empty(2, *shape(3, 8, dtype, "rows"), dtype=dtype)
        pages.copy_(pack(x, "rows"))
        assert pages.numel() == pack(x).numel(), "the same bytes as packed"
        rows = rows_of(pages)
        assert rows.shape == (2, 3, 16, 8)
        assert rows.stride() == (3 * 16 * 8, 16 * 8, 8, 1)
        assert torch.equal(rows[1, 2, 5].float(), x[21, 2].float())
        assert torch.equal(unpack(pages).float(), x.float())
        with pytest.raises(AssertionError, match="vnni"):
            rows_of(pack(torch.randn(32, 3, 8).to(torch.bfloat16)))


def test_views_put_page_i_and_slot_j_at_their_bytes() -> None:
    page_bytes, slot_stride = 4 * 2048, 4096
    arena = torch.zeros(16 * 2048, dtype=torch.uint8)
    caches = build_layer_caches(
        arena,
        layer_count=3,
        page_bytes=page_bytes,
        page_count=4,
        slot_stride_bytes=slot_stride,
        slot_count=8,
        kv_dtype="bfloat16",
        kv_fields=[Kv(1, 256, 2304, 2, 32)],
        state_fields=[State(0, "conv", 0, (5, 3), "bfloat16"), State(0, "recurrent", 256, (2, 4, 8), "float32")],
    )
    assert caches[2].k is None
    assert caches[2].state == {}
    k, v, recurrent = caches[1].k, caches[1].v, caches[0].state["recurrent"]
    assert k is not None
    assert v is not None
    assert k.shape == (4, 2, 16, 16, 2)
    assert v.shape == (4, 2, 8, 32, 2)
    assert recurrent.shape == (8, 2, 4, 8)
    assert caches[0].state["conv"].shape == (8, 5, 3)
    k[3, 0, 0, 0, 0] = 1.0
    at = 3 * page_bytes + 256
    assert arena[at : at + 2].view(torch.bfloat16)[0] == 1.0
    recurrent[5, 0, 0, 1] = 2.0
    at = 5 * slot_stride + 256 + 4
    assert arena[at : at + 4].view(torch.float32)[0] == 2.0


def test_a_view_that_would_leave_the_arena_is_caught() -> None:
    with pytest.raises(AssertionError, match="view ends at byte"):
        strided_view(
            torch.zeros(1024, dtype=torch.uint8),
            count=5,
            stride_bytes=256,
            offset_bytes=0,
            shape=(64,),
            dtype=torch.float32,
        )


def test_a_model_without_attention_or_without_states_has_empty_caches() -> None:
    caches = build_layer_caches(
        torch.zeros(0, dtype=torch.uint8),
        layer_count=2,
        page_bytes=0,
        page_count=0,
        slot_stride_bytes=0,
        slot_count=0,
        kv_dtype="float32",
        kv_fields=[],
        state_fields=[],
    )
    assert all(cache.k is None and cache.state == {} for cache in caches)
