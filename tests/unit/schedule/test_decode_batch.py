"""What stays the same while the same sequences decode, and when somebody has to look."""

from __future__ import annotations

import itertools

import numpy as np
import pytest

from weft.schedule.plan import StepPlan
from weft.schedule.rows import Countdown, DecodeBatch
from weft.schedule.snapshots import decodes_due, until_due
from weft.units import SeqId

from ..engine.rig import Rig

STAY = ("rows", "slots", "lengths", "fresh", "samples", "seqs")


def stays(before: StepPlan, plan: StepPlan) -> bool:
    return all(getattr(before, name) is getattr(plan, name) for name in STAY)


def test_steps_of_the_same_decodes_share_their_arrays_until_somebody_joins_or_leaves() -> None:
    rig = Rig(rows_max=4)
    rig.submit("a", 20, max_tokens=30)
    rig.submit("b", 25, max_tokens=12)
    rig.run()
    alone = [plan for plan in rig.plans if plan.run_count and plan.decode_count == plan.run_count]
    pairs = list(itertools.pairwise(alone))
    assert all(stays(one, next_) == (one.seqs == next_.seqs) for one, next_ in pairs)
    assert sum(stays(*pair) for pair in pairs) > 20, "most steps are like the one before"
    assert sum(not stays(*pair) for pair in pairs) == 1, "one sequence left"
    assert len({plan.starts.tobytes() for plan in alone}) == len(alone), "positions are each step's own"


def test_who_writes_what_steps_share_is_caught() -> None:
    decode_batch = DecodeBatch(np.array([3, 1], np.int32), [SeqId(7), SeqId(9)], np.array([0, 2], np.int32))
    for values in (
        decode_batch.rows,
        decode_batch.slots,
        decode_batch.lengths,
        decode_batch.fresh,
        decode_batch.samples,
    ):
        with pytest.raises(ValueError, match="read-only"):
            values[0] = 1


def test_a_countdown_is_over_until_it_is_started_and_when_the_nearest_may_be_due() -> None:
    countdown = Countdown()
    assert countdown.over, "nobody has looked yet"
    countdown.start(np.array([5, 3, 9], np.int32))
    for _ in range(3):
        assert not countdown.over
        countdown.step(1)
    assert countdown.over
    countdown.start(np.array([4, 0], np.int32))
    assert countdown.over, "one is due now"
    countdown.start(np.array([], np.int32))
    assert not countdown.over


@pytest.mark.parametrize("distance", [64, 128, 4096])
def test_the_distance_to_the_next_state_is_the_first_at_which_it_is_due(distance: int) -> None:
    target = np.array([100, 64, 129, 1000, 7], np.int32)
    computed = target + np.array([0, 0, 3, 70, 60], np.int32)
    assert not decodes_due(computed, target, distance)
    for one, left in enumerate(until_due(computed, target, distance).tolist()):
        assert left > 0
        assert one in decodes_due(computed + left, target, distance)
        assert not any(one in decodes_due(computed + made, target, distance) for made in range(left))
