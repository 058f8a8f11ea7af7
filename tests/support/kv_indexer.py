"""An index of one engine's prefix cache that has nothing but KV events: ``pip install pyzmq msgspec``."""

import hashlib
from typing import Any

import msgspec
import zmq

PAGE = 16
MASK = 2**64 - 1
POWER, MIX = 0x9E3779B97F4A7C15, 0xBF58476D1CE4E5B9


def word(text: bytes) -> int:
    return int.from_bytes(hashlib.blake2b(text, digest_size=8).digest(), "little")


LANES = [word(bytes([lane])) | 1 for lane in range(PAGE)]


def root_hash(cache_salt: str = "", adapter_digest: str = "") -> int:
    """Return the hash of no tokens. ``adapter_digest`` is the sha256 of the adapter, in hex."""
    return word((f"\0{adapter_digest}\0{cache_salt}" if adapter_digest else cache_salt).encode())


def page_hash(before: int, page: list[int], number: int) -> int:
    """Return the hash of a prefix that ends with page ``number``; a page that is not full is filled up with -1."""
    full = page + [-1] * (PAGE - len(page))
    mixed = sum((token & MASK) * lane for token, lane in zip(full, LANES, strict=True)) & MASK
    mixed ^= mixed >> 29
    mixed = mixed * MIX & MASK
    mixed ^= mixed >> 32
    return (before + mixed * pow(POWER, number + 1, 2**64)) & MASK


class Index:
    """``states``: whether the model has recurrent layers. ``blocks`` has prefixes whose KV is there, ``states``
    those at which a request can resume."""

    def __init__(self, *, states: bool = True) -> None:
        self.has_states, self.blocks, self.states = states, set[int](), set[int]()
        self.tails = dict[int, set[int]]()
        self.before = dict[int, int]()

    def apply(self, event: dict[str, Any]) -> None:
        if event["type"] == "AllBlocksCleared":
            for part in (self.blocks, self.states, self.tails, self.before):
                part.clear()
        elif event.get("group_idx", 0) == 0:
            change = self.blocks.update if event["type"] == "BlockStored" else self.blocks.difference_update
            change(event["block_hashes"])
        elif event["type"] == "BlockStored":
            [state] = event["block_hashes"]
            self.states.add(state)
            if len(event["token_ids"]) < PAGE:  # the state is after a part of a page
                self.before[state] = event["parent_block_hash"] or 0
                self.tails.setdefault(self.before[state], set()).add(state)
        else:
            for state in event["block_hashes"]:
                self.states.discard(state)
                if state in self.before:
                    self.tails[self.before.pop(state)].discard(state)

    def predict(self, tokens: list[int], root: int | None = None) -> int:
        """Return the tokens of a prompt that the engine will not compute. The last one is always computed."""
        tokens, hashes = tokens[:-1], [root_hash() if root is None else root]
        for at in range(0, len(tokens) // PAGE * PAGE, PAGE):
            hashes.append(page_hash(hashes[-1], tokens[at : at + PAGE], at // PAGE))
        if not self.has_states:
            pages = next((page for page, hash in enumerate(hashes[1:]) if hash not in self.blocks), len(hashes) - 1)
            return pages * PAGE
        for page in range(len(hashes) - 1, -1, -1):
            end = page * PAGE
            if self.tails.get(hashes[page] if page else 0):
                for length in range(min(PAGE - 1, len(tokens) - end), 0, -1):
                    if page_hash(hashes[page], tokens[end : end + length], page) in self.states:
                        return end + length
            if page and hashes[page] in self.states:
                return end
        return 0


class Subscriber:
    """Feeds ``index`` from the sockets of an engine. Lost batches are replayed."""

    def __init__(self, context: Any, events: str, replay: str, index: Index) -> None:
        self.index, self.expected, self.written_s = index, 0, 0.0
        self.events, self.replay = context.socket(zmq.SUB), context.socket(zmq.DEALER)
        self.events.connect(events)
        self.events.subscribe(b"")
        self.replay.connect(replay)

    def read(self, wait_ms: int = 0) -> None:
        """Take messages: all that have arrived, or the first in ``wait_ms``."""
        while self.events.poll(wait_ms):
            wait_ms = 0
            _, number, payload = self.events.recv_multipart()
            if not self._apply(int.from_bytes(number, "big"), payload):
                self.catch_up()

    def catch_up(self) -> None:
        """Ask for all batches from the expected one on, and take them."""
        self.ask()
        while True:
            _, _, number, payload = self.replay.recv_multipart()
            if not payload:
                return
            self._apply(int.from_bytes(number, "big"), payload)

    def ask(self) -> None:
        self.replay.send_multipart([b"", self.expected.to_bytes(8, "big")])

    def _apply(self, number: int, payload: bytes) -> bool:
        """Return whether no batch before this one is missing."""
        written_s, events, *_ = msgspec.msgpack.decode(payload)
        if number < self.expected:
            if written_s <= self.written_s:
                return True  # it came by a replay
            self.expected = 0  # another engine process counts from 0
        begins = events[0]["type"] == "AllBlocksCleared"  # an engine starts, or publishes everything again
        if number != self.expected and not begins:
            return False
        for event in events:
            self.index.apply(event)
        self.expected, self.written_s = number + 1, written_s
        return True
