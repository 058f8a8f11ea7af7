"""A small engine over the scripted executor, with its plans kept for looking at."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass, field

from tests.support.scripted import LateExecutor, NextToken, ScriptedExecutor
from tests.support.workload import longest_alone, small_arena
from weft.config import Sizes
from weft.costs.restore import RestorePrices
from weft.costs.step import StepCost
from weft.engine.engine import EngineCore
from weft.engine.pictures import PictureEncoder
from weft.engine.stats import Part
from weft.memory.memory import Memory
from weft.memory.prefix_store import Store, TransferBuffers
from weft.request import PlacedPicture, Request, SamplingParams, TokenEvent
from weft.schedule.budget import step_tokens_bound
from weft.schedule.plan import StepPlan, StepResult
from weft.schedule.snapshots import AUTO, SnapshotPolicy
from weft.schedule.store_tier import StoreTier
from weft.speculation.drafter import Drafter
from weft_tools.sim.replay import VirtualClock

VOCAB_SIZE = 97
EOS = 3


@dataclass
class Answer:
    tokens: list[int] = field(default_factory=list)
    events: list[TokenEvent] = field(default_factory=list)

    @property
    def reason(self) -> str | None:
        return self.events[-1].finish_reason if self.events else None

    @property
    def ends(self) -> int:
        return sum(event.finish_reason is not None for event in self.events)


class Rig(LateExecutor):
    def __init__(
        self,
        *,
        pages_per_frame: int = 5,
        slots_per_frame: int = 2,
        frame_count: int = 40,
        rows_max: int = 4,
        step_tokens_max: int = 256,
        queue_max: int = 64,
        seed: int = 0,
        max_model_len: int | None = None,
        next_token: NextToken | None = None,
        cache: bool = False,
        snapshots: SnapshotPolicy = AUTO,
        overlap: bool = False,
        store: Store | None = None,
        buffer_bytes: int = 1 << 24,
        token_s: float = 1.0,
        drafter: Drafter | None = None,
        exact: bool = True,
        encoder: PictureEncoder | None = None,
        pictures_bytes: int = 0,
        max_step_s: float | None = None,
        step_costs: StepCost | None = None,
        priority_across_keys: bool = False,
    ) -> None:
        """``store``: prefixes beyond memory, computed at ``token_s`` seconds a token at first; not ``exact``:
        also what was compressed once. ``tamper`` changes what the device gets."""
        super().__init__()
        arena = small_arena(pages_per_frame=pages_per_frame, slots_per_frame=slots_per_frame, frame_count=frame_count)
        self.sizes = Sizes(
            max_model_len=max_model_len or longest_alone(arena, 512),
            rows_max=rows_max,
            step_tokens_max=step_tokens_max,
            queue_max=queue_max,
            memory_bytes=arena.arena_bytes,
            priority_across_keys=priority_across_keys,
        )
        self.device = ScriptedExecutor(
            arena,
            vocab_size=VOCAB_SIZE,
            rows_max=rows_max,
            max_model_len=self.sizes.max_model_len,
            step_tokens_bound=step_tokens_bound(step_tokens_max, rows_max),
            next_token=next_token,
        )
        self.clock = VirtualClock()
        self.plans: list[StepPlan] = []
        self.before_execute: Callable[[StepPlan], None] = lambda plan: None
        self.tamper: Callable[[StepPlan], StepPlan] = lambda plan: plan
        memory = Memory(arena, cache=cache)
        self.tier = None
        if store is not None:
            buffers = TransferBuffers(arena.page_bytes, arena.slot_bytes, limit_bytes=buffer_bytes)
            self.device.arena.transfers.buffers = buffers
            self.tier = StoreTier(store, memory, buffers, RestorePrices(token_s), self.clock, exact=exact)
        self.core = EngineCore(
            vocab_size=VOCAB_SIZE,
            sizes=self.sizes,
            memory=memory,
            executor=self,
            clock=self.clock,
            seed=seed,
            eos_ids=(EOS,),
            snapshots=snapshots,
            overlap=overlap,
            store=self.tier,
            pause=self.clock.advance,
            drafter=drafter,
            encoder=encoder,
            pictures_bytes=pictures_bytes,
            max_step_s=max_step_s,
            step_costs=step_costs,
        )
        self.answers: dict[tuple[str, int], Answer] = {}

    def execute(self, plan: StepPlan) -> StepResult:
        self.plans.append(plan)
        self.clock.advance(1.0)
        self.before_execute(plan)
        return self.device.execute(self.tamper(plan))

    def sleep(self, level: int) -> tuple[Part, ...]:
        return self.device.sleep(level)

    def wake(self, part: Part) -> None:
        self.device.wake(part)

    def close(self) -> None:
        self.device.close()

    def submit(
        self,
        name: str,
        prompt: int | list[int] = 20,
        *,
        priority: int = 0,
        salt: str = "",
        key: str = "",
        boundaries: tuple[int, ...] = (),
        marks: tuple[int, ...] = (),
        pictures: list[PlacedPicture] | None = None,
        **sampling: object,
    ) -> None:
        if isinstance(prompt, int):
            prompt = [(7 * at + len(name)) % VOCAB_SIZE for at in range(prompt)]
        chosen = {"temperature": 0.0, "max_tokens": 10, "ignore_eos": True, **sampling}
        self.core.submit(
            Request(
                request_id=name,
                prompt_tokens=prompt,
                priority=priority,
                key=key,
                cache_salt=salt,
                boundaries=list(boundaries),
                marks=list(marks),
                pictures=pictures or [],
                sampling=SamplingParams(**chosen),
            )
        )

    def step(self) -> list[TokenEvent]:
        events = self.core.step()
        for event in events:
            answer = self.answers.setdefault((event.request_id, event.index), Answer())
            answer.events.append(event)
            answer.tokens += event.tokens
        if self.core.failure is None:
            self.core.audit()
        return events

    def run(self, steps_max: int = 2000) -> dict[tuple[str, int], Answer]:
        for _ in range(steps_max):
            if not self.core.has_work:
                return self.answers
            self.step()
        raise AssertionError(f"work left after {steps_max} steps")

    def tokens(self, name: str, index: int = 0) -> list[int]:
        return self.answers[name, index].tokens


def counting(first: int = 10) -> NextToken:
    """Tokens first, first + 1, ... whatever the prompt; for tests that need to know the answer."""
    calls = [first - 1]

    def choose(state: int, seed: int) -> int:
        calls[0] += 1
        return calls[0]

    return choose
