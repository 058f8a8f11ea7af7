"""A real server publishes KV events: an indexer predicts the cached tokens that each answer reports."""

from __future__ import annotations

import os
import shutil
import signal
from collections.abc import Iterator
from pathlib import Path
from random import Random
from typing import Any

import httpx
import msgspec
import pytest
import zmq

from tests.fixtures.adapters import factors, written
from tests.fixtures.checkpoints import checkpoint
from tests.oracle.test_replaced_weights import change_one_element
from tests.server.running import RunningServer, eventually, running_server
from tests.support.kv_indexer import Index, Subscriber, root_hash
from weft.adapters import read_adapter
from weft.server.banner import print_places
from weft.server.config import ServerConfig


class VllmEvent(msgspec.Struct, omit_defaults=True, tag=True):
    """The classes below have vLLM's fields and no others, as a reader of vLLM's events has them."""


class BlockStored(VllmEvent):
    block_hashes: list[bytes | int]
    parent_block_hash: bytes | int | None
    token_ids: list[int]
    block_size: int
    lora_id: int | None
    medium: str | None
    lora_name: str | None
    extra_keys: list[tuple[Any, ...] | None] | None = None
    group_idx: int | None = None
    kv_cache_spec_kind: str | None = None
    kv_cache_spec_sliding_window: int | None = None
    locality: str | None = None
    ownership: str | None = None


class BlockRemoved(VllmEvent):
    block_hashes: list[bytes | int]
    medium: str | None
    group_idx: int | None = None
    locality: str | None = None


class AllBlocksCleared(VllmEvent): ...


class VllmBatch(msgspec.Struct, array_like=True, omit_defaults=True):
    ts: float
    events: list[BlockStored | BlockRemoved | AllBlocksCleared]
    data_parallel_rank: int | None = None


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("kv-events")


@pytest.fixture(scope="module")
def adapter(home: Path) -> Path:
    tensors = {}
    for layer in range(4):
        tensors |= factors(f"model.layers.{layer}.mlp.down_proj", 64, 96, rank=4, seed=layer)
    return written(home / "adapter", tensors, r=4, lora_alpha=16)


def addresses(home: Path) -> tuple[str, str]:
    return f"ipc://{home}/events", f"ipc://{home}/replay"


@pytest.fixture(scope="module")
def server(home: Path, adapter: Path) -> Iterator[RunningServer]:
    events, replay = addresses(home)
    config = {"enable_kv_cache_events": True, "endpoint": events, "replay_endpoint": replay, "topic": "kv@pod@model"}
    engine = {
        "model": str(checkpoint("qwen3_5")),
        "memory": "2MB",
        "threads": 1,
        "max_model_len": 512,
        "lora": [f"law={adapter}"],
    }
    with running_server(
        "", engine=engine, server={"kv_events_config": msgspec.json.encode(config).decode()}
    ) as running:
        yield running


class Reader(Subscriber):
    """Reads each batch by vLLM's classes too."""

    kinds: set[str]

    def _apply(self, number: int, payload: bytes) -> bool:
        for event in msgspec.msgpack.decode(payload, type=VllmBatch).events:
            kind = event.kv_cache_spec_kind if isinstance(event, BlockStored) else ""
            self.kinds = {*getattr(self, "kinds", ()), f"{type(event).__name__} {kind}".strip()}
        return super()._apply(number, payload)


@pytest.fixture
def reader(home: Path) -> Iterator[Reader]:
    context = zmq.Context[zmq.Socket[bytes]]()
    yield Reader(context, *addresses(home), Index())
    context.destroy(linger=0)


def complete(server: RunningServer, prompt: list[int], **more: Any) -> int:
    """Return its cached tokens."""
    body = {"prompt": prompt, "max_tokens": 3, "temperature": 0, "ignore_eos": True, **more}
    answer: httpx.Response = server.post("/v1/completions", body)
    assert answer.is_success, answer.text
    cached: int = answer.json()["usage"]["prompt_tokens_details"]["cached_tokens"]
    return cached


def up_to_date(server: RunningServer, reader: Reader) -> Index:
    """Return the index once the engine has closed its answers: it does so in the step after the last token."""
    for _ in range(2):
        server.get("/v1/cache")
    reader.catch_up()
    return reader.index


def test_cached_tokens_are_those_that_events_predict(server: RunningServer, reader: Reader, adapter: Path) -> None:
    chance = Random(7)
    texts = [[chance.randrange(3, 200) for _ in range(chance.randint(40, 300))] for _ in range(6)]
    digest = read_adapter("law", adapter).digest
    hits = []
    for number in range(60):
        text = chance.choice(texts)
        prompt = [*text[: chance.randint(20, len(text))], *[chance.randrange(3, 200) for _ in range(9)]]
        model, salt = chance.choice(("default", "law")), chance.choice(("", "", "tenant"))
        index = up_to_date(server, reader)
        root = root_hash(salt, digest if model == "law" else "")
        expected = index.predict(prompt, root)
        found = complete(server, prompt, model=model, **({"cache_salt": salt} if salt else {}))
        assert found == expected, f"request {number}"
        hits.append(found)
        texts[chance.randrange(len(texts))] = prompt[:300]
    assert sum(map(bool, hits)) > 10
    assert {"BlockStored full_attention", "BlockStored mamba", "BlockRemoved"} <= reader.kinds
    metrics = server.get("/metrics").text
    assert "kv_event_batches_total" in metrics
    assert "kv_event_replays_total" in metrics


def test_other_weights_leave_nothing_that_is_predicted(server: RunningServer, reader: Reader, home: Path) -> None:
    prompt = list(range(3, 150))
    complete(server, prompt)
    assert up_to_date(server, reader).predict(prompt) > 0
    other = shutil.copytree(checkpoint("qwen3_5"), home / "other")
    change_one_element(other)
    assert server.post("/update_weights", {"path": str(other), "weight_version": "two"}).is_success
    assert not up_to_date(server, reader).blocks
    assert complete(server, prompt) == reader.index.predict(prompt) == 0


def test_an_engine_that_was_replaced_is_followed_from_its_first_batch(server: RunningServer, reader: Reader) -> None:
    prompt = list(range(5, 160))
    complete(server, prompt)
    assert up_to_date(server, reader).predict(prompt) > 0
    os.kill(server.engine_pid(), signal.SIGKILL)
    assert eventually(lambda: server.get("/health").json()["status"] == "degraded")
    assert eventually(lambda: server.get("/health").json()["status"] == "ok", 120)
    assert up_to_date(server, reader).predict(prompt) == complete(server, prompt) == 0
    assert up_to_date(server, reader).predict(prompt) == complete(server, prompt) > 0


@pytest.mark.parametrize(
    ("more", "sentence"),
    [
        ({"prefix_cache": False}, "--kv-events-config needs the prefix cache, and --no-prefix-cache turns it off"),
        ({}, "--kv-events-config: {endpoint}: No such file or directory"),
    ],
)
def test_a_start_that_cannot_publish_ends_with_a_sentence(tmp_path: Path, more: dict[str, Any], sentence: str) -> None:
    endpoint = f"ipc://{tmp_path}/no/such/folder/events"
    config = msgspec.json.encode({"enable_kv_cache_events": True, "endpoint": endpoint}).decode()
    engine = {"model": str(checkpoint("qwen3_5")), "memory": "2MB", "threads": 1, **more}
    with running_server(
        "", engine=engine, server={"kv_events_config": config}, wait_for=sentence.format(endpoint=endpoint)
    ) as running:
        assert running.exit_code() == 2


@pytest.mark.parametrize(
    ("endpoint", "replay", "named"),
    [
        ("tcp://*:5557", "tcp://[::1]:5558", ["tcp://*:5557"]),
        ("tcp://[::1]:5557", "tcp://*:5558", ["tcp://*:5558"]),
        ("tcp://router:5557", None, ["tcp://router:5557"]),
        ("tcp://127.0.0.1:5557", "tcp://[::1]:5558", []),
        ("ipc:///run/weft/events", "ipc:///run/weft/replay", []),
    ],
)
def test_the_start_warns_of_addresses_that_others_reach(endpoint: str, replay: str | None, named: list[str]) -> None:
    text = {"enable_kv_cache_events": True, "endpoint": endpoint, "replay_endpoint": replay}
    config = ServerConfig(kv_events_config=msgspec.json.encode(text).decode())
    assert config.open_event_addresses() == named
    lines: list[str] = []
    print_places(lambda text="", style="": lines.append(text), "http://127.0.0.1:8000", "", config)
    warned = [line for line in lines if "reads the tokens of all prompts" in line]
    assert [all(address in line for address in named) for line in warned] == [True] * bool(named)
    assert ServerConfig().open_event_addresses() == []
