"""Jobs that save in one folder: the first one holds it until it ends, whatever ends it."""

from __future__ import annotations

import gc
import os
import shutil
import signal
from contextlib import contextmanager, nullcontext
from multiprocessing import current_process, get_context

import pytest

import dure
from dure import env
from dure.checkpoint import Checkpointer, lock, save
from dure.checkpoint.folder import Folder
from dure.errors import CheckpointNotWritten
from dure.testing.pool import start_server
from tests.waiting import PATIENCE_S


def _be_a_job(folder, pipe, host, key):
    """Save the steps that come through the pipe, in one job; report each."""
    if key is not None:
        current_process().authkey = key
    if host:
        env.put("DURE_HOST_ID", host)
        lock._ONE_HOST = frozenset()
        lock._flock = lambda *_: True  # locks of a host hold on that host alone
    checkpoints = Checkpointer(folder, keep=1)
    while (step := pipe.recv()) is not None:
        try:
            pipe.send(checkpoints.save(step, state={"step": step}).name)
        except CheckpointNotWritten as e:
            pipe.send(e.seen)


class _Job:
    def __init__(self, process, pipe):
        self.process, self.pipe = process, pipe

    def ask(self, step):
        self.pipe.send(step)
        assert self.pipe.poll(PATIENCE_S)
        return self.pipe.recv()

    def end(self, how="ended"):
        if how == "killed":
            os.kill(self.process.pid, signal.SIGKILL)
        else:
            self.pipe.send(None)
        self.process.join(PATIENCE_S)


@contextmanager
def _job(folder, host="", key: bytes | None = b"of a program that was executed", context=None):
    context = context or start_server()
    here, there = context.Pipe()
    process = context.Process(target=_be_a_job, args=(folder, there, host, key))
    process.start()
    try:
        yield _Job(process, here)
    finally:
        process.kill()
        process.join()
        process.close()
        here.close()
        there.close()


@pytest.mark.parametrize("how", ["ended", "killed"])
def test_a_second_job_is_refused_between_the_saves_of_the_first_and_saves_after_its_end(
    tmp_path, how
):
    mine = Checkpointer(tmp_path, keep=1)
    with _job(tmp_path) as job:
        assert job.ask(1) == "000001-step-1"
        with pytest.raises(CheckpointNotWritten, match=f"pid {job.process.pid} on "):
            mine.save(7, state={})
        state = {}
        assert mine.load(state=state) == 1 and state == {"step": 1}
        assert job.ask(2) == "000002-step-2"
        job.end(how)
        mine.save(8, state={})
    assert sorted(p.name for p in tmp_path.iterdir()) == [".lock", "000003-step-8"]
    del mine
    gc.collect()  # its errors refer to it
    assert [p.name for p in tmp_path.iterdir()] == ["000003-step-8"]


def test_checkpointers_of_one_process_share_the_lock_and_the_last_one_ends_it(tmp_path):
    first, second = Checkpointer(tmp_path), Checkpointer(tmp_path)
    first.save(1, state={})
    second.save(2, state={})
    save({}, checkpoint_id=tmp_path)
    del first
    with _job(tmp_path) as job:
        assert "another job" in job.ask(3)
        del second
        gc.collect()
        assert job.ask(3) == "000003-step-3"


@pytest.mark.parametrize("method", ["fork", "forkserver"])
def test_processes_that_the_holder_started_save_and_so_does_the_holder(tmp_path, method):
    mine = Checkpointer(tmp_path)
    mine.save(0, state={})
    context = start_server() if method == "forkserver" else get_context("fork")
    with _job(tmp_path, key=None, context=context) as job:
        assert job.ask(1) == "000002-step-1"
        assert mine.save(2, state={}).name == "000003-step-2"
        assert job.ask(3) == "000004-step-3"
        with _job(tmp_path, key=None) as sibling:
            assert f"another job is saving there: pid {job.process.pid} on " in sibling.ask(4)
        with _job(tmp_path) as foreign:
            assert f"another job is saving there: pid {job.process.pid} on " in foreign.ask(4)
    mine.save(5, state={})


def test_a_copy_of_a_held_folder_holds_for_a_lease_if_hosts_share_it(tmp_path, monkeypatch):
    monkeypatch.setattr(lock, "_ONE_HOST", frozenset())
    monkeypatch.setattr(lock, "_flock", lambda *_: None)
    monkeypatch.setattr(lock, "LEASE_S", 0.5)
    with _job(tmp_path / "a") as job:
        job.ask(1)
        shutil.copytree(tmp_path / "a", tmp_path / "b")
        with pytest.raises(CheckpointNotWritten, match=f"pid {job.process.pid} on "):
            Checkpointer(tmp_path / "a").save(2, state={})
        assert Checkpointer(tmp_path / "b").save(2, state={}).name == "000002-step-2"


def _save_by_parts(rank, folder):
    """Save by the group of all ranks, and by a group without its rank 0."""
    everyone, part = Checkpointer(folder), dure.new_group([1])
    names = []
    for step in (1, 3):
        names.append(everyone.save(step, state={}).name)
        if rank == 1:
            names.append(Checkpointer(folder, process_group=part).save(step + 1, state={}).name)
        dure.barrier()
    return names


@pytest.mark.needs("engine")
def test_a_group_without_the_holder_saves(process_pool, tmp_path):
    names = [f"00000{n}-step-{n}" for n in range(1, 5)]
    assert process_pool(2).run(_save_by_parts, str(tmp_path)) == [names[::2], names]


def _save_alone(rank, folder):
    """Save by one group per rank, in turns."""
    groups = [dure.new_group([0]), dure.new_group([1])]
    mine, names = Checkpointer(folder, process_group=groups[rank]), []
    for step in range(4):
        if step % 2 == rank:
            names.append(mine.save(step, state={}).name)
        dure.barrier()
    return names


@pytest.mark.needs("engine")
def test_ranks_of_one_world_that_never_saved_together_share_a_folder(process_pool, tmp_path):
    names = [f"00000{n + 1}-step-{n}" for n in range(4)]
    assert process_pool(2).run(_save_alone, str(tmp_path)) == [names[::2], names[1::2]]


def _hold(folder, pipe):
    """Save, in the time until something comes through the pipe."""
    mine = Folder(folder)
    mine.hold()
    pipe.send("holds")
    pipe.recv()
    mine.release()
    pipe.recv()


@pytest.mark.parametrize("ends", [True, False])
def test_a_process_of_the_job_waits_for_the_end_of_a_save(tmp_path, monkeypatch, ends):
    here, there = get_context("fork").Pipe()
    other = get_context("fork").Process(target=_hold, args=(tmp_path, there))
    other.start()
    assert here.recv() == "holds"
    clock = [0.0]

    def pause(seconds):
        if ends and clock[0] == 0.0:
            here.send("end")
        clock[0] += seconds if ends else 10

    monkeypatch.setattr(lock, "_clock", lambda: clock[0])
    monkeypatch.setattr(lock, "_pause", pause)
    mine, expected = Folder(tmp_path), nullcontext()
    if not ends:
        seen = f"this job has been saving there for 60 s: pid {other.pid} "
        expected = pytest.raises(OSError, match=seen)
    try:
        with expected:
            mine.hold()
        mine.release()
        assert clock[0] > 0
    finally:
        other.kill()
        other.join()
        other.close()
        here.close()
        there.close()
