"""Blocks of volumes: what fits at all, which volumes stay, and how an error of the disk is said."""

from __future__ import annotations

import errno

import numpy as np
import pytest

from weft.store.pruning import _fullest
from weft.store.reading import reason_of
from weft.store.space import BLOCK_BYTES, VOLUME_BYTES_LEAST, Space


def test_what_is_larger_than_a_volume_never_fits() -> None:
    space = Space(
        capacity_bytes=4 * VOLUME_BYTES_LEAST, reserve_bytes=0, volume_bytes=VOLUME_BYTES_LEAST, disk_free_bytes=1 << 40
    )
    assert space.fits_ever(1)
    assert not space.fits_ever(VOLUME_BYTES_LEAST)
    assert not space.fits_ever(10 * VOLUME_BYTES_LEAST)
    space.volumes[0] = 20 * VOLUME_BYTES_LEAST // BLOCK_BYTES
    assert space.fits_ever(10 * VOLUME_BYTES_LEAST)


def opened(*records: tuple[int, int]) -> Space:
    """A store that is full, of one volume of 101 blocks, with these records: first block and blocks."""
    places = np.array([(0, first, blocks * BLOCK_BYTES - 7) for first, blocks in records], np.int64).reshape(-1, 3)
    return Space.of(101 * BLOCK_BYTES, 0, 0, 101 * BLOCK_BYTES, {0: 101}, 0, places)


def test_an_opened_store_has_every_block_free_that_no_record_has() -> None:
    assert opened().extents.free_blocks == 100, "the first block of a volume is its own"
    space = opened((40, 5), (1, 3), (4, 2), (60, 41))
    assert space.extents.free_blocks == 100 - 51
    assert space.extents.take(34) == (0, 6), "up to the next record, behind two that touch"
    assert space.extents.take(15) == (0, 45)
    assert space.extents.take(1) is None


def test_a_full_store_evicts_for_four_puts_less_what_is_free_or_becomes_free() -> None:
    space = opened((1, 97))
    assert space.shortage(5) == 4 * 5 - 3
    space.retiring_blocks = 7
    assert space.shortage(5) == 4 * 5 - 3 - 7
    assert opened().shortage(5) == 0


@pytest.mark.parametrize(
    ("blocks", "used", "kept"),
    [
        ({0: 10, 1: 10}, {0: 9, 1: 1}, {0, 1}),  # the first block of a volume is its own
        ({0: 10, 1: 10}, {0: 8, 1: 1}, {0}),
        ({0: 1000, 1: 10}, {0: 901, 1: 9}, {0}),  # fuller by its share
        ({0: 10, 1: 10, 2: 10}, {0: 1, 1: 7, 2: 1}, {1}),
        ({0: 10}, {0: 0}, set()),
    ],
)
def test_the_fewest_volumes_that_hold_all_stay_the_fullest_first(
    blocks: dict[int, int], used: dict[int, int], kept: set[int]
) -> None:
    assert _fullest(blocks, used) == kept


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (OSError(errno.EIO, "Input/output error", "/secret/path"), "Input/output error"),
        (OSError("a read was short"), "a read was short"),
        (OSError(), "OSError"),
        (TimeoutError(), "TimeoutError"),
    ],
)
def test_an_error_of_the_disk_is_said_without_its_path(error: OSError, said: str) -> None:
    assert reason_of(error) == said
