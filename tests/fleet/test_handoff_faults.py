"""Links between engines: each fault has a name, and the bytes that arrive are those that were sent."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import zmq

from tests.server.running import ROOT, eventually
from tests.support.child_path import child_path
from tests.support.stranger import taken_of_a_stranger
from weft.errors import ConfigError
from weft.handoff import parse_roles, partner_missing
from weft.memory.prefix_store import KvPiece, NewSnapshot, StagingBuffers
from weft.rpc.link import FRAME_BYTES_MAX
from weft.rpc.messages import PeerKeys
from weft.rpc.peer_link import PeerLink
from weft.store.inbox import FULL, STALE_S, Parcel
from weft.store.peer_store import NO_STORE, PeerStore

PAGE, STATE, CHUNK = 96, 40, 64
MODEL, OTHER = b"m" * 16, b"o" * 16
TOKEN, WRONG = "t" * 40, "w" * 40
TOKENS = np.arange(200, dtype=np.int32)


class End:
    """One engine's end: its store, its link, and a clock that a test moves."""

    def __init__(
        self, folder: Path, *, namespace: bytes = MODEL, token: str | None = None, inbox_bytes: int = 1 << 20
    ) -> None:
        folder.mkdir()
        self.now_s = 0.0
        self.store = PeerStore(
            NO_STORE,
            namespace,
            page_bytes=PAGE,
            state_bytes=STATE,
            chunk_tokens=CHUNK,
            inbox_bytes=inbox_bytes,
            clock=lambda: self.now_s,
        )
        keys = None if token is None else PeerKeys("127.0.0.1", 0, token)
        self.context = zmq.Context()
        self.link = PeerLink(self.context, str(folder), self.store.inbox.accept, keys)
        self.store.plug(self.link)

    @property
    def far(self) -> str:
        """Its address as another machine sees it: the folder is not there."""
        return f"ipc:///nowhere/peers {self.link.address.partition(' ')[2]}"

    def put(self, position: int, *, salt: str = "") -> bool:
        """As the writes of a scheduler: the records of TOKENS up to ``position``."""
        tokens = TOKENS[:position]
        offer = self.store.offer(salt or None, tokens, position, exact=True)
        if offer is None:
            return False
        assert self.store.wants(salt or None, tokens)
        kv = KvPiece(offer.start, position, memoryview(kv_bytes(offer.start, position)))
        state = memoryview(state_bytes(position))
        return self.store.put(NewSnapshot.of(salt or None, tokens, [kv], state, exact=True)) is not None

    def ended(self) -> list[tuple[str, str]]:
        """Orders that end within a while."""
        ended: list[tuple[str, str]] = []

        def look() -> bool:
            self.store.poll()
            ended.extend(self.store.ended())
            return bool(ended)

        assert eventually(look, 20)
        return ended

    def close(self) -> None:
        self.store.close()
        self.context.destroy(linger=0)


def kv_bytes(start: int, end: int) -> bytes:
    pages = range(start // 16, -(-end // 16))
    return b"".join(bytes([page + 1]) * PAGE for page in pages)


def state_bytes(position: int) -> bytes:
    return bytes([position % 251]) * STATE


@pytest.fixture
def ends(tmp_path: Path) -> Iterator[tuple[End, End]]:
    pair = End(tmp_path / "p", token=TOKEN), End(tmp_path / "d", token=TOKEN)
    yield pair
    for end in pair:
        end.close()


def received(end: End, above: int = 0, salt: str | None = None) -> tuple[int, bytes, bytes]:
    """What its engine would load of TOKENS."""
    prefix = end.store.match(salt, TOKENS, above)
    if prefix is None:
        return 0, b"", b""
    start = above - above % 16
    kv, state = bytearray(PAGE * (-(-prefix.position // 16) - start // 16)), bytearray(STATE)
    end.store.fetch(prefix, start, StagingBuffers(memoryview(kv), memoryview(state), PAGE))
    assert eventually(lambda: any(event.kind == "fetched" for event in end.store.poll()), 20)
    return prefix.position, bytes(kv), bytes(state)


def order(sender: End, address: str, start: int = 0) -> None:
    sender.store.order("r", address, "", TOKENS[:150], start)
    sender.store.computed("r", 150)


@pytest.mark.parametrize("is_near", [True, False])
def test_what_arrives_is_what_was_sent_over_shared_memory_and_over_a_network(
    ends: tuple[End, End], is_near: bool
) -> None:
    sender, receiver = ends
    order(sender, receiver.link.address if is_near else receiver.far)
    assert sender.put(64)
    assert sender.put(150)
    assert sender.ended() == [("r", "")]
    assert received(receiver) == (150, kv_bytes(0, 150), state_bytes(150))
    assert received(receiver) == (0, b"", b""), "what a request has loaded is given back"
    assert receiver.store.inbox.held_bytes == 0


def test_a_receiver_that_has_the_beginning_gets_the_rest_alone(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    order(sender, receiver.link.address, start=70)
    assert sender.put(150)
    assert sender.ended() == [("r", "")]
    assert receiver.store.match(None, TOKENS, 40) is None, "KV before it is not there"
    assert received(receiver, above=70) == (150, kv_bytes(64, 150), state_bytes(150))


def test_a_link_of_a_wrong_key_is_refused_with_a_reason(ends: tuple[End, End], tmp_path: Path) -> None:
    stranger = End(tmp_path / "s", token=WRONG)
    order(stranger, ends[1].far)
    assert stranger.put(150)
    [(_, reason)] = stranger.ended()
    assert "refuses the key" in reason
    assert received(ends[1])[0] == 0
    stranger.close()


def test_records_of_another_model_are_refused_with_a_reason(ends: tuple[End, End], tmp_path: Path) -> None:
    stranger = End(tmp_path / "s", namespace=OTHER)
    order(stranger, ends[1].link.address)
    assert stranger.put(150)
    [(_, reason)] = stranger.ended()
    assert "another model" in reason
    assert received(ends[1])[0] == 0
    stranger.close()


def test_damaged_bytes_are_refused_before_an_engine_sees_them(
    ends: tuple[End, End], monkeypatch: pytest.MonkeyPatch
) -> None:
    sender, receiver = ends
    accept = receiver.store.inbox.accept

    def damaged(parcel: object, payload: memoryview) -> str:
        return accept(parcel, memoryview(bytes([payload[0] ^ 1]) + bytes(payload[1:])))

    monkeypatch.setattr(receiver.link, "_accept", damaged)
    order(sender, receiver.link.address)
    assert sender.put(150)
    assert sender.ended() == [("r", "damaged bytes")]
    assert received(receiver)[0] == 0


def test_a_receiver_without_room_says_so(ends: tuple[End, End], tmp_path: Path) -> None:
    small = End(tmp_path / "s", inbox_bytes=100)
    order(ends[0], small.link.address)
    assert ends[0].put(150)
    [(_, reason)] = ends[0].ended()
    assert "there is room for 100" in reason
    small.close()


def test_a_receiver_has_no_more_of_one_prompt_than_its_room(ends: tuple[End, End], tmp_path: Path) -> None:
    """Each parcel has room, and both have not."""
    small = End(tmp_path / "s", inbox_bytes=900)
    order(ends[0], small.link.address)
    assert ends[0].put(64)
    assert ends[0].put(150)
    [(_, reason)] = ends[0].ended()
    assert reason == "1000 bytes, and there is room for 900"
    assert small.store.inbox.held_bytes == 0
    small.close()


ONE_PROMPT = 10 * PAGE + STATE


def two_orders(sender: End, receiver: End) -> None:
    """Of the prompts with salt a and b."""
    for salt in ("a", "b"):
        sender.store.order(salt, receiver.link.address, salt, TOKENS[:150], 0)


@pytest.mark.parametrize("is_near", [True, False])
def test_records_without_room_wait_in_their_order_until_others_are_taken(
    ends: tuple[End, End], tmp_path: Path, is_near: bool
) -> None:
    small = End(tmp_path / "s", token=TOKEN, inbox_bytes=ONE_PROMPT)
    for salt in ("a", "b"):
        ends[0].store.order(salt, small.link.address if is_near else small.far, salt, TOKENS[:150], 0)
    assert ends[0].put(150, salt="a")
    ends[0].store.computed("a", 150)
    assert ends[0].ended() == [("a", "")]
    assert ends[0].put(64, salt="b")
    assert ends[0].put(150, salt="b")
    ends[0].store.computed("b", 150)
    assert eventually(lambda: ends[0].link._roomless, 20)
    assert received(small, salt="a") == (150, kv_bytes(0, 150), state_bytes(150))
    assert ends[0].ended() == [("b", "")]
    assert received(small, salt="b") == (150, kv_bytes(0, 150), state_bytes(150))
    assert (small.store.inbox.held_bytes, small.store.inbox.refused) == (0, 0)
    small.close()


def test_records_that_get_no_room_end_the_order_after_a_while(
    ends: tuple[End, End], tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("weft.rpc.peer_link.ROOM_S", 0.1)
    small = End(tmp_path / "s", inbox_bytes=ONE_PROMPT)
    two_orders(ends[0], small)
    assert ends[0].put(150, salt="a")
    ends[0].store.computed("a", 150)
    assert ends[0].ended() == [("a", "")]
    assert ends[0].put(150, salt="b")
    assert ends[0].ended() == [("b", FULL)]
    assert received(small, salt="a")[0] == 150, "what was there first"
    small.close()


def test_records_that_no_request_takes_for_seconds_go_for_new_ones(ends: tuple[End, End], tmp_path: Path) -> None:
    """Their client may have left."""
    small = End(tmp_path / "s", inbox_bytes=ONE_PROMPT)
    two_orders(ends[0], small)
    assert ends[0].put(150, salt="a")
    ends[0].store.computed("a", 150)
    assert ends[0].ended() == [("a", "")]
    small.now_s = STALE_S + 0.1
    assert ends[0].put(150, salt="b")
    ends[0].store.computed("b", 150)
    assert ends[0].ended() == [("b", "")]
    assert received(small, salt="a")[0] == 0
    assert received(small, salt="b") == (150, kv_bytes(0, 150), state_bytes(150))
    small.close()


def test_of_two_prompts_that_have_no_room_beside_each_other_the_first_one_arrives(
    ends: tuple[End, End], tmp_path: Path
) -> None:
    """Each has begun, and waiting for the other one would have no end."""
    small = End(tmp_path / "s", inbox_bytes=ONE_PROMPT + 100)
    two_orders(ends[0], small)
    for salt in ("a", "b"):
        assert ends[0].put(64, salt=salt)
        assert eventually(lambda salt=salt: small.store.match(salt, TOKENS, 0) is not None, 20)
    assert ends[0].put(150, salt="a")
    ends[0].store.computed("a", 150)
    assert ends[0].ended() == [("a", "")]
    assert small.store.match("b", TOKENS, 0) is None
    assert received(small, salt="a") == (150, kv_bytes(0, 150), state_bytes(150))
    small.close()


def test_an_engine_that_is_gone_ends_the_order(ends: tuple[End, End]) -> None:
    order(ends[0], "ipc:///nowhere/peers")
    assert ends[0].put(150)
    [(_, reason)] = ends[0].ended()
    assert "is gone" in reason


def test_an_order_of_which_nothing_is_cached_any_more_ends(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    order(sender, receiver.link.address)
    sender.now_s = 60.0
    [(_, reason)] = sender.store.ended()
    assert "nothing to send" in reason


def test_records_that_no_request_takes_are_dropped(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    order(sender, receiver.link.address)
    assert sender.put(150)
    assert sender.ended() == [("r", "")]
    assert receiver.store.inbox.held_bytes > 0
    receiver.now_s = 120.0
    receiver.store.poll()
    assert receiver.store.inbox.held_bytes == 0


_PARTNER = """
import sys, time
from pathlib import Path
from tests.fleet.test_handoff_faults import End, order
end = End(Path(sys.argv[1]))
if sys.argv[2] == "receive":
    end.link._accept = lambda parcel, payload: time.sleep(3600) or ""
else:
    order(end, sys.argv[2])
    end.put(64)
print(end.link.address, flush=True)
time.sleep(3600)
"""


def partner(folder: Path, what: str) -> tuple[subprocess.Popen[str], str]:
    """Another process, and its address once it listens."""
    process = subprocess.Popen(
        [sys.executable, "-c", _PARTNER, str(folder), what],
        cwd=ROOT,
        text=True,
        stdout=subprocess.PIPE,
        env={**os.environ, "PYTHONPATH": child_path()},
    )
    assert process.stdout is not None
    return process, process.stdout.readline().strip()


def test_a_receiver_that_vanishes_in_the_middle_of_a_record_ends_the_order(
    ends: tuple[End, End], tmp_path: Path
) -> None:
    process, address = partner(tmp_path / "s", "receive")
    order(ends[0], address)
    assert ends[0].put(150)
    time.sleep(0.2)  # it is inside of the record, or before it: the reason is the same
    process.send_signal(signal.SIGKILL)
    process.wait()
    [(_, reason)] = ends[0].ended()
    assert "is gone" in reason
    assert not [one for one in Path("/proc/self/fd").iterdir() if "weft-parcel" in _target(one)]


def test_a_sender_that_vanishes_leaves_a_shorter_prefix(ends: tuple[End, End], tmp_path: Path) -> None:
    receiver = ends[1]
    process, _ = partner(tmp_path / "s", receiver.link.address)
    assert eventually(lambda: receiver.store.inbox.held_bytes > 0, 20)
    process.send_signal(signal.SIGKILL)
    process.wait()
    assert received(receiver) == (64, kv_bytes(0, 64), state_bytes(64))


def _target(link: Path) -> str:
    try:
        return os.readlink(link)
    except OSError:
        return ""


@pytest.mark.parametrize("text", ["", "p", "1x", "1p-2d", "1p 1d"])
def test_roles_of_another_form_are_refused(text: str) -> None:
    with pytest.raises(ConfigError, match="such as 1p2d"):
        parse_roles(text)


@pytest.mark.parametrize(
    ("text", "missing"), [("2p", "decode"), ("1d", "prefill"), ("1p1d", ""), ("2b", ""), ("1p1b", ""), ("1b", "")]
)
def test_a_role_without_a_partner_is_named(text: str, missing: str) -> None:
    assert partner_missing(parse_roles(text)) == missing


def test_an_inbox_keeps_salts_apart(ends: tuple[End, End]) -> None:
    sender, receiver = ends
    sender.store.order("r", receiver.link.address, "tenant", TOKENS[:150], 0)
    assert not sender.put(150), "the same tokens of another salt are not wanted"
    assert sender.put(150, salt="tenant")
    sender.store.computed("r", 150)
    assert sender.ended() == [("r", "")]
    assert receiver.store.match(None, TOKENS, 0) is None
    assert receiver.store.match("tenant", TOKENS, 0) is not None


def test_a_stranger_fills_no_frame_of_a_peer_before_it_proves_its_key(ends: tuple[End, End]) -> None:
    port = int(ends[1].link.address.rpartition(":")[2])
    assert taken_of_a_stranger(port, frame_bytes=1 << 30) < 32 << 20


def test_a_parcel_of_many_frames_arrives_whole(ends: tuple[End, End], tmp_path: Path) -> None:
    arrived: list[tuple[Parcel, bytes]] = []

    def accept(parcel: Parcel, content: memoryview) -> str:
        arrived.append((parcel, bytes(content)))
        return ""

    (tmp_path / "large").mkdir()
    context: zmq.Context[zmq.Socket[bytes]] = zmq.Context()
    receiver = PeerLink(context, str(tmp_path / "large"), accept, PeerKeys("127.0.0.1", 0, TOKEN))
    parcel = Parcel(
        namespace=b"n",
        handoff="h",
        salt="",
        tokens=bytes(range(256)) * (FRAME_BYTES_MAX // 128),
        start=0,
        position=0,
        exact=True,
        records=[],
    )
    payload = bytes(range(251)) * (FRAME_BYTES_MAX // 100)
    ends[0].link.send(
        1, f"ipc:///nowhere/peers {receiver.address.partition(' ')[2]}", parcel, [memoryview(payload)] * 2
    )
    assert eventually(lambda: bool(ends[0].link.outcomes()), 20)
    assert arrived == [(parcel, payload * 2)]
    receiver.close()
    context.destroy(linger=0)
