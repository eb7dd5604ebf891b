"""Saving in the background: what is in it, what holds it up, what becomes of failures."""

from __future__ import annotations

import gc
import os
import threading
import weakref
from pathlib import Path

import pytest
import torch

import dure
from dure.checkpoint import (
    CheckpointException,
    FileSystemReader,
    FileSystemWriter,
    async_save,
    background,
    load,
    save,
    slice_files,
)
from dure.checkpoint.staging import BlockingAsyncStager, DefaultStager
from dure.errors import UsageError
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks


def counted(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def saved_in_background(state, folder, **options):
    return async_save(state, checkpoint_id=folder, **options)


def loaded(folder, *shape):
    state = {"w": torch.full(shape, -1.0)}
    load(state, checkpoint_id=folder, no_dist=True)
    return state["w"].tolist()


class Gate(threading.Event):
    """No slice is written until it is set."""

    def __init__(self):
        super().__init__()
        self.reached = threading.Event()


@pytest.fixture
def gate(monkeypatch):
    opened = Gate()
    write = slice_files.write_all

    def waiting(descriptor, data):
        opened.reached.set()
        assert opened.wait(60)
        write(descriptor, data)

    monkeypatch.setattr(slice_files, "write_all", waiting)
    yield opened
    opened.set()


@pytest.mark.parametrize("kind", ["plain", "sharded"])
def test_what_is_saved_is_the_state_at_the_call(tmp_path, gate, kind):
    def body(rank):
        tensor = counted(7, 2)
        values = [1, 2]
        if kind == "sharded":
            tensor = distribute_tensor(tensor, init_device_mesh("cpu", (2,)), [Shard(0)])
        future = saved_in_background({"w": tensor, "values": values}, tmp_path)
        assert not future.done()
        tensor.fill_(5.0)
        values.append(3)
        dure.all_reduce(torch.ones(3))  # training goes on over the same ranks meanwhile
        dure.barrier()
        gate.set()
        return future.result(60).state_dict_metadata["w"].size

    assert run_ranks(2, body) == [(7, 2)] * 2
    assert loaded(tmp_path, 7, 2) == counted(7, 2).tolist()
    state = {"values": None}
    load(state, checkpoint_id=tmp_path)
    assert state["values"] == [1, 2]


def test_a_save_that_is_not_done_leaves_the_checkpoint_before(tmp_path, gate):
    gate.set()
    save({"w": counted(3)}, checkpoint_id=tmp_path)
    gate.clear()
    gate.reached.clear()
    future = saved_in_background({"w": torch.zeros(3)}, tmp_path)
    assert gate.reached.wait(60)
    assert loaded(tmp_path, 3) == [0, 1, 2]
    with pytest.raises(CheckpointException, match="another job is saving"):
        save({"w": torch.ones(3)}, checkpoint_id=tmp_path)
    gate.set()
    future.result(60)
    assert loaded(tmp_path, 3) == [0, 0, 0]


def test_one_save_at_a_time_and_the_next_waits(tmp_path, gate):
    first = saved_in_background({"w": counted(3)}, tmp_path / "1")
    threading.Timer(0.2, gate.set).start()
    second = saved_in_background({"w": torch.zeros(3)}, tmp_path / "2")
    assert first.done()
    second.result(60)
    assert loaded(tmp_path / "1", 3) == [0, 1, 2] and loaded(tmp_path / "2", 3) == [0, 0, 0]


def test_the_buffer_is_kept_and_told_and_given_back(tmp_path):
    stager = DefaultStager()
    places = []
    for value in (1.0, 2.0):
        state = {"w": torch.full((100,), value), "t": torch.full((3, 2), value).t()}
        response = async_save(state, checkpoint_id=tmp_path, async_stager=stager)
        assert response.staging_completion.done()
        response.upload_completion.result(60)
        assert stager.num_bytes == 448 + 64  # 400 and 24 bytes, each to the next 64
        places.append(stager._buffer.data_ptr())
        assert loaded(tmp_path, 100) == [value] * 100
    assert places[0] == places[1]
    stager.close()
    assert stager.num_bytes == 0
    forgetful = BlockingAsyncStager()
    future = saved_in_background({"w": torch.ones(100)}, tmp_path, async_stager=forgetful)
    future.result(60)
    held = weakref.ref(forgetful._buffer)
    saved_in_background({"w": torch.ones(200)}, tmp_path, async_stager=forgetful).result(60)
    gc.collect()
    assert held() is None and forgetful.num_bytes == 832


def test_a_rank_holds_only_what_it_writes(tmp_path):
    def body(rank):
        stager = DefaultStager()
        state = {f"w{i}": torch.zeros(16) for i in range(4)}  # 64 bytes each
        response = async_save(state, checkpoint_id=tmp_path, async_stager=stager)
        response.upload_completion.result(60)
        return stager.num_bytes

    assert run_ranks(2, body) == [128, 128]


def _full(path):
    raise OSError(28, "No space left on device")


def test_a_failure_is_the_futures_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", _full)

    def body(rank):
        future = saved_in_background({"w": counted(3)}, tmp_path)
        error = future.exception(60)
        assert isinstance(error, CheckpointException) and "No space left" in str(error)
        dure.barrier()
        if rank == 0:
            monkeypatch.undo()
        dure.barrier()
        saved_in_background({"w": counted(3)}, tmp_path).result(60)  # it was seen

    run_ranks(2, body)
    assert loaded(tmp_path, 3) == [0, 1, 2]


def test_a_failure_that_nobody_saw_fails_the_next_save_on_all_ranks(tmp_path, monkeypatch):
    monkeypatch.setattr(os, "fsync", _full)

    def body(rank):
        future = saved_in_background({"w": counted(3)}, tmp_path)
        if rank == 0:
            assert future.exception(60)
        with pytest.raises(CheckpointException, match=r"the save before failed.*No space left"):
            async_save({"w": counted(3)}, checkpoint_id=tmp_path)
        dure.barrier()
        if rank == 0:
            monkeypatch.undo()
        dure.barrier()
        saved_in_background({"w": counted(3)}, tmp_path).result(60)

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


def test_a_checkpoint_that_may_not_be_replaced(tmp_path):
    once = FileSystemWriter(tmp_path, overwrite=False)
    for _ in range(2):
        future = async_save({"a": 1}, storage_writer=once)
    with pytest.raises(CheckpointException, match="already"):
        future.result(60)
    assert list(FileSystemReader(Path(tmp_path)).read_metadata().state_dict_metadata) == ["a"]


def test_its_group_is_made_once(tmp_path, monkeypatch):
    made = []
    new_group = background.new_group
    monkeypatch.setattr(
        background, "new_group", lambda *a, **k: made.append(1) or new_group(*a, **k)
    )

    def body(rank):
        for _ in range(3):
            saved_in_background({"w": counted(3)}, tmp_path).result(60)

    run_ranks(2, body)
    assert len(made) == 2  # by two ranks
