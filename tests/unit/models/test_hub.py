"""A model by name: directories first, then the real huggingface_hub against a cache that the test makes."""

from __future__ import annotations

import shutil
from pathlib import Path

import httpx
import pytest
from huggingface_hub import constants, errors

from tests.fixtures.checkpoints import checkpoint
from tests.support.gguf_files import write_gguf
from tests.support.hub_server import hub_server
from weft.cli.main import main
from weft.errors import CheckpointError
from weft.models.hub import files_of_type, resolve_adapter, resolve_model
from weft.models.loading import load_model

COMMIT = "0123456789abcdef0123456789abcdef01234567"


@pytest.fixture
def hub_cache(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A hub cache that holds maker/tiny (main and tag v1), with the hub itself out of reach."""
    cache = tmp_path / "hub"
    repository = cache / "models--maker--tiny"
    shutil.copytree(checkpoint("lfm2"), repository / "snapshots" / COMMIT)
    for ref in ("main", "v1"):
        (repository / "refs").mkdir(exist_ok=True)
        (repository / "refs" / ref).write_text(COMMIT)
    monkeypatch.setattr(constants, "HF_HUB_CACHE", str(cache))
    monkeypatch.setattr(constants, "HF_HUB_OFFLINE", True)
    return cache


def test_a_directory_is_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    directory = checkpoint("lfm2")
    assert resolve_model(str(directory)) == directory.resolve()
    monkeypatch.chdir(directory.parent)
    assert resolve_model("lfm2") == directory.resolve()


def test_a_hub_model_that_ranks_do_not_divide_is_said_before_anything_listens(
    hub_cache: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    for file in (hub_cache / "models--maker--tiny" / "snapshots" / COMMIT).iterdir():
        if file.name != "config.json":
            file.unlink()
    assert main(["serve", "maker/tiny", "--tp", "3"]) == 2
    captured = capsys.readouterr()
    assert captured.err.startswith("error: --tp is 3, which does not divide this model")
    assert "listening" not in captured.out


@pytest.mark.parametrize("reachable", [True, False])
def test_an_adapter_of_the_hub_that_is_a_pickle_is_named_as_one(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, reachable: bool
) -> None:
    files = tmp_path / "adapter"
    files.mkdir()
    (files / "adapter_config.json").write_text("{}")
    (files / "adapter_model.bin").write_bytes(b"not read")
    refused = r"maker/adapter: has its weights as a pickle, adapter_model\.bin, which can run any code"
    if not reachable:
        repository = hub_cache / "models--maker--adapter"
        shutil.copytree(files, repository / "snapshots" / COMMIT)
        (repository / "refs").mkdir()
        (repository / "refs" / "main").write_text(COMMIT)
        with pytest.raises(CheckpointError, match=refused):
            resolve_adapter("maker/adapter")
        return
    with hub_server({"maker/adapter": files}) as hub:
        monkeypatch.setattr(constants, "HF_HUB_OFFLINE", False)
        monkeypatch.setattr(constants, "ENDPOINT", hub.endpoint)
        monkeypatch.setattr(
            constants, "HUGGINGFACE_CO_URL_TEMPLATE", hub.endpoint + "/{repo_id}/resolve/{revision}/{filename}"
        )
        with pytest.raises(CheckpointError, match=refused):
            resolve_adapter("maker/adapter")
        (files / "adapter_model.bin").unlink()
        with pytest.raises(CheckpointError, match=r"maker/adapter: adapter_model\.safetensors is missing"):
            resolve_adapter("maker/adapter")
    assert not list(hub_cache.rglob("adapter_model.bin")), "a pickle is not even fetched"


def test_a_hub_name_is_found_in_the_cache_and_loads(hub_cache: Path) -> None:
    found = resolve_model("maker/tiny")
    assert found == hub_cache / "models--maker--tiny" / "snapshots" / COMMIT
    assert load_model(found).spec.family == "lfm2"
    assert resolve_model("maker/tiny", revision="v1") == found
    assert resolve_model("maker/tiny", revision=COMMIT) == found


@pytest.mark.parametrize(
    ("name", "revision", "words"),
    [
        ("maker/other", None, ["'maker/other'", "cache", "cannot be reached"]),
        ("maker/tiny", "v2", ["'maker/tiny'", "'v2'", "cannot be reached"]),
        ("LFM2-350M", None, ["'LFM2-350M'", "cannot be reached", "owner/name, such as LiquidAI/LFM2-350M"]),
        ("maker//tiny", None, ["no such directory"]),
        ("./missing", None, ["missing", "no such directory"]),
        ("/nowhere/at/all", None, ["/nowhere/at/all", "no such directory"]),
        ("bad name!", None, ["'bad name!'", "not a hub name"]),
    ],
)
def test_what_cannot_be_resolved_says_what_was_tried(
    hub_cache: Path, name: str, revision: str | None, words: list[str]
) -> None:
    with pytest.raises(CheckpointError) as caught:
        resolve_model(name, revision)
    assert all(word in caught.value.message for word in words), caught.value.message


def test_a_directory_or_hub_model_without_config_is_refused(hub_cache: Path, tmp_path: Path) -> None:
    with pytest.raises(CheckpointError, match=r"no config\.json"):
        resolve_model(tmp_path)
    (hub_cache / "models--maker--tiny" / "snapshots" / COMMIT / "config.json").unlink()
    with pytest.raises(CheckpointError, match=r"without config\.json"):
        resolve_model("maker/tiny")
    with pytest.raises(CheckpointError, match="is a file"):
        resolve_model(checkpoint("lfm2") / "config.json")


@pytest.mark.parametrize(
    ("raised", "words"),
    [
        (errors.RepositoryNotFoundError, "no such model"),
        (errors.GatedRepoError, "gated"),
        (errors.RevisionNotFoundError, "not this revision"),
        (errors.HfHubHTTPError, "did not deliver"),
    ],
)
def test_answers_of_the_hub_become_errors_that_say_what_to_do(
    raised: type[errors.HfHubHTTPError], words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    def download(name: str, **options: object) -> str:
        raise raised("no", response=httpx.Response(404, request=httpx.Request("GET", "https://hub.invalid")))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    with pytest.raises(CheckpointError, match=words):
        resolve_model("maker/tiny")


def test_only_what_serving_reads_is_fetched(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: dict[str, object] = {}

    def download(name: str, **options: object) -> str:
        asked.update(options, name=name)
        return str(checkpoint("lfm2"))

    monkeypatch.setattr("huggingface_hub.snapshot_download", download)
    resolve_model("maker/tiny", "v1")
    assert (asked["name"], asked["revision"]) == ("maker/tiny", "v1")
    assert "*.safetensors" in asked["allow_patterns"]  # type: ignore[operator]
    assert not any("bin" in pattern for pattern in asked["allow_patterns"])  # type: ignore[attr-defined]


def hub_gguf(hub_cache: Path, *names: str) -> Path:
    """The cached snapshot, with a GGUF file under each name: links to digests, as that cache has them."""
    snapshot = hub_cache / "models--maker--tiny" / "snapshots" / COMMIT
    for number, name in enumerate(names):
        blob = hub_cache / "models--maker--tiny" / "blobs" / f"{number:064}"
        blob.parent.mkdir(exist_ok=True)
        write_gguf(checkpoint("lfm2"), blob)
        (snapshot / name).parent.mkdir(exist_ok=True)
        (snapshot / name).symlink_to(blob)
    return snapshot


def test_a_gguf_file_of_the_hub_is_named_by_its_type(
    hub_cache: Path, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    hub_gguf(hub_cache, "tiny-Q8_0.gguf", "tiny-Q4_K_M.gguf", "mmproj-tiny-Q8_0.gguf")
    view = resolve_model("maker/tiny:q8_0")
    assert (view / "tiny-Q8_0.gguf").resolve().name == f"{0:064}"
    assert load_model(view).spec.family == "lfm2"
    with pytest.raises(CheckpointError, match=r"no GGUF models .*Q5_K_M.*files are .*tiny-Q4_K_M.gguf"):
        resolve_model("maker/tiny:Q5_K_M")


def test_a_type_is_a_word_of_the_name_and_parts_are_one_model() -> None:
    files = [
        "README.md",
        "a-Q4_K_M.gguf",
        "a-Q4_K_S.gguf",
        "a-UD-Q4_K_XL.gguf",
        "a-Q8_0.gguf",
        "a-UD-Q8_0.gguf",
        "BF16/a-BF16-00002-of-00002.gguf",
        "BF16/a-BF16-00001-of-00002.gguf",
        "b.IQ4_XS.gguf",
        "c-Q2_K.gguf",
        "d-Q2_K.gguf",
    ]
    assert files_of_type(files, "Q4_K") == []
    assert files_of_type(files, "Q4_K_XL") == [["a-UD-Q4_K_XL.gguf"]]
    assert files_of_type(files, "Q8_0") == [["a-Q8_0.gguf"]]
    assert files_of_type(files, "UD-Q8_0") == [["a-UD-Q8_0.gguf"]]
    assert files_of_type(files, "iq4_xs") == [["b.IQ4_XS.gguf"]]
    assert files_of_type(files, "BF16") == [["BF16/a-BF16-00001-of-00002.gguf", "BF16/a-BF16-00002-of-00002.gguf"]]
    assert len(files_of_type(files, "Q2_K")) == 2
