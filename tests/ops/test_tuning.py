"""Numbers of products that are chosen by measured seconds: the choice by a table of seconds, and the equal bits."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import astuple, replace
from pathlib import Path

import pytest
import torch

from weft.assemble import weights as assembled_weights
from weft.host import last_cache_bytes
from weft.tensor import native, tuning
from weft.tensor.ops.linear import weight_product
from weft.tensor.tuning import GAIN, Tuning, choose
from weft.tensor.weights.tiles import rows_of, tiled, to_twelve_bit


@pytest.fixture(autouse=True)
def _own_numbers() -> Iterator[None]:
    before = tuning.in_use()
    native.choose("native")
    yield
    tuning.use(before)
    native.choose("auto")


class Machine:
    """Seconds by number, with a load that makes each second measurement slow by turns."""

    def __init__(self, seconds: dict[int, float], slow: float = 1.0) -> None:
        self.seconds, self.slow, self.asked = seconds, slow, []

    def __call__(self, number: int) -> float:
        self.asked.append(number)
        return self.seconds[number] * (self.slow if len(self.asked) % 2 else 1.0)


def test_the_fastest_number_is_chosen_on_any_machine() -> None:
    for best in (1024, 2048, 4096, 8192):
        machine = Machine({number: 1.0 if number == best else 1.5 for number in (1024, 2048, 4096, 8192)}, slow=3.0)
        assert choose(2048, (1024, 2048, 4096, 8192), machine) == best


def test_a_gain_within_the_noise_changes_nothing() -> None:
    assert choose(2048, (4096, 8192), Machine({2048: 1.0, 4096: 1.01 - GAIN, 8192: 0.99})) == 2048
    assert choose(2048, (4096, 8192), Machine({2048: 1.0, 4096: 0.99 - GAIN, 8192: 0.99})) == 4096


def test_candidates_take_turns_in_both_orders() -> None:
    machine = Machine(dict.fromkeys((1, 2, 3), 1.0))
    choose(1, (1, 2, 3), machine, rounds=2)
    assert machine.asked == [3, 2, 1, 1, 2, 3]


def weights() -> dict[str, tuning.TiledWeight | tuning.TwelveBitWeight]:
    torch.manual_seed(3)
    dense = (torch.randn(512, 1024) / 32).bfloat16()
    packed = to_twelve_bit([rows_of(dense)])
    assert packed is not None
    return {"tiles": tiled(dense), "12 bits": packed}


@pytest.mark.parametrize("rows", [1, 5, 40, 256])
def test_no_number_changes_a_bit(rows: int) -> None:
    x = torch.randn(rows, 1024).bfloat16()
    default = tuning.in_use()
    for name, weight in weights().items():
        tuning.use(default)
        expected = weight_product(x, weight)
        for other in (Tuning(64, 64, 4096, 4096), Tuning(65536, 65536, 1 << 24, 1 << 24)):
            tuning.use(other)
            assert tuning.in_use() == other
            assert torch.equal(weight_product(x, weight), expected), (name, other)


def test_the_numbers_found_are_in_use_and_the_rest_stays(monkeypatch: pytest.MonkeyPatch) -> None:
    asked = []

    def last_of(default: int, candidates: tuple[int, ...], seconds: tuning.Seconds) -> int:
        assert seconds(candidates[0]) > 0
        asked.append(candidates)
        return candidates[-1]

    monkeypatch.setattr(tuning, "choose", last_of)
    monkeypatch.setattr(tuning, "_STREAM_BYTES", (1 << 20, 1 << 20))
    before = tuning.in_use()
    found = tuning.tune()
    assert found == tuning.in_use()
    assert asked[-1] == tuning.PART_BYTES
    if native.extension().has_twelve_bit_products():
        ahead = "fetched_ahead" if native.matrix_unit() == "none" else "unit_fetched_ahead"
        expected = replace(
            before, **{ahead: tuning.AHEAD_BYTES[-1]}, unpacked_part_bytes=tuning.UNPACKED_PART_BYTES[-1]
        )
        assert replace(found, part_bytes=before.part_bytes) == expected
        assert len(asked) == 3
    assert all(number > 0 for number in astuple(found))


@pytest.mark.parametrize(("size_bytes", "count"), [(tuning.WEIGHTS_BYTES_MIN - 1, 0), (tuning.WEIGHTS_BYTES_MIN, 1)])
def test_small_weights_are_not_worth_a_measurement(
    monkeypatch: pytest.MonkeyPatch, size_bytes: int, count: int
) -> None:
    calls = []
    monkeypatch.setattr(tuning, "tune", lambda: calls.append(1))
    assembled_weights._tune_products(size_bytes)
    assert len(calls) == count
    native.choose("torch")
    assembled_weights._tune_products(size_bytes)
    assert len(calls) == count, "the kernels of torch have no such numbers"


def test_the_last_cache_of_a_core_is_the_largest(tmp_path: Path) -> None:
    for number, size in enumerate(("32K", "1024K", "96M")):
        (tmp_path / f"index{number}").mkdir()
        (tmp_path / f"index{number}" / "size").write_text(f"{size}\n")
    assert last_cache_bytes(tmp_path) == 96 << 20
    assert last_cache_bytes(tmp_path / "nothing") == 0
