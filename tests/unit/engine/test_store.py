"""A store below the arena: what it brings is what a cold run computes, whatever it does."""

from __future__ import annotations

from tests.fixtures.memory_store import Contents, MemoryStore
from tests.unit.engine.rig import Rig

PROMPT = [(11 * at + 5) % 97 for at in range(300)]


def contents(rig: Rig) -> Contents:
    return Contents(rig.core.memory.plan.page_bytes)


def test_a_prompt_is_a_hit_after_a_restart() -> None:
    kept = contents(Rig())
    first = Rig(cache=True, store=MemoryStore(kept))
    first.submit("cold", PROMPT)
    first.run()
    first.core.close()
    assert kept.checkpoints

    again = Rig(cache=True, store=MemoryStore(kept))
    again.submit("warm", PROMPT)
    again.run()
    assert again.core.failure is None, again.core.failure
    assert again.tokens("warm") == first.tokens("cold")
    stats = again.core.stats()
    assert stats.cached_tokens == 256
    assert stats.computed_tokens < 60
