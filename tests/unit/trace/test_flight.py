"""The flight recorder: sources, dumps, and what errors leave behind."""

from __future__ import annotations

import faulthandler
import gc
import json
import os
import signal
import stat
import threading
import warnings
from pathlib import Path

import msgspec
import pytest

from dure.errors import CommTimeout, Desync, PeerLost, UsageError
from dure.trace import dump, files, flight, recorded, signals
from dure.trace.record import Origin
from dure.trace.ring import FlightRing


@pytest.fixture(autouse=True)
def fresh(monkeypatch):
    """A recorder of the test's own."""
    monkeypatch.setattr(flight, "_recorder", flight._Recorder())


def _ring(rank: int = 3, group: str = "g", num_ops: int = 0) -> FlightRing:
    ring = FlightRing(Origin(group=group, rank=0, global_ranks=(rank, rank + 1)))
    flight.add_source(ring)
    for _ in range(num_ops):
        ring.end(ring.begin("barrier", None))
    return ring


def test_a_dump_is_a_private_file_that_says_who_when_and_where(tmp_path):
    ring = _ring(num_ops=2)
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
    assert content["groups"] == [{"name": "g", "rank": 0, "ranks": [3, 4], "backend": ""}]
    functions = [f["function"] for f in content["threads"][0]["stack"]]
    assert "test_a_dump_is_a_private_file_that_says_who_when_and_where" in functions
    assert list(path.parent.iterdir()) == [path]
    del ring


def test_a_dump_goes_to_the_file_that_is_named(tmp_path):
    ring = _ring()
    assert dump(tmp_path / "mine.json") == tmp_path / "mine.json"
    assert [p.name for p in tmp_path.iterdir()] == ["mine.json"]
    del ring


def test_several_ranks_of_one_process_write_a_file_each(tmp_path):
    rings = [_ring(0, "a", 1), _ring(5, "a", 2)]
    assert dump(tmp_path) == tmp_path
    assert {p.name for p in tmp_path.iterdir()} == {"rank0.json", "rank5.json"}
    assert len(json.loads((tmp_path / "rank5.json").read_text())["records"]) == 2
    assert dump(tmp_path / "one", rank=5) == tmp_path / "one" / "rank5.json"
    del rings


def test_what_a_retired_group_did_is_kept_and_bounded(tmp_path):
    for number in range(3):
        ring = _ring(group=f"g{number}", num_ops=1500)
        flight.retire(ring)
        flight.retire(ring)  # a second time does nothing
        del ring
    found = recorded(3)
    assert len(found) == flight.CAPACITY
    assert [r.group for r in found[:1] + found[-1:]] == ["g1", "g2"]
    starts = [r.start_ns for r in found]
    assert starts == sorted(starts)


def test_a_source_nobody_holds_is_gone():
    _ring(num_ops=1)
    gc.collect()
    assert recorded() == []


@pytest.mark.parametrize("kind", [Desync, PeerLost, CommTimeout])
def test_an_error_of_other_ranks_is_followed_by_one_dump_and_a_note(kind, tmp_path, monkeypatch):
    monkeypatch.setenv("DURE_TRACE_DIR", str(tmp_path))
    ring = _ring(num_ops=1)
    first, second = kind("x", group="g"), kind("y", group="g")
    flight.on_error(first)
    path = tmp_path / "rank3.json"
    assert json.loads(path.read_text())["reason"].startswith(kind.__name__)
    path.unlink()
    flight.on_error(second, 3)
    flight.on_error(second, 3)
    assert not path.exists(), "a group dumps once"
    (note,) = second.__notes__
    assert first.__notes__ == [note] and str(path) in note
    del ring


def test_a_group_made_again_under_its_name_dumps_again(tmp_path, monkeypatch):
    monkeypatch.setenv("DURE_TRACE_DIR", str(tmp_path))
    for _ in range(2):
        ring = _ring()
        flight.on_error(PeerLost("x", group="g"))
        (tmp_path / "rank3.json").unlink()
        flight.retire(ring)


def test_a_users_mistake_and_tracing_turned_off_dump_nothing(tmp_path, monkeypatch):
    ring = _ring()
    monkeypatch.setenv("DURE_TRACE_DIR", str(tmp_path))
    flight.on_error(UsageError("x", group="g"))
    monkeypatch.setenv("DURE_TRACE_DIR", "OFF")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    flight.on_error(PeerLost("x", group="g"))
    assert list(tmp_path.iterdir()) == []
    del ring


def test_a_dump_that_fails_never_hides_the_error(tmp_path, monkeypatch):
    blocker = tmp_path / "file"
    blocker.write_text("")
    monkeypatch.setenv("DURE_TRACE_DIR", str(blocker))
    ring = _ring()
    error = PeerLost("x", group="g")
    flight.on_error(error)
    assert not hasattr(error, "__notes__")
    with pytest.raises(OSError):
        dump()
    del ring


def test_without_a_folder_the_users_state_keeps_the_newest_jobs(tmp_path, monkeypatch):
    monkeypatch.delenv("DURE_TRACE_DIR")
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path))
    jobs = tmp_path / "dure" / "trace"
    ring = _ring()
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


def test_sigusr2_is_taken_only_where_the_program_has_no_handler():
    before = signal.getsignal(signal.SIGUSR2)
    assert before is signal.SIG_DFL
    try:
        signals.install()
        ours = signal.getsignal(signal.SIGUSR2)
        assert ours is not signal.SIG_DFL
        signals.remove()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
        signal.signal(signal.SIGUSR2, signal.SIG_IGN)
        signals.install()
        signals.remove()
        assert signal.getsignal(signal.SIGUSR2) is signal.SIG_IGN
    finally:
        signal.signal(signal.SIGUSR2, before)


def test_sigusr2_is_left_to_faulthandler_which_python_does_not_know_of(tmp_path):
    with open(tmp_path / "stacks", "w+") as stacks:
        faulthandler.register(signal.SIGUSR2, stacks)
        try:
            signals.install()
            assert signal.getsignal(signal.SIGUSR2) is signal.SIG_DFL
            signal.raise_signal(signal.SIGUSR2)
        finally:
            faulthandler.unregister(signal.SIGUSR2)
        stacks.seek(0)
        assert "most recent call first" in stacks.read()


def test_sigusr2_in_a_forked_child_writes_nothing_even_if_the_lock_was_held(tmp_path, monkeypatch):
    monkeypatch.setenv("DURE_TRACE_DIR", str(tmp_path))
    ring = _ring()
    held, done = threading.Event(), threading.Event()

    def hold() -> None:
        with flight._recorder.lock:
            held.set()
            done.wait(20)

    holder = threading.Thread(target=hold)
    holder.start()
    assert held.wait(10)
    signals.install()
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # Python 3.12 warns: there is another thread
            child = os.fork()
        if child == 0:
            signal.alarm(10)
            flight._recorder.clear()  # as at every fork; this recorder is the test's own
            signal.raise_signal(signal.SIGUSR2)
            os._exit(0)
        _, status = os.waitpid(child, 0)
    finally:
        done.set()
        holder.join()
        signals.remove()
    assert status == 0
    assert list(tmp_path.iterdir()) == []
    del ring


def test_sigusr2_in_the_midst_of_a_dump_leaves_whole_files(tmp_path, monkeypatch):
    monkeypatch.setenv("DURE_TRACE_DIR", str(tmp_path))
    ring = _ring(num_ops=3)
    encode = msgspec.json.encode

    def interrupted(content: object) -> bytes:
        monkeypatch.setattr(msgspec.json, "encode", encode)
        signal.raise_signal(signal.SIGUSR2)
        return encode(content)

    monkeypatch.setattr(msgspec.json, "encode", interrupted)
    signals.install()
    try:
        path = dump()
    finally:
        signals.remove()
    assert json.loads(path.read_text())["reason"] == "dump()"
    assert list(tmp_path.iterdir()) == [path]
    del ring


def test_sigusr2_writes_a_dump_and_says_where(tmp_path: Path, monkeypatch, capfd):
    monkeypatch.setenv("DURE_TRACE_DIR", str(tmp_path))
    ring = _ring()
    signals.install()
    try:
        signal.raise_signal(signal.SIGUSR2)
    finally:
        signals.remove()
    assert json.loads((tmp_path / "rank3.json").read_text())["reason"] == "SIGUSR2"
    assert str(tmp_path / "rank3.json") in capfd.readouterr().err
    del ring
