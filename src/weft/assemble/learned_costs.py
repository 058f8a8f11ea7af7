"""What computing a prompt costs: a guess at the start, and listeners that fit it to measured steps.

    guessed_cost    from the size of the weights and the number of attention layers
    cost_learner    --> the eviction policy        price_learner    --> restores from a store
"""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.memory.prefix.policy import Policy, PrefillCost, geometric_cost
from weft.memory.prefix.value.cost_fit import PrefillFit
from weft.schedule.plan import StepPlan
from weft.schedule.store_tier import StoreTier
from weft.schedule.work import work_of
from weft.spec import ITEM_BYTES

if TYPE_CHECKING:
    from weft.models.loading import LoadedModel


def guessed_cost(loaded: LoadedModel) -> PrefillCost:
    spec = loaded.spec
    return geometric_cost(hidden_size=spec.hidden_size, attention_layers=len(spec.attention_layers),
                          parameters=loaded.weights_bytes / ITEM_BYTES[spec.dtype])


def cost_learner(policy: Policy, guess: PrefillCost) -> Callable[[StepPlan, float], None]:
    """Gives ``policy`` the cost of computing a prompt here, fitted to measured steps. A step of decodes alone
    is like the step before it, so one in sixteen of them is enough."""
    fit = PrefillFit(guess)

    def measured(plan: StepPlan, seconds: float) -> None:
        if plan.window_count or (plan.step % 16 and not plan.prefills):
            return
        if fit.add(*work_of(plan), seconds):
            policy.costs(fit.cost())

    return measured


def price_learner(tier: StoreTier) -> Callable[[StepPlan, float], None]:
    return lambda plan, seconds: tier.prices.stepped(work_of(plan), seconds)
