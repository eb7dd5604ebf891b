"""Counts of operations, made of records of the flight recorder."""

import json

from dure.trace.counting import Counts, OpCount, write_counts
from dure.trace.record import Record, State

MS = 1_000_000


def _record(seq, end_ms, op="all_reduce", **fields):
    return Record(
        group="world",
        op=op,
        seq=seq,
        world_size=2,
        nbytes=fields.pop("nbytes", 8),
        start_ns=(end_ms - 2) * MS,
        end_ns=end_ms * MS,
        state=fields.pop("state", State.SUCCEEDED),
        **fields,
    )


def test_each_operation_is_counted_once_with_its_bytes_and_time():
    counts = Counts()
    first = [_record(1, 10), _record(2, 20, nbytes=24), _record(3, 12, op="send")]
    counts.add(first, 100 * MS)
    counts.add([*first, _record(3, 150), _record(4, 160, op="barrier", nbytes=0)], 200 * MS)
    assert counts.by_op["all_reduce"].count == 3
    assert counts.by_op["all_reduce"].num_bytes == 8 + 24 + 8
    assert abs(counts.by_op["all_reduce"].seconds - 0.006) < 1e-9  # 3 of 2 ms
    assert counts.by_op["send"].count == 1
    assert counts.by_op["barrier"] == OpCount(1, 0, counts.by_op["barrier"].seconds, 0)
    assert counts.unseen == 0


def test_an_operation_that_has_just_ended_or_has_not_is_counted_later():
    counts = Counts()
    running = Record(group="world", op="barrier", seq=2, start_ns=1)
    counts.add([_record(1, 99), running], 100 * MS)
    assert counts.by_op == {}
    counts.add([_record(1, 99), running], 110 * MS)
    assert counts.by_op["all_reduce"].count == 1


def test_failures_are_counted():
    counts = Counts()
    counts.add([_record(1, 10, state=State.FAILED), _record(2, 11)], 100 * MS)
    assert counts.by_op["all_reduce"].failures == 1


def test_collectives_that_the_recorder_dropped_are_unseen():
    counts = Counts()
    counts.add([_record(5, 10), _record(6, 11)], 100 * MS)  # 1 to 4 are gone
    assert counts.unseen == 4
    counts.add([_record(6, 11), _record(10, 150)], 200 * MS)  # and 7 to 9
    assert counts.unseen == 7
    assert counts.by_op["all_reduce"].count == 3


def test_all_ranks_choose_the_same_beginnings():
    many = [_record(n, 10 + n // 100) for n in range(1, 501)]
    mine, other = Counts(), Counts()
    mine.add(many, 100 * MS)
    other.add(many[:490], 100 * MS)
    size, starts = mine.starts["world"]
    assert size == 2
    assert [n for n, _ in starts] == list(range(4, 501, 4))  # 125 of 500, at most 128
    assert set(other.starts["world"][1]) <= set(starts)
    assert starts[0] == (4, 8 * MS)


def test_old_beginnings_are_left_out():
    counts = Counts()
    counts.add([_record(1, 10), _record(2, 5000)], 6000 * MS)
    assert counts.starts["world"][1] == [(2, 4998 * MS)]


def test_the_file_is_replaced(tmp_path, monkeypatch):
    records = [_record(1, 10)]
    monkeypatch.setattr("dure.trace.flight.recorded", lambda: records)
    counts: dict[int, Counts] = {}
    write_counts(tmp_path, counts)
    records.append(_record(2, 11, op="barrier"))
    write_counts(tmp_path, counts)
    (path,) = tmp_path.iterdir()
    assert path.name == "rank0.json"
    found = json.loads(path.read_text())["operations"]
    assert found["all_reduce"][:2] == [1, 8]
