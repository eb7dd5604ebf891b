"""Folders of torch that are damaged, incomplete, or made to run code; and parts of whole ones."""

from __future__ import annotations

import os
import pickle
from dataclasses import dataclass

import pytest
import torch
from torch.distributed.checkpoint import FileSystemWriter
from torch.distributed.checkpoint import save as save_as_torch
from torch.distributed.checkpoint.metadata import MetadataIndex

from dure.checkpoint import DefaultLoadPlanner, FileSystemReader, convert, load, save
from dure.errors import CheckpointError, CheckpointException, CheckpointMismatch

pytestmark = pytest.mark.filterwarnings("ignore:torch.distributed is disabled")


@dataclass
class Custom:
    """A class that no checkpoint of Dure may have."""

    number: int = 1


@pytest.fixture
def folder(tmp_path):
    state = {"w": torch.arange(6.0).view(2, 3), "b": torch.ones(2), "step": 3}
    save_as_torch(state, checkpoint_id=tmp_path / "theirs", no_dist=True)
    return tmp_path / "theirs"


def refused(folder, state=None):
    wanted = {"w": torch.zeros(2, 3)} if state is None else state
    with pytest.raises(CheckpointException) as found:
        load(wanted, checkpoint_id=folder, no_dist=True)
    return found.value.failures[0][0]


def changed(folder, change):
    """Write `.metadata` again, after a change."""
    path = folder / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    change(metadata)
    path.write_bytes(pickle.dumps(metadata))


def test_a_part_of_it_is_loaded_and_the_rest_left_alone(folder):
    state = {"w": torch.zeros(2, 3), "absent": torch.full((2,), 9.0)}
    planner = DefaultLoadPlanner(allow_partial_load=True)
    load(state, checkpoint_id=folder, planner=planner, no_dist=True)
    assert state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]
    assert state["absent"].tolist() == [9, 9]


def test_a_reader_says_what_is_in_it(folder):
    found = FileSystemReader(folder).read_metadata().state_dict_metadata
    assert sorted(found) == ["b", "step", "w"]
    assert found["w"].size == torch.Size([2, 3])
    assert found["w"].properties.dtype is torch.float32


def test_a_checkpoint_of_dure_in_the_same_folder_is_the_one_that_is_loaded(folder):
    save({"w": torch.full((2, 3), 8.0)}, checkpoint_id=folder, no_dist=True)
    state = {"w": torch.zeros(2, 3)}
    load(state, checkpoint_id=folder, no_dist=True)
    assert state["w"].tolist() == [[8, 8, 8], [8, 8, 8]]


def test_names_that_are_missing_and_shapes_that_differ(folder):
    assert "Missing key in checkpoint state_dict: v" in str(refused(folder, {"v": torch.ones(1)}))
    state = {"w": torch.zeros(3, 2)}
    failure = refused(folder, state)
    assert isinstance(failure, CheckpointMismatch)
    assert "Size mismatch" in str(failure)
    assert state["w"].tolist() == [[0, 0], [0, 0], [0, 0]]


def test_metadata_that_would_run_code_do_not(folder, tmp_path):
    class Runs:
        def __reduce__(self):
            return os.mkdir, (str(tmp_path / "ran"),)

    (folder / ".metadata").write_bytes(pickle.dumps(Runs()))
    failure = refused(folder)
    assert isinstance(failure, CheckpointError)
    assert "mkdir is not part of a checkpoint" in str(failure)
    assert not (tmp_path / "ran").exists()


@pytest.mark.parametrize("module", ["builtins.eval", "torch.load", "torch.hub.load"])
def test_nothing_but_the_classes_of_a_checkpoint_is_found(folder, module):
    path, _, name = module.rpartition(".")
    text = f"c{path}\n{name}\n."
    (folder / ".metadata").write_bytes(text.encode())
    assert f"{module} is not part of a checkpoint" in str(refused(folder))


def test_a_value_of_another_class_is_refused_by_name(tmp_path):
    save_as_torch({"config": Custom()}, checkpoint_id=tmp_path, no_dist=True)
    failure = refused(tmp_path, {"config": None})
    assert "'config'" in str(failure)
    assert "Custom" in str(failure)


def test_a_file_that_is_too_short_or_missing(folder):
    (file,) = folder.glob("*.distcp")
    file.write_bytes(file.read_bytes()[:100])
    failure = refused(folder)
    assert "damaged" in str(failure)
    assert f"{file.name} ends within w" in str(failure)
    file.unlink()
    assert f"No such file or directory: '{file}'" in str(refused(folder))


def test_bytes_that_are_no_tensor(folder):
    (file,) = folder.glob("*.distcp")
    file.write_bytes(b"\0" * file.stat().st_size)
    assert "damaged" in str(refused(folder))


@pytest.mark.parametrize(
    ("attribute", "value", "text"),
    [
        ("relative_path", "../outside.distcp", "w: ../outside.distcp is outside of the folder"),
        ("relative_path", "/etc/passwd", "w: /etc/passwd is outside of the folder"),
        ("transform_descriptors", ["zstd"], "w is stored through zstd"),
        ("offset", "0", "there is no list of stored slices"),
        ("length", -1, "there is no list of stored slices"),
    ],
)
def test_places_that_cannot_be_read(folder, attribute, value, text):
    place = MetadataIndex("w", torch.Size([0, 0]))
    changed(folder, lambda metadata: setattr(metadata.storage_data[place], attribute, value))
    assert text in str(refused(folder))


def test_metadata_that_lie_about_a_tensor(folder):
    def transpose(metadata):
        saved = metadata.state_dict_metadata["w"]
        saved.size = saved.chunks[0].sizes = torch.Size([3, 2])

    changed(folder, transpose)
    text = "w at [0, 0] is torch.float32[2, 3], not torch.float32[3, 2]"
    assert text in str(refused(folder, {"w": torch.zeros(3, 2)}))


def test_slices_beyond_their_tensor(folder):
    def move(metadata):
        metadata.state_dict_metadata["w"].chunks[0].offsets = torch.Size([1, 0])

    changed(folder, move)
    assert "the slices of 'w' are not within it" in str(refused(folder))


def test_a_slice_of_which_the_metadata_do_not_say_where_it_is(folder):
    changed(folder, lambda metadata: metadata.storage_data.clear())
    assert "w: the metadata do not say where it is" in str(refused(folder))


def test_a_file_in_a_folder_below(folder):
    (file,) = folder.glob("*.distcp")
    (folder / "below").mkdir()
    file.rename(folder / "below" / file.name)

    def move(metadata):
        for place in metadata.storage_data.values():
            place.relative_path = f"below/{file.name}"

    changed(folder, move)
    state = {"b": torch.zeros(2)}
    load(state, checkpoint_id=folder, no_dist=True)
    assert state["b"].tolist() == [1, 1]


def test_each_stored_slice_is_read_once_however_many_shards_take_of_it(tmp_path, monkeypatch):
    writer = FileSystemWriter(tmp_path)
    save_as_torch({"w": torch.arange(12.0).view(4, 3)}, storage_writer=writer, no_dist=True)
    reads = []
    load_stream = torch.load
    monkeypatch.setattr(torch, "load", lambda *a, **k: reads.append(1) or load_stream(*a, **k))
    state = {"w": torch.zeros(4, 3)}
    load(state, checkpoint_id=tmp_path, no_dist=True)
    assert len(reads) == 1


def test_a_tensor_that_is_not_row_major(tmp_path):
    saved = torch.arange(36.0).view(2, 2, 3, 3).to(memory_format=torch.channels_last)
    save_as_torch({"w": saved}, checkpoint_id=tmp_path / "a", no_dist=True)
    convert(tmp_path / "a", tmp_path / "b")
    for source in (tmp_path / "a", tmp_path / "b"):
        state = {"w": torch.zeros(2, 2, 3, 3)}
        load(state, checkpoint_id=source, no_dist=True)
        assert state["w"].flatten().tolist() == list(range(36))
