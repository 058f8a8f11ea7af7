from random import Random

import numpy as np
import pytest

from weft.request import SamplingParams
from weft.schedule.fair_queue import FairQueue
from weft.schedule.sequence import Rank, RankedQueue, Sequence
from weft.units import SeqId


def sequence(rank: Rank) -> Sequence:
    return Sequence(
        SeqId(hash(rank)), prompt=np.zeros(1, dtype=np.int32), sampling=SamplingParams(), seed=0, stop_ids=(), rank=rank
    )


def test_lower_priority_then_arrival_then_index_comes_first() -> None:
    ranks = [(0, 5, 0), (0, 1, 1), (0, 1, 0), (-1, 9, 0), (2, 0, 0)]
    queue = RankedQueue()
    for rank in ranks:
        queue.add(sequence(rank))
    assert [seq.rank for seq in queue] == [(-1, 9, 0), (0, 1, 0), (0, 1, 1), (0, 5, 0), (2, 0, 0)]


def test_what_is_removed_leaves_nothing_behind() -> None:
    random = Random(1)
    queue, model = RankedQueue(), {}
    for number in range(2000):
        rank = (random.randrange(3), number, 0)
        model[rank] = sequence(rank)
        queue.add(model[rank])
        if random.random() < 0.95:
            gone = model.pop(random.choice(list(model)))
            assert gone in queue
            queue.remove(gone)
            assert gone not in queue
        queue.audit()
        assert [seq.rank for seq in queue] == sorted(model)
    assert len(queue._ranks) == len(queue._seqs) == len(model)


def test_removing_a_stranger_is_a_bug_that_is_caught() -> None:
    queue = RankedQueue()
    queue.add(sequence((0, 1, 0)))
    with pytest.raises(AssertionError, match="not queued"):
        queue.remove(sequence((0, 1, 0)))
    with pytest.raises(AssertionError, match="taken"):
        queue.add(sequence((0, 1, 0)))


@pytest.mark.parametrize("keys", [("a", "a", "a", "a"), ("a", "b", "a", "b"), ("a", "b", "c", "d")])
def test_those_behind_one_are_the_rest_of_the_order(keys: tuple[str, ...]) -> None:
    queue = FairQueue()
    for number, key in enumerate(keys):
        seq = sequence((0, number, 0))
        seq.key = key
        queue.add(seq)
    order = list(queue)
    for place, seq in enumerate(order):
        assert list(queue.after(seq)) == order[place + 1 :]
