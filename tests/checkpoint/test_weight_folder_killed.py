"""A save of weights that is killed, or fails, at each call that changes the folder.

The calls are those of `os`. From the n-th on they raise: `_Killed`, which no handler catches and
after which nothing can be changed, as if the process were killed; or one `OSError`.
"""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
from contextlib import suppress

import pytest
import torch
from safetensors.torch import load_file, save_file

from dure.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    load,
    save,
)
from dure.checkpoint.folder import Folder

INDEX = "model.safetensors.index.json"
OTHERS = {"model_ema.safetensors", "model-best.safetensors"}
_CHANGES = ("ftruncate", "pwrite", "fsync", "rename", "unlink", "mkdir")
_WRITES = os.O_WRONLY | os.O_RDWR | os.O_CREAT


@pytest.fixture(autouse=True)
def _quick(monkeypatch):
    """Flush nothing: a process is killed here, not the system."""
    monkeypatch.setattr(os, "fsync", lambda descriptor: None)


class _Killed(BaseException):
    pass


class _Faults:
    """Lets `after` calls pass, and then lets calls fail."""

    def __init__(self, patch, error=None):
        self.after, self.count = 0, 0
        for method in ("hold", "release", "check"):  # the lock has tests of its own
            patch.setattr(Folder, method, lambda self: None)
        for name in (*_CHANGES, "open"):
            patch.setattr(os, name, self._failing(name, getattr(os, name), error))

    def _failing(self, name, plain, error):
        def call(*args, **kwargs):
            if name == "open" and not (args[1] & _WRITES):
                return plain(*args, **kwargs)
            self.count += 1
            if error is None and self.count > self.after:
                raise _Killed
            if error is not None and self.count == self.after + 1:
                raise OSError(error, os.strerror(error))
            return plain(*args, **kwargs)

        return call


def _state(value):
    return {"v": torch.full((2,), value), "w": torch.full((4, 3), value)}


def _save(folder, value, files, overwrite=False):
    writer = HuggingFaceStorageWriter(
        folder, max_bytes=1 if files == "several" else 10**6, overwrite=overwrite
    )
    return save(_state(value), storage_writer=writer, no_dist=True)


def _loaded(folder):
    """Return the value of all elements; None: there are no such weights."""
    state = _state(-1.0)
    try:
        load(state, storage_reader=HuggingFaceStorageReader(folder), no_dist=True)
    except CheckpointException:
        return None
    return _one_value(state)


def _loaded_by_transformers(folder):
    """Read the files that transformers' `from_pretrained` looks for, in its order."""
    if (folder / "model.safetensors").exists():
        return _one_value(load_file(folder / "model.safetensors"))
    if not (folder / INDEX).exists():
        return None
    placed = json.loads((folder / INDEX).read_text())["weight_map"]
    return _one_value({name: load_file(folder / file)[name] for name, file in placed.items()})


def _one_value(state):
    assert sorted(state) == ["v", "w"]
    values = {x for tensor in state.values() for x in tensor.flatten().tolist()}
    assert len(values) == 1, f"mixed: {values}"
    return values.pop()


def _fresh(folder):
    folder.mkdir()


def _foreign(folder):
    folder.mkdir()
    save_file(_state(1.0), folder / "model.safetensors")


def _indexed(folder):
    """Another program's index, which names model.safetensors."""
    _foreign(folder)
    text = json.dumps({"weight_map": dict.fromkeys("vw", "model.safetensors")})
    (folder / INDEX).write_text(text)


def _saved(files):
    def before(folder):
        _save(folder, 1.0, files)

    return before


BEFORE = {
    "fresh": _fresh,
    "one file": _saved("one"),
    "several files": _saved("several"),
    "another program's file": _foreign,
    "another program's index": _indexed,
}


def _folders(tmp_path, before):
    """Yield a copy of a used folder for each step."""
    template = tmp_path / "template"
    BEFORE[before](template)
    for name in OTHERS:
        save_file({name: torch.ones(2)}, template / name)
    for step in itertools.count():
        yield step, shutil.copytree(template, tmp_path / str(step))


def _check(folder, before):
    """The old or the new weights load, in Dure and elsewhere; other files are as they were."""
    old = None if before == "fresh" else 1.0
    assert _loaded(folder) in (old, 2.0)
    assert _loaded_by_transformers(folder) in (old, 2.0)
    assert all(load_file(folder / name)[name].tolist() == [1, 1] for name in OTHERS)


def _check_next_save(folder, files):
    _save(folder, 3.0, files, overwrite=True)
    assert _loaded(folder) == _loaded_by_transformers(folder) == 3.0
    names = {path.name for path in folder.iterdir()} - OTHERS
    single = files == "one" and INDEX not in names
    indexed = (
        set() if single else set(json.loads((folder / INDEX).read_text())["weight_map"].values())
    )
    assert names == ({"model.safetensors"} if single else {*indexed, INDEX})


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("before", BEFORE)
def test_killed_at_each_change_the_old_or_the_new_weights_load(tmp_path, before, files):
    for step, folder in _folders(tmp_path, before):
        finished = False
        with pytest.MonkeyPatch.context() as patch, suppress(_Killed):
            faults = _Faults(patch)
            faults.after = step
            _save(folder, 2.0, files, overwrite=True)
            finished = True
        _check(folder, before)
        if finished:
            assert _loaded(folder) == _loaded_by_transformers(folder) == 2.0
            break
        _check_next_save(folder, files)
    assert step > 5


@pytest.mark.parametrize("files", ["one", "several"])
@pytest.mark.parametrize("before", BEFORE)
def test_an_error_at_each_change_leaves_the_old_or_the_new_weights(tmp_path, before, files):
    failed = 0
    for step, folder in _folders(tmp_path, before):
        saved, error = False, (errno.ENOSPC, errno.EIO, errno.EMFILE)[step % 3]
        with pytest.MonkeyPatch.context() as patch, suppress(CheckpointException):
            faults = _Faults(patch, error)
            faults.after = step
            _save(folder, 2.0, files, overwrite=True)
            saved = True
        failed += not saved
        _check(folder, before)
        assert not saved or _loaded(folder) == 2.0
        if faults.count <= step:
            break
        _check_next_save(folder, files)
    assert failed > 5
