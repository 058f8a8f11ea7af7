"""Sizes that fit: what is asked of a model meets the arena.

    asked (EngineConfig)  --fit_sizes-->  Sizes: context length, rows, tokens of a step        + notes

The longest context is what one sequence alone can hold: one frame for its slot, the others for its pages.
The rows are the sequences that can hold a slot and a page each. A step always has room for all decodes and
one prefill chunk. A value that does not fit is shrunk. A note names the flag and both
numbers; if memory is short, it names the ``--memory`` that would hold the value.

Everything here is integers: no torch, no I/O.

Rejected: refusing to start when a request of full length does not fit (most traffic is shorter); a formula
for the memory that would hold it (typing rounds up and more memory may choose another frame: ``memory_for``
tries each answer).
"""

from __future__ import annotations

from weft.config import STEP_TOKENS_CPU, EngineConfig, Sizes
from weft.config_check import flag_name
from weft.errors import ConfigError
from weft.memory.frames.plan import ArenaPlan, memory_for
from weft.spec import CacheDTypeName, ModelSpec
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, format_bytes

DEFAULT_MEMORY_SHARE = 0.4
"""Share of the free RAM that the arena takes without ``--memory``."""

WORKSPACE_SHARE = 0.1
"""Share of the memory beside the weights that no arena takes: the tensors of a step live there."""


def default_memory_bytes(available_ram: int, spec: ModelSpec, config: EngineConfig,
                         kv_dtype: CacheDTypeName | None = None) -> int:
    """The default of ``--memory``: 40 % of ``available_ram``, at most the bytes that ``max_num_seqs``
    sequences of full length use."""
    share = int(available_ram * DEFAULT_MEMORY_SHARE)
    length = min(config.max_model_len or spec.max_positions, spec.max_positions)
    return min(share, memory_for(spec, kv_dtype or spec.dtype, config.max_num_seqs, length)[0])


def fit_sizes(config: EngineConfig, spec: ModelSpec, arena: ArenaPlan) -> Sizes:
    """The sizes of ``config`` for this model and arena. Values that do not fit are shrunk, and ``notes`` says
    so.

    ``max_model_len``: one sequence alone fits, with one frame for its slot and the rest for its pages.
    ``rows_max``: sequences that can hold a slot and a page each. They leave the step's budget room for one
    chunk of prefill beside all decodes, so decodes never starve a prompt.

    Raises ConfigError for a field that is not positive. Raises ConfigError if ``--memory`` cannot hold one
    frame of each kind; that error names the exact flag that would do.
    """
    for name in ("max_num_seqs", "max_num_batched_tokens", "max_queued_requests", "max_model_len"):
        value = getattr(config, name)
        if value is not None and value < 1:
            flag = flag_name(name)
            raise ConfigError(f"{flag} is {value}; it must be at least 1", param=flag)
    if arena.frame_count < arena.frames_min:
        need, flag = memory_for(spec, arena.kv_dtype, 1, 1)
        raise ConfigError(
            f"--memory is too small for one sequence of this {spec.family} model, which takes "
            f"{format_bytes(need)} at least: use {flag}", param="--memory")
    notes: list[str] = []
    max_model_len = _fit_length(config, spec, arena, notes)
    rows_max, step_tokens_max = _fit_rows(config, arena, notes)
    return Sizes(max_model_len=max_model_len, rows_max=rows_max, step_tokens_max=step_tokens_max,
                 queue_max=config.max_queued_requests, memory_bytes=arena.arena_bytes, notes=tuple(notes))


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
        notes.append(f"--max-model-len {length} shrunk to {holds}: one sequence of {holds} tokens fills "
                     f"the arena of {format_bytes(arena.arena_bytes)}; {flag} would hold {length}.")
    return min(length, holds)


def _fit_rows(config: EngineConfig, arena: ArenaPlan, notes: list[str]) -> tuple[int, int]:
    asked = config.max_num_batched_tokens or STEP_TOKENS_CPU
    tokens = max(asked, CHUNK_TOKENS + 1)
    if tokens > asked:
        notes.append(f"--max-num-batched-tokens {asked} raised to {tokens}: a step "
                     f"must hold one prefill chunk of {CHUNK_TOKENS} tokens and a decode.")
    rows = config.max_num_seqs
    held = _sequences_held(arena)
    if held is not None and held < rows:
        notes.append(f"--max-num-seqs {rows} shrunk to {held}: the arena of "
                     f"{format_bytes(arena.arena_bytes)} holds no more at once; more wait in the queue.")
        rows = held
    if rows > tokens - CHUNK_TOKENS:
        notes.append(f"--max-num-seqs {rows} shrunk to {tokens - CHUNK_TOKENS}: a step of "
                     f"--max-num-batched-tokens {tokens} must hold every decode and a prefill chunk of "
                     f"{CHUNK_TOKENS} tokens.")
        rows = tokens - CHUNK_TOKENS
    return rows, tokens


def _sequences_held(arena: ArenaPlan) -> int | None:
    """The most sequences of one page each: max over k slot frames of min(k m, (N - k) n). None: unbounded."""
    n, m, frames = arena.pages_per_frame, arena.slots_per_frame, arena.frame_count
    if not m:
        return frames * n if n else None
    if not n:
        return frames * m
    balanced = frames * n // (m + n)
    return max(min(k * m, (frames - k) * n) for k in (balanced, balanced + 1))
