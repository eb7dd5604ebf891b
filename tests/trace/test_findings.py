"""What records say side by side."""

import pytest

from dure.trace.events import State
from dure.trace.findings import study
from dure.trace.merging import read
from tests.trace.made_up import record, write


def _study(folder, *ranks):
    for rank, records in enumerate(ranks):
        if records is not None:
            write(folder, rank, records)
    return study(read(folder))


def _all(seqs, **fields):
    return [[record(r, s, **fields) for s in seqs] for r in range(3)]


@pytest.mark.parametrize(
    ("odd", "what"),
    [
        ({"op": "broadcast", "peer": 0}, "operation"),
        ({"dtype": "int32"}, "dtype"),
        ({"nbytes": 404}, "size"),
        ({"reduction": "MAX"}, "reduction"),
        ({"peer": 1}, "root"),
    ],
)
def test_the_first_number_under_which_calls_differ_is_found(tmp_path, odd, what):
    ranks = _all(range(1, 6))
    ranks[1][2] = record(1, 3, **odd, line=99)
    ranks[1][4] = record(1, 5, op="barrier")  # a consequence
    (difference,) = _study(tmp_path, *ranks).differences
    assert (difference.group, difference.seq, difference.what) == ("world", 3, (what,))
    assert set(difference.calls) == {0, 1, 2}
    assert "/home/me/train.py:99" in str(difference)


def test_a_rank_that_never_called_is_named_with_its_last_call_and_its_place(tmp_path):
    ranks = _all(range(1, 42))
    del ranks[2][-1]
    ranks[2].append(record(2, 1, op="send", peer=0, tag=3, line=77, start_ns=40_500_000))
    (absence,) = _study(tmp_path, *ranks).absences
    assert (absence.rank, absence.missed.seq, absence.called_by) == (2, 41, (0, 1))
    assert absence.last is not None and (absence.last.op, absence.last.line) == ("send", 77)
    assert absence.before_s == pytest.approx(0.0005)
    assert absence.now is not None and absence.now.line == 88
    text = str(absence)
    assert "rank 2 never called all_reduce #41" in text and "/home/me/train.py:77" in text


def test_a_rank_without_a_file_is_absent_from_the_last_call(tmp_path):
    (absence,) = _study(tmp_path, _all([1, 2])[0], None, _all([1, 2])[2]).absences
    assert (absence.rank, absence.missed.seq, absence.has_file) == (1, 2, False)


def test_what_a_ring_has_forgotten_is_not_held_against_the_rank(tmp_path):
    ranks = _all(range(1, 9))
    del ranks[1][:5]
    found = _study(tmp_path, *ranks)
    assert found.sentences == []
    assert [a.num_calls for a in found.arrivals] == [3, 3, 3]


def test_the_rank_that_comes_last_is_counted_and_timed(tmp_path):
    ranks = _all(range(1, 5))
    ranks[1] = [
        record(1, s, start_ns=s * 1_000_000 + late)
        for s, late in zip(range(1, 5), (100_000, 400_000, 0, 100_000), strict=True)
    ]
    found = {a.rank: a for a in _study(tmp_path, *ranks).arrivals}
    assert found[1].num_last == 3
    assert found[1].mean_late_s == pytest.approx(0.00015)
    assert found[1].max_late_s == pytest.approx(0.0004)
    assert found[1].worst.seq == 2
    assert found[2].max_late_s == 0


def _message(rank, op, peer, **fields):
    known = {"state": State.STARTED, "end_ns": 0, "start_ns": 9_000_000, **fields}
    return record(rank, 1, op, peer=peer, **known)


def test_ranks_that_wait_for_each_other_in_messages_are_named(tmp_path):
    ranks = _all([1])
    ranks[0].append(_message(0, "recv", 2, state=State.FAILED, error="CommTimeout"))
    ranks[2].append(_message(2, "send", 0))
    ranks[1].append(_message(1, "recv", 0))
    waits = {w.rank: (w.peer, w.mutual) for w in _study(tmp_path, *ranks).waits}
    assert waits == {0: (2, True), 2: (0, True), 1: (0, False)}
