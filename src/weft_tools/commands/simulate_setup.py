"""The setup of ``weft simulate``: memory, costs and limits, from the flags or from a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass, replace
from pathlib import Path
from typing import TYPE_CHECKING, Any

from weft.cli.plan import find_config, stored_as
from weft.errors import ConfigError
from weft.planning.roofline import BANDWIDTH_SHARE, FLOPS_SHARE, STEP_FIXED_S
from weft.units import CHUNK_TOKENS, format_bytes, parse_byte_rate, parse_bytes

if TYPE_CHECKING:
    from weft.costs.step import CostModel
    from weft.memory.frames.plan import ArenaPlan
    from weft_tools.sim.handoffs import LinkModel
    from weft_tools.sim.recording import Recording
    from weft_tools.sim.store_tier import PackingModel, StoreModel

DEFAULT_MEMORY = "20GB,40GB,80GB"
DEFAULT_DEVICE = "H100"


@dataclass(frozen=True, slots=True)
class Setup:
    """The setup of a study. ``plans``: an arena for each of ``sizes``, in bytes. ``length_max``: longest request
    served. ``grid_tokens``: states are kept at its multiples. ``plan_for``: an arena of another size. ``stores``: those
    of --store, None without. ``page_bytes``, ``state_bytes``: of all ``ranks``."""

    model: str
    sizes: list[int]
    plans: list[ArenaPlan]
    cost: CostModel
    length_max: int
    words: list[str]
    plan_for: Callable[[int], ArenaPlan]
    page_bytes: int
    state_bytes: int
    grid_tokens: int = CHUNK_TOKENS
    stores: Sequence[StoreModel | None] = (None,)
    ranks: int = 1

    def link_for(self, bytes_s: float, step_tokens_max: int) -> LinkModel:
        """Return the link that sends records of this model; a chunk is the tokens of one step."""
        from weft.schedule.snapshots import on_grid
        from weft_tools.sim.handoffs import LinkModel

        return LinkModel(
            bytes_s,
            self.page_bytes,
            self.state_bytes,
            on_grid(step_tokens_max, self.grid_tokens) or CHUNK_TOKENS,
            self.ranks,
        )


def setup_of(memory: str | None, recording: Recording | None, more: dict[str, Any]) -> Setup:
    """Return geometry and costs. Raise ConfigError if neither the flags nor the recording have them."""
    if more["model"] is None:
        return _as_recorded(memory, recording, more)
    from weft.memory.frames.plan import plan_arena
    from weft.planning.model_plan import PlanOptions, make_plan
    from weft.planning.roofline import model_load, roofline
    from weft_tools.sim.store_tier import packing_of

    name, config = find_config(more["model"], more["revision"])
    sizes = _sizes(memory or DEFAULT_MEMORY)
    options = PlanOptions(
        arena_bytes=max(sizes), **stored_as({flag: more[flag] for flag in ("tp", "kv_dtype", "quantize")})
    )
    tp, kv_dtype = options.tp, options.kv_dtype
    plan = make_plan(name, config, options)

    def plan_for(size: int) -> ArenaPlan:
        return _enough(plan_arena(plan.spec, size, kv_dtype=kv_dtype, compress=True), size)

    plans = [plan_for(size) for size in sizes]
    cost = _fitted(more["fit"], recording, more["device"])
    if cost is None:
        load = model_load(
            plan.architecture,
            parameters=plan.weights.parameters,
            eight_bit=plan.weights.form in ("fp8", "int8"),
            weight_bytes=plan.weights.rank_bytes * tp / plan.weights.parameters,
            kv_bytes=plan.kv_token_bytes * tp,
            state_bytes=plan.state_bytes * tp,
        )
        cost = roofline(load, more["device"] or DEFAULT_DEVICE, count=tp)
    length_max = min(plan.spec.max_positions, more["max_model_len"] or plan.spec.max_positions)
    where = f" on each of {tp} devices" if tp > 1 else ""
    words = [
        f"{name}: {format_bytes(plan.kv_token_bytes)} of KV a token, "
        f"{format_bytes(plan.state_bytes)} of state a sequence{where}",
        _cost_words(cost),
    ]
    whole = make_plan(name, config, replace(options, tp=1))
    arena = plan_arena(whole.spec, max(sizes), kv_dtype=kv_dtype)
    packing = packing_of(arena.kv_dtype, "float32") if more["store_pack"] == "auto" else None
    stores = _stores(more, arena.page_bytes, whole.state_bytes, ranks=tp, packing=packing)
    return Setup(
        name,
        sizes,
        plans,
        cost,
        length_max,
        words + _packing_words(stores),
        plan_for,
        arena.page_bytes,
        whole.state_bytes,
        stores=stores,
        ranks=tp,
    )


def _as_recorded(memory: str | None, recording: Recording | None, more: dict[str, Any]) -> Setup:
    from weft_tools.sim.recording import resized

    if recording is None:
        raise ConfigError(
            "the trace does not say which model it is for: name one with --model, such as "
            "--model Qwen3.5-4B (`weft plan` lists those it knows)",
            param="--model",
        )
    cost = _fitted(more["fit"], recording, None)
    if cost is None:
        raise ConfigError(
            "the recording has no step times to fit: name the model with --model for a "
            "roofline, or a recording that has them with --fit",
            param="--fit",
        )
    arena = recording.arena
    sizes = [arena.arena_bytes] if memory is None else _sizes(memory)
    plans = [arena] if memory is None else [_enough(resized(arena, size), size) for size in sizes]
    words = [
        f"{recording.model}, as recorded: {format_bytes(arena.page_bytes / arena.page_tokens)} of KV a "
        f"token, {format_bytes(arena.slot_bytes)} of state a sequence",
        _cost_words(cost),
    ]
    return Setup(
        recording.model,
        sizes,
        plans,
        cost,
        more["max_model_len"] or recording.max_model_len,
        words,
        lambda size: _enough(resized(arena, size), size),
        arena.page_bytes,
        arena.slot_bytes,
        recording.grid_tokens,
        _stores(more, arena.page_bytes, arena.slot_bytes),
    )


def _packing_words(stores: list[StoreModel | None]) -> list[str]:
    """Return a line about the replay's model of packing; none without a store that packs."""
    from weft_tools.sim.store_tier import NO_PACKING

    return list(
        dict.fromkeys(
            f"stored KV is packed to {store.packing.kv:.0%} and states to {store.packing.state:.0%} of their bytes, "
            f"at {store.packing.pack_bytes_s / 1e9:.1f} GB/s, and unpacked at "
            f"{store.packing.unpack_bytes_s / 1e9:.1f} GB/s"
            for store in stores
            if store is not None and store.packing != NO_PACKING
        )
    )


def _stores(
    more: dict[str, Any], page_bytes: int, state_bytes: int, *, ranks: int = 1, packing: PackingModel | None = None
) -> list[StoreModel | None]:
    """Return the stores of --store, for pages and states of all ranks together. ``packing``: None for none."""
    from weft_tools.sim.store_tier import NO_PACKING, StoreModel, parse_disk

    rate = parse_byte_rate(more["store_write"], flag="--store-write")
    disks = {text: parse_disk(text, rate) for text in several(more["store"], "--store")}
    return [
        None if disk is None else StoreModel(text, disk, page_bytes, state_bytes, ranks, packing or NO_PACKING)
        for text, disk in disks.items()
    ]


def _fitted(fit: Path | None, recording: Recording | None, device: str | None) -> CostModel | None:
    """Return the costs fitted to the steps of --fit, or of the trace if no device is named; None for a roofline."""
    from weft.costs.fit import STEPS_MIN, fit_steps
    from weft_tools.sim.recording import read_trace

    if fit is not None:
        _, source = read_trace(str(fit))
        if source is None:
            raise ConfigError(f"--fit {fit}: only a recording of `weft serve --record` has step times", param="--fit")
        return fit_steps(source.steps, name=str(fit))
    if recording is None or device is not None or len(recording.steps) < STEPS_MIN:
        return None
    return fit_steps(recording.steps)


def _cost_words(cost: CostModel) -> str:
    numbers = cost.to_json()
    prefill = f"a prompt of 1,000 tokens adds {cost.prefill_s(0, 1000) * 1e3:.1f} ms"
    if numbers["kind"] == "fitted":
        return (
            f"times fitted to {numbers['steps']:,} steps (median error {numbers['error']:.0%}): "
            f"{numbers['fixed_s'] * 1e3:.1f} ms a step, {prefill}"
        )
    return (
        f"{numbers['name']} at {FLOPS_SHARE:.0%} of FLOP/s and {BANDWIDTH_SHARE:.0%} of bandwidth: "
        f"{STEP_FIXED_S * 1e3:.0f} ms a step, {prefill}"
    )


def _sizes(memory: str) -> list[int]:
    return [parse_bytes(item, flag="--memory") for item in several(memory, "--memory")]


def several(text: str, flag: str) -> list[str]:
    items = [item.strip() for item in text.split(",")]
    if not all(items):
        raise ConfigError(f"{flag} {text!r} has an empty item in it", param=flag)
    return list(dict.fromkeys(items))


def _enough(arena: ArenaPlan, size: int) -> ArenaPlan:
    if arena.frame_count < arena.frames_min:
        raise ConfigError(
            f"--memory {format_bytes(size)} holds {arena.frame_count} frames of "
            f"{format_bytes(arena.frame_bytes)}: not even one sequence",
            param="--memory",
        )
    return arena
