"""What records say side by side."""

import pytest

from dure.trace import merging
from dure.trace.events import State
from dure.trace.findings import study
from dure.trace.merging import Flight, read
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


def _of_many(folder, records_of) -> Flight:
    """Write and read the files of 256 ranks."""
    groups = [{"name": "world", "rank": 0, "ranks": list(range(256)), "backend": "shm"}]
    for rank in range(256):
        write(folder, rank, records_of(rank), {"groups": groups})
    return read(folder)


def test_what_is_said_of_256_ranks_has_a_sentence_of_bounded_length_each(tmp_path):
    """Every second rank misses the last call, which the other 128 made, and has another size."""
    flight = _of_many(
        tmp_path, lambda r: [record(r, 1, nbytes=4 * r + 4), *([record(r, 2)] if r % 2 else [])]
    )
    found = study(flight)
    assert len(found.absences) == 128
    assert len({id(absence.called_by) for absence in found.absences}) == 1
    assert max(map(len, found.sentences)) < 700  # a list of 128 ranks alone has 580 characters
    text = str(found.absences[0])
    assert "(ranks 1, 3, 5, 7, 9, 11, 13, 15 and 120 more did)" in text
    (difference,) = found.differences
    assert "rank 7 called all_reduce #1" in str(difference)
    assert "and 248 other calls" in str(difference)


def test_many_ranks_with_one_call_are_named_together(tmp_path):
    flight = _of_many(tmp_path, lambda r: [record(r, 1, op="barrier" if r == 9 else "all_reduce")])
    (difference,) = study(flight).differences
    assert "ranks 0-8, 10-255 called all_reduce #1" in str(difference)
    assert "rank 9 called barrier #1" in str(difference)


def test_of_many_files_old_records_are_dropped_and_no_last_collective(tmp_path, monkeypatch):
    """A rank's only call in a group is old, and is still known to be made."""
    monkeypatch.setattr(merging, "_LEAST_RECORDS", 4)
    monkeypatch.setattr(merging, "_MOST_RECORDS", 256 * 4)

    def records(r):
        rare = [record(r, n, group="rare") for n in range(1, 4)]
        messages = [record(r, n, op="send", peer=0, tag=1) for n in range(10, 60)]
        failed = [record(r, 70, op="recv", peer=0, tag=1, state=State.FAILED, error="PeerLost")]
        return [*rare, record(r, 4, group="rare"), *failed, *messages] if r else [*rare, *messages]

    groups = [{"name": "rare", "rank": 0, "ranks": list(range(256)), "backend": "shm"}]
    for rank in range(256):
        write(tmp_path, rank, records(rank), {"groups": groups})
    flight = read(tmp_path)
    assert [len(flight.ranks[rank].records) for rank in (0, 1)] == [3 + 4, 4 + 1 + 4]
    found = study(flight)
    assert [(a.rank, a.missed.seq) for a in found.absences] == [(0, 4)]
    assert len(found.failures) == 255
    assert flight.problems[0].startswith("the oldest records of 256 files, because there are 256")


def test_lists_of_members_that_are_equal_are_kept_once(tmp_path):
    flight = _of_many(tmp_path, lambda r: [])
    assert len({id(file.groups[0].ranks) for file in flight.ranks.values()}) == 1


def test_of_256_ranks_in_a_ring_of_messages_all_wait_for_each_other(tmp_path):
    """Ranks 0 to 253 wait in a ring; 254 waits for one of them, and 255 for nobody."""
    peers = [*((r + 1) % 254 for r in range(254)), 0]
    flight = _of_many(
        tmp_path,
        lambda r: (
            [record(r, 1, op="recv", peer=peers[r], tag=1, state=State.STARTED, end_ns=0)]
            if r < 255
            else []
        ),
    )
    waits = study(flight).waits
    assert [wait.rank for wait in waits if wait.mutual] == list(range(254))
    assert [wait.rank for wait in waits if not wait.mutual] == [254]
