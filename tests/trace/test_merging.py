"""Reading the files of all ranks: one clock, and files that do not belong."""

import pytest

from dure.errors import UsageError
from dure.trace.merging import read, read_file
from tests.trace.made_up import record, write


def test_ranks_of_one_host_keep_their_common_clock(tmp_path):
    later = {"monotonic_ns": 10_000_000_000, "time_ns": 1_000_010_000_700_000}  # the clock was set
    write(tmp_path, 0, [record(0, 2)])
    write(tmp_path, 1, [record(1, 3)], {"clock": later})
    flight = read(tmp_path)
    assert flight.time_ns(0, 2_000_000) == 0
    assert flight.time_ns(1, 3_000_000) == 1_000_000


def test_ranks_of_two_hosts_are_aligned_by_the_time_of_day(tmp_path):
    other = {"monotonic_ns": 70_000_000_000, "time_ns": 1_000_010_000_000_000}
    write(tmp_path, 0, [record(0, 2)])
    start = 60_004_000_000  # 4 ms after the other host's zero
    write(tmp_path, 1, [record(1, 3, start_ns=start)], {"clock": other, "boot": "another"})
    flight = read(tmp_path)
    assert flight.time_ns(1, start) == 2_000_000


@pytest.mark.parametrize(
    ("name", "content"),
    [
        ("torn.json", '{"format": "dure-flight", "version": 1, "rank": 1, "rec'),
        ("list.json", "[1, 2]"),
        ("foreign.json", '{"format": "something", "version": 1}'),
        ("newer.json", '{"format": "dure-flight", "version": 99, "needs": "dure>=0.9"}'),
        ("older.json", '{"format": "dure-flight", "version": 0}'),
        ("damaged.json", '{"format": "dure-flight", "version": 1, "rank": "one"}'),
        ("binary.json", "\udcff\udcfe"),
    ],
)
def test_a_file_that_cannot_be_read_is_named_and_left_out(tmp_path, name, content):
    write(tmp_path, 0, [record(0, 1)])
    (tmp_path / name).write_bytes(content.encode(errors="surrogateescape"))
    flight = read(tmp_path)
    (problem,) = flight.problems
    assert problem.startswith(f"{name}: ")
    assert list(flight.ranks) == [0]
    with pytest.raises(UsageError) as caught:
        read_file(tmp_path / name)
    assert ("pip install 'dure>=0.9'" in str(caught.value)) == (name == "newer.json")
    assert ("does not read older formats" in str(caught.value)) == (name == "older.json")


def test_of_two_files_of_a_rank_the_newer_counts(tmp_path):
    newer = {"monotonic_ns": 20_000_000_000, "time_ns": 1_000_020_000_000_000}
    old = write(tmp_path, 0, [record(0, 1)])
    old.rename(tmp_path / "old.json")
    write(tmp_path, 0, [record(0, 1), record(0, 2)], {"clock": newer})
    flight = read(tmp_path)
    assert len(flight.ranks[0].records) == 2
    assert [p.partition(":")[0] for p in flight.problems] == ["old.json"]


def test_a_file_of_another_job_is_left_out(tmp_path):
    newer = {"monotonic_ns": 20_000_000_000, "time_ns": 1_000_020_000_000_000}
    write(tmp_path, 0, [record(0, 1)], {"clock": newer})
    write(tmp_path, 1, [record(1, 1)], {"job": "an older one"})
    flight = read(tmp_path)
    assert list(flight.ranks) == [0] and flight.absent == (1, 2)
    assert [p.partition(":")[0] for p in flight.problems] == ["rank1.json"]


def test_a_folder_without_records_is_a_users_mistake(tmp_path):
    with pytest.raises(UsageError):
        read(tmp_path / "missing")
    with pytest.raises(UsageError):
        read(tmp_path)


def test_texts_move_no_cursor(tmp_path):
    evil = "\x1b]0;owned\x07 \x9b2J \x7f back\\u001bslash"
    write(tmp_path, 0, [record(0, 1, file=evil)], {"host": evil})
    file = read_file(tmp_path / "rank0.json")
    shown = "\\u001b]0;owned\\u0007 \\u009b2J \\u007f back\\u001bslash"
    assert (file.host, file.records[0].file) == (shown, shown)
    (tmp_path / "a\x1b[2J.json").write_text("{")
    assert read(tmp_path).problems == ("a\\u001b[2J.json: is not JSON, or incomplete",)


def test_members_are_read_in_their_order_from_ranges_and_from_lists(tmp_path):
    """Files of version 1 have lists."""
    groups = [{"name": "g", "rank": 0, "backend": "shm", "ranges": [[4, 2, -4], [9, 1, 1]]}]
    write(tmp_path, 0, [record(0, 1)], {"groups": groups})
    groups = [{"name": "g", "rank": 1, "backend": "shm", "ranks": [4, 0, 9]}]
    write(tmp_path, 4, [record(1, 1)], {"version": 1, "groups": groups})
    flight = read(tmp_path)
    assert flight.problems == ()
    assert [flight.ranks[rank].groups[0].ranks for rank in (0, 4)] == [(4, 0, 9)] * 2
    assert flight.absent == (9,)


@pytest.mark.parametrize(
    "ranges",
    [[[0, 1 << 40, 1]], [[0, 1 << 40, 0]], [[0, 3, -1]], [[0, 1 << 40, 1], [0, -1 << 40, 1]]],
    ids=["many", "one rank many times", "negative ranks", "a negative number"],
)
def test_ranges_that_are_not_those_of_a_group_are_refused_before_they_take_memory(tmp_path, ranges):
    write(tmp_path, 0, [record(0, 1)])
    groups = [{"name": "g", "rank": 1, "ranges": ranges}]
    write(tmp_path, 1, [record(1, 1)], {"groups": groups})
    flight = read(tmp_path)
    (problem,) = flight.problems
    assert problem.startswith("rank1.json: ")
    assert list(flight.ranks) == [0]


def test_equal_groups_of_many_files_are_one_list(tmp_path):
    groups = [{"name": "g", "rank": 0, "ranges": [[0, 256, 1]]}]
    for rank in range(16):
        write(tmp_path, rank, [record(0, 1)], {"groups": groups, "rank": rank})
    flight = read(tmp_path)
    assert len({id(file.groups[0].ranks) for file in flight.ranks.values()}) == 1
