"""``weft store``: info, verify, prune, rm, with their exit codes."""

from __future__ import annotations

import json
from pathlib import Path

import pytest

from tests.unit.store.contents import assert_hit, identity, opened, prompt, written
from weft.cli.main import main


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
    assert main(["store", "info", str(filled), "--json"]) == 0
    facts = _json(capsys)
    models = facts["models"]
    assert isinstance(models, list)
    assert [(one["model"], one["checkpoints"], one["tokens"]) for one in models] == \
        [("tiny", 12, 3072), ("other", 2, 512)]
    assert facts["holder"] == ""


def test_info_works_beside_a_server_and_prune_does_not(filled: Path,
                                                       capsys: pytest.CaptureFixture[str]) -> None:
    store = opened(filled)
    assert main(["store", "info", str(filled)]) == 0
    assert "writes to it" in capsys.readouterr().out
    assert main(["store", "prune", str(filled)]) == 2
    assert "stop that server first" in capsys.readouterr().err
    store.close()


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


def test_prune_gives_space_back_and_keeps_what_is_valuable(filled: Path,
                                                           capsys: pytest.CaptureFixture[str]) -> None:
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
def test_a_path_that_is_no_store_is_named(tmp_path: Path, verb: str,
                                          capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", verb, str(tmp_path / "none")]) == 2
    assert str(tmp_path / "none") in capsys.readouterr().err
    assert not (tmp_path / "none").exists()


def test_a_bucket_is_no_path(capsys: pytest.CaptureFixture[str]) -> None:
    assert main(["store", "info", "s3://bucket/prefix"]) == 2
    assert "name the directory in front of it (--store-cache)" in capsys.readouterr().err
