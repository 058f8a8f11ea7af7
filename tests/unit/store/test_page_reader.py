"""docs/store.md is enough: a reader written from it restores what the engine's store restores."""

from __future__ import annotations

import ast
import hashlib
import json
from pathlib import Path

from tests.unit.store import page_reader
from tests.unit.store.contents import event_of, fetched, identity, kv_of, opened, prompt, put, state_of, written
from weft.store import file_digests
from weft.store.identity import weights_digest


def test_the_reader_imports_nothing_of_weft() -> None:
    tree = ast.parse(Path(page_reader.__file__).read_text(encoding="utf-8"))
    modules = {node.module for node in ast.walk(tree) if isinstance(node, ast.ImportFrom)} | {
        alias.name for node in ast.walk(tree) if isinstance(node, ast.Import) for alias in node.names
    }
    assert not any((module or "").startswith("weft") for module in modules)


def test_a_reader_written_from_the_page_restores_every_prefix(tmp_path: Path) -> None:
    store = opened(tmp_path, accept_inexact=True)
    base = prompt(300)
    branch = [*base[:288], *prompt(90, 1)]
    for tokens in (base, branch, [*base, *prompt(400, 2)]):
        written(store, tokens)
    written(store, prompt(70, 3), salt="tenant")
    written(store, prompt(33, 4), exact=False)
    store.close()
    prefixes = page_reader.read_store(tmp_path)
    by_tokens = {prefix.tokens: prefix for prefix in prefixes}
    assert len(by_tokens) == len(prefixes) == 5
    for tokens in (base, branch, [*base, *prompt(400, 2)], prompt(33, 4)):
        prefix = by_tokens[tuple(tokens)]
        assert prefix.state == state_of(tokens)
        assert prefix.salt == bytes(16)
        assert prefix.namespace == identity().digest
        assert prefix.exact == (len(tokens) != 33)
    assert by_tokens[tuple(branch)].kv == kv_of(branch, 0, len(branch))
    salted = by_tokens[tuple(prompt(70, 3))]
    assert salted.salt == page_reader.salt_of(tmp_path, "tenant")
    assert salted.kv == kv_of(prompt(70, 3), 0, 70, "tenant")


def test_the_reader_and_the_store_agree_on_a_store_that_evicts_and_is_damaged(tmp_path: Path) -> None:
    store = opened(tmp_path, capacity_bytes=256 << 10, volume_bytes=256 << 10)
    for seed in range(30):
        ticket = put(store, prompt(256, seed))
        if ticket is not None:
            event_of(store, ticket)
    assert store.stats().evicted
    store.close()
    volume = tmp_path / "volumes" / "volume-00000"
    content = bytearray(volume.read_bytes())
    content[40960] ^= 1
    content[81920] ^= 1
    volume.write_bytes(content)
    readable = {prefix.tokens for prefix in page_reader.read_store(tmp_path)}
    again = opened(tmp_path, capacity_bytes=256 << 10, volume_bytes=256 << 10)
    hits = {tuple(prompt(256, seed)) for seed in range(30) if isinstance(fetched(again, prompt(256, seed)), tuple)}
    assert hits == readable
    assert 3 < len(hits) < 30
    again.close()


def test_the_digests_of_the_page_are_those_of_the_store(tmp_path: Path) -> None:
    opened(tmp_path / "store").close()
    file = next((tmp_path / "store" / "namespaces").iterdir())
    facts = json.loads(file.read_bytes())
    assert facts.pop("model") == "tiny"
    text = json.dumps(facts, sort_keys=True, separators=(",", ":")).encode("ascii")
    assert file.stem == hashlib.sha256(text).hexdigest()[:32] == identity().digest.hex()

    content = bytes(range(256)) * 2000
    files = [tmp_path / "model-2.safetensors", tmp_path / "model-1.safetensors"]
    files[0].write_bytes(content)
    files[1].write_bytes(content[1:])
    one = bytes.fromhex(file_digests.content_digest(files[0]))
    other = bytes.fromhex(file_digests.content_digest(files[1]))
    expected = hashlib.sha256(file_digests.ALGORITHM.encode() + other + one).hexdigest()
    assert weights_digest(files) == expected
    files[0].write_bytes(content[:-1] + b"?")
    assert weights_digest(files) != expected
