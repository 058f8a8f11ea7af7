"""The geometry of the arena: page, slot and frame of one model, and the sizes of an engine that fit.

    arena   |  frame 0   |  frame 1   |  frame 2   | ...            F bytes each
            |P|P|P|P|P|P|  S'  |  S'  |P|P|P|P|P|P|                 n pages or m slots, never both

    F = n x P = m x S'    S' >= S    every offset a multiple of 256

P is the bytes of a KV page: 16 tokens for all attention layers, a K block then a V block per layer. S is the
bytes of a state slot: the states of all recurrent layers of one sequence. As n x P = m x S', page i is at i x
P and slot j at j x S' in every frame. Each kind is one plain strided view of the whole arena. A model without
attention has P = 0 and frames of one slot, one without recurrent layers S = 0 and frames of one page.

A *compressed* state is a snapshot in 8 bits and is stored in KV pages: in the number that its bytes need, anywhere. So
is compressed KV, in 8 bits or 4 (decision 0013). Neither is a third kind of frame.

``fit_sizes`` shrinks sizes that do not fit: the context to the length that one sequence can hold if no other runs, the
rows to the sequences that can hold a slot and a page each. A note names the flag and both numbers, and the ``--memory``
that would hold the value.

This file computes with integers only and needs neither torch nor I/O. Decision 0002 says why a slot is never split over
frames.
"""

from __future__ import annotations

from dataclasses import dataclass, replace
from math import gcd

from weft.config import STEP_TOKENS_CPU, EngineConfig, Sizes
from weft.config_check import check_fields
from weft.errors import ConfigError
from weft.spec import (
    ITEM_BYTES,
    TOKEN_SCALE_BYTES,
    CacheDTypeName,
    CompressedKvName,
    DTypeName,
    KvLayoutName,
    ModelSpec,
)
from weft.units import ALIGN_BYTES, CHUNK_TOKENS, PAGE_TOKENS, align_up, ceil_div, format_bytes, pages_for

FRAMES_WANTED = 50
"""Number of frames below which an arena is coarse: padding is then traded against frame size."""

COMPRESSED_KV_ALIGN = 64
"""Alignment of records of compressed KV, bytes."""
COMPRESSED_SCALE_BYTES = 4
"""Bytes of scales for each row of compressed numbers: a float32 or two bfloat16."""


@dataclass(frozen=True, slots=True)
class StateField:
    """One state tensor of one layer: ``shape`` and ``dtype`` at ``offset_bytes`` inside a slot."""

    layer: int
    name: str
    offset_bytes: int
    shape: tuple[int, ...]
    dtype: CacheDTypeName


@dataclass(frozen=True, slots=True)
class KvField:
    """One attention layer inside a page: a K block and a V block, each kv_heads x head_dim x 16 items.
    ``v_offset_bytes`` None: a layer without a V block (latent attention). ``scale_offset_bytes``: the scales of the
    layer's tokens, kv_heads x 16 for each block; None in dtypes without scales."""

    layer: int
    k_offset_bytes: int
    v_offset_bytes: int | None
    kv_heads: int
    head_dim: int
    scale_offset_bytes: int | None = None


@dataclass(frozen=True, slots=True)
class CompressedField:
    """A state field inside a compressed state, at ``offset_bytes``: int8 codes, with a float32 scale for each
    row (all but the last dimension) at ``scale_offset_bytes``. None there: the bytes of the field
    unchanged."""

    field: StateField
    offset_bytes: int
    scale_offset_bytes: int | None


@dataclass(frozen=True, slots=True)
class CompressedKvField:
    """A K block and its V block, if any, in a compressed page: codes from ``offset_bytes`` on, their scales
    from ``scale_offset_bytes`` on.

    int8   codes in the order of the numbers in the page; a float32 for each block, head and token
    int4   K [heads, channels, 16 tokens], V [heads, 16 tokens, channels], two to a byte; two bfloat16 for
           each row of these: the least number and the step"""

    field: KvField
    offset_bytes: int
    scale_offset_bytes: int


@dataclass(frozen=True, slots=True)
class ArenaPlan:
    """The geometry in plain integers, from ``plan_arena``; memory and the tensor views read it."""

    page_bytes: int
    pages_per_frame: int
    slot_bytes: int
    slot_stride_bytes: int
    slots_per_frame: int
    frame_bytes: int
    frame_count: int
    kv_dtype: CacheDTypeName
    model_dtype: DTypeName
    kv_fields: tuple[KvField, ...]
    state_fields: tuple[StateField, ...]
    compressed_pages: int = 0
    """Pages of a compressed state; 0: states are never compressed."""
    compressed_fields: tuple[CompressedField, ...] = ()
    compressed_kv_bytes: int = 0
    """Bytes of a compressed KV page; 0: KV is never compressed."""
    compressed_kv_fields: tuple[CompressedKvField, ...] = ()
    compressed_kv_dtype: CompressedKvName = "int8"
    kv_layout: KvLayoutName = "vnni"
    """Order of the numbers inside a page; it changes no size."""

    @property
    def compressed_bytes(self) -> int:
        return self.compressed_pages * self.page_bytes

    @property
    def page_count(self) -> int:
        return self.frame_count * self.pages_per_frame

    @property
    def slot_count(self) -> int:
        return self.frame_count * self.slots_per_frame

    @property
    def arena_bytes(self) -> int:
        return self.frame_count * self.frame_bytes

    @property
    def page_tokens(self) -> int:
        return PAGE_TOKENS

    def pages_for(self, tokens: int) -> int:
        """Return the pages of ``tokens`` tokens of one sequence: none in a model without attention."""
        return pages_for(tokens) if self.pages_per_frame else 0

    @property
    def frames_min(self) -> int:
        """Least number of frames that runs anything: one for each kind of the model."""
        return (self.pages_per_frame > 0) + (self.slots_per_frame > 0)

    def frames_for(self, sequences: int, tokens_each: int) -> int:
        """Return the frames that hold ``sequences`` sequences of ``tokens_each`` tokens in every case."""
        slots = ceil_div(sequences, self.slots_per_frame) if self.slots_per_frame else 0
        pages = sequences * self.pages_for(tokens_each)
        return slots + (ceil_div(pages, self.pages_per_frame) if pages else 0)


def _lay_page(spec: ModelSpec, kv_dtype: CacheDTypeName) -> tuple[tuple[KvField, ...], int]:
    fields, offset = [], 0
    for layer in spec.attention_layers:
        kv_heads, head_dim = spec.layers[layer].kv_heads, spec.layers[layer].head_dim
        has_values = spec.layers[layer].has_values
        block = align_up(kv_heads * head_dim * PAGE_TOKENS * ITEM_BYTES[kv_dtype])
        end = offset + (1 + has_values) * block
        scales = (1 + has_values) * kv_heads * PAGE_TOKENS * TOKEN_SCALE_BYTES.get(kv_dtype, 0)
        fields.append(
            KvField(layer, offset, offset + block if has_values else None, kv_heads, head_dim, end if scales else None)
        )
        offset = end + align_up(scales)
    return tuple(fields), offset


def _lay_slot(spec: ModelSpec) -> tuple[tuple[StateField, ...], int]:
    fields, offset = [], 0
    for layer in spec.recurrent_layers:
        for part in spec.layers[layer].state:
            fields.append(StateField(layer, part.name, offset, part.shape, part.dtype_in(spec.dtype)))
            offset = align_up(offset + part.part_bytes(spec.dtype))
    return tuple(fields), offset


def _lay_compressed(spec: ModelSpec, state_fields: tuple[StateField, ...]) -> tuple[tuple[CompressedField, ...], int]:
    """Return the fields of a compressed state: accumulators as codes and scales; states in the model's own dtype
    (windows) unchanged."""
    parts = [part for layer in spec.recurrent_layers for part in spec.layers[layer].state]
    fields, offset = [], 0
    for field, part in zip(state_fields, parts, strict=True):
        coded = part.dtype != "model" and ITEM_BYTES[field.dtype] > 1
        codes_bytes = part.element_count if coded else part.part_bytes(spec.dtype)
        end = align_up(offset + codes_bytes)
        fields.append(CompressedField(field, offset, end if coded else None))
        offset = align_up(end + part.element_count // part.shape[-1] * 4) if coded else end
    return tuple(fields), offset


def _lay_compressed_kv(
    kv_fields: tuple[KvField, ...], dtype: CompressedKvName
) -> tuple[tuple[CompressedKvField, ...], int]:
    """Return the fields of compressed KV: all codes, then all scales; the next record begins at a multiple of
    COMPRESSED_KV_ALIGN."""
    codes = [_numbers(field) // (1 if dtype == "int8" else 2) for field in kv_fields]
    fields, codes_at, scales_at = [], 0, sum(codes)
    for field, size in zip(kv_fields, codes, strict=True):
        fields.append(CompressedKvField(field, codes_at, scales_at))
        codes_at += size
        k_rows = PAGE_TOKENS if dtype == "int8" else field.head_dim
        v_rows = PAGE_TOKENS if field.v_offset_bytes is not None else 0
        scales_at += field.kv_heads * (k_rows + v_rows) * COMPRESSED_SCALE_BYTES
    return tuple(fields), align_up(scales_at, COMPRESSED_KV_ALIGN)


def _numbers(field: KvField) -> int:
    """Numbers in the K and V blocks of a page."""
    return field.kv_heads * PAGE_TOKENS * field.head_dim * (1 + (field.v_offset_bytes is not None))


def choose_frame(page_bytes: int, slot_bytes: int, memory_bytes: int) -> tuple[int, int]:
    """Return (pages per frame n, slots per frame m) for P = ``page_bytes`` and S = ``slot_bytes``. Both are
    multiples of 256, and 0 for a kind that the model does not have.

    Candidates: m = 1, 2, ... each with its smallest n, until one pads less than 1 %. That ends at m = P / 256
    at the latest, where S' = S. This frame is chosen if the arena has at least ``FRAMES_WANTED`` of it. If
    not, the candidate with the least loss is chosen: the padding of a frame plus one frame, as shares of
    frame and arena. Candidates that leave fewer than two frames are out if another one leaves two.
    """
    if not page_bytes or not slot_bytes:
        return int(page_bytes > 0), int(slot_bytes > 0)
    units = page_bytes // ALIGN_BYTES
    candidates: list[tuple[int, int]] = []
    fine: tuple[int, int] | None = None
    for m in range(1, units + 1):
        if fine is not None and m * slot_bytes > fine[0] * page_bytes:
            break
        step = m // gcd(m, units)
        n = step * ceil_div(m * slot_bytes, step * page_bytes)
        candidates.append((n, m))
        pads_little = 100 * (n * page_bytes - m * slot_bytes) < n * page_bytes
        if pads_little and (fine is None or n <= fine[0]):
            fine = (n, m)
    assert fine is not None, "m = P / 256 pads nothing"
    if FRAMES_WANTED * fine[0] * page_bytes <= memory_bytes:
        return fine

    def loss(candidate: tuple[int, int]) -> tuple[bool, float]:
        n, m = candidate
        frame_bytes = n * page_bytes
        too_big = 2 * frame_bytes > memory_bytes
        padding_share = 0.0 if too_big else 1 - m * slot_bytes / frame_bytes
        return too_big, padding_share + frame_bytes / max(memory_bytes, 1)

    return min(candidates, key=loss)


def plan_arena(
    spec: ModelSpec,
    memory_bytes: int,
    *,
    kv_dtype: CacheDTypeName | None = None,
    compress: bool = False,
    compress_kv: CompressedKvName = "int8",
    kv_layout: KvLayoutName = "vnni",
) -> ArenaPlan:
    """Return the arena of ``spec`` in at most ``memory_bytes``. ``kv_dtype`` None takes the model's. ``compress``:
    snapshots may be compressed, if that saves a quarter of their bytes and the model has pages. KV may too, in
    ``compress_kv``, if the model has snapshots and its KV has more than 8 bits. ``kv_layout``: the layout that the
    device's kernels read. Never fails: too little memory gives too few frames, and ``fit_sizes`` reports that."""
    kv_dtype = kv_dtype or spec.dtype
    kv_fields, page_bytes = _lay_page(spec, kv_dtype)
    state_fields, slot_bytes = _lay_slot(spec)
    n, m = choose_frame(page_bytes, slot_bytes, memory_bytes)
    frame_bytes = n * page_bytes if n else m * slot_bytes
    arena = ArenaPlan(
        page_bytes=page_bytes,
        pages_per_frame=n,
        slot_bytes=slot_bytes,
        slot_stride_bytes=frame_bytes // m if m else 0,
        slots_per_frame=m,
        frame_bytes=frame_bytes,
        frame_count=max(0, memory_bytes) // frame_bytes if frame_bytes else 0,
        kv_dtype=kv_dtype,
        model_dtype=spec.dtype,
        kv_fields=kv_fields,
        state_fields=state_fields,
        kv_layout=kv_layout,
    )
    if not compress:
        return arena
    compression = with_compression(arena, spec)
    states = compression if 4 * compression.compressed_bytes <= 3 * arena.slot_stride_bytes else arena
    return with_compressed_kv(states, compress_kv)


def with_compression(arena: ArenaPlan, spec: ModelSpec) -> ArenaPlan:
    """Return ``arena`` of ``spec`` with a layout for compressed states, however much that saves; unchanged if the model
    has no pages or no states."""
    if not arena.pages_per_frame or not arena.slots_per_frame:
        return arena
    fields, compressed_bytes = _lay_compressed(spec, arena.state_fields)
    return replace(arena, compressed_pages=ceil_div(compressed_bytes, arena.page_bytes), compressed_fields=fields)


def with_compressed_kv(arena: ArenaPlan, dtype: CompressedKvName = "int8") -> ArenaPlan:
    """Return ``arena`` with a layout for pages compressed in ``dtype``; unchanged if the model has no states, or KV of
    8 bits."""
    if not arena.pages_per_frame or not arena.slots_per_frame or ITEM_BYTES[arena.kv_dtype] == 1:
        return arena
    fields, record_bytes = _lay_compressed_kv(arena.kv_fields, dtype)
    return replace(arena, compressed_kv_bytes=record_bytes, compressed_kv_fields=fields, compressed_kv_dtype=dtype)


def memory_for(spec: ModelSpec, kv_dtype: CacheDTypeName, sequences: int, tokens_each: int) -> tuple[int, str]:
    """Return the bytes that hold ``sequences`` sequences of ``tokens_each`` tokens, and the ``--memory`` that asks for
    them.

    More memory may choose another frame, and typing rounds up. So the answer is tried, and grown until its
    arena is large enough. It grows each time, and from 50 frames on the frame stays the same.
    """
    need = 1
    while True:
        need, text = _typed(need)
        arena = plan_arena(spec, need, kv_dtype=kv_dtype)
        frames = arena.frames_for(sequences, tokens_each)
        if arena.frame_count >= frames:
            return need, text
        need = frames * arena.frame_bytes


def _typed(count: int) -> tuple[int, str]:
    """Return ``count`` rounded up by less than 1 % to a short text, and that text."""
    for suffix, scale in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if count > 100 * scale:
            return ceil_div(count, scale) * scale, f"--memory {ceil_div(count, scale)}{suffix}"
    return count, f"--memory {count}B"


DEFAULT_MEMORY_SHARE = 0.4
"""Share of the free RAM that the arena takes without ``--memory``."""

WORKSPACE_SHARE = 0.1
"""Share of the memory without weights that no arena takes: it holds the tensors of a step."""


def default_memory_bytes(
    available_ram: int, spec: ModelSpec, config: EngineConfig, kv_dtype: CacheDTypeName | None = None
) -> int:
    """Return the default of ``--memory``: 40 % of ``available_ram``, at most the bytes that ``max_num_seqs``
    sequences of full length use."""
    share = int(available_ram * DEFAULT_MEMORY_SHARE)
    length = min(config.max_model_len or spec.max_positions, spec.max_positions)
    return min(share, memory_for(spec, kv_dtype or spec.dtype, config.max_num_seqs, length)[0])


def fit_sizes(config: EngineConfig, spec: ModelSpec, arena: ArenaPlan) -> Sizes:
    """Return the sizes of ``config`` for this model and arena. Values that do not fit are shrunk, and ``notes`` says
    so.

    ``max_model_len``: one sequence fits by itself, with one frame for its slot and the rest for its pages.
    ``rows_max``: sequences that can hold a slot and a page each. They leave the step's budget room for one chunk of
    prefill in addition to all decodes, so decodes never starve a prompt.

    Raises ConfigError for a field that its declaration excludes. Raises ConfigError if ``--memory`` cannot
    hold one frame of each kind; that error names the exact flag that would do.
    """
    check_fields(config)
    if arena.frame_count < arena.frames_min:
        need, flag = memory_for(spec, arena.kv_dtype, 1, 1)
        raise ConfigError(
            f"--memory {config.memory or format_bytes(arena.arena_bytes)} is too small for one sequence of this "
            f"{spec.family} model, which takes {format_bytes(need)} at least: use {flag}",
            param="--memory",
        )
    notes: list[str] = []
    max_model_len = _fit_length(config, spec, arena, notes)
    rows_max, step_tokens_max = _fit_rows(config, arena, notes)
    if not spec.causal and max_model_len > step_tokens_max:
        notes.append(
            f"--max-model-len {max_model_len} shrunk to {step_tokens_max}: the model is not causal, so one "
            f"step computes all of a prompt, and --max-num-batched-tokens is {step_tokens_max}."
        )
        max_model_len = step_tokens_max
    return Sizes(
        max_model_len=max_model_len,
        rows_max=rows_max,
        step_tokens_max=step_tokens_max,
        queue_max=config.max_queued_requests,
        memory_bytes=arena.arena_bytes,
        notes=tuple(notes),
        whole_prompts=not spec.causal,
        priority_across_keys=config.priority_across_keys,
    )


def _fit_length(config: EngineConfig, spec: ModelSpec, arena: ArenaPlan, notes: list[str]) -> int:
    requested = config.max_model_len or spec.max_positions
    length = min(requested, spec.max_positions)
    if length < requested:
        notes.append(f"--max-model-len {requested} shrunk to {length}: the model has no more positions.")
    if not arena.pages_per_frame:
        return length
    slot_frames = int(arena.slots_per_frame > 0)
    holds = (arena.frame_count - slot_frames) * arena.pages_per_frame * PAGE_TOKENS
    if holds < length:
        _, flag = memory_for(spec, arena.kv_dtype, 1, length)
        notes.append(
            f"--max-model-len {length} shrunk to {holds}: one sequence of {holds} tokens fills "
            f"the arena of {format_bytes(arena.arena_bytes)}; {flag} would hold {length}."
        )
    return min(length, holds)


def _fit_rows(config: EngineConfig, arena: ArenaPlan, notes: list[str]) -> tuple[int, int]:
    limit = config.max_num_batched_tokens or STEP_TOKENS_CPU
    tokens = max(limit, CHUNK_TOKENS + 1)
    if tokens > limit:
        notes.append(
            f"--max-num-batched-tokens {limit} raised to {tokens}: a step "
            f"must hold one prefill chunk of {CHUNK_TOKENS} tokens and a decode."
        )
    rows = config.max_num_seqs
    sequences_max = _sequences_held(arena)
    if sequences_max is not None and sequences_max < rows:
        notes.append(
            f"--max-num-seqs {rows} shrunk to {sequences_max}: the arena of "
            f"{format_bytes(arena.arena_bytes)} holds no more at once; more wait in the queue."
        )
        rows = sequences_max
    if rows > tokens - CHUNK_TOKENS:
        notes.append(
            f"--max-num-seqs {rows} shrunk to {tokens - CHUNK_TOKENS}: a step of "
            f"--max-num-batched-tokens {tokens} must hold every decode and a prefill chunk of "
            f"{CHUNK_TOKENS} tokens."
        )
        rows = tokens - CHUNK_TOKENS
    return rows, tokens


def _sequences_held(arena: ArenaPlan) -> int | None:
    """Return the most sequences of one page each: max over k slot frames of min(k m, (N - k) n). None: unbounded."""
    n, m, frames = arena.pages_per_frame, arena.slots_per_frame, arena.frame_count
    if not m:
        return frames * n if n else None
    if not n:
        return frames * m
    balanced = frames * n // (m + n)
    return max(min(k * m, (frames - k) * n) for k in (balanced, balanced + 1))
