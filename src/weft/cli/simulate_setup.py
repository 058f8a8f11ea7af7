"""What ``weft simulate`` replays on: memory, costs and limits, from the flags or from a recording."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING

from weft.units import CHUNK_TOKENS

if TYPE_CHECKING:
    from weft.costs.step import CostModel
    from weft.memory.frames.plan import ArenaPlan
    from weft.sim.store_tier import StoreModel


@dataclass(frozen=True, slots=True)
class Setup:
    """``plans``: an arena for each of ``sizes``, in bytes. ``length_max``: longest request served.
    ``grid_tokens``: states are kept at its multiples. ``plan_for``: an arena of another size. ``stores``:
    those of --store, None without."""

    model: str
    sizes: list[int]
    plans: list[ArenaPlan]
    cost: CostModel
    length_max: int
    words: list[str]
    plan_for: Callable[[int], ArenaPlan]
    grid_tokens: int = CHUNK_TOKENS
    stores: Sequence[StoreModel | None] = (None,)
