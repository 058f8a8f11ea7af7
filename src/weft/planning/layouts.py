"""Layouts of other engines over the same bytes, compared with frames: bytes of a request and how many fit.

    padded pages    one pool of pages of one size. A page is the state of one recurrent layer, or the KV of
                    one attention layer, so the KV block grows until its bytes reach the state's:

                        block = 16 x ceil(state of a layer / (16 x KV per token of a layer))

                    Layers are taken in groups of equal size (the smaller kind's count), each group has a
                    block table, and one block is a page for each layer of a group. A request takes
                    ceil(tokens / block) blocks per attention group and 1 + drafts per group of states.
    packed pages    the same with N attention layers in a page: the block is 1/N of it, the groups too.
    static pools    two pools, cut at the start: states get r / (1 + r) of the bytes (r = 0.9), KV the rest,
                    in pages of one token. A request takes a state, and with speculation one more for each
                    token that is verified. Whichever pool is empty first is the limit.
    frames          weft: ``memory.plan``. Pages of 16 tokens of all layers, states in slots; any frame holds
                    either.

Each layout gets the same bytes, and no weights, graphs or activations, so the comparison is only about the layout. The
memory of prefix caching per running request is counted apart (``Load.cached``): padded pages keep one more state in
their aligned mode, static pools four (the room for snapshots that their cache reserves).

Sources, for behaviour: vLLM's hybrid KV cache (pull request 20016). Block sizes: its issues 40696 and 53749; 672
tokens for Nemotron-Nano-9B-v2 in 24280. Its proposal of packed pages: pull request 35703. SGLang's
``--mamba-full-memory-ratio`` and the slots that a request reserves (its cookbook for Qwen3.8-27B).
"""

from __future__ import annotations

from collections import Counter
from dataclasses import dataclass, replace

from weft.memory.frames.plan import ArenaPlan
from weft.spec import ITEM_BYTES, CacheDTypeName, LayerSpec, ModelSpec
from weft.units import PAGE_TOKENS, VERIFY_TOKENS_MAX, ceil_div

KERNEL_TOKENS = 16
"""Tokens. A block of other engines is a multiple of this, as their attention kernels require."""
GROUP_SLACK = 1.5
"""Ratio of the layer counts of both kinds. If it is below this, groups have the size of the larger kind, otherwise of
the smaller.
"""
STATE_RATIO = 0.9
"""Ratio of the state pool's bytes to those of the KV pool, the default of static pools."""


@dataclass(frozen=True, slots=True)
class Load:
    """The load of every request: ``tokens`` long, with ``drafts`` speculated tokens per step; ``cached``: with
    prefix caching on."""

    tokens: int
    drafts: int = 0
    cached: bool = False

    @property
    def verified(self) -> int:
        """Tokens of a step's window: the chosen one and its drafts; none without drafts."""
        return 1 + self.drafts if self.drafts else 0


@dataclass(frozen=True, slots=True)
class Frames:
    """weft's own layout. ``log_bytes``: bytes that replay needs for each token of a verify run. A step has one log for
    all requests, of at most VERIFY_TOKENS_MAX tokens. A request reserves no log, and is charged a share of it.
    """

    plan: ArenaPlan
    log_bytes: int
    name: str = "weft: frames"

    @property
    def block_tokens(self) -> int:
        return PAGE_TOKENS if self.plan.page_bytes else 0

    def request_bytes(self, load: Load) -> int:
        """Return the bytes of a request with its share of the log, when all requests that fit are running."""
        sequences = max(1, self.sequences(load))
        return self._arena_bytes(load) + ceil_div(self._step_log_bytes(sequences, load), sequences)

    def sequences(self, load: Load) -> int:
        """Return the most sequences whose frames (``frames_for``) fit, after the log of a step."""
        least = self._arena_bytes(load)
        low, high = 0, self.plan.arena_bytes // least if least else 0
        while low < high:
            middle = (low + high + 1) // 2
            left = self.plan.arena_bytes - self._step_log_bytes(middle, load)
            if self.plan.frames_for(middle, load.tokens) * self.plan.frame_bytes <= left:
                low = middle
            else:
                high = middle - 1
        return low

    def _arena_bytes(self, load: Load) -> int:
        return self.plan.pages_for(load.tokens) * self.plan.page_bytes + self.plan.slot_stride_bytes

    def _step_log_bytes(self, sequences: int, load: Load) -> int:
        return min(sequences * load.verified, VERIFY_TOKENS_MAX) * self.log_bytes


@dataclass(frozen=True, slots=True)
class PaddedPages:
    """One pool of equal pages. ``group_layers`` pages make a block; the counts are groups of layers of each kind."""

    name: str
    arena_bytes: int
    page_bytes: int
    block_tokens: int
    group_layers: int
    attention_groups: int
    window_groups: tuple[int, ...]
    """For each group of sliding-window layers, its window."""
    state_groups: int

    def blocks(self, load: Load) -> int:
        kv = ceil_div(load.tokens, self.block_tokens) if self.block_tokens else 0
        windows = sum(min(kv, ceil_div(window, self.block_tokens) + 1) for window in self.window_groups)
        states = 1 + load.drafts + load.cached
        return self.attention_groups * kv + windows + self.state_groups * states

    def request_bytes(self, load: Load) -> int:
        return self.blocks(load) * self.group_layers * self.page_bytes

    def sequences(self, load: Load) -> int:
        """Return how many sequences fit. One block is the null block, which no sequence gets."""
        blocks = self.arena_bytes // (self.group_layers * self.page_bytes) - 1
        return max(0, blocks) // self.blocks(load)


@dataclass(frozen=True, slots=True)
class StaticPools:
    name: str
    arena_bytes: int
    state_bytes: int
    kv_token_bytes: int

    CACHE_STATES = 4
    """States that a request reserves in addition to its own when prefixes are cached."""

    @property
    def block_tokens(self) -> int:
        return 1 if self.kv_token_bytes else 0

    def _states(self, load: Load) -> int:
        return 1 + load.verified + self.CACHE_STATES * load.cached

    def request_bytes(self, load: Load) -> int:
        return self._states(load) * self.state_bytes + load.tokens * self.kv_token_bytes

    def sequences(self, load: Load) -> int:
        if not self.state_bytes:
            return self.arena_bytes // (load.tokens * self.kv_token_bytes)
        if not self.kv_token_bytes:
            return self.arena_bytes // (self._states(load) * self.state_bytes)
        for_states = int(self.arena_bytes * STATE_RATIO / (1 + STATE_RATIO))
        for_kv = self.arena_bytes - for_states
        return min(for_states // (self._states(load) * self.state_bytes), for_kv // (load.tokens * self.kv_token_bytes))


Layout = Frames | PaddedPages | StaticPools
"""One way to cut an arena. ``block_tokens`` is the unit in which prefixes are cached: 0 without attention."""


def all_layouts(spec: ModelSpec, plan: ArenaPlan) -> list[Layout]:
    """Return weft's frames first, then the layouts of other engines, over the same bytes. ``spec`` is one rank's, with
    the dtypes of its states; a layout that does not differ for this model is left out.
    """
    layouts: list[Layout] = [Frames(plan, draft_log_bytes(spec))]
    padded = padded_pages(spec, plan.kv_dtype, plan.arena_bytes)
    if padded.group_layers:
        layouts.append(padded)
    packed = len(spec.attention_layers)
    if packed > 1 and spec.recurrent_layers:
        layouts.append(padded_pages(spec, plan.kv_dtype, plan.arena_bytes, packed=packed))
    layouts.append(
        StaticPools(
            "static pools",
            plan.arena_bytes,
            spec.state_bytes_per_sequence(spec.dtype),
            spec.kv_bytes_per_token(plan.kv_dtype),
        )
    )
    return layouts


def padded_pages(spec: ModelSpec, kv_dtype: CacheDTypeName, arena_bytes: int, *, packed: int = 1) -> PaddedPages:
    """Return one pool of pages of one size, with ``packed`` attention layers in a page."""
    paged, stateful = [layer for layer in spec.layers if layer.kv_heads], _stateful(spec)
    state_bytes = max((sum(part.part_bytes(spec.dtype) for part in layer.state) for layer in stateful), default=0)
    token_bytes = packed * max((layer.kv_bytes_per_token(kv_dtype) for layer in paged), default=0)
    block = 0
    if token_bytes:
        block = KERNEL_TOKENS * max(1, ceil_div(state_bytes, KERNEL_TOKENS * token_bytes))
    windows = Counter(part.shape[2] for layer in spec.layers for part in layer.state if part.name == "window")
    kinds = {"attention": ceil_div(len(paged), packed), "state": len(stateful)}
    kinds |= {f"window {window}": ceil_div(count, packed) for window, count in windows.items()}
    kinds = {kind: count for kind, count in kinds.items() if count}
    group = min(kinds.values(), default=0)
    if kinds and max(kinds.values()) < GROUP_SLACK * group:
        group = max(kinds.values())
    groups = {kind: ceil_div(count, group) for kind, count in kinds.items()}
    return PaddedPages(
        name="padded pages" if packed == 1 else f"{packed} layers a page",
        arena_bytes=arena_bytes,
        page_bytes=block * token_bytes if block else state_bytes,
        block_tokens=block,
        group_layers=group,
        attention_groups=groups.get("attention", 0),
        state_groups=groups.get("state", 0),
        window_groups=tuple(window for window in windows if block for _ in range(groups[f"window {window}"])),
    )


def draft_log_bytes(spec: ModelSpec) -> int:
    """Return the bytes of the replay log of one token of a verify run: the inputs of all recurrent layers."""
    return sum(
        numbers * ITEM_BYTES[spec.dtype] + 4 * exact for numbers, exact in (layer.logged for layer in spec.layers)
    )


def _stateful(spec: ModelSpec) -> list[LayerSpec]:
    """Return layers with a recurrence, with only that state: a window of keys and values counts as pages in other
    engines.
    """
    layers = (
        replace(layer, state=tuple(part for part in layer.state if part.name != "window")) for layer in spec.layers
    )
    return [layer for layer in layers if layer.state]
