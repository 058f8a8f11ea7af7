"""Several models in one memory: what each needs, and what each gets of it.

    config.json --need_of--> weights, and an arena for one sequence of COMFORT_TOKENS
    needs, memory --share_out--> bytes of each model (``residency.shares``)

The weights are those of ``weights``; an engine makes its arena of what its real weights leave of its share.
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
"""As many models stay in memory together as leave each one an arena for a sequence of so many tokens."""
AMPLE_BYTES = 1 << 50


@dataclass(frozen=True, slots=True)
class ModelNeed:
    """``arena_bytes``: for one sequence of ``--max-model-len``, or of COMFORT_TOKENS; both sizes are of one replica.
    The rest is what a list of models shows of one that was never loaded."""

    name: str
    weights_bytes: int
    arena_bytes: int = 0
    family: str = ""
    dtype: str = ""
    vocab_size: int = 0
    max_positions: int = 0
    causal: bool = True
    replicas: int = 1

    @property
    def all_weights_bytes(self) -> int:
        """Return the weights of all replicas."""
        return self.replicas * self.weights_bytes

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


def need_of(name: str, config: Mapping[str, Any], asked: PlanOptions) -> ModelNeed:
    """``asked`` has an ample arena. Raises what ``make_plan`` raises."""
    plan = make_plan(name, config, asked)
    if not asked.lengths and plan.spec.max_positions > COMFORT_TOKENS:
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
    """Return the share of a model whose companions are not known yet: its weights and the arena that it asks for.
    Raises ConfigError for one whose weights alone are more than ``memory``."""
    return share_out([need], min(memory, need.all_weights_bytes + max(1, need.all_arena_bytes)))[need.name]


def share_out(needs: Sequence[ModelNeed], memory: int) -> dict[str, int]:
    """Raises ConfigError for a model whose weights alone are more than ``memory``."""
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
