"""A Checkpointer alone: what comes back, what is refused and why, what is left in the folder."""

from __future__ import annotations

import errno
import hashlib
import operator
import os
import random
from collections import OrderedDict
from pathlib import Path
from typing import SupportsIndex

import numpy as np
import pytest
import torch
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from safetensors.torch import load_file
from torch import nn

from dure.checkpoint import Checkpointer, PerRank, checkpointer, folder, load
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.reading import faults
from dure.data import DistributedSampler
from dure.errors import (
    CheckpointDamaged,
    CheckpointError,
    CheckpointMismatch,
    CheckpointNotWritten,
    UsageError,
)


def small(seed=0, width=4):
    torch.manual_seed(seed)
    return nn.Sequential(nn.Linear(3, width), nn.BatchNorm1d(width), nn.Linear(width, 1))


def trained(seed=0):
    """Return a model, its optimizer and its scheduler after two steps."""
    model = small(seed)
    optimizer = torch.optim.AdamW(model.parameters())
    scheduler = torch.optim.lr_scheduler.MultiStepLR(optimizer, [1, 3])
    for _ in range(2):
        model(torch.randn(8, 3)).sum().backward()
        optimizer.step()
        scheduler.step()
    return {"model": model, "optimizer": optimizer, "scheduler": scheduler}


def equal(a, b):
    """Compare two states, tensors by value."""
    if isinstance(a, torch.Tensor):
        return a.dtype == b.dtype and torch.equal(a, b)
    if isinstance(a, dict):
        return list(a) == list(b) and all(equal(a[k], b[k]) for k in a)
    if isinstance(a, list | tuple):
        return len(a) == len(b) and all(map(equal, a, b))
    return a == b


def test_all_of_a_run_comes_back(tmp_path):
    saved, loaded = trained(1), trained(2)
    extra, other = {"curve": [0.5, float("inf")], 3: ("a", None)}, {"old": 1}
    sampler = DistributedSampler(range(20), 2, 0)
    Checkpointer(tmp_path).save(
        12, **saved, extra=extra, place=sampler, scaler=torch.amp.GradScaler("cpu")
    )
    draws = torch.rand(2).tolist(), random.random(), np.random.rand()
    scaler, curve = torch.amp.GradScaler("cpu"), []
    step = Checkpointer(tmp_path).load(**loaded, extra=other, place=sampler, scaler=scaler)
    assert step == 12 and other == extra and curve == []
    assert (torch.rand(2).tolist(), random.random(), np.random.rand()) == draws
    for name, thing in saved.items():
        assert equal(thing.state_dict(), loaded[name].state_dict()), name
    assert list(tmp_path.iterdir()) == [tmp_path / "000001-step-12"]


def test_list_is_filled_in_place(tmp_path):
    curve = [1.5, 2.5]
    Checkpointer(tmp_path).save(1, curve=curve)
    loaded = [0.0]
    Checkpointer(tmp_path).load(curve=loaded)
    assert loaded == curve


def test_every_dtype_and_shape_comes_back_and_can_be_read_by_safetensors(tmp_path):
    dtypes = [torch.bfloat16, torch.float8_e5m2, torch.int64, torch.bool, torch.uint16, torch.half]
    state = {str(d): torch.arange(5).to(d) for d in dtypes}
    state |= {"empty": torch.empty(0, 3), "number": torch.tensor(2.5), "strided": torch.eye(4)[::2]}
    path = Checkpointer(tmp_path).save(1, state=state)
    loaded = {}
    Checkpointer(tmp_path).load(state=loaded)
    assert {k: v.dtype for k, v in loaded.items()} == {k: v.dtype for k, v in state.items()}
    stored = load_file(path / "part-000001-00000.safetensors")
    for name, tensor in state.items():
        back = loaded[name]
        assert back.shape == tensor.shape
        assert torch.equal(back.double(), tensor.double())
        if tensor.numel():
            assert torch.equal(stored[f"state.{name}"].double(), tensor.double())


def test_load_reads_what_a_checkpointer_has_saved(tmp_path):
    saved, loaded = trained(1), trained(2)
    path = Checkpointer(tmp_path).save(12, **saved, extra={3: ("a", torch.ones(1))})
    found = load(loaded, checkpoint_id=path)
    for name, thing in saved.items():
        assert equal(thing.state_dict(), loaded[name].state_dict()), name
    assert found.missing_keys == []
    assert {"extra.3.0", "extra.3.1", "(run).step"} < set(found.unexpected_keys)
    assert faults(path, catalog_of(path)) == []


def test_loaded_tensors_do_not_depend_on_the_file(tmp_path):
    path = Checkpointer(tmp_path).save(1, state={"x": torch.ones(1000)})
    loaded = {}
    Checkpointer(tmp_path).load(state=loaded)
    with (path / "part-000001-00000.safetensors").open("r+b") as file:
        file.truncate(0)
    assert loaded["x"].sum() == 1000


def test_nothing_saved_is_nothing_loaded(tmp_path):
    checkpoints = Checkpointer(tmp_path / "absent")
    assert checkpoints.load(model=small()) is None
    assert checkpoints.latest() is None
    (tmp_path / "absent" / ".saving-000001-step-5").mkdir(parents=True)
    assert checkpoints.load(model=small()) is None


@settings(
    max_examples=25, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture]
)
@given(where=st.floats(0, 1, exclude_max=True), which=st.booleans(), cut=st.booleans())
def test_any_changed_byte_is_found_and_the_older_checkpoint_used(
    tmp_path_factory, where, which, cut
):
    path = tmp_path_factory.mktemp("run")
    checkpoints = Checkpointer(path)
    values = [0.0]
    checkpoints.save(1, values=values, model=small(1))
    newest = checkpoints.save(2, values=[1.0], model=small(2))
    file = newest / ("manifest.json" if which else "part-000001-00000.safetensors")
    data = bytearray(file.read_bytes())
    at = int(where * len(data))
    data[at] ^= 1 << (at % 8)
    file.write_bytes(data[:at] if cut else data)
    loaded, model = [], small(3)
    assert checkpoints.load(values=loaded, model=model) == 1
    assert loaded == values
    assert equal(model.state_dict(), small(1).state_dict())
    assert list(checkpoints.refused) == [str(newest)]
    assert checkpoints.latest().step == 1  # type: ignore[union-attr]


@pytest.mark.parametrize(
    "ruin",
    [
        lambda path: (path / "manifest.json").unlink(),
        lambda path: (path / "part-000001-00000.safetensors").unlink(),
        lambda path: (path / "manifest.json").write_text("{}"),
        lambda path: torch.save({}, path / "manifest.json"),
        lambda path: path.rename(path.with_name("000009-step-77")),
        lambda path: os.truncate(path / "part-000001-00000.safetensors", 5000),
    ],
)
def test_damaged_and_foreign_checkpoints_are_refused_by_name(tmp_path, ruin, caplog):
    checkpoints = Checkpointer(tmp_path)
    ruin(checkpoints.save(1, model=small()))
    model = small(5)
    before = {k: v.clone() for k, v in model.state_dict().items()}
    with pytest.raises(CheckpointDamaged) as caught:
        checkpoints.load(model=model)
    (path,) = tmp_path.iterdir()
    assert list(caught.value.refused) == [str(path)]
    assert str(path) in caplog.text
    assert equal(before, dict(model.state_dict()))


@pytest.mark.parametrize(
    "other",
    [
        lambda: {"model": small(width=5)},
        lambda: {"model": small().double()},
        lambda: {"model": nn.Sequential(nn.Linear(3, 4))},
        lambda: {"model": nn.Sequential(OrderedDict(other=nn.Linear(3, 4)))},
        lambda: {"optimizer": torch.optim.SGD(nn.Linear(1, 1).parameters())},
        lambda: {"model": PerRank(small())},
        lambda: {"unknown": small()},
        lambda: {"scheduler": small()},
    ],
)
def test_checkpoint_of_other_objects_is_refused_before_anything_changes(tmp_path, other):
    checkpoints = Checkpointer(tmp_path)
    path = checkpoints.save(1, **trained())
    objects = trained(4) | other()
    first = objects["model"]
    before = {k: v.clone() for k, v in getattr(first, "value", first).state_dict().items()}
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoints.load(**objects)
    assert equal(before, dict(getattr(first, "value", first).state_dict()))
    assert str(path) == caught.value.path


def test_no_file_stays_open_while_a_refusal_is_looked_at(tmp_path):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, **trained())
    with pytest.raises(CheckpointMismatch) as caught:
        checkpoints.load(**trained() | {"model": small(width=5)})
    names = [os.path.realpath(f"/proc/self/fd/{n}") for n in os.listdir("/proc/self/fd")]
    assert not [name for name in names if name.startswith(f"{tmp_path}{os.sep}")]
    del caught


def test_last_ones_are_kept_and_leftovers_removed(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=2)
    (tmp_path / ".removing-000007-step-1").mkdir()
    (tmp_path / ".saving-000007-step-1").mkdir()
    (tmp_path / "notes.txt").write_text("kept")
    for step in range(5):
        checkpoints.save(step, values=[step])
    names = sorted(p.name for p in tmp_path.iterdir())
    assert names == ["000004-step-3", "000005-step-4", "notes.txt"]


def test_refused_checkpoint_is_not_counted_and_stays(tmp_path):
    checkpoints = Checkpointer(tmp_path, keep=1)
    values = [1]
    checkpoints.save(1, values=values)
    Checkpointer(tmp_path, keep=None).save(2, values=[2])
    (tmp_path / "000002-step-2" / "manifest.json").write_text("")
    assert checkpoints.load(values=values) == 1
    checkpoints.save(2, values=values)
    assert sorted(p.name for p in tmp_path.iterdir()) == ["000002-step-2", "000003-step-2"]
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


@pytest.mark.parametrize("call", ["write", "fsync", "rename", "mkdir"])
def test_full_disk_leaves_the_older_checkpoint_and_nothing_else(tmp_path, monkeypatch, call):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, values=[1.0], x={"x": torch.ones(9)})

    def full(*_args, **_options):
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC), "somewhere")

    owner = os if call in ("write", "fsync") else Path
    with monkeypatch.context() as patched:
        patched.setattr(owner, call, full)
        with pytest.raises(CheckpointNotWritten) as caught:
            checkpoints.save(2, values=[2.0], x={"x": torch.ones(9)})
    assert isinstance(caught.value.__cause__, OSError)
    assert [p.name for p in tmp_path.iterdir()] == ["000001-step-1"]
    values = []
    assert checkpoints.load(values=values) == 1


def test_folder_that_cannot_be_made_is_said(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(CheckpointNotWritten):
        Checkpointer(tmp_path / "file" / "run").save(1, values=[])


@pytest.mark.parametrize("value", [3, object(), nn.ReLU])
def test_object_without_state_is_refused(tmp_path, value):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path).save(1, thing=value)
    assert list(tmp_path.iterdir()) == []


def test_step_left_out_is_refused(tmp_path):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path).save(nn.ReLU())  # pyright: ignore[reportArgumentType]


def test_no_checkpoint_at_all_cannot_be_kept(tmp_path):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path, keep=0)


def test_saving_flushes_files_before_the_commit_and_the_folder_after(tmp_path, monkeypatch):
    order = []
    real_fsync, real_rename = os.fsync, Path.rename

    def fsync(descriptor):
        order.append(Path(os.readlink(f"/proc/self/fd/{descriptor}")).name)
        real_fsync(descriptor)

    def rename(path, target):
        order.append("rename")
        return real_rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", rename)
    Checkpointer(tmp_path).save(3, x={"x": torch.ones(2)})
    hidden = ".saving-000001-step-3"
    manifest = [".saving-manifest.json", hidden, "rename", hidden]
    assert order == ["part-000001-00000.safetensors", *manifest, "rename", tmp_path.name]
    assert folder.Folder is checkpointer.Folder


@pytest.mark.parametrize("step", [-1, 5.0, "5", None])
def test_a_step_that_could_not_be_found_again_is_refused(tmp_path, step):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path).save(step, model=small())
    assert list(tmp_path.iterdir()) == []


def test_a_step_may_be_a_number_of_numpy_or_torch(tmp_path):
    steps: list[SupportsIndex] = [np.int64(5), torch.tensor(6)]
    for step in steps:
        Checkpointer(tmp_path).save(step, model=small())
        assert Checkpointer(tmp_path).load(model=small()) == operator.index(step)


@pytest.mark.parametrize(
    "objects", [{"a": {"\ud800": torch.ones(2)}}, {"(random)": PerRank({})}, {"(run)": {}}]
)
def test_a_name_that_could_not_be_read_again_is_refused(tmp_path, objects):
    with pytest.raises(UsageError):
        Checkpointer(tmp_path).save(1, **objects)
    assert list(tmp_path.iterdir()) == []


def test_tied_and_negated_tensors_come_back_as_they_were(tmp_path):
    weight, negated = torch.ones(3), torch.tensor([1 + 2j]).conj().imag
    assert negated.is_neg()
    Checkpointer(tmp_path).save(1, state={"a": weight, "b": weight, "c": negated})
    found = {}
    Checkpointer(tmp_path).load(state=found)
    assert found["a"] is found["b"]
    assert found["c"].tolist() == [-2.0]


class Versioned(nn.Module):
    _version = 3

    def __init__(self):
        super().__init__()
        self.weight = nn.Parameter(torch.ones(2))
        self.found = None

    def _load_from_state_dict(self, state_dict, prefix, local_metadata, *rest):
        self.found = local_metadata.get("version")
        super()._load_from_state_dict(state_dict, prefix, local_metadata, *rest)


def test_a_module_learns_of_which_version_the_saved_one_was(tmp_path):
    Checkpointer(tmp_path).save(1, model=nn.Sequential(Versioned()))
    other = nn.Sequential(Versioned())
    Checkpointer(tmp_path).load(model=other)
    assert other[0].found == 3


def test_two_jobs_do_not_save_in_one_folder_at_once(tmp_path):
    first, second = folder.Folder(tmp_path), Checkpointer(tmp_path)
    made = first.begin(1)
    with pytest.raises(CheckpointNotWritten):
        second.save(2, state={})
    assert made.exists()
    first.release()
    second.save(2, state={})
    assert [p.name for p in tmp_path.iterdir()] == ["000001-step-2"]


def test_the_folders_made_on_the_way_are_flushed(tmp_path, monkeypatch):
    flushed = []
    monkeypatch.setattr(os, "fsync", lambda fd: flushed.append(os.readlink(f"/proc/self/fd/{fd}")))
    Checkpointer(tmp_path / "a" / "b").save(1, model=small())
    assert {str(tmp_path), str(tmp_path / "a"), str(tmp_path / "a" / "b")} <= set(flushed)


def test_a_folder_that_cannot_be_listed_is_one_clear_error(tmp_path):
    (tmp_path / "file").write_bytes(b"")
    with pytest.raises(CheckpointError):
        Checkpointer(tmp_path / "file").load(model=small())


FOREIGN = {
    "deep": b"[" * 100_000,
    "infinite": b'{"(run)": {"step": 1e999, "ranks": {"0": {"(random)": {}}}}}',
    "no rank": b'{"(run)": {"step": 2, "ranks": {}}}',
    "rank 1 only": b'{"(run)": {"step": 2, "ranks": {"1": {"(random)": {}}}}}',
    "no random numbers": b'{"(run)": {"step": 2, "ranks": {"0": {}}}}',
    "no run": b"{}",
    "no state": b"[]",
    "no device": b'{"x": {"$": "device", "v": "nowhere"}}',
}


@pytest.mark.parametrize("kind", FOREIGN)
def test_a_manifest_that_nobody_here_wrote_is_refused_and_the_older_one_taken(tmp_path, kind):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, model=small())
    newest = checkpoints.save(2, model=small())
    body = b'{"format": "dure checkpoint", "version": 2, "tensors": {}, "state": %b}'
    body %= FOREIGN[kind]
    digest = hashlib.sha256(body).hexdigest().encode()
    (newest / "manifest.json").write_bytes(digest + b"\n" + body)
    assert checkpoints.load(model=small()) == 1
    assert list(checkpoints.refused) == [str(newest)]


@pytest.mark.parametrize("kind", ["pipe", "link"])
def test_a_manifest_that_is_no_file_is_refused_at_once(tmp_path, kind):
    path = Checkpointer(tmp_path).save(1, state={"a": 1})
    manifest = path / "manifest.json"
    manifest.rename(path / "moved")
    if kind == "pipe":
        os.mkfifo(manifest)  # opening one waits for a writer
    else:
        manifest.symlink_to(path / "moved")
    checkpoints = Checkpointer(tmp_path)
    with pytest.raises(CheckpointDamaged, match="is no file but"):
        checkpoints.load(state={"a": 0})
