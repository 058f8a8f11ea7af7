"""Numbers of CPU products that depend on caches and memory and change no bit, chosen by measured seconds.

    candidates of a number --each in turn, ROUNDS times--> least seconds of each --GAIN--> the number of the kernels,
                                                                                           or a better one

A CPU of a new kind gets its own prefetch distance and blocks. Kernels that differ in the bits of a result
are chosen by the CPU's features (``host.keeps_codes``): seconds vary from start to start, and answers must not.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Sequence
from dataclasses import astuple, dataclass, replace

import torch

from weft.host import last_cache_bytes
from weft.tensor import native
from weft.tensor.ops.linear import Weight, weight_product
from weft.tensor.weights import large_pages
from weft.tensor.weights.tiles import TILE_ROWS, UNIT_COLUMNS, TiledWeight, TwelveBitWeight

ROUNDS = 5
GAIN = 0.04
"""Share of the seconds that another number must save. Less is noise."""
AHEAD_BYTES = (1024, 2048, 4096, 8192)
PART_BYTES = (98_304, 196_608, 393_216)
UNPACKED_PART_BYTES = (262_144, 524_288, 1_048_576)
WEIGHTS_BYTES_MIN = 1 << 30
"""Bytes of weights from which the measurement (about a quarter of a second) is a small part of the start."""
_STREAM_BYTES = 48 << 20, 192 << 20
"""Least and most bytes of a weight that is read from memory."""
_COLUMNS, _MANY = 2048, 256
_BLOCK_BYTES = 8 << 20

Seconds = Callable[[int], float]


@dataclass(frozen=True, slots=True)
class Tuning:
    """``Tuning`` of csrc/kernels.hpp."""

    fetched_ahead: int
    unit_fetched_ahead: int
    part_bytes: int
    unpacked_part_bytes: int


def in_use() -> Tuning:
    """Return the numbers that the kernels use."""
    return Tuning(*native.extension().tuning())


def use(tuning: Tuning) -> None:
    """Let the kernels of this process use ``tuning``. No product may run meanwhile."""
    native.extension().tune(*astuple(tuning))


def choose(default: int, candidates: Sequence[int], seconds: Seconds, rounds: int = ROUNDS) -> int:
    """Return ``default``, or the candidate that takes least, if it saves at least GAIN. ``seconds``: measures one
    number once. Candidates take turns, so that a change of the machine's load meets all of them."""
    order = (default, *(number for number in candidates if number != default))
    least = dict.fromkeys(order, float("inf"))
    for turn in range(rounds):
        for number in order if turn % 2 else reversed(order):
            least[number] = min(least[number], seconds(number))
    best = min(order, key=least.__getitem__)
    return best if least[best] < (1 - GAIN) * least[default] else default


def tune() -> Tuning:
    """Measure, and let the kernels use the numbers found; return them. For a CPU with the C++ kernels."""
    tuning = in_use()
    if native.extension().has_twelve_bit_products():
        ahead = "fetched_ahead" if native.matrix_unit() == "none" else "unit_fetched_ahead"
        least, most = _STREAM_BYTES
        read_bytes = min(max(least, 2 * last_cache_bytes()), most)
        tuning = _tuned(tuning, ahead, AHEAD_BYTES, _twelve_bit(read_bytes), rows=1)
        tuning = _tuned(tuning, "unpacked_part_bytes", UNPACKED_PART_BYTES, _twelve_bit(_BLOCK_BYTES), rows=_MANY)
    tiles = torch.full((_BLOCK_BYTES // (_COLUMNS * 2 * TILE_ROWS), _COLUMNS // 2, TILE_ROWS, 2), 0.5).bfloat16()
    tuning = _tuned(tuning, "part_bytes", PART_BYTES, TiledWeight(tiles, len(tiles) * TILE_ROWS, _COLUMNS), rows=_MANY)
    large_pages.close()
    return tuning


def _tuned(tuning: Tuning, name: str, candidates: Sequence[int], weight: Weight, *, rows: int) -> Tuning:
    """Return ``tuning`` with the best number under ``name`` for ``rows`` rows of x times ``weight``, in use."""
    x = torch.full((rows, _COLUMNS), 0.5, dtype=torch.bfloat16)

    def seconds(number: int) -> float:
        use(replace(tuning, **{name: number}))
        begin_s = time.perf_counter()
        weight_product(x, weight)
        return time.perf_counter() - begin_s

    seconds(getattr(tuning, name))  # warms up
    best = replace(tuning, **{name: choose(getattr(tuning, name), candidates, seconds)})
    use(best)
    return best


def _twelve_bit(size_bytes: int) -> TwelveBitWeight:
    """Return a weight of about ``size_bytes``. Its numbers do not matter, but its pages must be written once."""
    pairs = size_bytes // (2 * TILE_ROWS * _COLUMNS * 3 // 2)
    tiles = 2 * pairs
    units = large_pages.empty((pairs, _COLUMNS // UNIT_COLUMNS, 2, 3, 64), torch.uint8).fill_(0x11)
    highs = torch.full((tiles, 16), 0x3F, dtype=torch.uint8)
    odd = torch.full((tiles + 1,), tiles, dtype=torch.int64)  # all tiles have one last entry, and no other
    odd[tiles] = 1 << 62
    return TwelveBitWeight(units, highs, odd, tiles * TILE_ROWS, _COLUMNS)
