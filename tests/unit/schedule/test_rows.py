import numpy as np
import pytest

from weft.request import SamplingParams
from weft.schedule.rows import UNBOUNDED, RowTable
from weft.schedule.sequence import SeqState, Sequence
from weft.units import PAD, RowId, SeqId, SlotId


def running(number: int, prompt: int = 20) -> Sequence:
    seq = Sequence(
        SeqId(number),
        prompt=np.arange(prompt, dtype=np.int32),
        sampling=SamplingParams(),
        seed=0,
        stop_ids=(),
        rank=(0, number, 0),
    )
    seq.state = SeqState.RUNNING
    return seq


def assign(rows: RowTable, row: int, seq: Sequence) -> None:
    rows.assign(RowId(row), seq, known=seq.known(), computed=0, slot=SlotId(5))


def test_a_row_belongs_to_one_sequence_at_a_time() -> None:
    rows, seq = RowTable(4), running(7)
    assign(rows, 2, seq)
    assert rows.row_of(seq) == 2
    assert rows.free_rows() == [0, 1, 3]
    with pytest.raises(AssertionError, match="still holds"):
        assign(rows, 2, running(8))
    rows.audit([seq])
    with pytest.raises(AssertionError, match="differ"):
        rows.audit([])


def test_a_row_that_is_given_back_is_wiped() -> None:
    rows, seq = RowTable(2), running(7)
    assign(rows, 1, seq)
    rows.add_pages(np.asarray([1, 1], dtype=np.int32), np.asarray([0, 1], dtype=np.int32))
    rows.advance(np.asarray([1], dtype=np.int32), np.asarray([20], dtype=np.int32), np.asarray([9], dtype=np.int32))
    assert rows.release(seq) == 1
    rows.audit([])
    assert rows.seqs[1] is rows.known[1] is None
    for array, empty in (
        (rows.computed, 0),
        (rows.target, 0),
        (rows.capacity, 0),
        (rows.pages_held, 0),
        (rows.slots, PAD),
        (rows.last_token, PAD),
        (rows.seq_ids, PAD),
    ):
        assert array[1] == empty


def test_a_row_that_was_not_wiped_is_noticed() -> None:
    rows, seq = RowTable(2), running(7)
    assign(rows, 1, seq)
    rows.release(seq)
    rows.slots[1] = 5
    with pytest.raises(AssertionError, match="not wiped"):
        rows.audit([])


def test_a_row_that_names_another_sequence_is_noticed() -> None:
    rows, seq = RowTable(2), running(1000)
    assign(rows, 1, seq)
    rows.audit([seq])
    rows.seq_ids[1] = 1001
    with pytest.raises(AssertionError, match="is not in row 1"):
        rows.audit([seq])


def test_capacity_is_what_the_pages_hold_and_without_pages_it_has_no_end() -> None:
    rows, seq = RowTable(2), running(7)
    assign(rows, 0, seq)
    assert rows.capacity[0] == UNBOUNDED
    rows.add_pages(np.asarray([0, 0, 0], dtype=np.int32), np.asarray([0, 1, 2], dtype=np.int32))
    assert (rows.pages_held[0], rows.capacity[0]) == (3, 48)


def test_a_sequence_decodes_once_all_its_known_tokens_are_computed() -> None:
    rows, seq = RowTable(1), running(7, prompt=20)
    assign(rows, 0, seq)
    for computed, decoding in ((0, False), (19, False), (20, True), (21, True)):
        rows.computed[0] = computed
        assert rows.decoding(RowId(0)) == decoding
