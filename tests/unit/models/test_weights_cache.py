"""The file of packed weights: what comes back is what went in, and a file that is not whole is made again."""

from __future__ import annotations

import logging
from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from tests.ops.quantised import noise
from weft.errors import ConfigError
from weft.models.weights_cache import WeightsCache
from weft.tensor import native
from weft.tensor.weights.tiles import TwelveBitWeight, rows_of, to_twelve_bit

BUILT = native.MISSING is None


def packed(seed: int, rows: int = 512, columns: int = 1024) -> TwelveBitWeight:
    native.choose("auto")
    made = to_twelve_bit((rows_of(noise(seed, rows, columns, dtype=torch.bfloat16)),))
    assert made is not None
    return made


def written(directory: Path) -> tuple[Path, dict[str, TwelveBitWeight]]:
    weights = {"q+k": packed(1), "v": packed(2, 33, 256)}
    with WeightsCache(directory, "key") as cache:
        assert not cache.is_mapped
        for name, weight in weights.items():
            assert cache.get(name) is None
            cache.put(name, weight)
    return directory / "key.weft", weights


def test_a_second_reading_maps_the_same_bytes(tmp_path: Path) -> None:
    if not BUILT:
        return
    path, weights = written(tmp_path / "new" / "folder")
    assert [one.name for one in path.parent.iterdir()] == ["key.weft"]
    before = path.stat().st_mtime_ns
    with WeightsCache(path.parent, "key") as cache:
        assert cache.is_mapped
        again = {name: cache.get(name) for name in weights}
        cache.put("other", weights["v"])
    for name, weight in weights.items():
        other = again[name]
        assert other is not None
        assert (other.rows, other.columns) == (weight.rows, weight.columns)
        for field in ("units", "highs", "odd"):
            assert torch.equal(getattr(other, field), getattr(weight, field))
        assert torch.equal(other.dense(), weight.dense())
    assert path.stat().st_mtime_ns == before


def cut(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:-9000])


def change(at: int) -> Callable[[Path], None]:
    def changed(path: Path) -> None:
        text = bytearray(path.read_bytes())
        text[at] ^= 64
        path.write_bytes(text)

    return changed


def foreign(path: Path) -> None:
    path.write_bytes(b"another program's file" * 400)


def other_key(path: Path) -> None:
    path.write_bytes(path.read_bytes().replace(b'"key": "key"', b'"key": "kee"'))


@pytest.mark.parametrize(
    "damage", [cut, change(5000), change(-100), foreign, other_key, lambda path: path.write_bytes(b"")]
)
def test_a_damaged_or_foreign_file_is_made_again(
    damage: Callable[[Path], None], tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    if not BUILT:
        return
    path, weights = written(tmp_path)
    whole = path.read_bytes()
    damage(path)
    with caplog.at_level(logging.WARNING), WeightsCache(tmp_path, "key") as cache:
        assert not cache.is_mapped
        for name, weight in weights.items():
            cache.put(name, weight)
    assert "is made again" in caplog.text
    assert path.read_bytes() == whole


def test_a_reading_that_fails_leaves_no_file(tmp_path: Path) -> None:
    if not BUILT:
        return
    cache = WeightsCache(tmp_path, "key")
    cache.__enter__()
    cache.put("v", packed(2, 33, 256))
    assert len(list(tmp_path.iterdir())) == 1
    error = ValueError("the checkpoint cannot be read")
    cache.__exit__(ValueError, error, None)
    assert list(tmp_path.iterdir()) == []


def test_a_directory_that_cannot_be_made_is_an_error_of_the_flag(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(ConfigError, match=r"--weights-cache is .*file/cache"):
        WeightsCache(tmp_path / "file" / "cache", "key")


def test_a_full_disk_costs_a_warning(tmp_path: Path, caplog: pytest.LogCaptureFixture) -> None:
    if not BUILT:
        return
    with caplog.at_level(logging.WARNING), WeightsCache(tmp_path, "key") as cache:
        assert cache._file is not None
        cache._file.close()
        cache._file = open("/dev/full", "wb", buffering=0)  # noqa: SIM115
        cache.put("v", packed(2, 33, 256))
        cache.put("v", packed(2, 33, 256))
    assert caplog.text.count("is not written") == 1
    assert list(tmp_path.iterdir()) == []
