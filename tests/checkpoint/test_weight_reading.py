"""What is read of a folder of weights, and what a save may replace there."""

import json
import os

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

from dure.checkpoint import (
    CheckpointException,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    consolidate,
    load,
    save,
)
from dure.checkpoint.state_dict import get_model_state_dict
from dure.errors import CheckpointError

INDEX = "model.safetensors.index.json"


def _load(folder, **state):
    load(state, storage_reader=HuggingFaceStorageReader(folder))
    return {name: tensor.tolist() for name, tensor in state.items()}


def _contents(folder):
    return {path.name: path.read_bytes() for path in folder.iterdir()}


def _data_begins(path):
    return 8 + int.from_bytes(path.read_bytes()[:8], "little")


@pytest.mark.parametrize("max_bytes", [10**6, 1], ids=["one file", "several files"])
def test_changed_byte_is_found(tmp_path, max_bytes):
    state = {"w": torch.arange(6.0).view(2, 3), "v": torch.tensor([7, 8], dtype=torch.int16)}
    save(state, storage_writer=HuggingFaceStorageWriter(tmp_path, max_bytes=max_bytes))
    tried = 0
    for path in tmp_path.glob("*.safetensors"):
        data = path.read_bytes()
        for at in range(_data_begins(path), len(data)):
            path.write_bytes(data[:at] + bytes([data[at] ^ 1]) + data[at + 1 :])
            with pytest.raises(CheckpointException, match="checksum is wrong"):
                _load(tmp_path, w=torch.zeros(2, 3), v=torch.zeros(2))
            tried += 1
        path.write_bytes(data)
    assert tried == 6 * 4 + 2 * 2
    assert _load(tmp_path, v=torch.zeros(2)) == {"v": [7, 8]}


def test_checksums_of_other_tensors_are_refused(tmp_path):
    path = tmp_path / "model.safetensors"
    save({"w": torch.ones(4)}, storage_writer=HuggingFaceStorageWriter(tmp_path))
    with safe_open(path, framework="pt") as file:
        metadata = file.metadata()
    for other in ({"w": torch.ones(4).int()}, {"w": torch.ones(2, 2)}, {"v": torch.ones(4)}):
        save_file(other, path, metadata=metadata)  # as conversions by other programs may do
        with pytest.raises(CheckpointException, match="remove 'dure' from the metadata"):
            _load(tmp_path, **other)
        save_file(other, path, metadata={"format": "pt"})
        _load(tmp_path, **other)


@pytest.mark.parametrize(
    "index", ["[" * 100_000, '{"weight_map": 3}', '{"weight_map": {"w": 1e400}}', "3", "pipe"]
)
def test_index_that_is_not_one_is_refused(tmp_path, index):
    path = tmp_path / "model.safetensors.index.json"
    path.write_text(index) if index != "pipe" else os.mkfifo(path)
    with pytest.raises(CheckpointError, match="the weights cannot be used"):
        _load(tmp_path, w=torch.zeros(1))


def test_hidden_files_are_not_weights(tmp_path):
    save_file({"w": torch.zeros(4)}, tmp_path / ".saving-model.safetensors")
    with pytest.raises(CheckpointException, match="there are no weights"):
        _load(tmp_path, w=torch.ones(4))


def test_files_beside_the_model_are_neither_read_nor_touched(tmp_path):
    others = ["model_ema.safetensors", "model-best.safetensors", "adapter.safetensors"]
    for number, name in enumerate(others):
        save_file({"w": torch.full((2,), 5.0 + number)}, tmp_path / name)
    before = _contents(tmp_path)
    state = {"w": torch.zeros(2), "v": torch.zeros(2)}
    for max_bytes in (10**6, 1, 1, 10**6):
        state = {name: tensor + 1 for name, tensor in state.items()}
        save(state, storage_writer=HuggingFaceStorageWriter(tmp_path, max_bytes=max_bytes))
        assert before.items() <= _contents(tmp_path).items()
        loaded = _load(tmp_path, w=torch.zeros(2), v=torch.zeros(2))
        assert loaded == {name: tensor.tolist() for name, tensor in state.items()}
    assert _contents(tmp_path).keys() == {*before, "model.safetensors"}


def _foreign(folder):
    save_file({"w": torch.ones(4)}, folder / "model.safetensors")


def _beside_an_index(folder):
    save_file({"w": torch.ones(4)}, folder / "a.safetensors")
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "a.safetensors"}}))
    _foreign(folder)


def _no_index(folder):
    save_file({"w": torch.ones(4)}, folder / "a.safetensors")
    (folder / INDEX).write_text("{")


def _leaving(folder):
    (folder / INDEX).write_text(json.dumps({"weight_map": {"w": "../a.safetensors"}}))
    save_file({"w": torch.ones(4)}, folder.parent / "a.safetensors")


@pytest.mark.parametrize("max_bytes", [10**6, 1], ids=["one file", "several files"])
@pytest.mark.parametrize("make", [_foreign, _beside_an_index, _no_index, _leaving])
def test_other_weights_are_replaced_only_if_asked(tmp_path, make, max_bytes):
    folder = tmp_path / "weights"
    folder.mkdir()
    make(folder)
    before = _contents(folder)
    new = {"w": torch.full((4,), 2.0), "v": torch.full((4,), 2.0)}
    save({"model": new}, checkpoint_id=tmp_path / "saved")
    with pytest.raises(CheckpointException) as refused:
        save(new, storage_writer=HuggingFaceStorageWriter(folder, max_bytes=max_bytes))
    assert "overwrite=True" in refused.value.failures[0][0].fix
    with pytest.raises(CheckpointException):
        consolidate(tmp_path / "saved", folder, "model.", max_bytes)
    assert _contents(folder) == before
    writer = HuggingFaceStorageWriter(folder, max_bytes=max_bytes, overwrite=True)
    save(new, storage_writer=writer)
    assert _load(folder, w=torch.zeros(4), v=torch.zeros(4))["w"] == [2, 2, 2, 2]
    assert (folder / "model.safetensors").exists() != (folder / INDEX).exists()
    assert not (tmp_path / "a.safetensors").exists() or make is _leaving
    consolidate(tmp_path / "saved", folder, "model.", max_bytes)  # they are Dure's now


class _Tied(nn.Module):
    def __init__(self):
        super().__init__()
        self.embed, self.head = nn.Embedding(6, 2), nn.Linear(2, 6, bias=False)
        self.head.weight = self.embed.weight


def test_tied_weights_have_all_their_names(tmp_path):
    model = _Tied()
    save(get_model_state_dict(model), storage_writer=HuggingFaceStorageWriter(tmp_path / "1"))
    save({"ema": model, "model": model}, checkpoint_id=tmp_path / "saved")
    consolidate(tmp_path / "saved", tmp_path / "2", prefix="model.")
    consolidate(tmp_path / "saved", tmp_path / "3", prefix="model.embed.", max_bytes=1)
    for number, names in (("1", model.state_dict()), ("2", model.state_dict()), ("3", ["weight"])):
        files = (tmp_path / number).glob("*.safetensors")
        held = {name: tensor for file in files for name, tensor in load_file(file).items()}
        assert held.keys() == set(names)
        assert all(tensor.equal(model.head.weight) for tensor in held.values())
    other = _Tied()
    load(get_model_state_dict(other), storage_reader=HuggingFaceStorageReader(tmp_path / "1"))
    assert other.head.weight.equal(model.head.weight)
