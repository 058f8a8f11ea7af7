"""Reports of snapshots: what matches, and what happens to reports that are lost, doubled or late."""

from __future__ import annotations

import numpy as np
import numpy.typing as npt
import pytest

from weft.prefix_digests import extended_digests, prefix_digests, salt_digest
from weft.router.snapshot_table import ASK_AGAIN_AFTER, SnapshotTable
from weft.snapshot_report import RemovedSnapshot, ReportedSnapshot, SnapshotReport
from weft.units import PAGE_TOKENS

PROMPT: npt.NDArray[np.int32] = np.arange(1000, 1400, dtype=np.int32)


def checkpoint(position: int, salt: str = "") -> ReportedSnapshot:
    whole = position // PAGE_TOKENS * PAGE_TOKENS
    digest = int(prefix_digests(PROMPT[:whole], salt)[-1])
    return ReportedSnapshot(digest, position, tuple(PROMPT[whole:position].tolist()))


def removed(position: int) -> RemovedSnapshot:
    one = checkpoint(position)
    return RemovedSnapshot(one.digest, one.tail)


def report(number: int, *positions: int, gone: tuple[int, ...] = (), is_full: bool = False) -> SnapshotReport:
    return SnapshotReport(
        number=number,
        added=[checkpoint(position) for position in positions],
        removed=[removed(position) for position in gone],
        is_full=is_full,
    )


def joined(*replicas: int) -> SnapshotTable:
    table = SnapshotTable()
    for replica in replicas:
        table.join(replica)
        assert table.is_stale(replica)
        assert not table.apply(replica, report(1, is_full=True))
        assert not table.is_stale(replica)
    return table


def positions(table: SnapshotTable, prompt: npt.NDArray[np.int32] = PROMPT, salt: str = "") -> dict[int, int]:
    matches = table.matches(prefix_digests(prompt, salt), prompt)
    return {replica: match.position for replica, match in matches.items()}


def test_the_deepest_snapshot_of_each_replica_matches() -> None:
    table = joined(0, 1, 2)
    table.apply(0, report(2, 64, 320))
    table.apply(1, report(2, 64, 128))
    assert positions(table) == {0: 320, 1: 128}
    assert positions(table, PROMPT[:320]) == {0: 64, 1: 128}, "one token is left to compute"
    other = PROMPT.copy()
    other[130] += 1
    assert positions(table, other) == {0: 64, 1: 128}
    table.apply(0, report(3, gone=(320,)))
    assert positions(table) == {0: 64, 1: 128}
    table.leave(1)
    assert positions(table) == {0: 64}


def test_a_tail_matches_to_the_token() -> None:
    table = joined(0)
    table.apply(0, report(2, 64, 70))
    assert positions(table) == {0: 70}
    other = PROMPT.copy()
    other[69] += 1
    assert positions(table, other) == {0: 64}
    assert positions(table, PROMPT[:70]) == {0: 64}


def test_salts_share_nothing() -> None:
    table = joined(0)
    table.apply(0, SnapshotReport(number=2, added=[checkpoint(64, "tenant")]))
    assert positions(table) == {}
    assert positions(table, salt="tenant") == {0: 64}


def test_digests_continue_from_any_ancestor() -> None:
    whole = prefix_digests(PROMPT, "a")
    assert whole.size == 25
    for pages in (0, 1, 7):
        before = int(whole[pages - 1]) if pages else salt_digest("a")
        later = extended_digests(before, PROMPT[pages * PAGE_TOKENS :], pages)
        assert later.tolist() == whole[pages:].tolist()
    assert np.unique(whole).size == whole.size


@pytest.mark.parametrize("change", ["swap pages", "swap tokens", "one token", "one page twice"])
def test_other_tokens_have_other_digests(change: str) -> None:
    other = PROMPT.copy()
    if change == "swap pages":
        other[:32] = np.concatenate([PROMPT[16:32], PROMPT[:16]])
    elif change == "swap tokens":
        other[3], other[4] = PROMPT[4], PROMPT[3]
    elif change == "one token":
        other[31] ^= 1 << 30
    else:
        other[16:32] = PROMPT[:16]
    assert not set(prefix_digests(other, "")[1:].tolist()) & set(prefix_digests(PROMPT, "").tolist())


# ---------------------------------------------------------------------- faults


def test_a_report_that_comes_twice_changes_nothing() -> None:
    table = joined(0)
    for _ in range(2):
        assert not table.apply(0, report(2, 64, 128))
    assert not table.apply(0, report(3, gone=(128,)))
    assert not table.apply(0, report(2, 64, 128)), "it is older than what is known"
    assert positions(table) == {0: 64}
    assert table.snapshots_of(0) == 1


def test_a_lost_report_makes_the_table_stale_until_a_full_report() -> None:
    table = joined(0)
    table.apply(0, report(2, 64))
    assert table.apply(0, report(4, 320)), "3 is missing: the router asks"
    assert table.is_stale(0)
    assert table.gaps_of(0) == 1
    assert positions(table) == {0: 320}, "what came counts all the same"
    assert not table.apply(0, report(5, 128)), "it does not ask with each report"
    assert not table.apply(0, report(6, 64, 192, is_full=True))
    assert not table.is_stale(0)
    assert positions(table) == {0: 192}
    assert table.snapshots_of(0) == 2


def test_a_full_report_that_never_comes_is_asked_for_again() -> None:
    table = joined(0)
    asked = [table.apply(0, report(number, 64)) for number in range(3, 3 + 3 * ASK_AGAIN_AFTER)]
    assert asked[0]
    assert 2 <= sum(asked) <= 4
    assert table.gaps_of(0) == 1


def test_a_full_report_that_is_late_does_not_undo_reports() -> None:
    table = joined(0)
    table.apply(0, report(2, 64))
    table.apply(0, report(4, 320))
    assert table.apply(0, report(3, 128, is_full=True)), "it is asked for again"
    assert positions(table) == {0: 320}
    assert table.is_stale(0)


def test_reports_before_the_first_full_report_are_in_it() -> None:
    table = SnapshotTable()
    table.join(0)
    table.apply(0, report(5, 320))
    assert positions(table) == {}
    table.apply(0, report(6, 64, is_full=True))
    assert positions(table) == {0: 64}


def test_a_new_process_of_a_replica_begins_with_nothing() -> None:
    table = joined(0)
    table.apply(0, report(7, 320))
    table.leave(0)
    assert not table.apply(0, report(8, 64)), "the last words of a process that ended"
    table.join(0)
    assert positions(table) == {}
    table.apply(0, report(1, 128, is_full=True))
    assert positions(table) == {0: 128}
