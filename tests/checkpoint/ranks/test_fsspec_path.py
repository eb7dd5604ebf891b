"""Checkpoints in a store that fsspec reaches: here in memory, by one process."""

import gc
import sys
from contextlib import contextmanager
from pathlib import Path

import pytest
import torch
from safetensors.torch import save as weights_of

from dure.checkpoint import (
    Checkpointer,
    CheckpointException,
    FileSystemWriter,
    HuggingFaceStorageReader,
    async_save,
    consolidate,
    convert,
    load,
    save,
    slice_files,
)
from dure.checkpoint.catalog import next_number
from dure.checkpoint.file_systems import names_in
from dure.checkpoint.folder import Folder
from dure.checkpoint.fsspec_path import FsspecPath, path_of
from dure.cli import app
from dure.errors import CheckpointDamaged, CheckpointError, CheckpointNotWritten, UsageError
from dure.tensor import Shard
from tests.checkpoint.saved_states import counted, load_one, save_one
from tests.thread_ranks import on_ranks

memory = pytest.importorskip("fsspec.implementations.memory", reason="needs fsspec")
MemoryFile, MemoryFileSystem = memory.MemoryFile, memory.MemoryFileSystem
Where = FsspecPath | Path | str
RUN = FsspecPath("memory://runs/a")


@pytest.fixture(autouse=True)
def empty_store():
    gc.collect()  # a Checkpointer of an earlier test would keep the lock of `RUN`
    MemoryFileSystem.store.clear()
    MemoryFileSystem.pseudo_dirs[:] = [""]
    yield
    MemoryFileSystem.store.clear()


def _value_at(url: Where = RUN):
    state = {"w": torch.zeros(3), "step": None}
    load(state, checkpoint_id=url, no_dist=True)
    return state["w"].tolist(), state["step"]


def _save(first, url: Where = RUN):
    save({"w": counted(3) + first, "step": first}, checkpoint_id=url, no_dist=True)


def _kinds(names):
    return sorted("part" if name.startswith("part-") else name for name in names)


# --------------------------------------------------------------------------------------------------
# Saving and loading.


@on_ranks(3)
def test_a_sharded_tensor_goes_to_a_store_and_comes_back_in_another_sharding(rank):
    save_one(rank, RUN, (3,), [Shard(0)])
    load_one(rank, RUN, (3,), [Shard(1)])  # columns: slices are read in part
    if rank == 0:
        assert _kinds(names_in(RUN)) == ["manifest.json", "part", "part", "part"]


def test_a_later_save_replaces_the_files_of_the_one_before():
    _save(0)
    before = set(names_in(RUN))
    _save(10)
    assert _value_at() == ([10, 11, 12], 10)
    assert _kinds(names_in(RUN)) == ["manifest.json", "part"]
    assert before & set(names_in(RUN)) == {"manifest.json"}


def test_a_save_over_a_checkpoint_lists_the_folder_three_times(monkeypatch):
    """For the number of the save, for what a killed one left, and for what it replaces."""
    _save(0)
    listed, names = [], FsspecPath.names
    monkeypatch.setattr(FsspecPath, "names", lambda path: listed.append(path) or names(path))
    _save(10)
    assert listed == [RUN, RUN, RUN]


def test_a_save_in_the_background_goes_to_a_store():
    weight = counted(3)
    saving = async_save({"w": weight, "step": 1}, checkpoint_id=str(RUN), no_dist=True)
    weight.zero_()
    assert saving.result().state_dict_metadata["w"].size == (3,)
    assert _value_at() == ([0, 1, 2], 1)


def test_a_changed_byte_is_found_and_named():
    _save(0)
    (part,) = (name for name in names_in(RUN) if name.startswith("part-"))
    stored = MemoryFileSystem.store[f"/runs/a/{part}"]
    content = bytearray(stored.getvalue())
    content[-1] ^= 1
    (RUN / part).write(bytes(content))
    with pytest.raises(CheckpointException, match=f"{part} is changed"):
        _value_at()


def test_a_url_of_a_local_file_is_a_local_folder(tmp_path):
    _save(4, f"file://{tmp_path}/here")
    assert (tmp_path / "here" / "manifest.json").is_file()
    assert _value_at(tmp_path / "here") == ([4, 5, 6], 4)
    assert path_of(f"file://{tmp_path}/here") == tmp_path / "here"


# --------------------------------------------------------------------------------------------------
# Runs.


def _model(value):
    model = torch.nn.Linear(2, 2, bias=False)
    torch.nn.init.constant_(model.weight, value)
    return model


def test_the_newest_checkpoint_of_a_run_in_a_store_is_loaded_and_old_ones_are_removed():
    run = Checkpointer(RUN, keep=2)
    for step in (1, 2, 3):
        run.save(step, model=_model(step))
    names = [name.rpartition("-")[0] for name in names_in(RUN) if name != ".lock"]
    assert names == ["000002-step-2", "000003-step-3"]
    model, other = _model(0), Checkpointer(RUN)
    assert other.load(model=model) == 3
    assert model.weight.tolist() == [[3, 3], [3, 3]]
    saved = other.latest()
    assert saved is not None
    assert saved.step == 3
    assert saved.path.parent == RUN
    assert other.load(2, model=model) == 2
    assert model.weight.tolist() == [[2, 2], [2, 2]]


def test_old_checkpoints_are_removed_from_a_folder_whose_name_looks_like_a_pattern():
    folder = "memory://runs/lr[0.1]?*"
    _save(7, "memory://runs/lr0xy")  # which the pattern would find
    run = Checkpointer(folder, keep=1)
    for step in (1, 2):
        run.save(step, model=_model(step))
    names = [name.rpartition("-")[0] for name in names_in(path_of(folder)) if name != ".lock"]
    assert names == ["000002-step-2"]
    assert _value_at("memory://runs/lr0xy") == ([7, 8, 9], 7)


def test_a_run_whose_checkpoint_is_removed_after_it_was_listed_has_the_next_one(monkeypatch):
    run, listed = Checkpointer(RUN, keep=1), []
    run.save(1, model=_model(1))
    names = FsspecPath.names

    def names_before_the_next_save(path):
        found = names(path)
        if path == RUN and not listed:
            listed.extend(found)
            run.save(2, model=_model(2))
        return found

    monkeypatch.setattr(FsspecPath, "names", names_before_the_next_save)
    model = _model(0)
    assert Checkpointer(RUN).load(model=model) == 2  # None would be: nothing was ever saved
    assert model.weight.tolist() == [[2, 2], [2, 2]]
    assert len(listed) == 2  # the lock, and the first


def test_a_later_save_of_a_run_makes_sixteen_requests_and_the_upload(monkeypatch):
    """Is the folder a file (1). Renew the lock (2). Which checkpoints are complete (1, and one
    each). Upload the slices (2), and look for them (1). Look at the lock, and upload the manifest
    (2). Remove the oldest (3). Renew the lock (2)."""
    run = Checkpointer(RUN, keep=2)
    for step in (1, 2):
        run.save(step, model=_model(step))
    made, request = [], FsspecPath._call

    def counted_request(path, call):
        made.append(path)
        return request(path, call)

    monkeypatch.setattr(FsspecPath, "_call", counted_request)
    run.save(3, model=_model(3))
    assert len(made) == 16


def _before_slices_are_looked_for(monkeypatch, act):
    """Do something once, when the manifest has been read and the file of slices has not."""
    size, done = FsspecPath.size, []

    def acting(path):
        if path.name.startswith("part-") and not done:
            done.append(path)
            act()
        return size(path)

    monkeypatch.setattr(FsspecPath, "size", acting)


def test_a_checkpoint_that_is_replaced_while_it_is_read_is_not_called_damaged(monkeypatch):
    _save(0)
    _before_slices_are_looked_for(monkeypatch, lambda: _save(10))
    with pytest.raises(CheckpointException, match="was replaced while it was read") as caught:
        _value_at()
    assert type(caught.value.failures[0][0]) is CheckpointError
    assert _value_at() == ([10, 11, 12], 10)


def test_a_checkpoint_of_a_run_that_is_removed_while_it_is_read_is_not_called_damaged(monkeypatch):
    run, reader = Checkpointer(RUN, keep=1), Checkpointer(RUN)
    run.save(1, model=_model(1))
    _before_slices_are_looked_for(monkeypatch, lambda: run.save(2, model=_model(2)))
    model = _model(0)
    with pytest.raises(CheckpointError, match="was removed while it was read") as caught:
        reader.load(model=model)
    assert type(caught.value) is CheckpointError
    assert reader.load(model=model) == 2


def test_a_checkpoint_that_lacks_a_file_is_damaged():
    _save(0)
    (part,) = (name for name in names_in(RUN) if name.startswith("part-"))
    (RUN / part).unlink()
    with pytest.raises(CheckpointException, match=f"{part}: No such file") as caught:
        _value_at()
    assert type(caught.value.failures[0][0]) is CheckpointDamaged


def test_a_run_whose_address_is_that_of_a_file_is_refused():
    RUN.write(b"a file")
    with pytest.raises(CheckpointNotWritten, match="it is a file, not a folder: memory:"):
        Checkpointer(RUN).save(1, model=_model(1))


def test_a_run_that_was_killed_in_its_first_save_has_no_checkpoint():
    (RUN / "000001-step-1-5f0c2a" / "part-000001-00000.safetensors").write(b"")
    assert Checkpointer(RUN).load(model=_model(0)) is None


def test_a_damaged_checkpoint_of_a_run_in_a_store_is_passed_over():
    run = Checkpointer(RUN)
    run.save(1, model=_model(1))
    path = run.save(2, model=_model(2))
    (path / "manifest.json").write(b"{}")
    assert run.load(model=_model(0)) == 1
    assert list(run.refused) == [str(path)]


# --------------------------------------------------------------------------------------------------
# A writer that is killed: after each request that changes the store.


@contextmanager
def _moments(monkeypatch):
    """Note what is in the store after each change: what a writer that is killed then leaves."""
    moments = []

    def noted(change):
        def call(*args, **kwargs):
            result = change(*args, **kwargs)
            moments.append({key: f.getvalue() for key, f in MemoryFileSystem.store.items()})
            return result

        return call

    with monkeypatch.context() as patch:
        for kind, name in [
            (MemoryFileSystem, "_open"),
            (MemoryFileSystem, "_rm"),
            (MemoryFile, "write"),
        ]:
            patch.setattr(kind, name, noted(getattr(kind, name)))
        yield moments


def _left_by_a_killed_writer(moment):
    """Put what was in the store then into it. Its lock is that of a process that has ended."""
    MemoryFileSystem.store.clear()
    for key, content in moment.items():
        if not key.endswith("/.lock"):
            FsspecPath(f"memory:/{key}").write(content)


def test_a_writer_that_is_killed_leaves_the_old_checkpoint_or_the_new_one(monkeypatch):
    _save(0)
    with _moments(monkeypatch) as moments:
        _save(10)
    assert len(moments) >= 6  # the lock, the slices piece by piece, the manifest, what is removed
    steps = []
    for moment in moments:
        _left_by_a_killed_writer(moment)
        weight, step = _value_at()
        assert weight == [step, step + 1, step + 2]
        steps.append(step)
        _save(20)
        assert _value_at() == ([20, 21, 22], 20)
        assert _kinds(names_in(RUN)) == ["manifest.json", "part"]
    assert steps == sorted(steps)
    assert set(steps) == {0, 10}


def test_a_run_whose_writer_is_killed_has_complete_checkpoints_only(monkeypatch):
    run = Checkpointer(RUN, keep=1)
    run.save(1, model=_model(1))
    with _moments(monkeypatch) as moments:
        run.save(2, model=_model(2))
    del run
    steps = []
    for moment in moments:
        _left_by_a_killed_writer(moment)
        model, reader = _model(0), Checkpointer(RUN, keep=1)
        step = reader.load(model=model)
        assert step is not None
        steps.append(step)
        assert model.weight.tolist() == [[step, step], [step, step]]
        for place in Folder(RUN).places():  # those that are being removed, too
            assert reader.load(place.step, model=model) == place.step
        assert reader.refused == {}
        reader.save(3, model=_model(3))
        (kept,) = (name for name in names_in(RUN) if name != ".lock")
        assert "-step-3-" in kept
        del reader
    assert steps == sorted(steps)
    assert set(steps) == {1, 2}


def test_an_upload_that_fails_leaves_no_file_and_the_checkpoint_before(monkeypatch):
    _save(0)
    before = names_in(RUN)

    def full(*_):
        raise ConnectionError("the store is away")  # without a number, as clients do

    with monkeypatch.context() as patch:
        patch.setattr(MemoryFile, "write", full)
        with pytest.raises(CheckpointException, match="the store is away"):
            _save(10)
    assert names_in(RUN) == before
    assert _value_at() == ([0, 1, 2], 0)


def test_a_manifest_that_cannot_be_uploaded_leaves_the_checkpoint_before(monkeypatch):
    _save(0)
    before, write = names_in(RUN), FsspecPath.write

    def refusing(path, data, new=False):
        if path.name == "manifest.json":
            raise PermissionError(13, "Access Denied", str(path))
        write(path, data, new)

    with monkeypatch.context() as patch:
        patch.setattr(FsspecPath, "write", refusing)
        with pytest.raises(CheckpointException, match="Access Denied"):
            _save(10)
    assert names_in(RUN) == before
    assert _value_at() == ([0, 1, 2], 0)


# --------------------------------------------------------------------------------------------------
# A writer that another job has followed, since it was suspended.


def _after_the_manifest(monkeypatch, act):
    """Do something right after a manifest was uploaded: the writer is suspended then."""
    write = FsspecPath.write

    def writing(path, data, new=False):
        write(path, data, new)
        if path.name == "manifest.json":
            act()

    monkeypatch.setattr(FsspecPath, "write", writing)


def _take_over():
    """Do what the next job does first, and upload a file."""
    (RUN / ".lock").unlink()
    (RUN / ".lock").write(b"{}")
    (RUN / "part-7777777-00000.safetensors").write(b"theirs")


def test_a_writer_that_loses_the_lock_after_its_upload_removes_no_file_of_the_next_job(
    monkeypatch,
):
    _save(0)
    with monkeypatch.context() as patch:
        _after_the_manifest(patch, _take_over)
        _save(10)
    assert (RUN / "part-7777777-00000.safetensors").read(0, 9) == b"theirs"
    assert _value_at() == ([10, 11, 12], 10)


def test_a_writer_that_has_lost_the_lock_uploads_no_manifest(monkeypatch):
    _save(0)
    size = FsspecPath.size

    def suspended(path):  # rank 0 looks for the files of all ranks, and has the lock
        _take_over()
        return size(path)

    with monkeypatch.context() as patch:
        patch.setattr(FsspecPath, "size", suspended)
        with pytest.raises(CheckpointException, match="another job has taken the folder over"):
            _save(10)
    assert _value_at() == ([0, 1, 2], 0)
    assert (RUN / "part-7777777-00000.safetensors").read(0, 9) == b"theirs"


def test_a_run_that_loses_the_lock_after_its_upload_removes_no_checkpoint(monkeypatch, caplog):
    run = Checkpointer(RUN, keep=1)
    first = run.save(1, model=_model(1))
    with monkeypatch.context() as patch:
        _after_the_manifest(patch, _take_over)
        second = run.save(2, model=_model(2))
    assert [place.path for place in Folder(RUN).places()] == [first, second]
    assert "could not be removed" in caplog.text


def test_numbers_of_saves_in_a_store_are_not_used_twice():
    _save(0)
    with pytest.MonkeyPatch.context() as patch:
        drawn = iter([5, 9])
        patch.setattr("dure.checkpoint.object_store.secrets.randbelow", lambda _: next(drawn))
        for part in [name for name in names_in(RUN) if name.startswith(("part-", "manifest"))]:
            (RUN / part).unlink()
        assert [next_number(RUN), next_number(RUN)] == [6, 10]


def test_a_tensor_that_changes_while_it_is_uploaded_is_named_and_not_saved(monkeypatch):
    _save(0)
    weight = counted(3)

    def summed_before(*arguments):
        found = kept(*arguments)
        weight.add_(1)  # a thread that trains in the meantime
        return found

    kept = slice_files.FileLayout.completed
    with monkeypatch.context() as patch:
        patch.setattr(slice_files.FileLayout, "completed", summed_before)
        with pytest.raises(CheckpointException, match="was changed while it was saved") as caught:
            save({"w": weight}, checkpoint_id=RUN, no_dist=True)
    (failure, _) = caught.value.failures[0]
    assert type(failure) is CheckpointNotWritten
    assert failure.seen == "w"
    assert _value_at() == ([0, 1, 2], 0)
    assert _kinds(names_in(RUN)) == ["manifest.json", "part"]


# --------------------------------------------------------------------------------------------------
# What is at a URL, or cannot be there.


def test_weights_in_a_store_are_read():
    content = weights_of({"w": counted(3), "b": counted(2, 2)})
    (RUN / "model.safetensors").write(content)
    state = {"w": torch.zeros(3), "b": torch.zeros(2, 2)}
    load(state, storage_reader=HuggingFaceStorageReader(str(RUN)), no_dist=True)
    assert state["w"].tolist() == [0, 1, 2]
    assert state["b"].tolist() == [[0, 1], [2, 3]]


def test_a_checkpoint_of_torch_in_a_store_is_read(tmp_path):
    convert(_saved_at(tmp_path / "dure"), tmp_path / "torch", to="distcp")
    for path in (tmp_path / "torch").iterdir():
        (RUN / path.name).write(path.read_bytes())
    assert _value_at() == ([7, 8, 9], 7)


def _saved_at(folder):
    _save(7, folder)
    return folder


def test_convert_and_consolidate_read_from_a_store_and_convert_writes_into_one(tmp_path):
    _save(7)
    convert(str(RUN), tmp_path / "copy")
    assert _value_at(tmp_path / "copy") == ([7, 8, 9], 7)
    convert(tmp_path / "copy", "memory://runs/b")
    assert _value_at("memory://runs/b") == ([7, 8, 9], 7)
    consolidate(str(RUN), tmp_path / "weights")
    state = {"w": torch.zeros(3)}
    load(state, storage_reader=HuggingFaceStorageReader(tmp_path / "weights"), no_dist=True)
    assert state["w"].tolist() == [7, 8, 9]


@pytest.mark.parametrize("to", ["torch", "safetensors", "distcp"])
def test_other_forms_are_not_written_into_a_store(to):
    _save(7)
    with pytest.raises(UsageError, match="memory://runs/b"):
        convert(str(RUN), "memory://runs/b", to=to)
    assert names_in(path_of("memory://runs/b")) == []


def _command(words):
    return app.run_command_line(words, lambda: None)


def test_the_commands_take_urls(capsys):
    _save(7)
    _save(8, "memory://runs/b")
    assert _command(["checkpoint", "show", str(RUN)]) == 0
    assert "step = 7" in capsys.readouterr().out
    assert _command(["checkpoint", "verify", str(RUN)]) == 0
    assert _command(["checkpoint", "diff", str(RUN), str(RUN)]) == 0
    assert _command(["checkpoint", "diff", str(RUN), "memory://runs/b"]) == 1
    assert "w differs in 3 of 3 elements" in capsys.readouterr().out


def test_an_absent_checkpoint_is_named():
    with pytest.raises(CheckpointException, match="memory://runs/a"):
        _value_at()
    Checkpointer(RUN).save(1, model=_model(1))
    with pytest.raises(CheckpointException, match=r"name one of them, such as .*000001-step-1-"):
        _value_at()


def test_a_store_that_cannot_be_read_is_not_taken_for_damage(monkeypatch):
    _save(7)

    def away(*_, **__):
        raise RuntimeError("no credentials")  # the class of the client's own error

    monkeypatch.setattr(MemoryFileSystem, "cat_file", away)
    with pytest.raises(CheckpointException, match="no credentials") as caught:
        _value_at()
    (failure, _) = caught.value.failures[0]
    assert type(failure) is CheckpointError
    assert "manifest.json" in str(failure)


@pytest.mark.parametrize("missing", ["fsspec.core", "s3fs"])
def test_a_package_that_is_not_installed_is_named(monkeypatch, missing):
    monkeypatch.setattr(sys.modules["fsspec.registry"], "_registry", {})  # of what is imported
    monkeypatch.setitem(sys.modules, missing, None)
    with pytest.raises(UsageError, match=r"pip install 'dure\[fsspec\]'") as caught:
        _save(0, "s3://bucket/run")
    assert "s3://bucket/run" in str(caught.value)
    assert missing.partition(".")[0] in str(caught.value)


def test_a_url_that_pathlib_has_changed_is_refused():
    with pytest.raises(UsageError, match="Pass the URL as a str"):
        Checkpointer(Path("s3://bucket/run"))
    with pytest.raises(UsageError, match="names no folder"):
        Checkpointer("memory://")


@pytest.mark.parametrize(
    ("url", "says"),
    [
        ("s3:/bucket/run", "one slash for two"),  # as os.path.normpath returns it
        ("simplecache::memory://runs/a", "chain of URLs"),
        ("zip://a.zip::memory://runs/a", "chain of URLs"),
        ("my_store://runs/a", "Protocol not known"),
    ],
)
def test_a_url_that_cannot_be_used_is_not_taken_for_a_local_folder(
    monkeypatch, tmp_path, url, says
):
    monkeypatch.chdir(tmp_path)
    for use in (_save, lambda _, at: Checkpointer(at)):
        with pytest.raises(UsageError, match=says):
            use(0, url)
    assert list(tmp_path.iterdir()) == []
    assert MemoryFileSystem.store == {}


def test_a_relative_url_of_a_local_file_is_where_the_writer_was_made(monkeypatch, tmp_path):
    (tmp_path / "other").mkdir()
    monkeypatch.chdir(tmp_path)
    writer = FileSystemWriter("file://runs/a")
    monkeypatch.chdir(tmp_path / "other")
    save({"w": counted(3), "step": 5}, storage_writer=writer, no_dist=True)
    assert _value_at(tmp_path / "runs" / "a") == ([0, 1, 2], 5)


def test_a_path_in_a_store_has_the_parts_of_its_address():
    path = path_of("memory://runs/a/")
    assert path == RUN
    assert (path / "x.y").url == "memory://runs/a/x.y"
    assert (path / "x").parent == path
    assert path.name == "a"
    assert FsspecPath("memory://runs").parent == FsspecPath("memory://runs")
    assert path / "memory://other/file" == FsspecPath("memory://other/file")


def test_files_of_a_store_are_listed_by_name_and_not_with_the_folder_itself():
    (RUN / "b").write(b"1")
    (RUN / "inner" / "c").write(b"2")
    (FsspecPath("memory://runs/ab") / "d").write(b"3")  # begins with the same name
    assert RUN.names() == ["b", "inner"]
    assert (RUN / "inner").is_dir()
    assert not (RUN / "inner").is_file()
    assert (RUN / "b").is_file()
    assert (RUN / "b").size() == 1
    with pytest.raises(FileExistsError):
        (RUN / "b").write(b"2", new=True)
    assert (RUN / "b").read(0, 9) == b"1"
