"""A plan: the memory that a model takes of a device, the requests that fit the rest, and both as data (``--json``).

    memory of a device  = weights | kept free for the step | arena
                                    WORKSPACE_SHARE of it    frames: KV pages or states

The arena's geometry and the number of sequences that fit come from ``memory.frames`` (``plan_arena``, ``frames_for``).
The engine allocates the same with ``--memory`` set to the arena's bytes. With ``arena_bytes`` instead of a device's
memory, weights are left out of the account. The keys of ``plan_data`` are part of weft's interface; a test holds them.

Pure: the configuration and the bytes are passed in.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.families import read_architecture
from weft.families.architecture import Architecture
from weft.families.sharding import possible_tps, rank_architecture
from weft.memory.frames.plan import WORKSPACE_SHARE, ArenaPlan, fit_sizes, memory_for, plan_arena, with_compressed_kv
from weft.planning.layouts import Frames, Layout, Load, all_layouts, draft_log_bytes
from weft.planning.weights import Weights, count_weights, form_of, with_share_of_codes
from weft.spec import CacheDTypeName, DTypeName, ModelSpec, with_cache_dtypes

LENGTHS = (4096, 32768, 131072)
"""Lengths shown by default, tokens; the longest that the model takes is added."""
DRAFTS = 3
"""Speculated tokens per step in comparisons that speculate."""
_AMPLE_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class PlanOptions:
    """Options of a plan. Exactly one of ``memory_bytes`` (of a device, with weights) and ``arena_bytes`` (only for
    pages and states) is set. ``ep``: experts are divided by number. ``quantize``: a name of ``weights.FORMS``; None:
    the form of the checkpoint. ``mtp``: the plan includes the head for multi-token prediction, if the model has one and
    there is one rank. ``twelve_bit``: the device is a CPU that keeps bfloat16 in 12 bits; ``coded_tiles``: it also
    keeps fp8, nf4 and fp4 as codes.
    """

    memory_bytes: int | None = None
    arena_bytes: int | None = None
    tp: int = 1
    ep: bool = False
    dtype: DTypeName | None = None
    kv_dtype: CacheDTypeName | None = None
    state_dtype: CacheDTypeName | None = None
    quantize: str | None = None
    twelve_bit: bool = False
    coded_tiles: bool = False
    lengths: tuple[int, ...] = ()
    drafts: int = DRAFTS
    mtp: bool = False


@dataclass(frozen=True, slots=True)
class Fit:
    """One sequence of ``tokens`` takes ``request_bytes``; ``sequences`` fit at once."""

    tokens: int
    request_bytes: int
    sequences: int


@dataclass(frozen=True, slots=True)
class ModelPlan:
    """A plan of a model on one device; all bytes are of that device. ``arena`` has no frames if the weights leave no
    memory, but valid sizes of pages, slots and frames. ``need_bytes``: the least memory of a device that runs one
    sequence of the shortest length; ``tp_that_fits``: the least ``--tp`` for which the memory suffices, None if it
    suffices already or for no ``--tp``.
    """

    name: str
    options: PlanOptions
    architecture: Architecture
    spec: ModelSpec
    weights: Weights
    state_dtype: CacheDTypeName
    arena: ArenaPlan
    workspace_bytes: int
    fits: tuple[Fit, ...]
    need_bytes: int
    tp_that_fits: int | None
    layouts: tuple[Layout, ...]

    @property
    def enough(self) -> bool:
        return self.fits[0].sequences > 0

    @property
    def longest_tokens(self) -> int:
        """Return the context that the engine would serve: one sequence surely fits. 0 if nothing does."""
        if self.arena.frame_count < self.arena.frames_min:
            return 0
        return fit_sizes(EngineConfig(), self.spec, self.arena).max_model_len

    @property
    def kv_token_bytes(self) -> int:
        return self.spec.kv_bytes_per_token(self.arena.kv_dtype)

    @property
    def handoff_bytes_s(self) -> int:
        """Return the bytes that a replica for prompts sends at 1,000 prompt tokens a second (``weft serve
        --roles``): KV of all ranks, and a state after each HANDOFF_TOKENS."""
        states = self.arena.slot_bytes * HANDOFF_TOKENS_S // HANDOFF_TOKENS
        return self.options.tp * (HANDOFF_TOKENS_S * self.kv_token_bytes + states)

    @property
    def state_bytes(self) -> int:
        """Return the exact bytes of one sequence's state; a slot adds alignment."""
        return self.spec.state_bytes_per_sequence(self.spec.dtype)

    @property
    def snapshot_tokens(self) -> int:
        """Tokens whose KV takes the bytes of one kept state: 0 if either takes nothing."""
        return self.arena.slot_stride_bytes // self.kv_token_bytes if self.kv_token_bytes else 0

    @property
    def compressed_bytes(self) -> int:
        """Return the bytes of a cached state in 8 bits (``--no-exact``): 0 where that would save little."""
        return self._compression.compressed_bytes

    @property
    def compressed_kv_token_bytes(self) -> float:
        """Return the bytes of a token's KV in 8 bits (``--no-exact``): 0 where KV is never compressed."""
        return self._compression.compressed_kv_bytes / self.arena.page_tokens

    @property
    def compressed4_kv_token_bytes(self) -> float:
        """Return the bytes of a token's KV in 4 bits (``cache.compress_kv int4``)."""
        return with_compressed_kv(self._compression, "int4").compressed_kv_bytes / self.arena.page_tokens

    @property
    def _compression(self) -> ArenaPlan:
        memory_bytes = self.arena.arena_bytes or _AMPLE_BYTES
        return plan_arena(self.spec, memory_bytes, kv_dtype=self.arena.kv_dtype, compress=True)


def make_plan(name: str, config: Mapping[str, Any], options: PlanOptions) -> ModelPlan:
    """Plan the model that ``config`` (a parsed config.json) describes.

    Raises UnknownArchitectureError or CheckpointError where the configuration cannot be read, ConfigError
    where ``--tp`` does not divide it or a length is longer than it takes.
    """
    assert (options.memory_bytes is None) != (options.arena_bytes is None)
    whole = read_architecture({key: value for key, value in config.items() if key != "quantization_config"})
    if options.dtype is not None:
        whole = replace(whole, dtype=options.dtype)
    lengths = _lengths(options, whole.max_positions)
    spec, weights = _of_rank(config, whole, options, options.tp)
    available = _available_bytes(options, weights)
    arena = plan_arena(spec, max(0, available), kv_dtype=options.kv_dtype)
    if arena.frame_count < arena.frames_min:  # nothing fits: only the sizes of an ample arena are shown
        arena = replace(plan_arena(spec, _AMPLE_BYTES, kv_dtype=options.kv_dtype), frame_count=0)
    frames = Frames(arena, draft_log_bytes(spec))
    fits = tuple(Fit(tokens, frames.request_bytes(Load(tokens)), frames.sequences(Load(tokens))) for tokens in lengths)
    return ModelPlan(
        name=name,
        options=options,
        architecture=whole,
        spec=spec,
        weights=weights,
        state_dtype=spec.state_dtype,
        arena=arena,
        workspace_bytes=max(0, (options.memory_bytes or 0) - weights.rank_bytes - available),
        fits=fits,
        need_bytes=_need_bytes(options, spec, weights, lengths[0]),
        tp_that_fits=None if fits[0].sequences else _tp_that_fits(config, whole, options, lengths[0]),
        layouts=tuple(all_layouts(spec, arena)),
    )


def _of_rank(
    config: Mapping[str, Any], whole: Architecture, options: PlanOptions, tp: int
) -> tuple[ModelSpec, Weights]:
    rank = rank_architecture(whole, tp, ep=options.ep)
    mtp = options.mtp and rank.mtp is not None
    spec = with_cache_dtypes(rank.spec(mtp=mtp), options.kv_dtype, options.state_dtype)
    form = form_of(
        config, whole.dtype, options.quantize, twelve_bit=options.twelve_bit, coded_tiles=options.coded_tiles
    )
    if options.quantize is None:
        form = with_share_of_codes(form, config, whole, twelve_bit=options.twelve_bit)
    return spec, count_weights(whole, rank, tp, form, mtp=mtp)


def _available_bytes(options: PlanOptions, weights: Weights) -> int:
    """Return the bytes for the arena; negative if the weights exceed the memory."""
    if options.arena_bytes is not None:
        return options.arena_bytes
    assert options.memory_bytes is not None
    left = options.memory_bytes - weights.rank_bytes
    return left - max(0, int(left * WORKSPACE_SHARE))


def _need_bytes(options: PlanOptions, spec: ModelSpec, weights: Weights, tokens: int) -> int:
    arena, _ = memory_for(spec, options.kv_dtype or spec.dtype, 1, tokens)
    if options.arena_bytes is not None:
        return arena
    return weights.rank_bytes + int(arena / (1 - WORKSPACE_SHARE)) + 1


def _tp_that_fits(config: Mapping[str, Any], whole: Architecture, options: PlanOptions, tokens: int) -> int | None:
    have = options.memory_bytes if options.memory_bytes is not None else options.arena_bytes
    assert have is not None
    for tp in possible_tps(whole, ep=options.ep):
        if tp > options.tp and _need_bytes(options, *_of_rank(config, whole, options, tp), tokens) <= have:
            return tp
    return None


def _lengths(options: PlanOptions, longest: int) -> tuple[int, ...]:
    """Return the requested lengths; by default the usual ones below the model's longest context, and that."""
    too_long = [tokens for tokens in options.lengths if tokens > longest]
    if too_long:
        raise ConfigError(
            f"--max-model-len {too_long[0]} is longer than the {longest} positions of this model",
            param="--max-model-len",
        )
    chosen: Sequence[int] = options.lengths or [*(tokens for tokens in LENGTHS if tokens < longest), longest]
    return tuple(sorted(set(chosen)))


HANDOFF_TOKENS_S, HANDOFF_TOKENS = 1000, 8192
"""Prompt tokens a second for which a handoff is priced, and tokens that are sent at once on a GPU."""
SHORT_TOKENS = 100
"""Tokens of a short request, whose cost shows the fixed charges of a layout."""


def plan_data(plan: ModelPlan, *, compare: bool) -> dict[str, Any]:
    """Return the plan as data for ``json.dumps``. With ``compare``, a list of layouts, weft's first."""
    arena, weights = plan.arena, plan.weights
    data: dict[str, Any] = {
        "model": plan.name,
        "family": plan.spec.family,
        "layers": len(plan.spec.layers),
        "attention_layers": len(plan.spec.attention_layers),
        "recurrent_layers": len(plan.spec.recurrent_layers),
        "max_positions": plan.spec.max_positions,
        "tp": plan.options.tp,
        "ep": plan.options.ep,
        "why_no_gpu": plan.architecture.why_no_gpu,
        "dtype": plan.spec.dtype,
        "kv_dtype": arena.kv_dtype,
        "state_dtype": plan.state_dtype,
        "memory_bytes": plan.options.memory_bytes,
        "workspace_bytes": plan.workspace_bytes,
        "weights": {
            "parameters": weights.parameters,
            "bytes": weights.rank_bytes,
            "form": weights.form,
            "parts": dict(weights.parts),
        },
        "kv_bytes_per_token": plan.kv_token_bytes,
        "compressed_kv_bytes_per_token": plan.compressed_kv_token_bytes,
        "compressed_kv_bytes_per_token_int4": plan.compressed4_kv_token_bytes,
        "state_bytes_per_sequence": plan.state_bytes,
        "handoff_bytes_s": plan.handoff_bytes_s,
        "arena": {
            "bytes": arena.arena_bytes,
            "frame_bytes": arena.frame_bytes,
            "frames": arena.frame_count,
            "page_bytes": arena.page_bytes,
            "pages_per_frame": arena.pages_per_frame,
            "slot_bytes": arena.slot_stride_bytes,
            "slots_per_frame": arena.slots_per_frame,
        },
        "snapshot": {
            "bytes": arena.slot_stride_bytes,
            "tokens": plan.snapshot_tokens,
            "compressed_bytes": plan.compressed_bytes,
        },
        "longest_tokens": plan.longest_tokens,
        "enough": plan.enough,
        "need_bytes": plan.need_bytes,
        "tp_that_fits": plan.tp_that_fits,
        "lengths": [
            {"tokens": fit.tokens, "request_bytes": fit.request_bytes, "sequences": fit.sequences} for fit in plan.fits
        ],
    }
    if compare:
        data["layouts"] = [_layout_data(plan, layout) for layout in plan.layouts]
    return data


def loads(plan: ModelPlan) -> list[Load]:
    """Return the kinds of requests to compare, without their lengths: plain, speculating, and with prefix caching."""
    drafts = plan.options.drafts
    speculating = [Load(0, drafts)] if drafts else []
    return [Load(0), *speculating, Load(0, drafts, cached=True)]


def _layout_data(plan: ModelPlan, layout: Layout) -> dict[str, Any]:
    def at(load: Load, tokens: int) -> dict[str, Any]:
        full = Load(tokens, load.drafts, load.cached)
        return {"tokens": tokens, "request_bytes": layout.request_bytes(full), "sequences": layout.sequences(full)}

    lengths = [SHORT_TOKENS, *(fit.tokens for fit in plan.fits)]
    return {
        "layout": layout.name,
        "block_tokens": layout.block_tokens,
        "loads": [
            {"drafts": load.drafts, "cached": load.cached, "lengths": [at(load, tokens) for tokens in lengths]}
            for load in loads(plan)
        ],
    }
