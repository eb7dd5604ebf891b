"""Files of flight records: where they are, who may read them, how many are kept."""

import json
import os
import stat

import pytest

from dure.trace import dump, files, flight
from dure.trace.record import Origin
from tests.trace.made_up import ring_of

pytestmark = pytest.mark.usefixtures("recorder")


def test_a_dump_is_a_private_file_that_says_who_when_and_where(tmp_path):
    ring = ring_of(num_ops=2)
    flight.set_job("job-1")
    path = dump(tmp_path / "deep" / "folder")
    content = json.loads(path.read_text())
    assert path == tmp_path / "deep" / "folder" / "rank3.json"
    assert stat.S_IMODE(path.stat().st_mode) == 0o600
    assert stat.S_IMODE(path.parent.stat().st_mode) == 0o700
    assert (content["format"], content["version"]) == (files.FORMAT, files.VERSION)
    assert (content["rank"], content["world_size"], content["job"]) == (3, 5, "job-1")
    assert content["pid"] == os.getpid() and content["reason"] == "dump()"
    assert content["clock"].keys() == {"monotonic_ns", "time_ns"}
    assert [r["seq"] for r in content["records"]] == [1, 2]
    assert content["groups"] == [{"name": "g", "rank": 0, "ranges": [[3, 2, 1]], "backend": ""}]
    functions = [f["function"] for f in content["threads"][0]["stack"]]
    assert "test_a_dump_is_a_private_file_that_says_who_when_and_where" in functions
    assert list(path.parent.iterdir()) == [path]
    del ring


def test_several_ranks_of_one_process_write_a_file_each(tmp_path):
    rings = [ring_of(0, "a", 1), ring_of(5, "a", 2)]
    assert dump(tmp_path) == tmp_path
    assert {p.name for p in tmp_path.iterdir()} == {"rank0.json", "rank5.json"}
    assert len(json.loads((tmp_path / "rank5.json").read_text())["records"]) == 2
    assert dump(tmp_path / "one", rank=5) == tmp_path / "one" / "rank5.json"
    del rings


def test_without_a_folder_the_users_state_keeps_the_newest_jobs(tmp_path, monkeypatch):
    monkeypatch.delenv("DURE_TRACE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    jobs = tmp_path / "dure" / "trace"
    ring = ring_of()
    for number in range(25):
        flight.set_job(f"job/{number}")
        path = dump()
        os.utime(path.parent, (number, number))
    assert path.parent.parent == jobs
    assert stat.S_IMODE(jobs.stat().st_mode) == 0o700
    assert {p.name for p in jobs.iterdir()} == {f"job-{n}" for n in range(5, 25)}
    (jobs / "job-5" / "notes.txt").write_text("the user's own")
    os.utime(jobs / "job-5", (5, 5))
    flight.set_job("last")
    dump()
    assert [p.name for p in (jobs / "job-5").iterdir()] == ["notes.txt"]
    del ring


def test_ranks_are_written_as_ranges_in_their_order():
    assert files.ranges_of([]) == []
    assert files.ranges_of([7]) == [(7, 1, 1)]
    assert files.ranges_of([0, 8, 16, 17]) == [(0, 3, 8), (17, 1, 1)]
    assert files.ranges_of([2, 1, 0, 5]) == [(2, 3, -1), (5, 1, 1)]


@pytest.mark.parametrize("step", [1, 8])
def test_the_file_of_a_rank_of_10000_is_as_small_as_that_of_a_rank_of_16(tmp_path, step):
    sizes: list[int] = []
    for ranks in (16, 10_000):
        group = Origin(group="g", rank=0, global_ranks=tuple(range(0, ranks * step, step)))
        path = files.write(
            files.Target(folder=tmp_path), rank=0, groups=[group], records=[], job="", reason=""
        )
        sizes.append(len(path.read_bytes()))
    assert sizes[1] < sizes[0] + 20  # digits of two numbers
