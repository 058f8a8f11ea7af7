"""Scenarios of simulated runs: an arena, limits, and a script of arrivals and cancellations.

A ``Scenario`` is a value and a pure function of its seed: the seed of a failed run is the whole bug report.
Scenarios are small on purpose. The arena is often so tight that exactly one sequence of full length fits.
Prompts and answers are a few pages, and arrivals come in bursts longer than the queue: pressure in every
step, thousands of scenarios a minute.

    Arrival(at_s, request)                     submitted when the clock has passed at_s
    ScriptedCancel(request_id, index, when)    at a time between steps, or inside the step number so-and-so
"""

from __future__ import annotations

from dataclasses import dataclass
from random import Random

from weft.config import Sizes
from weft.memory.frames.plan import ArenaPlan
from weft.request import Pooling, Request, SamplingParams
from weft.units import ALIGN_BYTES, CHUNK_TOKENS, PAGE_TOKENS, ceil_div, pages_for

VOCAB_SIZE = 97
EOS_IDS = (3,)
LENGTH_MAX = 224
"""Longest context of most scenarios: three and a half chunks, fourteen pages."""
LONG_LENGTH_MAX = 4096
"""Longest context of scenarios whose prefills take longer than the headroom of an admission lasts."""


@dataclass(frozen=True, slots=True)
class Arrival:
    at_s: float
    request: Request


@dataclass(frozen=True, slots=True)
class ScriptedCancel:
    """A cancellation. ``index`` None: of all choices of the request. With ``in_step`` it happens while that step
    executes, otherwise when the clock has passed ``at_s``. Before the arrival or after the end it has no effect."""

    request_id: str
    index: int | None
    at_s: float
    in_step: int | None = None


@dataclass(frozen=True, slots=True)
class Scenario:
    """A scenario. ``fail_in_step``: the executor raises in that step (a broken device), None: never. ``cache``:
    prefixes are cached; ``snapshots``: where states are saved; ``flush_every_steps``: how often the cache is flushed
    while a step is in flight; 0: never. ``overlap``: the next step is planned meanwhile. ``max_step_s``: as of the
    engine.
    """

    seed: int
    arena: ArenaPlan
    sizes: Sizes
    arrivals: tuple[Arrival, ...]
    cancels: tuple[ScriptedCancel, ...]
    fail_in_step: int | None = None
    cache: bool = False
    snapshots: str = "auto"
    flush_every_steps: int = 0
    overlap: bool = False
    max_step_s: float | None = None


def small_arena(*, pages_per_frame: int, slots_per_frame: int, frame_count: int) -> ArenaPlan:
    """Return an arena without a model: bytes chosen so that a frame holds exactly these numbers of pages and slots; 0
    for a kind that the imagined model does not have."""
    pages, slots = pages_per_frame, slots_per_frame
    page_bytes = ALIGN_BYTES * max(slots, 1) if pages else 0
    stride_bytes = ALIGN_BYTES * max(pages, 1) if slots else 0
    return ArenaPlan(
        page_bytes=page_bytes,
        pages_per_frame=pages,
        slot_bytes=stride_bytes,
        slot_stride_bytes=stride_bytes,
        slots_per_frame=slots,
        frame_bytes=pages * page_bytes or slots * stride_bytes,
        frame_count=frame_count,
        kv_dtype="float32",
        model_dtype="float32",
        kv_fields=(),
        state_fields=(),
    )


def longest_alone(arena: ArenaPlan, limit: int = LENGTH_MAX) -> int:
    """Return the tokens, at most ``limit``, of the longest sequence that fits if no other runs: one frame for a slot,
    the others for pages, as ``fit_sizes`` computes for a real model."""
    if not arena.pages_per_frame:
        return limit
    frames = arena.frame_count - (1 if arena.slots_per_frame else 0)
    return min(limit, frames * arena.pages_per_frame * PAGE_TOKENS)


def scenario_from_seed(seed: int, *, requests: int | None = None, long: bool | None = None) -> Scenario:
    """Return a scenario that follows from ``seed``. ``requests`` sets the number of arrivals; ``long``: whether
    prefills take many steps (None: in one scenario of ten).
    """
    random = Random(seed)
    drawn = random.random() < 0.1
    long = drawn if long is None else long
    arena = (
        random_arena(random, random.randrange(170, 256), (0,))
        if long
        else random_arena(random, random.randrange(2, 12), (0, 0, 1, 2, 5, 10))
    )
    max_model_len = longest_alone(arena, LONG_LENGTH_MAX if long else LENGTH_MAX)
    rows_max = 8 if long else random.choice([1, 2, 3, 4, 8, 16])
    sizes = Sizes(
        max_model_len=max_model_len,
        rows_max=rows_max,
        step_tokens_max=CHUNK_TOKENS if long else random.choice([CHUNK_TOKENS, 128, 256, 512]),
        queue_max=random.choice([4, 16, 64, 256]),
        memory_bytes=arena.arena_bytes,
        grid_tokens=PAGE_TOKENS if seed % 4 == 3 else CHUNK_TOKENS,
    )
    if long:
        arrivals = _long_arrivals(random, arena, max_model_len)
    else:
        arrivals = _random_arrivals(random, requests or random.choice([4, 12, 30]), max_model_len)
    cancels = random_cancels(random, arrivals)
    fail_in_step = random.randrange(1, 60) if random.random() < 0.1 else None
    return Scenario(seed=seed, arena=arena, sizes=sizes, arrivals=arrivals, cancels=cancels, fail_in_step=fail_in_step)


def random_arena(random: Random, pages_for_one: int, frames_more: tuple[int, ...]) -> ArenaPlan:
    """Return an arena of one of three kinds of model, with the least frames that hold one sequence of ``pages_for_one``
    pages, and some more."""
    kind = random.choice(["hybrid", "hybrid", "hybrid", "attention", "recurrent"])
    pages = 0 if kind == "recurrent" else random.choice([1, 2, 5, 7])
    slots = 0 if kind == "attention" else random.choice([1, 1, 2, 3])
    frames_for_one = (1 if slots else 0) + (ceil_div(pages_for_one, pages) if pages else 0)
    return small_arena(
        pages_per_frame=pages, slots_per_frame=slots, frame_count=frames_for_one + random.choice(frames_more)
    )


def _random_arrivals(random: Random, count: int, max_model_len: int) -> tuple[Arrival, ...]:
    arrivals: list[Arrival] = []
    at_s = 0.0
    burst = 0
    priorities = random.choice([(0,), (0,), (0, 1), (-1, 0, 5)])
    for number in range(count):
        if burst == 0:
            at_s += random.expovariate(random.choice([2.0, 10.0, 100.0]))
            burst = random.choice([1, 1, 2, 10, 40])
        burst -= 1
        arrivals.append(Arrival(at_s, _random_request(random, number, max_model_len, priorities)))
    return tuple(arrivals)


def _long_arrivals(random: Random, arena: ArenaPlan, max_model_len: int) -> tuple[Arrival, ...]:
    """Return short prompts with growing answers, then prompts of nearly one length that just fit in addition. The
    prefill of such a prompt takes many steps, in which the others outgrow their headroom and preempt it."""
    growers = random.randrange(2, 6)
    prompts = [random.randrange(1, 60) for _ in range(growers)]
    pages_used = sum(pages_for(prompt + 10) for prompt in prompts) + growers + random.randrange(2)
    if arena.slots_per_frame:
        slot_frames = ceil_div(growers + 1, arena.slots_per_frame)
        pages_used += (slot_frames - 1) * arena.pages_per_frame  # the first is not in max_model_len
    longest = max(1, max_model_len - pages_used * PAGE_TOKENS)
    prompts += [max(1, longest - random.randrange(16)) for _ in range(random.randrange(1, 4))]
    arrivals: list[Arrival] = []
    for number, prompt in enumerate(prompts):
        grows = number < growers
        answer = random.randrange(60, 250) if grows else random.randrange(1, 30)
        sampling = SamplingParams(
            max_tokens=min(answer, max_model_len - prompt), ignore_eos=True, prompt_logprobs=random.choice([None, 1])
        )
        arrivals.append(
            Arrival(
                number * 1e-3,
                Request(
                    request_id=f"r{number}",
                    sampling=sampling,
                    priority=0 if grows else random.choice([0, 1]),
                    prompt_tokens=[(number * 31 + at * 7) % VOCAB_SIZE for at in range(prompt)],
                ),
            )
        )
    return tuple(arrivals)


def _random_request(random: Random, number: int, max_model_len: int, priorities: tuple[int, ...]) -> Request:
    # A few have the greatest length that fits, so that the pool holds nothing else.
    longest = max_model_len if random.random() < 0.2 else max(2, max_model_len // 3)
    prompt = random.choice([random.randrange(1, longest), min(random.choice([1, 63, 64, 65]), longest - 1)])
    room = max_model_len - prompt
    max_tokens = random.choice([0, 1, min(20, room), random.randrange(0, room + 1), room, None])
    n = random.choice([1, 1, 1, 2, 3])
    answer = room if max_tokens is None else max_tokens
    sampling = SamplingParams(
        n=n,
        temperature=random.choice([0.0, 1.0]),
        max_tokens=max_tokens,
        seed=random.choice([None, 7]),
        ignore_eos=random.random() < 0.5,
        min_tokens=random.choice([0, 0, min(answer, 5)]),
        stop_token_ids=random.choice([(), (), (11, 12)]),
        logprobs=random.choice([None, None, 0, 2]),
        prompt_logprobs=random.choice([None, None, 0, 1]),
    )
    # Prompts repeat, so that different sequences have equal memory contents: nothing may depend on it.
    first = random.choice([number, 0])
    pooling = None
    if max_tokens == 0 and n == 1 and sampling.prompt_logprobs is None:  # drawn from nothing more
        skip = prompt * (number % 3) // 3
        pooling = (Pooling(kind="mean", skip=skip), Pooling(), Pooling(kind="token"))[number // 3 % 3]
    return Request(
        request_id=f"r{number}",
        sampling=sampling,
        priority=random.choice(priorities),
        key=("", "a", "a", "a", "b")[number % 5] if max_model_len // 16 % 2 else "",
        prompt_tokens=[(first * 31 + at * 7) % VOCAB_SIZE for at in range(prompt)],
        pooling=pooling,
    )


def random_cancels(random: Random, arrivals: tuple[Arrival, ...]) -> tuple[ScriptedCancel, ...]:
    share = random.choice([0.0, 0.1, 0.5])
    cancels: list[ScriptedCancel] = []
    for arrival in arrivals:
        if random.random() >= share:
            continue
        request = arrival.request
        index = random.choice([None, random.randrange(request.sampling.n)])
        at_s = arrival.at_s + random.choice([0.0, 0.01, 0.1, 1.0, 5.0])
        in_step = random.choice([None, random.randrange(0, 200)])
        cancels.append(ScriptedCancel(request.request_id, index, at_s, in_step))
    return tuple(sorted(cancels, key=lambda cancel: (cancel.at_s, cancel.request_id)))
