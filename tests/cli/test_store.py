"""``weft store``: info, verify, prune, rm, with their exit codes."""

from __future__ import annotations

import json
import os
import shutil
import time
from pathlib import Path

import pytest

from tests.unit.store.contents import assert_hit, assert_right_or_none, identity, opened, options, prompt, written
from weft.cli.main import main
from weft.store.tiered_store import open_store


@pytest.fixture
def filled(tmp_path: Path) -> Path:
    """Twelve prompts of one model and two of another, in volumes of 128 KiB."""
    place = tmp_path / "store"
    for who, seeds in ((identity(), range(12)), (identity(model="other", weights="w9"), range(20, 22))):
        store = opened(place, who=who, volume_bytes=128 << 10)
        for seed in seeds:
            written(store, prompt(256, seed), seconds=float(seed + 1))
        store.close()
    return place


def _json(capsys: pytest.CaptureFixture[str]) -> dict[str, object]:
    facts = json.loads(capsys.readouterr().out)
    assert isinstance(facts, dict)
    return facts


def test_info_names_models_and_bytes(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "info", str(filled)]) == 0
    shown = capsys.readouterr().out
    assert "tiny" in shown
    assert identity().digest.hex()[:8] in shown
    assert "in 3 volumes; " in shown
    assert main(["store", "info", str(filled), "--json"]) == 0
    facts = _json(capsys)
    models = facts["models"]
    assert isinstance(models, list)
    assert [(one["model"], one["snapshots"], one["tokens"]) for one in models] == [
        ("tiny", 12, 3072),
        ("other", 2, 512),
    ]
    assert facts["holder"] == ""


def test_one_volume_is_one(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = opened(tmp_path / "store")
    written(store, prompt(256, 1), seconds=1.0)
    store.close()
    assert main(["store", "info", str(tmp_path / "store")]) == 0
    assert "in 1 volume; " in capsys.readouterr().out


def test_info_works_beside_a_server_and_prune_does_not(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    store = opened(filled)
    assert main(["store", "info", str(filled)]) == 0
    assert "writes to it" in capsys.readouterr().out
    assert main(["store", "prune", str(filled)]) == 2
    assert "stop that server first" in capsys.readouterr().err
    store.close()


def test_a_copy_that_is_taken_beside_a_server_is_verified_and_read(
    filled: Path, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    """The backup of docs/operating.md: ``cp -a``, ``weft store verify``, and a start on the copy."""
    store, copy = opened(filled), tmp_path / "copy"
    written(store, prompt(256, 30), seconds=1.0)
    shutil.copytree(filled, copy)
    written(store, prompt(256, 31), seconds=1.0)
    store.close()
    assert main(["store", "verify", str(copy)]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    back = opened(copy)
    for seed in (0, 11, 30):
        assert_hit(back, prompt(256, seed), 256)
    assert assert_right_or_none(back, prompt(256, 31)) == 0, "written behind the copy"
    back.close()


def test_verify_finds_every_damaged_record(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", str(filled)]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    volume = filled / "volumes" / "volume-00001"
    content = bytearray(volume.read_bytes())
    content[4096] ^= 4
    volume.write_bytes(content)
    assert main(["store", "verify", str(filled), "--json"]) == 1
    facts = _json(capsys)
    assert [reason for _, reason in facts["damaged"]] == ["checksum"]  # type: ignore[attr-defined]
    assert main(["store", "verify", str(filled), "--retire"]) == 1
    assert "they are removed now" in capsys.readouterr().out
    assert main(["store", "verify", str(filled)]) == 0


def test_prune_gives_space_back_and_keeps_what_is_valuable(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    size = sum(path.stat().st_size for path in (filled / "volumes").iterdir())
    assert main(["store", "prune", str(filled), "--size", "100KiB", "--json"]) == 0
    facts = _json(capsys)
    left = sum(path.stat().st_size for path in (filled / "volumes").iterdir())
    assert left == facts["allocated_bytes"] == 128 << 10
    assert facts["allocated_bytes_before"] == size > 2 * left
    assert main(["store", "verify", str(filled)]) == 0
    store = opened(filled)
    assert_hit(store, prompt(256, 11), 256)
    assert store.match(None, prompt(256, 0), 0) is None
    written(store, prompt(256, 70))
    store.close()


def test_rm_removes_one_model_or_all(filled: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "rm", str(filled)]) == 2
    assert main(["store", "rm", str(filled), "--model", "nobody/none"]) == 2
    assert "has other, tiny" in capsys.readouterr().err
    assert main(["store", "rm", str(filled), "--model", "tiny"]) == 0
    store = opened(filled)
    assert store.match(None, prompt(256, 3), 0) is None
    store.close()
    other = opened(filled, who=identity(weights="w9"))
    assert_hit(other, prompt(256, 20), 256)
    other.close()
    assert main(["store", "rm", str(filled), "--all"]) == 0
    assert not filled.exists()


@pytest.mark.parametrize("verb", ["info", "verify", "prune"])
def test_a_path_that_is_no_store_is_named(tmp_path: Path, verb: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", verb, str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_bucket_that_cannot_be_named_or_reached_is_said(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "info", "ftp://bucket/prefix"]) == 2
    assert "the scheme ftp is not one of" in capsys.readouterr().err
    assert main(["store", "info", f"file://{tmp_path}/none"]) == 0
    assert "is empty" in capsys.readouterr().out


@pytest.fixture
def bucket(tmp_path: Path) -> str:
    """A directory as a bucket, with three prefixes of one model and one of another."""
    location = f"file://{tmp_path / 'bucket'}"
    for who, prompts in (
        (identity(), (prompt(256, 1), prompt(300, 2), prompt(40, 3))),
        (identity(weights="w9", model="other"), (prompt(256, 20),)),
    ):
        store = open_store(location, who, options(cache_directory=str(tmp_path / "cache"), refresh_s=0.1))
        for tokens in prompts:
            written(store, tokens)
        end = time.monotonic() + 20
        while store.stats().remote.get("uploaded", 0) < len(prompts) and time.monotonic() < end:
            store.poll()
            time.sleep(0.01)
        store.close()
    return location


def test_info_of_a_bucket_names_models_and_bytes(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "info", bucket, "--json"]) == 0
    facts = json.loads(capsys.readouterr().out)
    models = sorted((one["model"], one["snapshots"]) for one in facts["models"])
    assert models == [("other", 1), ("tiny", 3)]
    assert facts["payload_bytes"] == sum(one["payload_bytes"] for one in facts["models"]) > 0
    assert main(["store", "info", bucket]) == 0
    assert "segments" in capsys.readouterr().out


def test_verify_of_a_bucket_reads_every_payload(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "verify", bucket]) == 0
    assert "every checksum is right" in capsys.readouterr().out
    payloads = sorted(Path(bucket.removeprefix("file://")).glob("v1/records/*/*"))
    content = bytearray(payloads[0].read_bytes())
    content[7] ^= 1
    payloads[0].write_bytes(content)
    payloads[1].unlink()
    assert main(["store", "verify", bucket, "--json"]) == 1
    result = json.loads(capsys.readouterr().out)
    assert [reason for _, reason in result["damaged"]] == ["checksum"]
    assert result["missing"] == 1
    assert main(["store", "verify", bucket, "--retire"]) == 1
    capsys.readouterr()
    assert main(["store", "verify", bucket]) == 0


def test_a_key_belongs_to_a_bucket_and_finds_what_is_signed_with_it(
    bucket: str, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    key = tmp_path / "key"
    key.write_text("k" * 32)
    key.chmod(0o600)
    assert main(["store", "info", bucket, "--key", str(key)]) == 0
    assert "is empty" in capsys.readouterr().out, "nothing there is signed"
    assert main(["store", "info", "--key", str(key), str(tmp_path)]) == 2
    assert "is of a bucket" in capsys.readouterr().err
    assert main(["store", "verify", bucket, "--key", str(tmp_path / "none")]) == 2
    assert "No such file" in capsys.readouterr().err


def test_prune_of_a_bucket_removes_orphans_and_the_oldest(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    folder = Path(bucket.removeprefix("file://"))
    payloads = sorted(folder.glob("v1/records/*/*"))
    total = sum(one.stat().st_size for one in payloads)
    for name, age_s in (("young", 60), ("old", 7200)):
        orphan = payloads[0].with_name(f"{'0' * 31}{len(name)}-4")
        orphan.write_bytes(b"abcd")
        os.utime(orphan, (time.time() - age_s,) * 2)
    assert main(["store", "prune", bucket, "--json"]) == 0
    assert json.loads(capsys.readouterr().out) == {
        "removed": 1,
        "removed_bytes": 4,
        "objects": len(payloads) + 1,
        "payload_bytes": total + 4,
    }
    os.utime(payloads[0], (0, 0))
    assert main(["store", "prune", bucket, "--size", f"{total}B", "--json"]) == 0
    capsys.readouterr()
    assert not payloads[0].exists()
    assert all(one.exists() for one in payloads[1:])
    assert list(folder.glob("v1/ledger/*/*/*"))
    assert main(["store", "prune", bucket, "--size", "0B"]) == 0
    assert not [*folder.glob("v1/ledger/*/*/*"), *folder.glob("v1/records/*/*")]


def test_rm_of_a_bucket_removes_one_model_or_all(bucket: str, capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "rm", bucket, "--model", "nothing"]) == 2
    assert "has other, tiny" in capsys.readouterr().err
    assert main(["store", "rm", bucket, "--model", "other"]) == 0
    assert main(["store", "info", bucket, "--json"]) == 0
    out = capsys.readouterr().out
    assert [one["model"] for one in json.loads(out[out.index("{") :])["models"]] == ["tiny"]
    assert main(["store", "rm", bucket, "--all"]) == 0
    assert not [one for one in Path(bucket.removeprefix("file://")).rglob("*") if one.is_file()]
