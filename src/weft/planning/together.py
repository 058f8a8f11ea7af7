"""Several models in one memory: the need and the share of each.

    config.json --need_of--> weights, and an arena for one sequence of COMFORT_TOKENS
    needs, memory --share_out--> bytes of each model (``residency.shares``)

The weights are those of ``weights``; the arena of an engine is its share minus its real weights.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from weft.config import EngineConfig
from weft.errors import ConfigError
from weft.planning.model_plan import PlanOptions, make_plan
from weft.planning.residency import shares
from weft.spec import KV_DTYPES
from weft.units import format_bytes

COMFORT_TOKENS = 32768
"""Context length, tokens, that every resident model must be able to hold."""
AMPLE_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """Memory that a model needs. ``arena_bytes``: for one sequence of ``--max-model-len``, or of COMFORT_TOKENS; both
    sizes are of one replica. The other fields are for lists of models, which show models that were never loaded.
    """

    name: str
    weights_bytes: int
    arena_bytes: int = 0
    family: str = ""
    dtype: str = ""
    vocab_size: int = 0
    max_positions: int = 0
    causal: bool = True
    replicas: int = 1
    process_bytes: int = 0
    """Memory of a replica's process in addition to weights and arena: on a GPU its context, and a step."""

    @property
    def all_weights_bytes(self) -> int:
        """Return the weights of all replicas, with the memory of their processes."""
        return self.replicas * (self.weights_bytes + self.process_bytes)

    @property
    def all_arena_bytes(self) -> int:
        """Return the arenas of all replicas."""
        return self.replicas * self.arena_bytes


def options_of(config: EngineConfig, *, twelve_bit: bool = False, coded_tiles: bool = False) -> PlanOptions:
    """Return the options of a model whose memory is not known yet."""
    return PlanOptions(
        arena_bytes=AMPLE_BYTES,
        dtype=KV_DTYPES.get(config.dtype),  # type: ignore[arg-type]
        kv_dtype=KV_DTYPES.get(config.kv_dtype),
        state_dtype=KV_DTYPES.get(config.state_dtype),
        quantize=None if config.quantize == "none" else config.quantize,
        mtp=config.speculate != "off",
        twelve_bit=twelve_bit,
        coded_tiles=coded_tiles,
        lengths=() if config.max_model_len is None else (config.max_model_len,),
    )


def need_of(name: str, config: Mapping[str, Any], options: PlanOptions) -> ModelNeed:
    """Return the need of a model. ``options`` has an ample arena. Raises as ``make_plan``."""
    plan = make_plan(name, config, options)
    if not options.lengths and plan.spec.max_positions > COMFORT_TOKENS:
        comfort = next(fit for fit in plan.fits if fit.tokens >= COMFORT_TOKENS)
        arena = comfort.request_bytes + plan.arena.frame_bytes
    else:
        arena = plan.fits[-1].request_bytes + plan.arena.frame_bytes
    return ModelNeed(
        name,
        plan.weights.rank_bytes,
        arena,
        plan.spec.family,
        plan.spec.dtype,
        plan.spec.vocab_size,
        plan.spec.max_positions,
        plan.spec.causal,
    )


def share_of(need: ModelNeed, memory: int) -> int:
    """Return the share of a model when the other models are not known yet: its weights and the arena that it asks for.
    Raises ConfigError if its weights exceed ``memory``.
    """
    return share_out([need], min(memory, need.all_weights_bytes + max(1, need.all_arena_bytes)))[need.name]


def share_out(needs: Sequence[ModelNeed], memory: int) -> dict[str, int]:
    """Return the share of each model. Raises ConfigError for a model whose weights exceed ``memory``."""
    for need in needs:
        if need.all_weights_bytes >= memory:
            raise ConfigError(
                f"the weights of {need.name} take some {format_bytes(need.all_weights_bytes)}, and "
                f"--memory of all models together is {format_bytes(memory)}",
                param="--memory",
            )
    return shares(
        {need.name: need.all_weights_bytes for need in needs},
        {need.name: need.all_arena_bytes for need in needs},
        memory,
    )
