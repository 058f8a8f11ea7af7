"""Models that come to this machine's disk while a server runs: pulled, or uploaded by Ollama's client."""

from __future__ import annotations

import hashlib
import os
import shutil
from collections.abc import Iterator
from pathlib import Path

import httpx
import ollama
import pytest
from gguf import GGUFWriter

from tests.fixtures.checkpoints import checkpoint
from tests.server.running import RunningServer, eventually, running_server
from tests.server.test_several_models import scripted
from tests.support.gguf_files import split, write_gguf
from weft.errors import CheckpointError, ConfigError, RequestError
from weft.models import blobs, local
from weft.models.gguf.view import stored_tensors
from weft.models.hub import resolve_model
from weft.models.local import Manifest, ModelFile, write_manifest
from weft.planning.together import ModelNeed, share_of

GGUF_OF = "lfm2"


@pytest.fixture(scope="module")
def gguf(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return write_gguf(checkpoint(GGUF_OF), tmp_path_factory.mktemp("gguf") / "tiny.gguf")


@pytest.fixture
def models(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("WEFT_MODEL_DIR", str(tmp_path / "models"))
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "cache"))
    return tmp_path / "models"


def upload(data: bytes, *, digest: str | None = None, bytes_max: int = 1 << 30) -> str:
    digest = digest or hashlib.sha256(data).hexdigest()
    coming = blobs.Upload(digest, bytes_max)
    try:
        coming.write(data)
        coming.finish()
    finally:
        coming.close()
    return digest


def test_an_upload_is_kept_if_its_bytes_have_the_digest_and_nothing_else_stays(models: Path) -> None:
    digest = upload(b"weights")
    assert (blobs.blob(digest) or Path()).read_bytes() == b"weights"
    with pytest.raises(RequestError, match=r"the file has the digest sha256:.*, and not the one"):
        upload(b"other bytes", digest="0" * 64)
    with pytest.raises(blobs.BlobError, match=r"the limit is 4 B \(limits.blob_size\)"):
        upload(b"more bytes", bytes_max=4)
    coming = blobs.Upload("0" * 64, 1 << 62)
    with pytest.raises(blobs.BlobError, match=r"and .* has .* free"):
        coming.check_size(1 << 61)
    coming.close()
    with pytest.raises(RequestError, match="it is sha256: and 64 hexadecimal digits"):
        blobs.read_digest("sha256:../../etc/passwd", param="digest")
    killed = models / ".blobs" / f"sha256-{'1' * 64}.abcd.part"
    killed.write_bytes(b"half")
    assert {path.name for path in (models / ".blobs").iterdir()} == {f"sha256-{digest}", killed.name}
    coming = blobs.Upload("2" * 64, 9)
    assert not killed.exists(), "the next upload removes what a killed server left"
    os.utime(models / ".blobs" / f"sha256-{digest}", (0, 0))
    upload(b"new")
    assert blobs.blob(digest) is None, "after a day an upload goes"
    assert len(list((models / ".blobs").glob("*.part"))) == 1, "one that comes stays"
    coming.close()


def test_a_model_is_made_of_an_uploaded_gguf_file_alone(models: Path, gguf: Path) -> None:
    digest = upload(gguf.read_bytes())
    made = blobs.create_model("mario", {"any.gguf": digest})
    assert (made.name, made.state) == ("mario", "whole")
    assert local.damage(made) == ""
    assert blobs.create_model("mario", {"any.gguf": digest}).state == "whole", "in place of the one before"
    with pytest.raises(RequestError, match=r"which was not uploaded: POST /api/blobs/sha256:000"):
        blobs.create_model("luigi", {"any.gguf": "0" * 64})
    bad = upload(b"no weights at all")
    with pytest.raises(CheckpointError, match="not a usable GGUF file"):
        blobs.create_model("luigi", {"any.gguf": bad})
    assert [path.name for path in models.iterdir() if not path.name.startswith(".")] == ["mario"]


def test_a_model_in_several_files_needs_all_of_them_and_keeps_a_projector(
    models: Path, gguf: Path, tmp_path: Path
) -> None:
    whole = tmp_path / "whole.gguf"
    whole.write_bytes(gguf.read_bytes())
    parts = split(whole, 3)
    digests = {part.name: upload(part.read_bytes()) for part in parts}
    projector = tmp_path / "clip.gguf"
    writer = GGUFWriter(projector, "clip")
    writer.write_header_to_file()
    writer.write_kv_data_to_file()
    writer.write_tensors_to_file()
    writer.close()
    made = blobs.create_model("mario", {**digests, projector.name: upload(projector.read_bytes())})
    assert [file.path for file in made.manifest.files] == ["mmproj.gguf", *sorted(part.name for part in parts)]
    assert local.damage(made) == ""
    assert stored_tensors(resolve_model("mario"))[0].keys() == stored_tensors(resolve_model(whole))[0].keys()
    first, *others = digests
    with pytest.raises(CheckpointError, match=r"whole-00001-of-00003\.gguf: the file is missing"):
        blobs.create_model("luigi", {name: digests[name] for name in others})
    with pytest.raises(RequestError, match=r"names end in -00001-of-00002\.gguf and so on; 'b\.gguf' does not"):
        blobs.create_model("luigi", {first: digests[first], "b.gguf": digests[others[0]]})
    with pytest.raises(RequestError, match=r"'\.\.-00001-of-00002\.gguf' does not"):
        blobs.create_model("luigi", {"x/..-00001-of-00002.gguf": digests[first], others[0]: digests[others[0]]})
    assert [path.name for path in models.iterdir() if not path.name.startswith(".")] == ["mario"]


def test_a_model_beside_others_that_are_not_known_gets_its_weights_and_one_arena() -> None:
    assert share_of(ModelNeed("a", 10, 5), 100) == 15
    assert share_of(ModelNeed("a", 90, 50), 100) == 100
    with pytest.raises(ConfigError, match="the weights of a take some 100 B, and --memory"):
        share_of(ModelNeed("a", 100, 5), 100)


@pytest.fixture(scope="module")
def server(tmp_path_factory: pytest.TempPathFactory) -> Iterator[RunningServer]:
    root = tmp_path_factory.mktemp("pulled")
    with running_server(
        "build",
        engine={"memory": "60MB", "max_model_len": 512},
        models=(scripted(root, "one"),),
        server={
            "pulled": True,
            "name_store": str(root / "names.json"),
            "max_body_mb": 1,
            "blob_size": "8MB",
            "body_timeout": 1.0,
            "keep_alive": "0",
        },
        environment={"WEFT_MODEL_DIR": str(root / "models"), "XDG_CACHE_HOME": str(root / "cache")},
    ) as running:
        running.root = root  # type: ignore[attr-defined]
        yield running


def test_a_model_of_an_uploaded_file_is_served_at_once_and_gone_with_its_file(
    server: RunningServer, gguf: Path
) -> None:
    client = ollama.Client(host=server.url)
    digest = client.create_blob(gguf)
    assert client.create_blob(gguf) == digest, "the client sends it again"
    assert server._http.head(f"{server.url}/api/blobs/{digest}").status_code == 200
    assert server._http.head(f"{server.url}/api/blobs/sha256:{'0' * 64}").status_code == 404
    lines = [line.status for line in client.create(model="tiny", files={"tiny.gguf": digest}, stream=True)]
    assert lines == ["tiny is on disk", "success"]
    parts = split(shutil.copy(gguf, server.root / "split.gguf"), 2)  # type: ignore[attr-defined]
    sent = {part.name: client.create_blob(part) for part in parts}
    assert client.create(model="split", files=sent).status == "success"
    assert "split" in [one.model for one in client.list().models]
    client.delete("split")
    assert client.create(model="poet", files={"tiny.gguf": digest}, system="You are a poet.").status == "success"
    assert [one.model for one in client.list().models] == ["one", "tiny", "poet:gguf", "poet"]
    assert client.show("poet").modelfile.startswith("FROM poet:gguf")
    cards = {card["id"]: card["state"] for card in server.get("/v1/models").json()["data"]}
    assert cards["tiny"] == "absent", "it is loaded when it is asked for"
    client.delete("tiny")
    assert [one.model for one in client.list().models] == ["one", "poet:gguf", "poet"]
    for files, words in (
        ({"a": f"sha256:{'0' * 64}"}, "was not uploaded"),
        ({"a": digest, "b": digest}, "files names 2 files of one model, whose names end in -00001-of-00002.gguf"),
        ({"a": "x"}, "64 hexadecimal digits"),
    ):
        with pytest.raises(ollama.ResponseError, match=words):
            client.create(model="luigi", files=files)


def test_a_pull_of_another_process_is_served_without_a_restart(server: RunningServer, gguf: Path) -> None:
    place = server.root / "models" / "maker--small"  # type: ignore[attr-defined]
    part = place.with_name(place.name + ".part")
    part.mkdir(parents=True)
    (part / "model.gguf").write_bytes(gguf.read_bytes())
    file = ModelFile(path="model.gguf", source="model.gguf", size=gguf.stat().st_size, sha256="0" * 64)
    write_manifest(part, Manifest(name="maker/small", revision="", commit="1", pulled_s=1.0, files=[file]))
    part.rename(place)

    def names() -> list[str]:
        return [card["id"] for card in server.get("/v1/models").json()["data"]]

    assert eventually(lambda: "maker/small" in names())
    local.discard(place)
    assert eventually(lambda: "maker/small" not in names())


def test_an_upload_may_be_larger_and_slower_than_a_body_and_has_a_limit_of_its_own(server: RunningServer) -> None:
    data = os.urandom(3_000_000)
    digest = hashlib.sha256(data).hexdigest()

    def slowly() -> Iterator[bytes]:
        for at in range(0, len(data), 500_000):
            yield data[at : at + 500_000]
            eventually(lambda: False, 0.3)

    sent = server._http.post(f"{server.url}/api/blobs/sha256:{digest}", content=slowly())
    assert sent.status_code == 201, sent.text
    assert server.metric("http_buffered_bytes") == 0
    large = server.post(f"/api/blobs/sha256:{'0' * 64}", content=bytes(9_000_000))
    assert (large.status_code, "limits.blob_size" in large.text) == (413, True)
    other = server.post("/api/chat", content=bytes(3_000_000))
    assert other.status_code == 413, "the control: another body of that size is refused"
    folder = server.root / "models" / ".blobs"  # type: ignore[attr-defined]
    assert eventually(lambda: not list(folder.glob("*.part")))
    with pytest.raises(httpx.HTTPError), httpx.Client() as client:
        client.post(f"{server.url}/api/blobs/sha256:{'0' * 64}", content=breaking())
    assert eventually(lambda: not list(folder.glob("*.part"))), "a client that leaves leaves nothing"


def breaking() -> Iterator[bytes]:
    yield bytes(100_000)
    raise httpx.WriteError("the client leaves")
