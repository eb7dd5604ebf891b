"""Saving in the background: what is in it, what holds it up, what becomes of failures."""

import os
import threading
from contextvars import copy_context

import pytest
import torch

import dure
from dure.checkpoint import Checkpointer, CheckpointException, async_save, load, local_files, save
from dure.errors import UsageError
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted, loaded
from tests.waiting import PATIENCE_S, until, waits_in_join


class Gate(threading.Event):
    """No slice is written until it is set."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()


@pytest.fixture
def gate(monkeypatch):
    opened = Gate()
    write = local_files.write_all

    def waiting(descriptor, data, *at):
        opened.reached.set()
        assert opened.wait(PATIENCE_S)
        write(descriptor, data, *at)

    monkeypatch.setattr(local_files, "write_all", waiting)
    yield opened
    opened.set()


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_what_is_saved_is_the_state_at_the_call(tmp_path, gate, kind):
    def body(rank):
        tensor = counted(7, 2)
        values = [1, 2]
        if kind == "sharded":
            tensor = distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)])
        future = async_save({"w": tensor, "values": values}, checkpoint_id=tmp_path)
        assert not future.done()
        tensor.fill_(5.0)
        values.append(3)
        dure.all_reduce(torch.ones(3))  # training goes on over the same ranks meanwhile
        dure.barrier()
        gate.set()
        return future.result(PATIENCE_S).state_dict_metadata["w"].size

    assert run_ranks(2, body) == [(7, 2)] * 2
    assert loaded(tmp_path, 7, 2) == counted(7, 2).tolist()
    state = {"values": None}
    load(state, checkpoint_id=tmp_path)
    assert state["values"] == [1, 2]


def test_one_save_at_a_time_and_the_next_waits(tmp_path, gate):
    first = async_save({"w": counted(3)}, checkpoint_id=tmp_path / "1")
    seen = []

    class Looking:
        """A state that is asked for when the next save begins."""

        def state_dict(self):
            seen.append(first.done())
            return {"w": torch.zeros(3)}

        def load_state_dict(self, state):
            del state

    def save_next():
        async_save({"looking": Looking()}, checkpoint_id=tmp_path / "2").result(PATIENCE_S)

    following = threading.Thread(target=copy_context().run, args=(save_next,))
    following.start()
    until(lambda: seen or waits_in_join(following), "the next save waiting")
    gate.set()
    following.join()
    assert seen == [True]
    assert loaded(tmp_path / "1", 3) == [0, 1, 2]


@pytest.mark.parametrize("how", ["save", "other group", "checkpointer"])
def test_a_save_waits_for_this_jobs_own_save_into_the_same_folder(tmp_path, gate, how):
    (tmp_path / "link").symlink_to(tmp_path / "last")

    def body(rank):
        group = dure.new_group([0, 1])
        first = async_save({"w": counted(3)}, checkpoint_id=tmp_path / "last")
        _open_when_joined(gate)
        if how == "save":
            save({"w": torch.zeros(3)}, checkpoint_id=tmp_path / "link")
        elif how == "checkpointer":
            Checkpointer(tmp_path / "link").save(1, state={"w": torch.zeros(3)})
        else:
            where = {"checkpoint_id": tmp_path / "link", "process_group": group}
            async_save({"w": torch.zeros(3)}, **where).result(PATIENCE_S)
        assert first.result(PATIENCE_S)

    run_ranks(2, body)
    assert loaded(tmp_path / "last", 3) == ([0, 1, 2] if how == "checkpointer" else [0, 0, 0])


def _open_when_joined(gate):
    """Open `gate`, for all ranks, once the calling thread of one waits for another thread."""
    me = threading.current_thread()

    def watch():
        until(lambda: gate.is_set() or waits_in_join(me), "a wait for the save")
        gate.set()

    threading.Thread(target=watch).start()


def test_destroying_a_group_raises_the_failure_that_a_rank_has_not_seen(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", _full)

    def body(rank):
        future = async_save({"w": counted(3)}, checkpoint_id=tmp_path)
        if rank == 0:
            assert future.exception(PATIENCE_S)
            dure.destroy_process_group()
            return
        with pytest.raises(CheckpointException, match="No space left") as caught:
            dure.destroy_process_group()
        assert str(tmp_path) in caught.value.__notes__[0]
        assert not dure.is_initialized()

    run_ranks(2, body)


def _full(path):
    raise OSError(28, "No space left on device")


@pytest.mark.parametrize("seen_by", [(0, 1), (0,)])
def test_a_failure_is_the_futures_and_that_of_the_next_save_if_a_rank_has_not_seen_it(
    tmp_path, monkeypatch, seen_by
):
    monkeypatch.setattr(os, "fsync", _full)

    def body(rank):
        future = async_save({"w": counted(3)}, checkpoint_id=tmp_path)
        if rank in seen_by:
            error = future.exception(PATIENCE_S)
            assert isinstance(error, CheckpointException) and "No space left" in str(error)
        if len(seen_by) < 2:
            with pytest.raises(CheckpointException, match=r"the save before failed.*No space left"):
                async_save({"w": counted(3)}, checkpoint_id=tmp_path)
        dure.barrier()
        if rank == 0:
            monkeypatch.undo()
        dure.barrier()
        async_save({"w": counted(3)}, checkpoint_id=tmp_path).result(PATIENCE_S)

    run_ranks(2, body)
    assert loaded(tmp_path, 3) == [0, 1, 2]


def test_what_cannot_be_saved_is_told_at_the_call(tmp_path):
    def body(rank):
        with pytest.raises(CheckpointException, match="own"):
            async_save({"own": torch.ones(2 + rank)}, checkpoint_id=tmp_path)
        with pytest.raises(CheckpointException, match="value cannot be saved"):
            async_save({"own": object() if rank else 1}, checkpoint_id=tmp_path)

    run_ranks(2, body)
    assert not list(tmp_path.iterdir())
    with pytest.raises(UsageError):
        async_save({}, checkpoint_id=tmp_path, use_collectives=False)
