"""Rows of an embedding, in whichever order the table lies."""

from __future__ import annotations

import pytest
import torch

from weft.models.embedding import Embedding
from weft.tensor import native
from weft.tensor.weights.tiles import TILE_ROWS, TiledWeight, rows_of, to_twelve_bit

ROWS, WIDTH = 83, 24


def in_tiles(weight: torch.Tensor) -> TiledWeight:
    """Laid out here, so that it needs no kernels."""
    pack = 4 // weight.itemsize
    padded = torch.nn.functional.pad(weight, (0, 0, 0, -len(weight) % TILE_ROWS))
    tiles = padded.view(-1, TILE_ROWS, WIDTH // pack, pack).transpose(1, 2).contiguous()
    return TiledWeight(tiles, len(weight), WIDTH)


@pytest.mark.parametrize("tiled", [False, True], ids=["rows", "tiles"])
@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize("count", [1, 5, 300])
def test_rows_are_those_of_the_table_bit_for_bit(dtype: torch.dtype, count: int, *, tiled: bool) -> None:
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((ROWS, WIDTH), generator=generator).to(dtype)
    embedding = Embedding(in_tiles(weight) if tiled else weight)
    tokens = torch.empty(count, dtype=torch.int64)
    for _ in range(3):  # the same tensor asks with other tokens
        tokens.copy_(torch.randint(0, ROWS, (count,), generator=generator))
        assert torch.equal(embedding.rows_at(tokens), weight[tokens])
    other = torch.randint(0, ROWS, (count,), generator=generator)
    before = embedding.rows_at(other)
    embedding.rows_at(tokens)
    assert torch.equal(before, weight[other]), "rows of another tensor are its own"


@pytest.mark.parametrize("count", [1, 5, 300])
def test_rows_of_a_twelve_bit_table_are_those_of_the_table_bit_for_bit(count: int) -> None:
    if native.MISSING is not None:
        return  # no weight is in 12 bits without the kernels
    generator = torch.Generator().manual_seed(0)
    weight = torch.randn((ROWS, WIDTH), generator=generator).bfloat16()
    made = to_twelve_bit((rows_of(weight),))
    assert made is not None
    embedding, tokens = Embedding(made), torch.empty(count, dtype=torch.int64)
    for _ in range(3):  # the same tensor asks with other tokens
        tokens.copy_(torch.randint(0, ROWS, (count,), generator=generator))
        assert torch.equal(embedding.rows_at(tokens), weight[tokens])
    with pytest.raises(IndexError):
        embedding.rows_at(torch.tensor([ROWS]))


def test_a_token_beyond_the_table_is_a_bug_that_is_seen() -> None:
    with pytest.raises(IndexError):
        Embedding(torch.zeros(ROWS, WIDTH)).rows_at(torch.tensor([ROWS]))


def test_a_weight_that_has_moved_is_read_where_it_is() -> None:
    weight = torch.zeros(ROWS, WIDTH)
    embedding, tokens = Embedding(weight), torch.tensor([2])
    assert not embedding.rows_at(tokens).any()
    weight.set_(torch.ones(ROWS, WIDTH))
    assert embedding.rows_at(tokens).all()
