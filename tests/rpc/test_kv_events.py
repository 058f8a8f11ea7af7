"""KV events say where a request resumes: an indexer that has nothing else predicts the hit of each request."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from random import Random
from typing import Any

import msgspec
import pytest
import zmq

from tests.arch.rules import ROOT
from tests.fixtures.memory_store import Contents, MemoryStore
from tests.support import kv_indexer
from tests.support.kv_indexer import Index, Subscriber, root_hash
from tests.unit.engine.rig import VOCAB_SIZE, Rig
from weft.adapters import Adapter, salt_parts, salted
from weft.engine.adapters import AdapterPool
from weft.engine.sleeper import Sleeper
from weft.errors import ConfigError
from weft.kv_events import BlockRemoved, BlockStored, KvEvent, KvEventsConfig, read_config
from weft.request import Request, SamplingParams
from weft.rpc import kv_publisher
from weft.rpc.kv_publisher import KvEventFeed

Context = zmq.Context[zmq.Socket[bytes]]
ADAPTERS = [
    Adapter(name=name, directory="", digest=digest * 64, rank=8) for name, digest in (("law", "a"), ("med", "b"))
]


@pytest.fixture
def context() -> Iterator[Context]:
    context = zmq.Context[zmq.Socket[bytes]]()
    yield context
    context.destroy(linger=0)


@dataclass
class _Loaded:
    adapter: Adapter
    held_bytes: int = 1


class _Host:
    def read_adapter(self, adapter: Adapter) -> _Loaded:
        return _Loaded(adapter)

    def install_adapter(self, loaded: Any) -> None: ...

    def remove_adapter(self, loaded: Any) -> None: ...


class InTurn(Subscriber):
    """A subscriber in the thread of the feed, which answers when it asks."""

    def __init__(self, context: Any, feed: KvEventFeed, index: Index) -> None:
        assert feed.replay is not None
        sockets = feed._publisher, feed.replay
        super().__init__(context, *(socket.getsockopt_string(zmq.LAST_ENDPOINT) for socket in sockets), index)
        self.feed, self.asked = feed, 0

    def ask(self) -> None:
        super().ask()
        self.asked += 1
        assert self.feed.replay is not None
        assert self.feed.replay.poll(5000)
        self.feed.answer()


@dataclass
class Walk:
    """Requests of a rig, and the hit that an indexer expects of each one when it is admitted. ``loses``: makes of an
    event what is published of it. ``hears``: whether a batch arrives; others are lost on the way."""

    context: Context
    seed: int = 0
    pages_per_frame: int = 5
    slots_per_frame: int = 2
    frame_count: int = 60
    store: MemoryStore | None = None
    buffer_steps: int = 10_000
    loses: Callable[[KvEvent], KvEvent | None] = lambda event: event
    hears: Callable[[], bool] = lambda: True
    predicted: dict[str, int] = field(default_factory=dict)
    hits: dict[str, int] = field(default_factory=dict)

    def __post_init__(self) -> None:
        self.chance = Random(self.seed)
        self.rig = Rig(
            pages_per_frame=self.pages_per_frame,
            slots_per_frame=self.slots_per_frame,
            frame_count=self.frame_count,
            cache=True,
            store=self.store,
        )
        self.rig.core.adapters = AdapterPool(_Host(), budget_bytes=4, rank_max=64)
        config = KvEventsConfig(
            endpoint=f"inproc://events{id(self)}",
            replay_endpoint=f"inproc://replay{id(self)}",
            buffer_steps=self.buffer_steps,
        )
        self.feed = KvEventFeed(self.rig.core.memory, self.context, config)
        follower = self.feed._follower
        take = follower.take
        follower.take = lambda: [kept for event in take() if (kept := self.loses(event)) is not None]  # type: ignore[method-assign]
        self.index = Index(states=self.slots_per_frame > 0)
        self.subscriber = InTurn(self.context, self.feed, self.index)
        self.subscriber.catch_up()
        self.documents = [self._tokens(self.chance.randint(20, 400)) for _ in range(12)]
        self.waiting: dict[int, tuple[str, list[int], int]] = {}

    def _tokens(self, count: int) -> list[int]:
        return [self.chance.randrange(VOCAB_SIZE) for _ in range(count)]

    def prompt(self) -> list[int]:
        document = self.chance.choice(self.documents)
        prompt = document[: self.chance.choice((len(document), self.chance.randint(1, len(document))))]
        prompt = [*prompt, *self._tokens(self.chance.choice((1, 3, 20, 70)))]
        if self.chance.random() < 0.3:
            self.documents[self.chance.randrange(len(self.documents))] = prompt[:400]
        return prompt

    def submit(self, name: str) -> None:
        core, prompt = self.rig.core, self.prompt()
        adapter = self.chance.choice((None, None, None, *ADAPTERS))
        salt = self.chance.choice(("", "", "tenant"))
        if adapter is not None:
            self.feed.name(adapter)
            core.adapters.load(adapter)
        sampling = SamplingParams(temperature=0.0, max_tokens=self.chance.choice((1, 1, 2, 24)), ignore_eos=True)
        core.submit(Request(request_id=name, prompt_tokens=prompt, cache_salt=salt, adapter=adapter, sampling=sampling))
        root = root_hash(salt, "" if adapter is None else adapter.digest)
        self.waiting[core.streams.by_request[name][0]] = name, prompt, root

    def step(self) -> None:
        """Read the index after the step: it has all events that were published before it."""
        plans = len(self.rig.plans)
        for event in self.rig.core.step():
            self.hits.setdefault(event.request_id, event.cached_tokens)
        assert self.rig.core.failure is None, self.rig.core.failure
        for admission in (one for plan in self.rig.plans[plans:] for one in plan.admissions):
            if admission.seq in self.waiting:  # else it was preempted
                name, prompt, root = self.waiting.pop(admission.seq)
                self.predicted[name] = self.index.predict(prompt, root)
        del self.rig.plans[:]
        self.publish()

    def publish(self) -> None:
        before = self.feed.number
        self.feed.publish()
        if self.hears():
            while self.subscriber.expected < self.feed.number > before:
                self.subscriber.read(5000)
        else:
            for _ in range(self.feed.number - before):
                assert self.subscriber.events.poll(5000)
                self.subscriber.events.recv_multipart()

    def run(self, requests: int) -> Walk:
        for number in range(len(self.hits), len(self.hits) + requests):
            self.submit(f"r{number}")
            while self.rig.core.has_work and (self.rig.core.live_count > 2 or self.chance.random() < 0.7):
                self.step()
            if number % 601 == 600:
                self.drain()
                self.refit()
        self.drain()
        assert set(self.hits) == set(self.predicted)
        return self

    def drain(self) -> None:
        while self.rig.core.has_work:
            self.step()

    def refit(self) -> None:
        """Do the part of a refit that memory sees (``Sleeper.refit``)."""
        sleeper = Sleeper(self.rig.core)
        sleeper.sleep(2)
        sleeper.wake_up()
        self.publish()

    @property
    def wrong(self) -> int:
        return sum(self.predicted[name] != hit for name, hit in self.hits.items())


def stored() -> MemoryStore:
    return MemoryStore(Contents(Rig().core.memory.plan.page_bytes))


def test_an_indexer_predicts_the_hit_of_every_request(context: Context) -> None:
    walk = Walk(context, frame_count=50, store=stored()).run(2500)
    assert walk.wrong == 0
    stats, hits = walk.rig.core.stats(), [hit for hit in walk.hits.values() if hit]
    assert stats.store is not None
    assert len(hits) > 500
    assert sum(hit % 16 > 0 for hit in hits) > 100, "states after a part of a page"
    assert stats.memory.cache.evicted_states > 500
    assert stats.memory.cache.evicted_pages > 500
    assert stats.store.restores.restores > 50
    assert walk.subscriber.asked == 1, "the start alone"


@pytest.mark.parametrize(("pages", "slots"), [(5, 0), (0, 2)])
def test_models_with_one_kind_of_layers_are_predicted_too(context: Context, pages: int, slots: int) -> None:
    walk = Walk(context, pages_per_frame=pages, slots_per_frame=slots).run(500)
    assert walk.wrong == 0
    assert sum(map(bool, walk.hits.values())) > 100


def no_states(event: KvEvent) -> KvEvent | None:
    return None if isinstance(event, BlockStored) and event.group_idx == 1 else event


def fewer_removals(group: int) -> Callable[[KvEvent], KvEvent]:
    """Lose the first hash of every removal of ``group``."""

    def loses(event: KvEvent) -> KvEvent:
        if isinstance(event, BlockRemoved) and event.group_idx == group:
            return msgspec.structs.replace(event, block_hashes=event.block_hashes[1:])
        return event

    return loses


@pytest.mark.parametrize(("loses", "slots"), [(no_states, 2), (fewer_removals(1), 2), (fewer_removals(0), 0)])
def test_without_an_event_the_prediction_is_wrong(
    context: Context, loses: Callable[[KvEvent], KvEvent | None], slots: int
) -> None:
    walk = Walk(context, slots_per_frame=slots, loses=loses).run(500)
    assert walk.wrong > 0


def test_lost_batches_are_replayed(context: Context) -> None:
    chance = Random(1)
    walk = Walk(context, hears=lambda: chance.random() < 0.3).run(500)
    assert walk.subscriber.asked > 50
    assert walk.feed.stats().resets == 0
    walk.subscriber.catch_up()
    again = Walk(context, hears=lambda: True).run(500)
    assert (walk.index.blocks, walk.index.states) == (again.index.blocks, again.index.states)
    assert walk.wrong > again.wrong == 0, "the control: until the next batch arrives, a lost one is missed"


def test_a_batch_that_is_kept_no_longer_brings_everything_anew(context: Context) -> None:
    walk = Walk(context, buffer_steps=3).run(100)
    late = InTurn(context, walk.feed, Index())
    late.catch_up()
    assert walk.feed.stats().resets > 0
    assert late.index.states == walk.index.states
    assert late.index.blocks == walk.index.blocks
    walk.subscriber.read(5000)
    assert late.index.states == walk.index.states, "those that had everything have it still"
    walk.run(100)
    assert walk.wrong == 0


def test_a_subscriber_of_an_engine_that_has_ended_gets_everything_of_the_next_one(context: Context) -> None:
    walk = Walk(context).run(60)
    after = Walk(context, seed=1).run(20)
    assert after.feed.number < walk.subscriber.expected
    moved = InTurn(context, after.feed, walk.index)
    moved.expected, moved.written_s = walk.subscriber.expected, walk.subscriber.written_s
    moved.catch_up()
    assert (moved.index.blocks, moved.index.states) == (after.index.blocks, after.index.states)


def test_kept_batches_are_bounded_in_bytes(context: Context, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kv_publisher, "BUFFER_BYTES_MAX", 4000)
    walk = Walk(context).run(100)
    assert 0 < walk.feed._buffer_bytes <= 4000
    assert walk.feed._buffer_bytes == sum(len(payload) for _, payload in walk.feed._buffer)


def test_the_page_shows_the_indexer_that_runs_here() -> None:
    code = Path(kv_indexer.__file__).read_text(encoding="utf-8").split("\n", 2)[2]
    assert f"```python\n{code}```\n" in (ROOT / "docs" / "kv-events.md").read_text(encoding="utf-8")


def test_nothing_is_noted_without_a_follower() -> None:
    rig = Rig(cache=True)
    tree = rig.core.memory.prefix_tree
    assert tree.watches == []
    follower = rig.core.memory.follow_blocks(str)
    assert len(tree.watches) == 1
    follower.watch.stop()
    assert tree.watches == []


@pytest.mark.parametrize("cache_salt", ["", "tenant", "\0odd", "\0\0", "a\0b"])
@pytest.mark.parametrize("adapter", [None, ADAPTERS[0]])
def test_the_parts_of_a_salt_come_back(adapter: Adapter | None, cache_salt: str) -> None:
    digest = None if adapter is None else adapter.digest
    assert salt_parts(salted(adapter, cache_salt)) == (digest, cache_salt)


def test_blocks_say_their_adapter_and_their_salt(context: Context) -> None:
    walk = Walk(context)
    events: list[KvEvent] = []
    walk.loses = lambda event: events.append(event) or event  # type: ignore[func-returns-value]
    walk.run(60)
    stored = [event for event in events if isinstance(event, BlockStored) and event.parent_block_hash is None]
    seen = {(event.lora_name, event.extra_keys and event.extra_keys[0]) for event in stored}
    of_law = ("law", f"sha256:{'a' * 64}")
    assert {(None, None), (None, ("tenant",)), ("law", of_law), ("law", (*of_law, "tenant"))} <= seen


GOOD = {"enable_kv_cache_events": True, "publisher": "zmq", "endpoint": "tcp://*:5557", "topic": "kv@pod@model"}


def test_ports_and_paths_grow_with_the_number_of_the_engine() -> None:
    config = read_config(msgspec.json.encode({**GOOD, "replay_endpoint": "ipc:///tmp/replay"}).decode())
    assert config is not None
    third = config.of_rank(2)
    assert (third.endpoint, third.replay_endpoint) == ("tcp://*:5559", "ipc:///tmp/replay_dp2")


@pytest.mark.parametrize("text", ["{}", '{"enable_kv_cache_events": true, "publisher": "null"}'])
def test_events_are_off_as_in_vllm(text: str) -> None:
    assert read_config(text) is None


@pytest.mark.parametrize(
    ("text", "sentence"),
    [
        ("{", "--kv-events-config is not JSON: Input data was truncated"),
        ("[]", "--kv-events-config is not valid: Expected `object`, got `array`"),
        ({"buffer_steps": 0}, "--kv-events-config has buffer_steps 0; it must be at least 1 and at most 1000000"),
        ({"hwm": 10**9}, "--kv-events-config has hwm 1000000000; it must be at least 1 and at most 10000000"),
        ({"publisher": "nats"}, "--kv-events-config has publisher 'nats'; it may be zmq or null"),
        ({"enable_kv_cache_events": False}, "--kv-events-config has publisher zmq without enable_kv_cache_events"),
        ({"topics": "x"}, "--kv-events-config is not valid: Object contains unknown field `topics`"),
        ({"max_queue_size": 5}, "--kv-events-config has max_queue_size; events are sent by the step that makes them"),
        ({"endpoint": "http://x"}, "--kv-events-config has endpoint 'http://x'; it is tcp://HOST:PORT or ipc://PATH"),
        ({"endpoint": "tcp://*:70000"}, "--kv-events-config gives engine 0 the port 70000"),
        ({"replay_endpoint": "tcp://10.0.0.1:5558"}, "--kv-events-config has replay_endpoint 'tcp://10.0.0.1:5558'"),
        ({"replay_endpoint": "tcp://*:5557"}, "--kv-events-config has 'tcp://*:5557' as endpoint and as replay"),
        ({"topic": "t" * 300}, "--kv-events-config has a topic of 300 bytes; the limit is 256"),
    ],
)
def test_a_wrong_config_is_one_sentence(text: str | dict[str, object], sentence: str) -> None:
    given = text if isinstance(text, str) else msgspec.json.encode({**GOOD, **text}).decode()
    with pytest.raises(ConfigError) as error:
        read_config(given)
    assert error.value.message.startswith(sentence)
    assert "\n" not in error.value.message


def test_an_address_in_use_is_one_sentence(context: Context) -> None:
    other = context.socket(zmq.PUB)
    port = other.bind_to_random_port("tcp://*")
    with pytest.raises(ConfigError, match=f"--kv-events-config: tcp://\\*:{port}: Address already in use"):
        KvEventFeed(Rig(cache=True).core.memory, context, KvEventsConfig(endpoint=f"tcp://*:{port}"))
