"""What a full store can find: rules of eviction beside a store that knows the future, on a light model.

    python benchmarks/store_bound.py TRACE [--limit 4000] [--store 1TB]

Snapshots stand where the engine puts them: at ends of answers, at forks and inside prompts
(`wanted_positions`). Each is stored as soon as it is computed, and a request finds the deepest one of its
prompt. When the store is full, the rule evicts until 1 % of it is free.

    whole    seconds from the root on / bytes from the root on
    above    seconds behind the stored snapshot above / bytes behind it           (weft.store.eviction)

    value = seconds x uses / bytes / age to the power p       uses: ``w`` for the first one of a snapshot
                                                              that a longer prefix goes on from

Left out: the memory above the store, the rate of writes, and the time of reads. So the rules are compared by
capacity alone, in some seconds. `weft simulate --store` has all of it, and takes minutes. Sizes and costs are
those of Qwen3.5-397B-A17B on eight H100: 30,720 B a token, 192 MB a state.
"""

from __future__ import annotations

import argparse
from bisect import bisect_right
from collections.abc import Callable
from functools import partial
from math import inf

import numpy as np
import numpy.typing as npt

from weft.schedule.snapshots import AUTO, insurance_tokens, on_grid, wanted_positions
from weft.units import CHUNK_TOKENS, PAGE_TOKENS, parse_bytes
from weft_tools.sim.oracle import Forest, computed_tokens
from weft_tools.sim.recording import SAMPLE, read_trace

KV_TOKEN_BYTES, STATE_BYTES = 30_720, 192e6
TOKEN_S, PAIR_S = 5.16e-6, 7.76e-11
DECODE_TOKEN_S = 0.02
EVICTED_SHARE = 0.01
TURN_USES = np.asarray([0.87, 1.33, 1.9, 2.3])
"""Ends of first, second, third and later answers: uses of each over the mean, in the first 4,000 requests."""

Floats = npt.NDArray[np.float64]
Ints = npt.NDArray[np.int64]
Rule = Callable[["LightStore", Ints], Floats]
"""The values of snapshots at these places; the smallest goes first."""


class Requests:
    """``paths``: the places of each request, from its first token on. ``inside``: those inside its prompt
    where it leaves a state. ``begins``, ``ends``: tokens before and behind each place."""

    def __init__(self, trace: str, limit: int) -> None:
        traffic = read_trace(trace, limit=limit)[0]
        forest, positions = Forest(traffic), list[list[int]]()
        first = insurance_tokens(int(STATE_BYTES / 8), PAGE_TOKENS * KV_TOKEN_BYTES // 2)
        self.forks: list[int] = []
        for index, one in enumerate(traffic.requests):
            seen = forest.add(index, computed_tokens(traffic, index))[0]
            self.forks.append(on_grid(min(seen, one.prompt_tokens - 1), CHUNK_TOKENS))
            positions.append(
                wanted_positions(
                    AUTO,
                    known_tokens=one.prompt_tokens,
                    start=0,
                    boundaries=one.boundaries,
                    marks=one.marks,
                    kv_tokens=seen,
                    insurance_first=first,
                )
            )
        inside = [[forest.place_at(index, position) for position in wanted] for index, wanted in enumerate(positions)]
        paths = [forest.path(index) for index in range(len(traffic))]
        number = {
            id(place): at for at, place in enumerate({id(place): place for path in paths for place in path}.values())
        }
        places = {number[id(place)]: place for path in paths for place in path}
        self.paths = [[number[id(place)] for place in path] for path in paths]
        self.inside = [[number[id(place)] for place in wanted] for wanted in inside]
        self.begins = np.asarray([places[at].start for at in range(len(places))])
        self.ends = np.asarray([places[at].end for at in range(len(places))])
        self.at_s = [one.at_s for one in traffic.requests]
        self.ended_s = [one.at_s + 0.5 + DECODE_TOKEN_S * one.output_tokens for one in traffic.requests]
        self.prompts = [one.prompt_tokens for one in traffic.requests]
        self.uses: dict[int, list[int]] = {}
        for index, path in enumerate(self.paths):
            for place in path:
                if self.ends[place] < self.prompts[index]:
                    self.uses.setdefault(place, []).append(index)

    def drop_insurance(self) -> None:
        """Of the states inside a prompt only the last one and the fork stay."""
        for index, places in enumerate(self.inside):
            last = max((int(self.ends[place]) for place in places), default=0)
            self.inside[index] = [place for place in places if self.ends[place] in (last, self.forks[index])]


class LightStore:
    """Columns by place. ``second_touch``: a store that is 94 % full takes no state inside a prompt but
    forks."""

    def __init__(self, requests: Requests, capacity_bytes: float, rule: Rule, *, second_touch: bool = False) -> None:
        self.requests, self.rule, self.capacity_bytes = requests, rule, capacity_bytes
        self.second_touch = second_touch
        count = len(requests.ends)
        self.kv_bytes = (requests.ends - requests.begins) * float(KV_TOKEN_BYTES)
        self.stored = np.zeros(count, np.bool_)
        self.needed_by = np.zeros(count, np.int64)
        self.hits = np.zeros(count, np.int64)
        self.last_use = np.zeros(count, np.int64)
        self.last_use_s = np.zeros(count)
        self.turn = np.zeros(count, np.int64)
        """Ends of answers: how many answers of the conversation precede it."""
        self.path_of: dict[int, Ints] = {}
        self.now, self.tick, self.used_bytes = 0, 0, 0.0
        self.now_s = 0.0

    def play(self) -> float:
        """The share of prompt tokens that are found."""
        requests, hit_tokens = self.requests, 0
        moments = sorted(
            [(at_s, 0, index) for index, at_s in enumerate(requests.at_s)]
            + [(at_s, 1, index) for index, at_s in enumerate(requests.ended_s)]
        )
        ends, turns = dict[int, int](), dict[int, int]()
        for self.now_s, is_end, index in moments:
            path = requests.paths[index]
            if is_end:
                ends[path[-1]] = self.turn[path[-1]] = turns[index]
                self._add(index, path[-1])
                continue
            self.now = index
            turns[index] = next((ends[place] + 1 for place in reversed(path) if place in ends), 0)
            hit = next(
                (
                    place
                    for place in reversed(path)
                    if self.stored[place] and requests.ends[place] < requests.prompts[index]
                ),
                None,
            )
            start = 0 if hit is None else int(requests.ends[hit])
            if hit is not None:
                hit_tokens += start
                self.hits[hit] += 1
                self.last_use[hit], self.last_use_s[hit] = self.tick, self.now_s
            for place in requests.inside[index]:
                full = self.second_touch and self.used_bytes >= 0.94 * self.capacity_bytes
                if requests.ends[place] > start and not (full and requests.ends[place] != requests.forks[index]):
                    self._add(index, place)
        return hit_tokens / sum(requests.prompts)

    def _add(self, index: int, place: int) -> None:
        if self.stored[place]:
            return
        path = np.asarray(self.requests.paths[index])
        path = path[: int(np.flatnonzero(path == place)[0]) + 1]
        if self.used_bytes + self._bytes_without(path) > self.capacity_bytes:
            self._evict(self.used_bytes + self._bytes_without(path) - self.capacity_bytes)
        self.used_bytes += self._bytes_without(path)
        self.needed_by[path] += 1
        self.stored[place], self.path_of[place], self.hits[place] = True, path, 0
        self.last_use[place], self.last_use_s[place] = self.tick, self.now_s
        self.tick += 1

    def _bytes_without(self, path: Ints) -> float:
        """Of a state, and of the KV of ``path`` that nothing stored needs."""
        return float(self.kv_bytes[path[self.needed_by[path] == 0]].sum()) + STATE_BYTES

    def _evict(self, short_bytes: float) -> None:
        places = np.flatnonzero(self.stored)
        least = self.used_bytes - short_bytes - EVICTED_SHARE * self.capacity_bytes
        for place in places[np.argsort(self.rule(self, places), kind="stable")]:
            if self.used_bytes <= least:
                return
            path = self.path_of.pop(int(place))
            self.stored[place] = False
            self.needed_by[path] -= 1
            self.used_bytes -= self._bytes_without(path)

    def above(self, places: Ints) -> Floats:
        """The position of the stored snapshot above each place."""
        answers = np.zeros(len(places))
        for at, place in enumerate(places.tolist()):
            path = self.path_of[place][:-1]
            stored = path[self.stored[path]]
            answers[at] = self.requests.ends[stored[-1]] if len(stored) else 0
        return answers


def seconds(tokens: Floats) -> Floats:
    cost: Floats = TOKEN_S * tokens + PAIR_S * tokens**2 / 2
    return cost


def least_recent(store: LightStore, places: Ints) -> Floats:
    return store.last_use[places].astype(np.float64)


def in_records(store: LightStore, places: Ints) -> Floats:
    return 1.0 / (store.tick + 1.0 - store.last_use[places])


def in_seconds(store: LightStore, places: Ints) -> Floats:
    return 1.0 / (20.0 + store.now_s - store.last_use_s[places])


def fading(store: LightStore, places: Ints) -> Floats:
    """After 200 s two in three of the next turns have come."""
    return np.exp((store.last_use_s[places] - store.now_s) / 200.0)


def ranked(
    store: LightStore,
    places: Ints,
    *,
    above: bool,
    weight: float,
    power: float = 1.0,
    age: Rule = in_records,
    by_turn: bool = False,
) -> Floats:
    continued = store.needed_by[places] > 1
    first = TURN_USES[np.minimum(store.turn[places], len(TURN_USES) - 1)] if by_turn else 1.0
    hits = store.hits[places]
    uses = np.where(continued, weight + np.maximum(0, hits - 1), first * (1.0 + hits))
    ends = store.requests.ends[places].astype(np.float64)
    start = store.above(places) if above else np.zeros(len(places))
    held = STATE_BYTES + np.where(continued, 0.0, (ends - start) * KV_TOKEN_BYTES)
    values: Floats = (seconds(ends) - seconds(start)) * uses / held * age(store, places) ** power
    return values


def future(store: LightStore, places: Ints) -> Floats:
    """Seconds saved at the next use, per byte and second until then; what is never used goes first."""
    requests, values = store.requests, np.empty(len(places))
    for at, place in enumerate(places.tolist()):
        uses = requests.uses.get(place, [])
        later = bisect_right(uses, store.now)
        if later == len(uses):
            values[at] = -1.0
            continue
        wait_s = max(1e-3, requests.at_s[uses[later]] - requests.at_s[store.now])
        path = store.path_of[place]
        held = STATE_BYTES + float(store.kv_bytes[path[store.needed_by[path] == 1]].sum())
        values[at] = float(seconds(requests.ends[place])) / held / wait_s
    return values


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawTextHelpFormatter)
    parser.add_argument("trace", nargs="?", default=SAMPLE)
    parser.add_argument("--limit", type=int, default=4000)
    parser.add_argument("--store", default="1TB")
    args = parser.parse_args()
    requests, capacity_bytes = Requests(args.trace, args.limit), parse_bytes(args.store, flag="--store")
    rows: list[tuple[str, float, Rule, bool]] = [
        ("no limit", inf, least_recent, False),
        ("the future is known", capacity_bytes, future, False),
        ("least recently used", capacity_bytes, least_recent, False),
    ]
    for name, above, touch in (
        ("whole, second touch", False, True),
        ("whole", False, False),
        ("above, second touch", True, True),
    ):
        rows.append((f"{name}, w 0.25", capacity_bytes, partial(ranked, above=above, weight=0.25), touch))
    rows += [
        (f"above, w {weight:g}", capacity_bytes, partial(ranked, above=True, weight=weight), False)
        for weight in (0.06, 0.12, 0.25, 0.5, 1.0)
    ]
    rows += [
        (f"above, w 0.25, p {power:g}", capacity_bytes, partial(ranked, above=True, weight=0.25, power=power), False)
        for power in (0.5, 0.75, 1.5, 2.0)
    ]
    adopted = partial(ranked, above=True, weight=0.25)
    rows += [
        ("above, age in seconds", capacity_bytes, partial(adopted, age=in_seconds), False),
        ("above, age exp(-s / 200)", capacity_bytes, partial(adopted, age=fading), False),
        ("above, by turn", capacity_bytes, partial(adopted, by_turn=True), False),
    ]
    for name, size_bytes, rule, touch in rows:
        share = LightStore(requests, size_bytes, rule, second_touch=touch).play()
        print(f"{name:28s} {100 * share:5.2f} %", flush=True)
    requests.drop_insurance()
    for name, size_bytes in (("no insurance, no limit", inf), ("no insurance, above", capacity_bytes)):
        print(f"{name:28s} {100 * LightStore(requests, size_bytes, adopted).play():5.2f} %", flush=True)


if __name__ == "__main__":
    main()
