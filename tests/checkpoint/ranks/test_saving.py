"""Saving: what fails on one rank fails on all, and what was saved before stays."""

from __future__ import annotations

import os
from pathlib import Path
from typing import Any, cast

import pytest
import torch

import dure
from dure.checkpoint import CheckpointException, DefaultLoadPlanner, FileSystemWriter, load, save
from dure.errors import Desync, UsageError
from dure.tensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted
from tests.thread_ranks import on_ranks

S0 = Shard(0)


@pytest.mark.parametrize("full_at", [0, 1, 2])  # the slices, the manifest, its folder
def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch, full_at):
    save({"w": counted(3)}, checkpoint_id=tmp_path)
    before = sorted(p.name for p in tmp_path.glob("*.*"))
    flush, flushed = os.fsync, []

    def fsync(descriptor):
        flushed.append(descriptor)
        if len(flushed) > full_at:
            raise OSError(28, "No space left on device")
        flush(descriptor)

    monkeypatch.setattr(os, "fsync", fsync)
    with pytest.raises(CheckpointException, match="No space left"):
        save({"w": torch.zeros(3)}, checkpoint_id=tmp_path)
    monkeypatch.undo()
    assert set(before) <= {p.name for p in tmp_path.iterdir()}
    state = {"w": torch.zeros(3)}
    load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == [0, 1, 2]


def test_ranks_that_do_not_all_save(tmp_path):
    def body(rank):
        def call():
            if rank == 0:
                save({"w": counted(3)}, checkpoint_id=tmp_path)
            else:
                dure.all_reduce(torch.zeros(3))

        with pytest.raises(Desync) as caught:
            call()
        assert f"{Path(__file__).name}:" in caught.value.calls[0]
        assert "checkpoint.save," in caught.value.calls[0]

    run_ranks(2, body)
    assert not (tmp_path / "manifest.json").exists()


@on_ranks(2)
def test_what_cannot_be_saved_is_refused_by_name(rank, tmp_path):
    mesh = init_device_mesh("cpu", (2,))
    terms = DTensor.from_local(torch.ones(2), mesh, [Partial()])
    half = distribute_tensor(counted(4), mesh, [S0])
    tensors = {"terms": terms, "meta": torch.ones(2, device="meta")}
    tensors |= {"sparse": torch.ones(2).to_sparse(), "own": torch.ones(2 + rank)}
    for name, value in tensors.items():
        with pytest.raises(CheckpointException, match=name):
            save({name: value}, checkpoint_id=tmp_path)
    with pytest.raises(CheckpointException, match=r"half.* in no slice"):
        save({"half": half}, checkpoint_id=tmp_path / str(rank), no_dist=True)
    together = {"a.b": 1} if rank else {"a": {"b": 2}}
    for state in (together, {"a.b": 1, "a": {"b": 2}}, {"inner": {torch.ones(1)}}):
        with pytest.raises(CheckpointException):
            save(state, checkpoint_id=tmp_path)


MISUSE = {
    "no folder": lambda at: save({}),
    "a cloud": lambda at: save({}, checkpoint_id="s3://bucket/x"),
    "no planner": lambda at: load({}, checkpoint_id=at, planner=cast(Any, object())),
    "no collectives": lambda at: save({}, checkpoint_id=at, use_collectives=False),
    "not flat": lambda at: DefaultLoadPlanner(flatten_state_dict=False),
}


@pytest.mark.parametrize("misuse", MISUSE)
def test_misuse_is_refused(tmp_path, misuse):
    with pytest.raises(UsageError):
        MISUSE[misuse](tmp_path)


def test_a_checkpoint_that_is_absent_or_may_not_be_replaced(tmp_path):
    with pytest.raises(CheckpointException, match="the folder is empty"):
        load({}, checkpoint_id=tmp_path)
    once = FileSystemWriter(tmp_path, overwrite=False)
    save({"a": 1}, storage_writer=once)
    with pytest.raises(CheckpointException, match="already"):
        save({"a": 2}, storage_writer=once)
