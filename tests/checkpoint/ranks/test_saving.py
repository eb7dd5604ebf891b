"""Saving: what fails on one rank fails on all, and what was saved before stays."""

import copy
import errno
import os
import pickle
import shutil
from dataclasses import replace
from email.message import Message
from pathlib import Path
from typing import Any, cast
from urllib.error import HTTPError

import pytest
import torch

import dure
from dure.checkpoint import (
    Checkpointer,
    CheckpointException,
    DefaultLoadPlanner,
    DefaultSavePlanner,
    FileSystemWriter,
    PerRank,
    async_save,
    load,
    save,
    saving,
)
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.reading import faults
from dure.errors import CheckpointNotWritten, Desync, UsageError
from dure.tensor import DTensor, Partial, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted
from tests.thread_ranks import on_ranks
from tests.waiting import PATIENCE_S

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
    "an unknown store": lambda at: save({}, checkpoint_id="none://bucket/x"),
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


# --------------------------------------------------------------------------------------------------
# The folder that is saved into: what killed saves left there, and whether all ranks see it.


def _names(path):
    return sorted(p.name for p in path.iterdir())


def _save(state, folder):
    save(state, checkpoint_id=folder)


def _save_in_background(state, folder):
    async_save(state, checkpoint_id=folder).result(PATIENCE_S)


@pytest.fixture
def before_writing(monkeypatch):
    """Return a list with what is in the folder when a save begins to write, for each save."""
    seen, write = [], saving.write_slices

    def writing(path, *rest):
        seen.append(_names(path.parent))
        return write(path, *rest)

    monkeypatch.setattr(saving, "write_slices", writing)
    return seen


@pytest.mark.parametrize("store", [_save, _save_in_background])
@pytest.mark.parametrize("is_used", [False, True])
def test_what_killed_saves_left_is_removed_before_the_next_one_writes(
    tmp_path, before_writing, store, is_used
):
    if is_used:
        store({"w": counted(3)}, tmp_path)
    left = ["part-000002-00000.safetensors", "part-000007-00001.safetensors"]
    others = ["part-000002-00000.safetensors.copy", "notes.txt"]
    for name in left + others:
        (tmp_path / name).write_text("")
    store({"w": counted(3)}, tmp_path)
    first = ["part-000001-00000.safetensors"] if is_used else []
    kept = [*others, *first, *(["manifest.json"] if is_used else [])]
    assert before_writing[-1] == sorted([".lock", *kept])
    assert _names(tmp_path) == sorted([*others, "manifest.json", "part-000008-00000.safetensors"])


def test_saves_without_tensors_are_numbered_and_the_next_one_takes_another_number(tmp_path):
    _save({"step": 1}, tmp_path)
    _save({"w": counted(3)}, tmp_path)
    assert _names(tmp_path) == ["manifest.json", "part-000002-00000.safetensors"]
    _save({"step": 2}, tmp_path)
    assert _names(tmp_path) == ["manifest.json"]
    _save({"w": counted(3)}, tmp_path)
    assert _names(tmp_path) == ["manifest.json", "part-000004-00000.safetensors"]


def test_what_a_killed_save_left_beside_a_manifest_without_tensors_is_removed_before_writing(
    tmp_path, before_writing
):
    _save({"step": 1}, tmp_path)
    (tmp_path / "part-000002-00000.safetensors").write_text("")
    _save({"w": counted(3)}, tmp_path)
    assert before_writing[-1] == [".lock", "manifest.json"]
    assert _names(tmp_path) == ["manifest.json", "part-000003-00000.safetensors"]


def test_next_save_beside_a_manifest_of_format_3_has_the_next_number(tmp_path):
    stored = Path(__file__).parents[1] / "stored/format_3/sharded"
    shutil.copytree(stored, tmp_path, dirs_exist_ok=True)
    _save({"w": counted(3)}, tmp_path)
    assert _names(tmp_path) == ["manifest.json", "part-000002-00000.safetensors"]


@pytest.mark.parametrize("writes", [(0, 1), (0,), (1,)])
@pytest.mark.parametrize("is_there", [True, False])
def test_a_folder_that_each_host_has_on_its_own_disk_is_refused(tmp_path, is_there, writes):
    disks = [tmp_path / "host0", tmp_path / "host1"]
    _save({"w": counted(3)}, disks[0])
    if is_there:
        disks[1].mkdir()

    def body(rank):
        with pytest.raises(CheckpointException, match="not see the same folder") as caught:
            _save({f"of rank {rank}": counted(3)} if rank in writes else {}, disks[rank])
        return [type(error) for error, _ in caught.value.failures.values()]

    assert run_ranks(2, body) == [[CheckpointNotWritten]] * 2
    assert _names(disks[0]) == ["manifest.json", "part-000001-00000.safetensors"]
    assert not is_there or _names(disks[1]) == []
    state = {"w": torch.zeros(3)}
    load(state, checkpoint_id=disks[0])
    assert state["w"].tolist() == [0, 1, 2]


@pytest.mark.parametrize("how", ["has 100 bytes", "is absent"])
def test_a_file_that_rank_0_does_not_see_is_not_published(tmp_path, monkeypatch, how):
    write = saving.write_slices

    def spoil(path, *rest):
        sums = write(path, *rest)
        if how == "is absent":
            path.unlink()
        else:
            os.truncate(path, 100)
        return sums

    monkeypatch.setattr(saving, "write_slices", spoil)
    with pytest.raises(CheckpointException, match=f"part-000001-00000.*{how}"):
        _save({"w": counted(3)}, tmp_path)
    assert _names(tmp_path) == []


@pytest.fixture
def failing_flush(monkeypatch):
    """Return a function: flushing fails once something gets the name that it is called with."""
    flush, rename = os.fsync, Path.rename
    switch = {"after": "", "renamed": False}

    def fsync(descriptor):
        if switch["renamed"]:
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        flush(descriptor)

    def renaming(path, target):
        switch["renamed"] = switch["renamed"] or Path(target).name == switch["after"]
        return rename(path, target)

    monkeypatch.setattr(os, "fsync", fsync)
    monkeypatch.setattr(Path, "rename", renaming)

    return lambda after: switch.update(after=after, renamed=False)


def test_a_save_whose_last_flush_fails_is_in_place_and_the_error_says_so(tmp_path, failing_flush):
    first, second = "part-000001-00000.safetensors", "part-000002-00000.safetensors"
    _save({"w": counted(3)}, tmp_path)
    failing_flush("manifest.json")

    def body(rank):
        del rank
        with pytest.raises(CheckpointException) as caught:
            _save({"w": counted(4)}, tmp_path)
        return str(caught.value)

    for text in run_ranks(2, body):
        assert "in place" in text and "not saved" not in text
    failing_flush("")
    assert _names(tmp_path) == ["manifest.json", first, second]  # either manifest has its file
    state = {"w": torch.zeros(4)}
    load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == [0, 1, 2, 3]
    _save({"w": counted(4)}, tmp_path)
    assert _names(tmp_path) == ["manifest.json", "part-000003-00000.safetensors"]


@pytest.fixture
def lost_answer(monkeypatch):
    """Return a function: the rename to the name that it is called with is reported as an error.

    As over NFS, it has taken effect, unless `has_effect` is False. After it, opening that name
    fails if `is_unreadable`.
    """
    rename, opening = os.rename, os.open
    switch = {"name": None, "has_effect": True, "is_unreadable": False, "is_lost": False}

    def renaming(old, new, **options):
        is_it = Path(new).name == switch["name"]
        if not is_it or switch["has_effect"]:
            rename(old, new, **options)
        if is_it:
            switch["is_lost"] = True
            raise FileNotFoundError(errno.ENOENT, os.strerror(errno.ENOENT), str(old))

    def open_unless_lost(path, *rest, **options):
        if switch["is_lost"] and switch["is_unreadable"] and Path(path).name == switch["name"]:
            raise OSError(errno.EIO, os.strerror(errno.EIO), str(path))
        return opening(path, *rest, **options)

    monkeypatch.setattr(os, "rename", renaming)
    monkeypatch.setattr(os, "open", open_unless_lost)
    return lambda name, **how: switch.update(name=name, is_lost=False, **how)


@pytest.mark.parametrize("store", [_save, _save_in_background])
def test_a_manifest_that_is_in_place_although_its_rename_failed_is_a_save(
    tmp_path, lost_answer, store
):
    store({"w": counted(3)}, tmp_path)
    lost_answer("manifest.json")
    store({"w": counted(4)}, tmp_path)
    assert _names(tmp_path) == ["manifest.json", "part-000002-00000.safetensors"]
    state = {"w": torch.zeros(4)}
    load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == [0, 1, 2, 3]


@pytest.mark.parametrize("has_effect", [True, False])
def test_files_of_a_manifest_that_cannot_be_read_after_its_rename_failed_are_kept(
    tmp_path, lost_answer, has_effect
):
    """Which checkpoint is in place is not known then, so both have their files."""
    _save({"w": counted(3)}, tmp_path)
    lost_answer("manifest.json", has_effect=has_effect, is_unreadable=True)
    with pytest.raises(CheckpointException, match="not saved"):
        _save({"w": counted(3) + 5}, tmp_path)
    lost_answer(None)
    both = ["part-000001-00000.safetensors", "part-000002-00000.safetensors"]
    assert _names(tmp_path) == ["manifest.json", *both]
    state = {"w": torch.zeros(3)}
    load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == ([5, 6, 7] if has_effect else [0, 1, 2])
    _save({"w": counted(3)}, tmp_path)
    assert _names(tmp_path) == ["manifest.json", "part-000003-00000.safetensors"]


def test_a_manifest_that_could_not_be_renamed_leaves_the_checkpoint_before(tmp_path, lost_answer):
    _save({"w": counted(3)}, tmp_path)
    lost_answer("manifest.json", has_effect=False)
    with pytest.raises(CheckpointException, match="not saved"):
        _save({"w": counted(4)}, tmp_path)
    assert _names(tmp_path) == ["manifest.json", "part-000001-00000.safetensors"]
    state = {"w": torch.zeros(3)}
    load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == [0, 1, 2]


def test_a_run_whose_folder_is_renamed_although_that_failed_is_saved(tmp_path, lost_answer):
    lost_answer("000001-step-5")
    values = [7.0]
    path = Checkpointer(tmp_path).save(5, values=values)
    assert path == tmp_path / "000001-step-5"
    loaded = [0.0]
    assert Checkpointer(tmp_path).load(values=loaded) == 5 and loaded == [7.0]


@pytest.mark.parametrize("when", ["before it writes", "after it has written"])
@pytest.mark.parametrize("store", [_save, _save_in_background])
def test_a_save_that_lost_its_lock_leaves_what_the_next_job_has_saved(
    tmp_path, monkeypatch, store, when
):
    write, ours, theirs = saving.write_slices, tmp_path / "a", tmp_path / "b"
    save({"x": torch.full((3,), 2.0)}, checkpoint_id=theirs)

    def writing(path, *rest):  # a process that was suspended here for longer than the lease
        if when == "before it writes":
            (ours / ".lock").unlink()
            shutil.copytree(theirs, ours, dirs_exist_ok=True)
            return write(path, *rest)
        found = write(path, *rest)
        (ours / ".lock").unlink()
        shutil.rmtree(ours)
        shutil.copytree(theirs, ours)
        return found

    monkeypatch.setattr(saving, "write_slices", writing)
    with pytest.raises(CheckpointException):
        store({"x": torch.full((3,), 1.0)}, ours)
    found = {"x": torch.zeros(3)}
    load(found, checkpoint_id=ours)
    assert found["x"].tolist() == [2, 2, 2]


class HasAnErrorThatCannotBeReceived:
    """Its state is an error of a class that pickle writes and cannot read."""

    def state_dict(self):
        raise HTTPError("http://example", 500, "the server failed", Message(), None)

    def load_state_dict(self, state): ...


def test_an_error_that_other_ranks_cannot_receive_fails_on_all(tmp_path):
    def be(rank):
        state = {"x": HasAnErrorThatCannotBeReceived() if rank == 1 else torch.ones(1)}
        with pytest.raises(CheckpointException) as found:
            save(state, checkpoint_id=tmp_path)
        return str(found.value.failures[1][0])

    assert all("HTTPError: HTTP Error 500: the server failed" in text for text in run_ranks(3, be))


def test_what_a_save_returns_can_be_asked_copied_and_changed_before_it_is_read(tmp_path):
    found = save({"w": counted(3)}, checkpoint_id=tmp_path)
    assert not hasattr(found, "absent")
    assert list(copy.deepcopy(found).state_dict_metadata) == ["w"]
    found.storage_data = "mine"
    assert list(found.state_dict_metadata) == ["w"]
    assert found.storage_data == "mine"
    assert list(pickle.loads(pickle.dumps(found)).state_dict_metadata) == ["w"]


def test_a_planner_may_have_an_item_twice(tmp_path):
    class Twice(DefaultSavePlanner):
        def finish_plan(self, new_plan):
            return replace(new_plan, items=[*new_plan.items, new_plan.items[0]])

    save({"a": counted(3), "b": counted(2)}, checkpoint_id=tmp_path, planner=Twice())
    state = {"a": torch.zeros(3), "b": torch.zeros(2)}
    load(state, checkpoint_id=tmp_path)
    assert torch.equal(state["a"], counted(3))
    assert torch.equal(state["b"], counted(2))


def test_a_tensor_of_one_rank_that_other_ranks_have_under_another_name_too(tmp_path):
    def be(rank):
        mine = torch.full((3,), float(rank))
        own = PerRank({"t": mine if rank == 1 else mine + 5})
        entries: dict[str, Any] = {"own": own}
        if rank:
            entries["x"] = {"v": mine}
        checkpoints = Checkpointer(tmp_path)
        checkpoints.save(1, **entries)
        loaded: dict[str, Any] = {"own": PerRank({"t": torch.zeros(3)})}
        if rank:
            loaded["x"] = {"v": torch.zeros(3)}
        checkpoints.load(**loaded)
        shared = loaded["x"]["v"][0].item() if rank else None
        return loaded["own"].value["t"][0].item(), shared

    assert run_ranks(3, be) == [(5.0, None), (1.0, 1.0), (7.0, 1.0)]


def test_places_in_the_manifest_are_those_of_the_writers(tmp_path):
    """Rank 0 works out where each slice is in a file; its writer lays the file out by itself."""
    half = torch.arange(6).to(torch.float16)
    wanted = {
        "w": counted(8, 2),
        "x[0:2, 0:2]": counted(2, 2) + 50,  # the name that a slice of x gets
        "half": half,
        "x": counted(5, 2) + 70,
        "b": torch.arange(3),
        "a": counted(8, 2) + 100,
        "complex": torch.tensor([1 + 2j, 3 - 4j]),
        "number": torch.tensor(9.0),
    }

    def body(rank):
        mesh = init_device_mesh("cpu", (3,))
        rows = {n: distribute_tensor(wanted[n], mesh, [Shard(0)]) for n in ("w", "x", "a", "half")}
        save(
            {name: rows.get(name, value) for name, value in wanted.items()}, checkpoint_id=tmp_path
        )

    run_ranks(3, body)
    assert faults(tmp_path, catalog_of(tmp_path)) == []
    state = {name: torch.zeros_like(value) for name, value in wanted.items()}
    load(state, checkpoint_id=tmp_path, no_dist=True)
    assert all(state[name].equal(value) for name, value in wanted.items())
