"""The drafter of an engine, with the costs of steps measured on the engine's own executor.

    EngineConfig.speculate --> sources --> ProfileRun: a short answer of an engine without clients
                                               |
                                       seconds of steps of 1, 2, 4, 8 and 16 rows --> Speculator

Where the engine overlaps steps, a plain step is measured once more, with the host's work hidden. A step with drafts is
planned while no other is computed: on a GPU a draft has to pay for the host's time as well.

The profile run has its own memory on the same arena. Its sequence leaves nothing, because the memory that serves hands
out zeroed frames. The run takes 30 to 50 steps once per start, and 4 or 5 with a large model. The prompt is one token:
a longer prompt would take a large model a step of the same number of rows.
"""

from __future__ import annotations

import time
from collections.abc import Callable
from typing import TYPE_CHECKING

from weft.config import EngineConfig, Sizes
from weft.costs.rows import RowCosts
from weft.costs.step import StepCost
from weft.engine.engine import EngineCore
from weft.engine.executor import Executor
from weft.errors import ConfigError, EngineUnavailableError
from weft.memory.memory import Memory
from weft.request import Request, SamplingParams
from weft.speculation.drafter import SWITCHES, parse_sources
from weft.speculation.profile_run import PROFILE_TOKENS, ProfileRun
from weft.speculation.sources import salt_tokens
from weft.speculation.speculator import Speculator
from weft.units import HEAD_DRAFTS_MAX

if TYPE_CHECKING:
    from weft.models.loading import LoadedModel

_NAME = "profile run"


_PLAIN_STEPS = 12
"""Overlapped steps that are measured, of which the shortest counts."""


def make_drafter(
    config: EngineConfig,
    memory: Memory,
    executor: Executor,
    sizes: Sizes,
    loaded: LoadedModel,
    tell: Callable[[str], None],
    step_costs: StepCost | None,
    overlap: bool,
) -> Speculator | None:
    """Return the drafter, or None if ``speculate`` is off. ``executor`` computes nothing else meanwhile. ``overlap``:
    the engine overlaps steps. ``step_costs``: as of an engine; with them the drafter itself takes no time. Raises
    ConfigError.
    """
    head = loaded.model.mtp is not None
    sources = parse_sources(config.speculate)
    if not head and config.speculate not in SWITCHES and "mtp" in sources:
        raise ConfigError(
            f"--speculate is {config.speculate!r}, and this checkpoint has no head for "
            "multi-token prediction that weft knows (mtp.*); use auto, or leave mtp out",
            param="--speculate",
        )
    sources = tuple(source for source in sources if head or source != "mtp")
    if not sources:
        return None
    tell("speculation: measuring steps of 1 to 16 rows")
    measured = profile_steps(
        Memory(memory.plan),
        executor,
        sizes,
        loaded.spec.vocab_size,
        head_drafts=HEAD_DRAFTS_MAX if head else 0,
        step_costs=step_costs,
    )
    plain = measured.plain
    if overlap and step_costs is None:
        plain |= {1: overlapped_step_s(Memory(memory.plan), executor, sizes, loaded.spec.vocab_size)}
    return Speculator(
        sources,
        costs=RowCosts(plain, measured.verify_runs),
        tree=memory.prefix_tree if memory.caches else None,
        drafts_max=config.speculate_max,
        head_seconds=measured.head_measured,
        prompt_share=1 / len(loaded.spec.layers) if config.speculate == "auto" else None,
        salt_tokens=salt_tokens(memory.plan.arena_bytes),
        clock=time.perf_counter if step_costs is None else lambda: 0.0,
    )


def profile_steps(
    memory: Memory,
    executor: Executor,
    sizes: Sizes,
    vocab_size: int,
    clock: Callable[[], float] = time.perf_counter,
    *,
    head_drafts: int = 0,
    step_costs: StepCost | None = None,
) -> ProfileRun:
    """Return a finished profile run. ``memory`` must be empty, and is empty afterwards."""
    profile = ProfileRun(head_drafts)
    core = _core(memory, executor, sizes, vocab_size, clock, drafter=profile, step_costs=step_costs)
    _answer(core, PROFILE_TOKENS, lambda: profile.complete)
    return profile


def overlapped_step_s(
    memory: Memory, executor: Executor, sizes: Sizes, vocab_size: int, clock: Callable[[], float] = time.perf_counter
) -> float:
    """Return the seconds of a decode that is planned while the step before it is computed. ``memory`` as above."""
    core = _core(memory, executor, sizes, vocab_size, clock, overlap=True)
    seconds: list[float] = []
    core.on_step.append(lambda plan, step_s: seconds.append(step_s) if plan.decode_count else None)
    _answer(core, 1 + _PLAIN_STEPS, lambda: False)
    return min(seconds)


def _core(
    memory: Memory,
    executor: Executor,
    sizes: Sizes,
    vocab_size: int,
    clock: Callable[[], float],
    *,
    drafter: ProfileRun | None = None,
    step_costs: StepCost | None = None,
    overlap: bool = False,
) -> EngineCore:
    return EngineCore(
        vocab_size=vocab_size,
        sizes=sizes,
        memory=memory,
        executor=executor,
        clock=clock,
        seed=0,
        eos_ids=(),
        drafter=drafter,
        step_costs=step_costs,
        overlap=overlap,
    )


def _answer(core: EngineCore, tokens: int, complete: Callable[[], bool]) -> None:
    """Run ``core`` until it has answered a prompt of one token with ``tokens``, or the answer is ``complete``."""
    sampling = SamplingParams(temperature=0.0, max_tokens=min(tokens, core.sizes.max_model_len - 1), ignore_eos=True)
    core.submit(Request(request_id=_NAME, prompt_tokens=[0], sampling=sampling))
    while core.has_work:
        core.step()
        if complete():
            core.cancel(_NAME)
    if core.failure is not None:
        raise EngineUnavailableError(f"measuring the cost of steps failed: {core.failure!r}") from core.failure
