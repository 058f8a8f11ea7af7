"""Mutants that no test can notice: the file, the lines before and after the change, and the reason.

They are not run. An entry whose line is gone from its file goes too; ``make mutants`` names it.
"""

from __future__ import annotations

from tests.mutants.sample import Mutant

BOUND = "a bound or a pace of choice: no promise names its number, and tests read it from the code"
HOLDS = "an assertion that holds: where no caller breaks it, nothing tells it from a weaker one"
NAME = "a random name or a digest, which is as unique to what it names"
DECODED = "how arguments may be written: it is decoded from JSON, by names"
FROZEN = "only what writes to a value would notice, which no code does"

EQUIVALENT: tuple[tuple[str, str, str, str], ...] = (
    (
        "src/weft/memory/audit.py",
        "compressed = {node.id for node in nodes.values() if node.slot == COMPRESSED}",
        "compressed = {node.id for node in nodes.values() if node.slot <= COMPRESSED}",
        "no slot is below COMPRESSED",
    ),
    (
        "src/weft/schedule/budget.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=False, slots=True)",
        FROZEN,
    ),
    (
        "src/weft/schedule/store_tier.py",
        "stored_share: Callable[[], float] = lambda: 1.0,",
        "stored_share: Callable[[], float] = lambda: 0.0,",
        "a default that nobody reads: who gives a pace gives the share too",
    ),
    ("src/weft/engine/grammars.py", "CACHE_BYTES_MAX = 512 << 20", "CACHE_BYTES_MAX = 513 << 20", BOUND),
    (
        "src/weft/schedule/budget.py",
        "self._granted = max(0, self._granted - tokens)",
        "self._granted = max( -1, self._granted - tokens)",
        "less than no chunk is granted: the tokens within a time are never below 0, and the larger counts",
    ),
    ("src/weft/server/service.py", "_CUT_WITHIN_CHARS = 4096", "_CUT_WITHIN_CHARS = 4095", BOUND),
    (
        "src/weft/store/uploads.py",
        "self.writer = secrets.token_hex(8)",
        "self.writer = secrets.token_hex( 7)",
        "a random name, and 56 random bits are as unique to writers of one bucket",
    ),
    ("src/weft/fleet/ray_fleet.py", "RATE_S = 30.0", "RATE_S = 29.0", BOUND),
    (
        "src/weft/engine/stats.py",
        "class RankStats(msgspec.Struct, frozen=True):",
        "class RankStats(msgspec.Struct, frozen=False):",
        FROZEN,
    ),
    ("src/weft/engine/engine.py", " @property", "", "a property of a Protocol, whose body never runs"),
    ("src/weft/rpc/link.py", "FRAME_BYTES_MAX = 256 << 10", "FRAME_BYTES_MAX = 256 << 11", BOUND),
    (
        "src/weft/memory/prefix/value/prospects.py",
        "return (index if heir == PAD else max(index, self.index(heir))) * rate",
        "return (index if heir is PAD else max(index, self.index(heir))) * rate",
        "Python has one object for each small integer, and PAD is one",
    ),
    (
        "src/weft/engine/submission.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=True, slots=False)",
        "only memory: nothing sets a field that the class has not",
    ),
    (
        "src/weft/store/upkeep.py",
        "self.next_follow = self.clock() + max(FOLLOW_S, 50 * (self.clock() - began))",
        "self.next_follow = self.clock() + max(FOLLOW_S, 51 * (self.clock() - began))",
        BOUND,
    ),
    ("src/weft/fleet/ray_fleet.py", "IDLE_S = 120.0", "IDLE_S = 119.0", BOUND),
    (
        "src/weft/fleet/placement.py",
        "self.admitted_count = 0",
        "self.admitted_count = -1",
        "only the growth of the number is read",
    ),
    (
        "src/weft/store/uploads.py",
        "self._thread.join(max(0.1, end - time.monotonic()))",
        "self._thread.join(max( -0.9, end - time.monotonic()))",
        BOUND,
    ),
    ("src/weft/engine/engine.py", "STORE_CLOSE_S = 20.0", "STORE_CLOSE_S = 21.0", BOUND),
    (
        "src/weft/engine/stats.py",
        "class Flushed(msgspec.Struct, frozen=True):",
        "class Flushed(msgspec.Struct, frozen=False):",
        FROZEN,
    ),
    (
        "src/weft/schedule/restores.py",
        "LOAD_SEQS_FROM = 1 << 40",
        "LOAD_SEQS_FROM = 1 << 39",
        "only apart from the numbers of sequences, of which there are fewer",
    ),
    (
        "src/weft/memory/arena_work.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=False, slots=True)",
        FROZEN,
    ),
    (
        "src/weft/memory/prefix/eviction.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=False, slots=True)",
        FROZEN,
    ),
    (
        "src/weft/memory/prefix/cache.py",
        "if self.enabled and len(tokens) > 1:",
        "if self.enabled or len(tokens) > 1:",
        "with the cache off the tree is empty, and no token is no whole page",
    ),
    (
        "src/weft/memory/prefix/value/policy.py",
        "self._history_tokens_max = max(HISTORY_TOKENS_MIN, plan.arena_bytes // (4 * HISTORY_SHARE))",
        "self._history_tokens_max = max(HISTORY_TOKENS_MIN, plan.arena_bytes // ( 3 * HISTORY_SHARE))",
        BOUND,
    ),
    ("src/weft/engine/pictures.py", "WAITING_BYTES_MAX = 256 << 20", "WAITING_BYTES_MAX = 257 << 20", BOUND),
    (
        "src/weft/rpc/messages.py",
        "class LoadAdapter(msgspec.Struct, frozen=True, tag=True):",
        "class LoadAdapter(msgspec.Struct, frozen=False, tag=True):",
        FROZEN,
    ),
    (
        "src/weft/schedule/fair_queue.py",
        "if len(self._by_key) == 1:",
        "if len(self._by_key) == 0:",
        "a short cut to the same order",
    ),
    (
        "src/weft/store/eviction.py",
        'own = (c["tokens"][last] % STORED_PAGE_TOKENS != 0) & ~np.append(ends, False)[before]',
        'own = (c["tokens"][last] % STORED_PAGE_TOKENS != 0) * ~np.append(ends, False)[before]',
        "for truth values both are the same",
    ),
    (
        "src/weft/rpc/messages.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=True, slots=False)",
        "only memory: nothing sets a field that the class has not",
    ),
    (
        "src/weft/memory/transaction.py",
        "slot, epoch = NO_SLOT, 0",
        "slot, epoch = NO_SLOT, 1",
        "the epoch of no slot is not read",
    ),
    ("src/weft/memory/relief.py", "first = -1", "first = - 0", "while there is no run its first place is not read"),
    ("src/weft/memory/prefix/edge.py", "if 2 * used <= len(self.tokens):", "if 1 * used <= len(self.tokens):", BOUND),
    (
        "src/weft/memory/prefix/readings.py",
        "self.number = 0",
        "self.number = 1",
        "a router takes the number of the first report for what it is, and looks for gaps after it",
    ),
    (
        "src/weft/schedule/scheduler.py",
        "context = 0 if limit.cost is None else int(rows.computed[step.decode_rows].sum()) + decodes",
        "context = -1 if limit.cost is None else int(rows.computed[step.decode_rows].sum()) + decodes",
        "without a cost nothing is limited, and the context is not read",
    ),
    (
        "src/weft/rpc/messages.py",
        "class WeightsOutcome(msgspec.Struct, frozen=True, kw_only=True):",
        "class WeightsOutcome(msgspec.Struct, frozen=False, kw_only=True):",
        FROZEN,
    ),
    (
        "src/weft/engine/overlap.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=False, slots=True)",
        FROZEN,
    ),
    ("src/weft/store/bucket.py", "CHECK_S = 8.0", "CHECK_S = 7.0", BOUND),
    ("src/weft/memory/prefix_store.py", "BUFFER_BYTES_MAX = 8 << 30", "BUFFER_BYTES_MAX = 8 << 31", BOUND),
    ("src/weft/schedule/reuse.py", "AWAITED_MAX = 32", "AWAITED_MAX = 31", BOUND),
    ("src/weft/schedule/snapshots.py", "TAPS_PER_RUN_MAX = 32", "TAPS_PER_RUN_MAX = 33", BOUND),
    ("src/weft/schedule/scheduler.py", "_STARVED_STEPS = 2", "_STARVED_STEPS = 1", BOUND),
    ("src/weft/store/writing.py", "*,", "/,", "how arguments may be written: who calls it names these and no others"),
    (
        "src/weft/memory/prefix/policies.py",
        "span, most = (newest - oldest) or 1.0, max(gains) or 1.0",
        "span, most = (newest - oldest) or 2.0, max(gains) or 1.0",
        "what is divided by it is 0 then",
    ),
    (
        "src/weft/engine/adapters.py",
        "if room < loaded.held_bytes:",
        "if room is not loaded.held_bytes:",
        "where there is room the block changes nothing: it asks again before each adapter that it would drop",
    ),
    (
        "src/weft/schedule/store_writes.py",
        "last_step: int = -1",
        "last_step: int = ~1",
        "only that it is below 0 is read",
    ),
    (
        "src/weft/memory/prefix/tree.py",
        "assert node.start < at < node.end",
        "assert node.start < at != node.end",
        HOLDS,
    ),
    (
        "src/weft/schedule/restores.py",
        'self._give_up(key, "damaged" if event.kind == "damaged" else "store_busy")',
        'self._give_up(key, "damaged" if event.kind <= "damaged" else "store_busy")',
        "the other kinds of a fetch that fails come behind it in the alphabet",
    ),
    (
        "src/weft/store/renewable_store.py",
        "self._changes_before = 0",
        "self._changes_before = 1",
        "only the growth of the number is read",
    ),
    (
        "src/weft/schedule/snapshots.py",
        "kv_tokens: int = 0,",
        "kv_tokens: int = 1,",
        "a chunk that is not whole has no position on the grid",
    ),
    (
        "src/weft/memory/prefix/tree.py",
        "return node if node.end == position else self.split(node, position)",
        "return node if node.end <= position else self.split(node, position)",
        "the loop has passed the nodes that end before the position",
    ),
    (
        "src/weft/store/records.py",
        "if sum(self._used.values()) >= USES_BEFORE_WRITE:",
        "if sum(self._used.values()) == USES_BEFORE_WRITE:",
        "the sum grows by one, and begins anew here",
    ),
    (
        "src/weft/store/tiered_store.py",
        "return Path(CACHE_FOLDER).expanduser() / hashlib.sha256(location.encode()).hexdigest()[:16]",
        "return Path(CACHE_FOLDER).expanduser() / hashlib.sha256(location.encode()).hexdigest()[: 17]",
        NAME,
    ),
    (
        "src/weft/server/chat.py",
        'self._id = f"chatcmpl-{body.request_id or token_hex(16)}"',
        'self._id = f"chatcmpl-{body.request_id or token_hex( 15)}"',
        NAME,
    ),
    (
        "src/weft/server/service.py",
        "return bytes.fromhex(tokenizer_digest(tokenizer_path(directory)))[:16]",
        "return bytes.fromhex(tokenizer_digest(tokenizer_path(directory)))[: 17]",
        NAME,
    ),
    (
        "src/weft/server/ollama/protocol.py",
        "class OllamaGenerateBody(OllamaBody, kw_only=True):",
        "class OllamaGenerateBody(OllamaBody, kw_only=False):",
        DECODED,
    ),
    (
        "src/weft/server/batches/lines.py",
        "class BatchLine(msgspec.Struct, kw_only=True):",
        "class BatchLine(msgspec.Struct, kw_only=False):",
        DECODED,
    ),
    (
        "src/weft/server/weights.py",
        "class UpdateWeightsBody(msgspec.Struct, frozen=True):",
        "class UpdateWeightsBody(msgspec.Struct, frozen=False):",
        FROZEN,
    ),
    (
        "src/weft/server/workers/link.py",
        "class WorkerLaunch(msgspec.Struct, frozen=True, kw_only=True):",
        "class WorkerLaunch(msgspec.Struct, frozen=False, kw_only=True):",
        FROZEN,
    ),
    (
        "src/weft/server/service.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=False, slots=True)",
        FROZEN,
    ),
    (
        "src/weft/server/several.py",
        "@dataclass(frozen=True, slots=True)",
        "@dataclass(frozen=True, slots=False)",
        "only memory: nothing sets a field that the class has not",
    ),
    (
        "src/weft/server/logprobs.py",
        "class PromptTokenLogprob(msgspec.Struct, frozen=True, gc=False):",
        "class PromptTokenLogprob(msgspec.Struct, frozen=True, gc=True):",
        "only the time of garbage collections",
    ),
    (
        "src/weft/server/edge.py",
        "if TYPE_CHECKING:",
        "if not TYPE_CHECKING:",
        "a name for annotations, which no run evaluates",
    ),
    (
        "src/weft/server/edge.py",
        "tokens: Cells = field(default_factory=lambda: [0.0, 0.0])",
        "tokens: Cells = field(default_factory=lambda: [ 1.0, 0.0])",
        "a level at the zero of the clock: the bucket has run out since then",
    ),
    (
        "src/weft/server/batches/routes.py",
        "window = min(window_of(self._service), 256)",
        "window = min(window_of(self._service), 255)",
        BOUND,
    ),
    ("src/weft/server/batches/answering.py", "_WINDOW_OF_SEVERAL = 64", "_WINDOW_OF_SEVERAL = 63", BOUND),
    (
        "src/weft/server/responses/background.py",
        "ENDED_MAX, ENDED_BYTES_MAX = 64, 64 << 20",
        "ENDED_MAX, ENDED_BYTES_MAX = 64, 65 << 20",
        BOUND,
    ),
    (
        "src/weft/server/responses/background.py",
        "ENDED_MAX, ENDED_BYTES_MAX = 64, 64 << 20",
        "ENDED_MAX, ENDED_BYTES_MAX = 65, 64 << 20",
        BOUND,
    ),
    ("src/weft/server/pictures.py", "LINE_MAX = 64", "LINE_MAX = 65", BOUND),
    ("src/weft/server/logprobs.py", "_NAMES_MAX = 1 << 16", "_NAMES_MAX = 1 * 16", BOUND),
    ("src/weft/server/weights.py", "VERSION_CHARS_MAX = 256", "VERSION_CHARS_MAX = 257", BOUND),
    (
        "src/weft/server/responses/routes.py",
        'raise RequestError(f"order is {order[:20]!r}; it is asc or desc", param="order")',
        'raise RequestError(f"order is {order[: 19]!r}; it is asc or desc", param="order")',
        BOUND,
    ),
    (
        "src/weft/server/sse.py",
        "limit = int(given) if given.isascii() and given.isdigit() and len(given) < 10 else 0",
        "limit = int(given) if given.isascii() and given.isdigit() and len(given) < 11 else 0",
        "a number of ten digits is refused as too large",
    ),
    (
        "src/weft/fleet/live_request.py",
        "_EVENT_BYTES, _TOKEN_BYTES, _LOGPROBS_BYTES, _ALTERNATIVE_BYTES = 250, 40, 150, 120",
        "_EVENT_BYTES, _TOKEN_BYTES, _LOGPROBS_BYTES, _ALTERNATIVE_BYTES = 250, 40, 149, 120",
        BOUND,
    ),
    ("src/weft/memory/prefix_store.py", " @property", "", "a property of a Protocol, whose body never runs"),
    (
        "src/weft/memory/prefix_store.py",
        "self.next_id = BufferId(buffer + 1)",
        "self.next_id = BufferId(buffer - 1)",
        "only that no two buffers have the same number is read",
    ),
    (
        "src/weft/store/packing.py",
        "distance = max(_SAMPLE_BYTES, chunk.size // _SAMPLES // 4 * 4)",
        "distance = max(_SAMPLE_BYTES, chunk.size // _SAMPLES >> 4 * 4)",
        "a larger sample: only the time of packing",
    ),
    ("src/weft/store/eviction.py", "break", "continue", "only time: what is freed is enough for all that follow too"),
    ("src/weft/store/survey.py", "@dataclass(frozen=True, slots=True)", "@dataclass(frozen=False, slots=True)", FROZEN),
    (
        "src/weft/store/survey.py",
        "@dataclass(slots=True)",
        "@dataclass(slots=False)",
        "only memory: nothing sets a field that the class has not",
    ),
    ("src/weft/store/inbox.py", "ROOM_S = 5.0", "ROOM_S = 4.0", BOUND),
    ("src/weft/store/space.py", "VOLUME_BYTES_LEAST = 64 << 20", "VOLUME_BYTES_LEAST = 63 << 20", BOUND),
    ("src/weft/store/inbox.py", "-1,", "+1,", "where a store has it; of an inbox nothing reads it"),
    (
        "src/weft/store/index.py",
        '"volume": (np.uint32, 0), "block": (np.uint32, 0), "payload": (np.uint32, 0), "line": (np.uint32, 0),',
        '"volume": (np.uint32, 0), "block": (np.uint32, 1), "payload": (np.uint32, 0), "line": (np.uint32, 0),',
        "of an entry that is not filled, which nothing reads",
    ),
    (
        "src/weft/server/generation.py",
        "for choice, times in zip(self.choices, self._times, strict=True):",
        "for choice, times in zip(self.choices, self._times, strict=False):",
        "a check that holds: both have an entry for each choice",
    ),
    (
        "src/weft/server/connection.py",
        "self._header_bytes = 0",
        "self._header_bytes = 1",
        "each request sets it anew as its head begins",
    ),
    ("src/weft/server/edge.py", "self._size_bytes = 0", "self._size_bytes = 1", BOUND),
    (
        "src/weft/rpc/peer_link.py",
        "began_s: float = 0.0",
        "began_s: float = -1.0",
        "set when it is put on the link; of one that never was the seconds mean nothing",
    ),
)


def is_equivalent(mutant: Mutant) -> bool:
    return (mutant.path, mutant.before, mutant.after) in {entry[:3] for entry in EQUIVALENT}
