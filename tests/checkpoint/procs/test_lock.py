"""Jobs that save in one folder: the first one holds it until it ends, whatever ends it."""

from __future__ import annotations

import gc
import os
import signal
import subprocess
from contextlib import contextmanager

import pytest

import dure
from dure import env
from dure.checkpoint import Checkpointer, lock, save
from dure.errors import CheckpointNotWritten
from dure.testing.pool import start_server
from tests.waiting import PATIENCE_S


def _be_a_job(folder, pipe, host):
    """Save the steps that come through the pipe, in one job; report each."""
    if host:
        env.put("DURE_HOST_ID", host)
        lock._ONE_HOST = frozenset()
        lock._flock = lambda _: True  # locks of a host hold on that host alone
    checkpoints = Checkpointer(folder, keep=1)
    while (step := pipe.recv()) is not None:
        if step == "copy":  # as C code would fork it
            held = checkpoints._folder._lock._held.descriptor
            assert held is not None
            kept = os.dup(held)
            pipe.send(subprocess.Popen(["sleep", "1000"], pass_fds=[kept]).pid)
            continue
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
def _job(folder, host=""):
    context = start_server()
    here, there = context.Pipe()
    process = context.Process(target=_be_a_job, args=(folder, there, host))
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


def test_a_killed_job_holds_nothing_although_a_process_has_a_copy_of_its_lock(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lock, "_ENDING_S", 0.1)
    with _job(tmp_path) as job:
        job.ask(1)
        child = job.ask("copy")
        job.end("killed")
    try:
        Checkpointer(tmp_path).save(2, state={})
    finally:
        os.kill(child, signal.SIGKILL)


def test_a_job_on_another_host_is_refused_while_the_first_lives_and_saves_after_its_lease(
    tmp_path, monkeypatch
):
    monkeypatch.setattr(lock, "_ONE_HOST", frozenset())
    monkeypatch.setattr(lock, "_flock", lambda _: None)
    monkeypatch.setattr(lock, "LEASE_S", 0.5)
    with _job(tmp_path, "far") as job:
        job.ask(1)
        held = tmp_path / ".lock"
        with monkeypatch.context() as patched:
            patched.setattr(lock, "_pause", lambda _: os.utime(held))  # as the holder does
            with pytest.raises(CheckpointNotWritten, match=f"pid {job.process.pid} on far"):
                Checkpointer(tmp_path).save(2, state={})
        job.end("killed")
        Checkpointer(tmp_path).save(2, state={})


def _save_by_turns(rank, folder):
    """Save by two groups of one job, with another rank 0 each time."""
    del rank
    turned = dure.new_group([1, 0], sort_ranks=False)
    groups = [None, turned] * 2
    checkpointers = [Checkpointer(folder, process_group=group) for group in groups]
    return [c.save(step, state={}).name for step, c in enumerate(checkpointers)]


@pytest.mark.needs("engine")
def test_another_process_of_the_job_may_become_rank_0(process_pool, tmp_path):
    names = [f"00000{n + 1}-step-{n}" for n in range(4)]
    assert process_pool(2).run(_save_by_turns, str(tmp_path)) == [names, names]
