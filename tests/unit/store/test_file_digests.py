"""The digest of a file is that of all its bytes, and is computed once for a file that does not change."""

from __future__ import annotations

import hashlib
import os
import subprocess
import sys
import time
from pathlib import Path

import pytest

from weft.errors import CheckpointError
from weft.store import file_digests
from weft.store.file_digests import FileFacts, cache_folder, check_unchanged, content_digest, file_digest

EMPTY_BLAKE3 = "af1349b9f5f9a1a6a0404dea36dcc9499bcb25c9adc112b7cc9a93cae41f3262"
"""The first test vector of BLAKE3's specification."""


@pytest.fixture(autouse=True)
def own_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "cache" / "weft" / "digests"


@pytest.fixture
def computed(monkeypatch: pytest.MonkeyPatch) -> list[Path]:
    """The files whose bytes were read."""
    files: list[Path] = []

    def counted(file: Path) -> str:
        files.append(file)
        return content_digest(file)

    monkeypatch.setattr(file_digests, "content_digest", counted)
    return files


def old_file(path: Path, content: bytes, age_s: float = 3600.0) -> Path:
    path.write_bytes(content)
    then_ns = time.time_ns() - int(age_s * 1e9)
    os.utime(path, ns=(then_ns, then_ns))
    return path


@pytest.fixture
def settled(monkeypatch: pytest.MonkeyPatch) -> None:
    """A file counts as settled at once: no test can set a ctime."""
    monkeypatch.setattr(file_digests, "SETTLED_NS", -1)


def test_the_digest_is_that_of_all_bytes(tmp_path: Path) -> None:
    content = bytearray(os.urandom(5 << 20))
    file = tmp_path / "model.safetensors"
    file.write_bytes(content)
    first = content_digest(file)
    for position in (0, 1, 70_001, 2_345_678, (5 << 20) - 1):
        content[position] ^= 1
        file.write_bytes(content)
        assert content_digest(file) != first
        content[position] ^= 1
    file.write_bytes(content)
    assert content_digest(file) == first


def test_the_function_is_the_one_that_the_algorithm_names(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    empty, text = tmp_path / "empty", tmp_path / "text"
    empty.write_bytes(b"")
    text.write_bytes(b"weights")
    if file_digests.blake3 is not None:
        assert content_digest(empty) == EMPTY_BLAKE3
        assert content_digest(text) == file_digests.blake3(b"weights").hexdigest()
    monkeypatch.setattr(file_digests, "blake3", None)
    assert content_digest(text) == hashlib.blake2b(b"weights").hexdigest()


@pytest.mark.usefixtures("settled")
def test_a_file_that_has_not_changed_is_read_once(tmp_path: Path, computed: list[Path]) -> None:
    file = old_file(tmp_path / "a", b"weights")
    assert file_digest(file) == file_digest(file) == content_digest(file)
    assert computed == [file]


def test_a_file_written_just_now_is_read_again(tmp_path: Path, computed: list[Path], own_cache: Path) -> None:
    file = tmp_path / "a"
    file.write_bytes(b"weights")
    file_digest(file)
    file_digest(file)
    assert computed == [file, file]
    assert not own_cache.exists()


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("how", ["written", "replaced", "touched", "linked"])
def test_a_file_whose_facts_changed_is_read_again(tmp_path: Path, computed: list[Path], how: str) -> None:
    file = old_file(tmp_path / "a", b"weights")
    before = file.stat()
    first = file_digest(file)
    if how == "written":  # the same size and mtime: the ctime tells
        file.write_bytes(b"WEIGHTS")
        os.utime(file, ns=(before.st_atime_ns, before.st_mtime_ns))
    elif how == "replaced":
        old_file(tmp_path / "b", b"WEIGHTS").rename(file)
    elif how == "touched":
        os.utime(file)
    else:
        old_file(tmp_path / "b", b"WEIGHTS")
        file.unlink()
        file.symlink_to(tmp_path / "b")
    assert (file_digest(file) == first) is (how == "touched")
    assert len(computed) == 2


@pytest.mark.usefixtures("settled")
def test_a_copy_has_the_digest_of_its_original(tmp_path: Path) -> None:
    """The hub's cache names a file by a link to its sha256; the digest is that of the bytes all the same."""
    blob = old_file(tmp_path / hashlib.sha256(b"weights").hexdigest(), b"weights")
    (tmp_path / "model.safetensors").symlink_to(blob)
    copy = old_file(tmp_path / "copy", b"weights")
    assert file_digest(tmp_path / "model.safetensors") == file_digest(copy)


@pytest.mark.usefixtures("settled")
@pytest.mark.parametrize("entry", [b"", b"{", b"[]", b'{"digest": "00"}', b"\xff" * 9])
def test_a_damaged_entry_is_computed_again(tmp_path: Path, computed: list[Path], own_cache: Path, entry: bytes) -> None:
    file = old_file(tmp_path / "a", b"weights")
    first = file_digest(file)
    [path] = own_cache.iterdir()
    path.write_bytes(entry)
    assert file_digest(file) == file_digest(file) == first
    assert len(computed) == 2


@pytest.mark.usefixtures("settled")
def test_a_cache_that_cannot_be_written_costs_no_start(
    tmp_path: Path, computed: list[Path], monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "no-directory").write_bytes(b"")
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "no-directory"))
    file = old_file(tmp_path / "a", b"weights")
    assert file_digest(file) == file_digest(file)
    assert len(computed) == 2


@pytest.mark.usefixtures("settled")
def test_the_cache_has_a_bound(tmp_path: Path, own_cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(file_digests, "ENTRIES_MAX", 4)
    for number in range(9):
        file_digest(old_file(tmp_path / str(number), b"%d" % number))
    assert len(list(own_cache.iterdir())) == 4


def test_a_file_that_changes_while_it_is_read_is_refused(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    file = old_file(tmp_path / "a", b"weights")

    def written_meanwhile(path: Path) -> str:
        old_file(path, b"WEIGHTS")
        return content_digest(path)

    check_unchanged(file, FileFacts.of(file))
    monkeypatch.setattr(file_digests, "content_digest", written_meanwhile)
    with pytest.raises(CheckpointError, match="was written while it was read"):
        file_digest(file)


RACE = """
import sys
from pathlib import Path
from weft.store import file_digests
file_digests.SETTLED_NS = -1
look, real = file_digests._cached, file_digests.content_digest
def looked(facts):
    known = look(facts)
    print("looked", flush=True)
    return known
def slow(file):
    sys.stdin.readline()
    print("read", flush=True)
    return real(file)
file_digests._cached, file_digests.content_digest = looked, slow
print(file_digests.file_digest(Path(sys.argv[1])), flush=True)
"""


def test_of_starts_at_the_same_time_one_reads_the_file(tmp_path: Path) -> None:
    file = old_file(tmp_path / "a", b"weights")
    racers = [
        subprocess.Popen(
            [sys.executable, "-c", RACE, str(file)], stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
        )
        for _ in range(3)
    ]
    for racer in racers:  # all have seen that the cache has nothing, and then one may read
        assert racer.stdout is not None
        assert racer.stdout.readline() == "looked\n"
    for racer in racers:
        assert racer.stdin is not None
        racer.stdin.write("\n")
        racer.stdin.flush()
    lines = [racer.communicate(timeout=60)[0].split() for racer in racers]
    assert sorted(len(line) for line in lines) == [1, 1, 2]
    assert {line[-1] for line in lines} == {content_digest(file)}
    assert len(list(cache_folder().iterdir())) == 1
