"""Models on disk: pulled from a hub on loopback by the real huggingface_hub, resumed, checked, removed."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import closing
from pathlib import Path

import pytest
from huggingface_hub import constants

from tests.fixtures.checkpoints import checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.hub_server import Hub, hub_server
from weft import Engine
from weft.cli import chat
from weft.cli.main import main
from weft.errors import CheckpointError
from weft.models import local, pulling
from weft.models.hub import resolve_model
from weft.models.local import INCOMPLETE, MANIFEST, ModelInUseError, find, listed, model_directory, remove
from weft.models.pulling import PullCancelledError, PullProgress, mended, pull

WEIGHTS = "model.safetensors"
CHUNK_BYTES = 1 << 16


@pytest.fixture
def files(tmp_path: Path) -> Path:
    """The repository maker/tiny, to be changed by a test."""
    root = tmp_path / "repository"
    shutil.copytree(checkpoint("lfm2"), root)
    (root / "README.md").write_text("# not fetched")
    (root / "1_Pooling").mkdir()
    (root / "1_Pooling" / "config.json").write_text("{}")
    return root


@pytest.fixture
def hub(files: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Hub]:
    monkeypatch.setenv("WEFT_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", CHUNK_BYTES)
    with hub_server({"maker/tiny": files}) as running:
        monkeypatch.setattr(constants, "ENDPOINT", running.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", running.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        yield running


def pull_a_part(name: str = "maker/tiny") -> None:
    """Until some of the weights are on disk."""
    came: dict[str, int] = {}

    def on_progress(now: PullProgress) -> None:
        came[now.file.path] = now.file_bytes

    with pytest.raises(PullCancelledError):
        pull(name, on_progress=on_progress, cancelled=lambda: came.get(WEIGHTS, 0) >= 2 * CHUNK_BYTES)


def test_a_run_fetches_a_model_that_is_not_here_and_goes_on_with_a_partial_one(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """The chat itself is tests/cli/test_chat.py: here the server is asked for the name alone."""
    served: list[str | None] = []
    monkeypatch.setattr(chat, "_with_own_server", lambda values, *_: served.append(values["model"]) or 0)
    pull_a_part()
    assert main(["run", "maker/tiny"]) == 0
    assert main(["run", "maker/tiny"]) == 0
    assert served == ["maker/tiny"] * 2
    found = find("maker/tiny")
    assert found is not None
    assert found.state == "whole"
    begins = [begin for file, begin in hub.ranges if file == WEIGHTS]
    assert len(begins) == 2
    assert begins[1] >= 2 * CHUNK_BYTES
    assert main(["run", "maker/none"]) == 2
    assert "maker/none" in capsys.readouterr().err
    assert main(["run", str(checkpoint("lfm2"))]) == 0
    assert main(["run"]) == 0
    assert len(served) == 4


def test_a_model_is_fetched_once_and_is_found_by_its_name(hub: Hub) -> None:
    assert find("maker/tiny") is None
    seen: list[PullProgress] = []
    model, is_new = pull("maker/tiny", on_progress=seen.append)
    assert is_new
    assert resolve_model("maker/tiny") == model.path == model_directory() / "maker--tiny"
    assert resolve_model("maker/tiny", "main") == resolve_model("maker/tiny", hub.commit) == model.path
    assert {file.path for file in model.manifest.files} >= {WEIGHTS, "config.json", "1_Pooling/config.json"}
    assert not (model.path / "README.md").exists()
    assert max(now.done_bytes for now in seen) == model.held_bytes == model.manifest.total_bytes
    count = len(hub.ranges)
    assert pull("maker/tiny") == (model, False)
    assert len(hub.ranges) == count, "nothing is fetched twice"
    with Engine("maker/tiny", memory="16MiB") as engine:
        assert engine.info.name == "maker/tiny"


def test_a_pull_goes_on_where_the_last_one_ended_and_half_a_model_never_loads(hub: Hub) -> None:
    pull_a_part()
    [half] = listed()
    assert half.state == "partial"
    assert not (model_directory() / "maker--tiny").exists()
    with pytest.raises(CheckpointError, match=r"are here; `weft pull maker/tiny` goes on"):
        resolve_model("maker/tiny")
    held = (half.path / (WEIGHTS + INCOMPLETE)).stat().st_size
    assert held >= 2 * CHUNK_BYTES
    hub.ranges.clear()
    pull("maker/tiny")
    assert dict(hub.ranges)[WEIGHTS] == held
    assert (model_directory() / "maker--tiny" / WEIGHTS).read_bytes() == (checkpoint("lfm2") / WEIGHTS).read_bytes()


def test_a_connection_that_is_lost_costs_no_more_than_a_piece(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(constants, "DOWNLOAD_CHUNK_SIZE", 10 << 20)
    monkeypatch.setattr(pulling, "PIECE_BYTES", CHUNK_BYTES)
    cut = 5 * CHUNK_BYTES + 1
    hub.cuts[WEIGHTS] = [cut]
    pull("maker/tiny")
    [first, again] = [begin for file, begin in hub.ranges if file == WEIGHTS]
    assert first == 0
    assert cut - CHUNK_BYTES <= again <= cut


def test_a_pull_that_was_killed_leaves_what_it_had_and_no_lock(hub: Hub) -> None:
    hub.cuts[WEIGHTS], hub.held[WEIGHTS] = [5 * CHUNK_BYTES], threading.Event()
    child = subprocess.Popen(
        [
            sys.executable,
            "-c",
            f"from huggingface_hub import constants as c; c.DOWNLOAD_CHUNK_SIZE = "
            f"{CHUNK_BYTES}; from weft.cli.main import main; main(['pull', 'maker/tiny'])",
        ],
        env={**os.environ, "HF_ENDPOINT": hub.endpoint, "PYTHONPATH": str(Path(local.__file__).parents[2])},
    )
    unfinished = model_directory() / "maker--tiny.part" / (WEIGHTS + INCOMPLETE)
    while not unfinished.exists() or unfinished.stat().st_size < 4 * CHUNK_BYTES:
        assert child.poll() is None
        time.sleep(0.01)
    with pytest.raises(ModelInUseError, match=f"is being pulled by process {child.pid}"):
        pull("maker/tiny")
    with pytest.raises(ModelInUseError, match="being pulled"):
        remove("maker/tiny")
    child.kill()
    child.wait()
    hub.held.pop(WEIGHTS).set()
    hub.ranges.clear()
    pull("maker/tiny")
    assert dict(hub.ranges)[WEIGHTS] >= 4 * CHUNK_BYTES
    assert resolve_model("maker/tiny").is_dir()


def test_a_wrong_checksum_costs_one_more_download_and_then_the_pull(hub: Hub) -> None:
    hub.wrong[WEIGHTS] = 1
    pull("maker/tiny")
    assert [name for name, _ in hub.ranges].count(WEIGHTS) == 2
    remove("maker/tiny")
    hub.wrong["tokenizer.json"] = 2  # a small file, by git's digest
    with pytest.raises(CheckpointError, match=r"tokenizer\.json came 2 times with another checksum"):
        pull("maker/tiny")
    assert [model.state for model in listed()] == ["partial"]


def test_a_model_that_changes_on_the_hub_is_fetched_in_its_changed_files(hub: Hub, files: Path) -> None:
    before, _ = pull("maker/tiny")
    inode = (before.path / WEIGHTS).stat().st_ino
    (files / "generation_config.json").write_text('{"temperature": 0.5}')
    (files / "chat_template.jinja").unlink()
    hub.commit = "f" * 40
    hub.ranges.clear()
    with closing(local.LoadedLock("maker/tiny")), pytest.raises(ModelInUseError):
        pull("maker/tiny")
    after, is_new = pull("maker/tiny")
    assert is_new
    assert [name for name, _ in hub.ranges] == ["generation_config.json"]
    assert (after.path / WEIGHTS).stat().st_ino == inode
    assert not (after.path / "chat_template.jinja").exists()
    assert resolve_model("maker/tiny", "f" * 40) == after.path


def test_what_is_damaged_does_not_load_and_is_mended_alone(hub: Hub) -> None:
    model, _ = pull("maker/tiny")
    weights = model.path / WEIGHTS
    os.truncate(weights, 1000)
    with pytest.raises(CheckpointError, match=r"damaged: model\.safetensors has 1000 of \d+ bytes"):
        resolve_model("maker/tiny")
    hub.ranges.clear()
    model, _ = pull("maker/tiny")
    assert hub.ranges == [(WEIGHTS, 0)]
    with weights.open("r+b") as file:
        file.seek(5000)
        file.write(b"!!!!")
    assert mended(model).state == "damaged", "which sizes alone do not show"
    pull("maker/tiny")
    assert local.damage(model) == ""


def test_what_is_loaded_is_removed_by_force_alone(hub: Hub) -> None:
    pull("maker/tiny")
    with Engine("maker/tiny", memory="16MiB") as engine:
        with pytest.raises(ModelInUseError, match=f"loaded by process {os.getpid()}; stop that first"):
            remove("maker/tiny")
        assert remove("maker/tiny", force=True) > 0
        assert engine.generate("abc", max_tokens=2)[0].tokens
    pull("maker/tiny")
    remove("maker/tiny")
    assert list(model_directory().iterdir()) == []
    with pytest.raises(CheckpointError, match="no model 'maker/tiny'"):
        remove("maker/tiny")


def test_only_directories_that_a_pull_made_are_removed(hub: Hub) -> None:
    """The control: the same directory without its manifest."""
    model, _ = pull("maker/tiny")
    (model.path / MANIFEST).rename(model.path / "other.json")
    with pytest.raises(CheckpointError, match="there is no model"):
        remove("maker/tiny")
    for name in ("../maker--tiny", "maker/..", "/etc", "a/b/c", "maker--tiny", "maker/tiny:../x", ""):
        with pytest.raises(CheckpointError, match="is not a valid model name"):
            remove(name)
    assert (model.path / WEIGHTS).is_file()


@pytest.mark.parametrize("path", ["../evil.json", "/etc/evil.json", "a/../../evil.json", "..\\evil.json"])
def test_a_hub_writes_nowhere_else(hub: Hub, path: str, tmp_path: Path) -> None:
    hub.names["generation_config.json"] = path
    with pytest.raises(CheckpointError, match="leads out of the directory"):
        pull("maker/tiny")
    assert not list(tmp_path.rglob("evil.json"))


def test_a_name_that_is_a_file_and_a_folder_is_refused_in_one_line(hub: Hub) -> None:
    hub.names["generation_config.json"] = "config.json/x.json"
    with pytest.raises(CheckpointError, match=r"lists config.json as a file and as a folder"):
        pull("maker/tiny")


def test_a_hub_replaces_no_manifest_and_fills_no_disk(hub: Hub, files: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (files / MANIFEST).write_text("{}")
    assert find("maker/tiny") is None
    usage = shutil.disk_usage
    monkeypatch.setattr(shutil, "disk_usage", lambda path: usage(path)._replace(free=1000))
    with pytest.raises(CheckpointError, match=r"takes .* more, and .* has 1000 B free"):
        pull("maker/tiny")
    monkeypatch.undo()


def test_one_gguf_file_of_a_repository_is_a_model_of_its_own(hub: Hub, tmp_path: Path) -> None:
    root = tmp_path / "gguf"
    (root / "more").mkdir(parents=True)
    for name in ("tiny-Q8_0.gguf", "more/tiny-Q4_K_M.gguf"):
        write_gguf(checkpoint("lfm2"), root / name)
    hub.files["maker/files"] = root
    pull("maker/files:Q4_K_M")
    assert [name for name, _ in hub.ranges] == ["more/tiny-Q4_K_M.gguf"]
    assert (resolve_model("maker/files:Q4_K_M") / "config.json").is_file()
    with Engine("maker/files:Q4_K_M", memory="16MiB"), pytest.raises(ModelInUseError):
        remove("maker/files:Q4_K_M")
    with pytest.raises(CheckpointError, match=r"no GGUF models .*Q5_K_M.*files are .*tiny-Q8_0"):
        pull("maker/files:Q5_K_M")
    with pytest.raises(CheckpointError, match=r"without config\.json.* by its type, maker/files:Q4_K_M"):
        pull("maker/files")


def test_what_the_hub_has_not_is_one_line(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    for name, revision, words in (
        ("maker/other", None, "the hub has no such model"),
        ("maker/tiny", "v9", "not this revision"),
    ):
        with pytest.raises(CheckpointError, match=words):
            pull(name, revision)
    monkeypatch.setattr(constants, "ENDPOINT", "http://127.0.0.1:9")
    assert main(["pull", "maker/tiny"]) == 2
    assert "the hub http://127.0.0.1:9 cannot be reached" in capsys.readouterr().err


def test_the_commands_show_what_is_there_and_what_is_wrong(
    hub: Hub, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(tmp_path / "hub"))
    assert main(["list"]) == 0
    assert "`weft pull owner/name` fetches one" in capsys.readouterr().out
    pull_a_part()
    (tmp_path / "hub" / "models--owner--cached" / "blobs").mkdir(parents=True)
    assert main(["list"]) == 0
    out = capsys.readouterr().out
    assert "partial" in out
    assert "owner/cached" in out
    assert main(["pull", "maker/tiny"]) == 0
    assert "maker/tiny pulled" in capsys.readouterr().out
    with (model_directory() / "maker--tiny" / WEIGHTS).open("r+b") as file:
        file.write(b"\x00\x00")
    assert main(["list"]) == 0
    assert main(["list", "--verify"]) == 1
    assert "does not have the checksum" in capsys.readouterr().out
    assert main(["pull", "maker/tiny", "--verify"]) == 0
    assert main(["list", "--verify"]) == 0
    assert main(["plan", "maker/tiny"]) == 0
    assert main(["rm", "maker/tiny"]) == 0
    assert main(["rm", "owner/cached"]) == 2
    assert "`hf cache rm model/owner/cached` removes it there" in capsys.readouterr().err


def test_a_cancelled_pull_asks_a_silent_hub_no_second_time(hub: Hub, monkeypatch: pytest.MonkeyPatch) -> None:
    """Its client tries six times, and waits for an answer each time."""
    asked: list[socket.socket] = []
    before: list[int] = []

    def is_cancelled() -> bool:
        if asked:
            before.append(len(asked))
        return bool(asked)

    monkeypatch.setattr(constants, "HF_HUB_DOWNLOAD_TIMEOUT", 0.2)
    with socket.create_server(("127.0.0.1", 0), backlog=64) as silent:
        monkeypatch.setattr(
            constants,
            "HUGGINGFACE_CO_URL_TEMPLATE",
            f"http://127.0.0.1:{silent.getsockname()[1]}/{{repo_id}}/{{revision}}/{{filename}}",
        )

        def accept() -> None:
            with contextlib.suppress(OSError):
                while True:
                    asked.append(silent.accept()[0])

        thread = threading.Thread(target=accept)
        thread.start()
        with pytest.raises(PullCancelledError):
            pull("maker/tiny", cancelled=is_cancelled)
        silent.shutdown(socket.SHUT_RDWR)
        thread.join()
    for one in asked:
        one.close()
    assert len(asked) - before[0] <= pulling._FILES_AT_ONCE, "more than the tries that were in flight"
