"""What an engine keeps of requests that have ended: tables with a bound, and nothing else.

Resident memory says little in a minute: heaps have holes, and tables fill for an hour. So tables get small
bounds here, and objects are counted: instances of our own types, and the members of each container.
"""

from __future__ import annotations

import gc
import random
from collections import Counter, OrderedDict, deque
from collections.abc import Sized
from pathlib import Path
from typing import NamedTuple

import pytest

import weft
from weft import Engine
from weft.engine import loop
from weft.memory.prefix.value import policy
from weft.schedule.plan import Admission
from weft.speculation import sources

REQUESTS = 80
"""Between two counts. What gets one for each of them has grown by so many, what has a bound by far fewer."""
_CONTAINERS = (list, dict, set, deque, OrderedDict)
_EMBEDDED = str(Path(weft.__file__).parent / "embedded" / "weft-recall")


class Kept(NamedTuple):
    instances: Counter[str]
    containers: list[tuple[Sized, int]]
    """With their members at this moment."""


def kept(engine: Engine) -> Kept:
    """Prefixes that the arena has room for are left out."""
    for _ in range(4):  # what is evicted is forgotten in later commits, some of it in each
        engine.flush_cache()
        engine.generate("x", max_tokens=2, seed=0, ignore_eos=True)
    engine.flush_cache()
    gc.collect()
    alive = gc.get_objects()
    return Kept(
        Counter(f"{type(one).__module__}.{type(one).__qualname__}" for one in alive),
        [(one, len(one)) for one in alive if type(one) in _CONTAINERS],
    )


def grown(engine: Engine) -> list[str]:
    """What has grown by half a member for each of REQUESTS: prompts that share beginnings, greedy and
    sampled, with grammars and drafts."""
    before = kept(engine)
    for number in range(REQUESTS // 8):
        rng = random.Random(number)
        prompts = [
            f"List {rng.randrange(3)}: " + " ".join(str(rng.randrange(1000)) for _ in range(12)) for _ in range(8)
        ]
        grammar = {"guided_regex": f"[0-9]{{2}}-{number}"} if number % 4 == 0 else {}
        engine.generate(prompts, max_tokens=6, seed=number, temperature=number % 2 * 0.9, **grammar)
    after = kept(engine)
    return [
        name
        for name, count in after.instances.items()
        if name.startswith("weft.") and count - before.instances[name] > REQUESTS // 2
    ] + [
        f"a {type(one).__name__} of {len(one)}" for one, count in before.containers if len(one) - count > REQUESTS // 2
    ]


def test_full_tables_do_not_grow_with_requests_and_one_that_does_is_seen(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(policy, "GHOSTS_MAX", 20)
    monkeypatch.setattr(loop, "SAMPLES_MAX", 2)
    monkeypatch.setattr(sources.AnswerLibrary.__init__, "__defaults__", (0, 0))  # its bounds
    with Engine(_EMBEDDED, memory="12MiB", max_model_len=512, threads=1, speculate="suffix") as engine:
        grown(engine)  # fills them
        assert grown(engine) == []
        admissions: list[Admission] = []
        engine._core.on_step.append(lambda plan, seconds: admissions.extend(plan.admissions))
        found = grown(engine)
    assert len(admissions) >= REQUESTS
    assert {"weft.schedule.plan.Admission", f"a list of {len(admissions)}"} <= set(found)
