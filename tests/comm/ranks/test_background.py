"""Tasks in the background: who waits for them, and where their errors are raised."""

import logging
import threading

import pytest
import torch

import dure
from dure.comm.background import BackgroundTask
from dure.comm.init import leave
from dure.comm.world import current_world
from dure.errors import PeerLost, UsageError
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S, until, waits_in_join


class Broken(Exception):
    """What a task raises."""


def _break():
    raise Broken("of the task")


def _open_when_joined(gate):
    """Set `gate` when the calling thread waits for another one."""
    me = threading.current_thread()

    def watch():
        until(lambda: waits_in_join(me), "a wait for the task")
        gate.set()

    watcher = threading.Thread(target=watch)
    watcher.start()
    return watcher


def _sums(group, gate, sums):
    assert gate.wait(PATIENCE_S)
    ones = torch.ones(2)
    dure.all_reduce(ones, group=group)
    sums.append(ones.tolist())


@pytest.mark.parametrize("which", ["world", "group"])
def test_destroying_a_group_waits_for_the_tasks_that_use_it(which):
    sums = []

    def body(rank):
        group = dure.new_group([0, 1]) if which == "group" else current_world().need_default()
        gate = threading.Event()
        BackgroundTask().start(lambda: _sums(group, gate, sums), "task", [group])
        watcher = _open_when_joined(gate)
        dure.destroy_process_group(group)
        watcher.join()
        assert group.closed

    run_ranks(2, body)
    assert sums == [[2, 2], [2, 2]]


@on_ranks(2)
def test_an_unseen_error_is_raised_once_and_the_groups_are_left(rank):
    group = dure.new_group([0, 1])
    BackgroundTask().start(_break, "task", [group])
    BackgroundTask().start(_break, "task")
    with pytest.raises(Broken) as caught:
        dure.destroy_process_group(group)
    assert "in the background" in caught.value.__notes__[0]
    assert group.closed and dure.is_initialized()
    with pytest.raises(Broken):
        dure.destroy_process_group()
    assert not dure.is_initialized()
    with pytest.raises(UsageError):
        dure.destroy_process_group()


@pytest.mark.parametrize("ask", ["result", "exception", "callback"])
@on_ranks(2)
def test_an_error_that_was_seen_is_not_raised_again(rank, ask):
    task, found = BackgroundTask(), []
    if ask == "callback":
        task.add_done_callback(lambda t: found.append(t.exception()))
    task.start(_break, "task")
    if ask == "result":
        with pytest.raises(Broken):
            task.result(PATIENCE_S)
    elif ask == "exception":
        assert isinstance(task.exception(PATIENCE_S), Broken)
    dure.destroy_process_group()
    assert ask != "callback" or isinstance(found[0], Broken)


@on_ranks(2)
def test_a_task_ends_when_a_peer_is_lost_and_its_error_is_raised(rank):
    group = current_world().need_default()
    if rank == 1:
        leave(current_world(), abort=True)
        return
    BackgroundTask().start(lambda: dure.all_reduce(torch.ones(1), group=group), "task", [group])
    with pytest.raises(PeerLost):
        dure.destroy_process_group()
    assert not dure.is_initialized()


@on_ranks(1)
def test_several_errors_are_one_with_notes(rank):
    for _ in range(2):
        BackgroundTask().start(_break, "task")
    with pytest.raises(Broken) as caught:
        dure.destroy_process_group()
    assert [note for note in caught.value.__notes__ if "Broken: of the task" in note]


def test_groups_that_are_aborted_end_their_tasks_and_the_error_is_logged(caplog):
    ends = []

    def body(rank):
        group = current_world().need_default()
        task = BackgroundTask()
        task.add_done_callback(lambda _: ends.append(rank))
        if rank == 0:
            task.start(lambda: dure.recv(torch.ones(1), 1, group=group), "task", [group])
        with caplog.at_level(logging.ERROR, "dure.comm"):
            leave(current_world(), abort=True)
            if rank == 0:
                until(lambda: caplog.records, "the error in the log")

    run_ranks(2, body)
    assert ends == [0]
    assert "a task in the background failed" in caplog.text


def test_a_block_that_raises_waits_and_keeps_its_own_error():
    gate, seen = threading.Event(), []

    def end():
        assert gate.wait(PATIENCE_S)
        seen.append("end")
        raise Broken("of the task")

    def job():
        with dure.process_group("threads", store=dure.HashStore(), rank=0, world_size=1):
            BackgroundTask().start(end, "task")
            _open_when_joined(gate)
            raise KeyError("of the block")

    def body(rank):
        dure.destroy_process_group()
        with pytest.raises(KeyError) as caught:
            job()
        assert "Broken: of the task" in caught.value.__notes__[0]
        assert not dure.is_initialized()

    run_ranks(1, body)
    assert seen == ["end"]
