"""Blocks of volumes: what fits at all, which volumes stay, and how an error of the disk is said."""

from __future__ import annotations

import errno

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
