"""Choice of the models in memory: one budget, loads and unloads, and the queue of requests that wait.

    absent --enter--> waits --room--> loading --loaded--> loaded --unload--> unloading --unloaded--> absent
       ^                                 |                   |
       '--------- failed (refused for a while) --------------'  died

A pure state machine. Times are passed in, and ``actions`` names the next steps: load, unload, or admit the
requests that waited for a model which stays after all. The process control around it is ``server.on_demand``.

    L1   the shares of models that are loading, loaded or unloading never exceed the budget
    L2   a model that a request uses is never unloaded
    L3   one load at a time, in the order in which models were first asked for: nothing starves
    L4   requests that wait are bounded; beyond that ``enter`` says so

To make room, models without requests are unloaded, the least recently used first. If that is not enough, the load waits
PATIENCE_S for others to fall idle. Then the least recently used of the busy models *drain*: new requests wait until
after the load, and running requests go on to the end. A model that was loaded less than PATIENCE_S ago does not drain:
otherwise a model whose load takes longer than PATIENCE_S would be unloaded without a single answer.

A share is weights and arena together. It follows only from the set of all models (``shares``), never from the models
that are loaded at the time. So a model always serves the same context.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Literal

PATIENCE_S = 5.0
"""Seconds that a load waits for models to fall idle before busy ones drain."""
FRESH_S = 10.0
"""Seconds that a model which has just been loaded is kept for the requests that are about to come."""
RETRY_FIRST_S, RETRY_MAX_S = 2.0, 120.0
"""Seconds for which a model is refused after a failed load, first and at most; doubled after each further failure."""

State = Literal["absent", "loading", "loaded", "unloading"]
Entry = Literal["in", "waits", "full", "refused"]
Verb = Literal["load", "unload", "admit"]


def shares(weights: Mapping[str, int], arenas: Mapping[str, int], budget: int) -> dict[str, int]:
    """Return the bytes of each model, weights and arena. ``arenas``: the least that each should have.

    The most models that fit together with these arenas are chosen, from the smallest on. The
    memory left by their weights is divided into equal arenas. A larger model gets such an arena too, if there
    is room.
    """
    by_size = sorted(weights, key=lambda name: weights[name])
    together = max(
        (
            count
            for count in range(1, len(by_size) + 1)
            if _arena(by_size[:count], weights, budget) >= max(arenas[name] for name in by_size[:count])
        ),
        default=1,
    )
    arena = _arena(by_size[:together], weights, budget)
    return {
        name: max(size, min(budget, size + max(arena, arenas[name] if name in by_size[together:] else 0)))
        for name, size in weights.items()
    }


def _arena(together: Sequence[str], weights: Mapping[str, int], budget: int) -> int:
    return (budget - sum(weights[name] for name in together)) // len(together)


@dataclass(frozen=True, slots=True)
class Action:
    """One action on a model. ``admit``: the model stays, and the requests that waited for it are admitted."""

    verb: Verb
    name: str


@dataclass(frozen=True, slots=True)
class Use:
    """Use of a model by one request, from ``enter`` to ``leave``. ``life``: number of the load it belongs to."""

    name: str
    life: int


@dataclass(slots=True)
class Resident:
    """One model. ``expires_s``: when it is unloaded for lack of use; None while it is used, or if it never expires."""

    name: str
    share: int
    keep_alive_s: float | None
    state: State = "absent"
    life: int = 0
    users: int = 0
    waiting: int = 0
    since_s: float = 0.0
    """Time since which the first of the ``waiting`` requests waits."""
    drains: bool = False
    loaded_s: float = 0.0
    used_s: float = 0.0
    expected: int = 0
    """Requests that left and are expected again (``keep_fresh``)."""
    fresh_until_s: float = 0.0
    expires_s: float | None = None
    failures: int = 0
    retry_s: float = 0.0
    loads: int = 0
    unloads: int = 0

    @property
    def used_bytes(self) -> int:
        return 0 if self.state == "absent" else self.share

    @property
    def is_absent(self) -> bool:
        """Return whether the model is not in memory, and no request waits for it."""
        return self.state == "absent" and not self.waiting


@dataclass(slots=True)
class Residency:
    """State of all models. ``keep_alive_s``: time that unused models stay unless a request says differently; None for
    ever. ``waiting_max``: most requests that wait for loads.
    """

    budget: int
    waiting_max: int
    models: dict[str, Resident] = field(default_factory=dict)
    _queue: list[str] = field(default_factory=list)
    """Models that are requested and not loaded, in the order of their first waiting request."""

    @classmethod
    def of(cls, shares: Mapping[str, int], budget: int, *, waiting_max: int, keep_alive_s: float | None) -> Residency:
        assert all(share <= budget for share in shares.values()), "shares() never gives more"
        return cls(budget, waiting_max, {name: Resident(name, share, keep_alive_s) for name, share in shares.items()})

    @property
    def used_bytes(self) -> int:
        return sum(model.used_bytes for model in self.models.values())

    @property
    def waiting(self) -> int:
        return sum(model.waiting for model in self.models.values())

    # ------------------------------------------------------------------ requests

    def enter(self, name: str, now_s: float) -> Entry:
        """Record a request for the model and return its state. "in": the request counts as a user of the
        model; waiting requests count once the model is loaded or they are admitted.
        """
        model = self.models[name]
        if model.state == "loaded" and not model.drains:
            model.expected = max(0, model.expected - 1)
            self._let_in(model, 1, now_s)
            return "in"
        if now_s < model.retry_s:
            return "refused"
        if self.waiting >= self.waiting_max:
            return "full"
        model.waiting += 1
        if name not in self._queue and model.state != "loading":
            self._queue.append(name)
            model.since_s = now_s
        return "waits"

    def leave_queue(self, name: str) -> None:
        """Record that a waiting request has gone."""
        model = self.models[name]
        assert model.waiting > 0
        model.waiting -= 1
        if not model.waiting and name in self._queue:
            self._queue.remove(name)

    def use(self, name: str) -> Use:
        """Return a new use of a loaded model."""
        return Use(name, self.models[name].life)

    def leave(self, use: Use, now_s: float, *, keep_fresh: bool = False) -> None:
        """Record that a request has ended. ``keep_fresh``: another one that uses the model is about to come. A model
        that died meanwhile has dropped its uses.
        """
        model = self.models[use.name]
        if model.life != use.life or model.state != "loaded":
            return
        assert model.users > 0
        model.users -= 1
        model.used_s = now_s
        if keep_fresh:
            model.expected += 1
        elif not model.expected:
            model.fresh_until_s = 0.0
        self._set_expiry(model, now_s)

    def keep_alive(self, name: str, seconds: float | None, now_s: float) -> None:
        """Set the seconds that the model stays after its last request; None for ever."""
        model = self.models[name]
        model.keep_alive_s = seconds
        if model.state == "loaded":
            if seconds is not None and seconds <= 0:
                model.fresh_until_s = 0.0
            self._set_expiry(model, now_s)

    # ------------------------------------------------------------------ results of actions

    def loaded(self, name: str, now_s: float) -> None:
        """Record that the model is loaded and admit its waiting requests."""
        model = self.models[name]
        assert model.state == "loading"
        model.state, model.failures, model.loads = "loaded", 0, model.loads + 1
        model.loaded_s, model.used_s, model.fresh_until_s = now_s, now_s, now_s + FRESH_S
        self._admit(model, now_s)
        if not model.users:
            self._set_expiry(model, now_s)

    def failed(self, name: str, now_s: float) -> None:
        """Record that the load failed. The caller answers the requests that waited, and later ones are refused for a
        while.
        """
        model = self.models[name]
        assert model.state == "loading"
        self._end(model)
        self._refuse_for_a_while(model, now_s)

    def died(self, name: str, now_s: float) -> None:
        """Record that the model's engines have ended for good; ``unloaded`` follows."""
        model = self.models[name]
        assert model.state == "loaded"
        model.state, model.users, model.drains = "unloading", 0, False
        self._refuse_for_a_while(model, now_s)

    def unloaded(self, name: str) -> None:
        model = self.models[name]
        assert model.state == "unloading"
        model.unloads += 1
        self._end(model)

    # ------------------------------------------------------------------ decisions

    def actions(self, now_s: float) -> Sequence[Action]:
        """Return the actions to begin now, and change the states as if they had begun. ``loaded``, ``failed`` and
        ``unloaded`` report how one ended; then there may be further actions."""
        actions = [
            self._unload(model)
            for model in self.models.values()
            if model.expires_s is not None
            and now_s >= model.expires_s
            and self._is_idle(model, now_s)
            and not model.waiting
        ]
        head = self.models[self._queue[0]] if self._queue else None
        victims: set[str] = set()
        if head is not None and head.state == "absent":
            lacking = head.share - (self.budget - self.used_bytes)
            if lacking <= 0 and not any(model.state == "loading" for model in self.models.values()):
                head.state, head.life = "loading", head.life + 1
                self._queue.remove(head.name)
                actions.append(Action("load", head.name))
            elif lacking > 0:
                lacking -= sum(model.share for model in self.models.values() if model.state == "unloading")
                victims = self._make_room(head, lacking, now_s, actions)
        for model in self.models.values():
            if model.drains and model.name not in victims:
                model.drains = False
                if model.state == "loaded" and model.waiting:
                    self._queue.remove(model.name)
                    self._admit(model, now_s)
                    actions.append(Action("admit", model.name))
        return actions

    def _make_room(self, head: Resident, lacking: int, now_s: float, actions: list[Action]) -> set[str]:
        """Append unloads if idle models are enough. Return the models that are to drain."""
        loaded = sorted(
            (model for model in self.models.values() if model.state == "loaded"),
            key=lambda model: (not model.drains, model.used_s),
        )
        idle = _enough([model for model in loaded if self._is_idle(model, now_s)], lacking)
        if idle is not None:
            actions += [self._unload(model) for model in idle]
            return set()
        if now_s < head.since_s + PATIENCE_S:
            return set()
        ripe = [model for model in loaded if now_s >= model.loaded_s + PATIENCE_S]
        idle_first = sorted(ripe, key=lambda model: not self._is_idle(model, now_s) and not model.drains)
        draining = _enough(idle_first, lacking) or []  # None: a model that loads, or was just loaded, has the rest
        for model in draining:
            model.drains = True
        return {model.name for model in draining}

    def next_s(self, now_s: float) -> float:
        """Return when to call ``actions`` again, if nothing else happens; infinity for never."""
        times = [model.expires_s for model in self.models.values() if model.expires_s is not None]
        times += [model.fresh_until_s for model in self.models.values() if model.state == "loaded"]
        if self._queue:
            since_s = self.models[self._queue[0]].since_s
            times += [max(since_s, model.loaded_s) + PATIENCE_S for model in self.models.values()]
        return min((time for time in times if time > now_s), default=math.inf)

    # ------------------------------------------------------------------ parts

    def _is_idle(self, model: Resident, now_s: float) -> bool:
        return model.state == "loaded" and not model.users and now_s >= model.fresh_until_s

    def _let_in(self, model: Resident, count: int, now_s: float) -> None:
        model.users += count
        model.used_s, model.expires_s = now_s, None

    def _admit(self, model: Resident, now_s: float) -> None:
        if model.waiting:
            self._let_in(model, model.waiting, now_s)
            model.waiting = 0

    def _set_expiry(self, model: Resident, now_s: float) -> None:
        if model.users or model.keep_alive_s is None:
            model.expires_s = None
        else:
            model.expires_s = max(now_s + model.keep_alive_s, model.fresh_until_s)

    def _unload(self, model: Resident) -> Action:
        assert not model.users, "law L2"
        model.state, model.drains, model.expires_s = "unloading", False, None
        return Action("unload", model.name)

    def _end(self, model: Resident) -> None:
        model.state, model.users, model.expires_s, model.fresh_until_s = "absent", 0, None, 0.0
        model.drains, model.expected = False, 0

    def _refuse_for_a_while(self, model: Resident, now_s: float) -> None:
        model.failures += 1
        model.retry_s = now_s + min(RETRY_MAX_S, RETRY_FIRST_S * 2.0 ** (model.failures - 1))
        model.waiting = 0
        if model.name in self._queue:
            self._queue.remove(model.name)


def _enough(models: Sequence[Resident], lacking: int) -> list[Resident] | None:
    """Return the first of ``models`` whose shares are ``lacking`` bytes, without those that are not needed for that;
    None if all together are too few.
    """
    chosen: list[Resident] = []
    for model in models:
        if lacking <= 0:
            break
        chosen.append(model)
        lacking -= model.share
    if lacking > 0:
        return None
    for model in list(chosen):  # a small one before a large one may not be needed
        if lacking + model.share <= 0:
            chosen.remove(model)
            lacking += model.share
    return chosen
