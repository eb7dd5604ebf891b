"""The folder of a run's checkpoints: what is kept, removed, flushed, locked and left."""

import os
import re
from pathlib import Path

import pytest
import torch

from dure.checkpoint import Checkpointer
from dure.errors import CheckpointError, CheckpointNotWritten
from tests.checkpoint.small_runs import small


def test_last_ones_are_kept_and_leftovers_removed(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=2)
    (tmp_path / ".removing-000007-step-1").mkdir()
    (tmp_path / ".saving-000007-step-1").mkdir()
    (tmp_path / "notes.txt").write_text("kept")
    for step in range(5):
        checkpoints.save(step, values=[step])
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [".lock", "000004-step-3", "000005-step-4", "notes.txt"]


def test_refused_checkpoint_is_not_counted_and_stays(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=1)
    values = [1]
    checkpoints.save(1, values=values)
    Checkpointer(tmp_path, keep=None).save(2, values=[2])
    (tmp_path / "000002-step-2" / "manifest.json").write_text("")
    assert checkpoints.load(values=values) == 1
    checkpoints.save(2, values=values)
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == [".lock", "000002-step-2", "000003-step-2"]
    assert Checkpointer(tmp_path).load(values=values) == 2


def test_run_sent_back_to_an_older_step_goes_on_from_there(tmp_path):
    checkpoints, values = Checkpointer(tmp_path), []
    for step in (10, 20):
        checkpoints.save(step, values=[step])
    assert checkpoints.load(10, values=values) == 10 and values == [10]
    checkpoints.save(15, values=[15])
    assert checkpoints.load(values=values) == 15
    with pytest.raises(CheckpointError):
        checkpoints.load(11, values=values)


def test_a_folder_that_cannot_be_made_or_listed_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten):
        Checkpointer(tmp_path / "file" / "run").save(1, values=[])
    with pytest.raises(CheckpointError):
        Checkpointer(tmp_path / "file").load(model=small())


def test_saving_flushes_files_before_the_commit_and_the_folder_after(tmp_path, monkeypatch):
    order = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor):
        order.append(os.readlink(f"/proc/self/fd/{descriptor}").removeprefix(f"{tmp_path}/a/b/"))
        real_fsync(descriptor)

    def rename(path, target):
        order.append("rename")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    Checkpointer(tmp_path / "a" / "b").save(3, x={"x": torch.ones(2)})
    made = [str(tmp_path), str(tmp_path / "a")]  # the folders on the way
    order = [re.sub("-[0-9a-f]{6}(?=/|$)", "", name) for name in order]  # of this save alone
    hidden = ".saving-000001-step-3"
    manifest = [f"{hidden}/.saving-manifest.json", hidden, "rename", hidden]
    part = f"{hidden}/part-000001-00000.safetensors"
    assert order == [*made, part, *manifest, "rename", str(tmp_path / "a" / "b")]
