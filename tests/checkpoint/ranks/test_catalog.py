"""A manifest that lies, or is absent: refused by name."""

from __future__ import annotations

import json
import shutil
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

from dure.checkpoint import (
    Checkpointer,
    CheckpointException,
    HuggingFaceStorageReader,
    PerRank,
    load,
    save,
)
from dure.checkpoint.catalog import VERSION, catalog_of
from dure.checkpoint.reading import faults
from dure.checkpoint.weight_reading import catalog_of_weights
from dure.data import DataLoader
from dure.errors import CheckpointDamaged, CheckpointTooNew
from dure.tensor import Shard
from dure.testing import run_ranks
from tests.checkpoint.manifests import read_manifest, write_manifest
from tests.checkpoint.saved_states import save_one

S0 = Shard(0)


def _lies(folder, change):
    fields = read_manifest(folder)
    change(fields, fields["tensors"]["w"])
    write_manifest(folder, fields)


LIES = {
    "another file": lambda f, w: w.update(files=[1, 1]),
    "a file that is not there": lambda f, w: w.update(files=[0, 2]),
    "files of another save": lambda f, w: f["files"].update(save=2),
    "identity": lambda f, w: f["files"].update(id="0" * 32),
    "no identity": lambda f, w: f["files"].update(id=None),
    "digits of the identity": lambda f, w: f["files"].update(id="x" * 32),
    "files of no save": lambda f, w: f["files"].update(save="../1"),
    "overlap": lambda f, w: w.update(offsets=[[0, 1], [0, 0]]),
    "missing": lambda f, w: w.update(
        offsets=[[0], [0]], sizes=[[2], [2]], files=[0], begins=[0], places=[0]
    ),
    "outside": lambda f, w: w.update(offsets=[[0, 9], [0, 0]]),
    "a column is shorter": lambda f, w: w.update(begins=[0]),
    "a dimension too few": lambda f, w: w.update(offsets=[[0, 2]]),
    "below 0": lambda f, w: w.update(begins=[0, -8]),
    "a run below 0": lambda f, w: w.update(begins=[[0, -8, 2]]),
    "no numbers": lambda f, w: w.update(begins=[0, 0.0]),
    "no run": lambda f, w: w.update(begins=[[0, 0]]),
    "a run of no numbers": lambda f, w: w.update(begins=[0, 0, [0, 0, 0]]),
    "more rows than memory": lambda f, w: w.update(places=[[0, 0, 1 << 60]]),
    "begins in the header": lambda f, w: f["files"].update(headers=[8, 8]),
    "a header of another length": lambda f, w: f["files"].update(headers=[1 << 40, 1 << 40]),
    "a file of another length": lambda f, w: f["files"].update(bytes=[1, 1]),
    "begins beyond the end": lambda f, w: w.update(begins=[0, 1 << 40]),
    "a checksum beyond the end": lambda f, w: w.update(places=[0, 1 << 40]),
    "a checksum that is not one": lambda f, w: w.update(places=[0, 1]),
    "header": lambda f, w: f["files"].update(crc32c="0" * 16),
    "fewer headers": lambda f, w: f["files"].update(crc32c=f["files"]["crc32c"][:8]),
    "digits": lambda f, w: f["files"].update(crc32c="x" * 16),
    "shape": lambda f, w: w.update(shape=[1 << 60, 2]),
    "unknown dtype": lambda f, w: w.update(dtype="F31"),
    "form": lambda f, w: f.pop("tensors"),
    "form of a tensor": lambda f, w: w.pop("places"),
    "version": lambda f, w: f.update(version=1),
    "newer version": lambda f, w: f.update(version=99),
    "no tensor of that name": lambda f, w: f.update(state={"w": {"$": "tensor", "v": "z"}}),
    "no state": lambda f, w: f.update(state=[]),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path, lie):
    run_ranks(2, save_one, tmp_path, (2,), [S0], (4, 2))
    _lies(tmp_path, LIES[lie])
    with pytest.raises(CheckpointException, match=str(tmp_path)):
        load({"w": torch.zeros(4, 2)}, checkpoint_id=tmp_path)


def test_manifest_with_places_of_other_slices_is_found_by_verify(tmp_path):
    save({"a": torch.zeros(2), "b": torch.zeros(2)}, checkpoint_id=tmp_path)
    fields = read_manifest(tmp_path)
    a, b = (fields["tensors"][name] for name in "ab")
    a["begins"], b["begins"], a["places"], b["places"] = [8], [0], [1], [0]
    write_manifest(tmp_path, fields)
    wanted = "part-000001-00000.safetensors has other slices than its manifest says"
    assert faults(tmp_path, catalog_of(tmp_path)) == [wanted]


LIES_OF_FORMAT_3 = {
    "leaves the folder": lambda f, s: s[0].update(file="../part-000001-00000.safetensors"),
    "another file": lambda f, s: s[0].update(file="part-000009-00000.safetensors"),
    "overlap": lambda f, s: s[1].update(offsets=[1, 0]),
    "missing": lambda f, s: s.pop(),
    "outside": lambda f, s: s[1].update(offsets=[9, 0]),
    "shape": lambda f, s: f["tensors"]["w"].update(shape=[1 << 60, 2]),
    "unknown dtype": lambda f, s: f["tensors"]["w"].update(dtype="F31"),
    "sum": lambda f, s: s[0].update(crc32c=s[0]["crc32c"] ^ 1),
    "form": lambda f, s: f.pop("tensors"),
    "version": lambda f, s: f.update(version=1),
    "newer version": lambda f, s: f.update(version=99),
    "no tensor of that name": lambda f, s: f.update(state={"w": {"$": "tensor", "v": "z"}}),
    "no state": lambda f, s: f.update(state=[]),
}


@pytest.mark.parametrize("lie", LIES_OF_FORMAT_3)
def test_a_manifest_of_format_3_that_lies_is_refused(tmp_path, lie):
    shutil.copytree(STORED / "format_3" / "sharded", tmp_path, dirs_exist_ok=True)
    change = LIES_OF_FORMAT_3[lie]
    _lies(tmp_path, lambda fields, w: change(fields, w["slices"]))
    with pytest.raises(CheckpointException, match=str(tmp_path)):
        load({"w": torch.zeros(7, 5)}, checkpoint_id=tmp_path)


def test_folders_that_are_no_checkpoints_say_what_they_are(tmp_path):
    def seen(folder):
        with pytest.raises(CheckpointDamaged) as caught:
            catalog_of(folder)
        return str(caught.value)

    assert "there is no such folder" in seen(tmp_path / "nowhere")
    (tmp_path / "empty").mkdir()
    assert "the folder is empty" in seen(tmp_path / "empty")
    Checkpointer(tmp_path / "run").save(3, values=[1])
    assert "name one of them, such as" in (text := seen(tmp_path / "run"))
    assert "run/000001-step-3" in text
    (tmp_path / "other").mkdir()
    (tmp_path / "other" / "notes").touch()
    assert "not a checkpoint, or was never finished" in seen(tmp_path / "other")
    (tmp_path / "other/.metadata").touch()
    assert "a checkpoint of torch.distributed.checkpoint" in seen(tmp_path / "other")


# --------------------------------------------------------------------------------------------------
# Checkpoints of every format that was ever written: the folders in `stored`, see its README.


STORED = Path(__file__).parents[1] / "stored"
EVERY = [f"format_{n}" for n in range(2, VERSION + 1)]  # a new format needs a stored folder
FORMATS = pytest.mark.parametrize("format", EVERY)
FOLDERS = [*EVERY, "weights_1"]


@FORMATS
def test_a_stored_run_is_resumed_bit_for_bit(format):
    model = nn.Linear(3, 2)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.1)
    loader = DataLoader(range(8), batch_size=1)
    values: dict[str, Any] = {}
    own: dict[str, Any] = {}
    step = Checkpointer(STORED / format / "run").load(
        model=model, optimizer=optimizer, loader=loader, values=values, own=PerRank(own)
    )
    assert torch.randint(1000, (4,)).tolist() == [497, 683, 101, 866]
    assert step == 3
    assert model.weight.tolist() == [[-0.5, 0.5, 1.5], [2.5, 3.5, 4.5]]
    assert model.bias.tolist() == [5.5, 6.5]
    (group,) = optimizer.param_groups
    assert (group["lr"], group["momentum"]) == (0.5, 0.5)
    buffers = [optimizer.state[p]["momentum_buffer"].tolist() for p in group["params"]]
    assert buffers == [[[1.0] * 3] * 2, [1.0] * 2]
    assert next(iter(loader)).tolist() == [1]
    assert values == {"loss": 0.25, "names": ("a", b"b"), "none": None}
    assert own == {"rank": 0}


@FORMATS
def test_a_stored_sharded_state_is_loaded_bit_for_bit(format):
    folder = STORED / format / "sharded"
    state = {
        "w": torch.zeros(7, 5, dtype=torch.bfloat16),
        "c": torch.zeros(2, dtype=torch.complex64),
        "half": torch.zeros(2, dtype=torch.float16),
        "empty": torch.zeros(0, 3),
        "step": 0,
        "dtype": torch.float64,
    }
    assert load(state, checkpoint_id=folder, no_dist=True).unexpected_keys == []
    assert state["w"].equal(torch.arange(35).view(7, 5).to(torch.bfloat16))
    assert state["c"].tolist() == [1 + 2j, 3 - 4j]
    assert state["half"].tolist() == [0.5, float("-inf")]
    assert (state["step"], state["dtype"]) == (9, torch.float32)
    assert faults(folder, catalog_of(folder)) == []


@pytest.mark.parametrize("name", ["weights", "weights_indexed"])
@pytest.mark.parametrize("folder", FOLDERS)
def test_stored_weights_are_loaded_bit_for_bit(folder, name):
    path = STORED / folder / name
    state = {"w": torch.zeros(7, 5), "b": torch.zeros(3, dtype=torch.int64)}
    load(state, storage_reader=HuggingFaceStorageReader(path), no_dist=True)
    assert state["w"].equal(torch.arange(35.0).view(7, 5))
    assert state["b"].tolist() == [0, 1, 2]
    catalog = catalog_of_weights(path)
    assert faults(path, catalog) == []
    assert catalog.has_sums == (folder != "format_2")


@FORMATS
def test_a_changed_bit_in_any_byte_of_a_manifest_is_damage(format, tmp_path):
    shutil.copytree(STORED / format / "sharded", tmp_path, dirs_exist_ok=True)
    path = tmp_path / "manifest.json"
    text = path.read_bytes()
    assert catalog_of(tmp_path).num_bytes == 35 * 2 + 2 * 8 + 2 * 2
    for at in {*range(120), *range(120, len(text), 3)}:  # what seals it, and a third of the rest
        changed = bytearray(text)
        changed[at] ^= 1 << at % 8
        path.write_bytes(changed)
        with pytest.raises(CheckpointDamaged):
            catalog_of(tmp_path)


def test_a_manifest_is_json():
    fields = json.loads((STORED / "format_4" / "sharded" / "manifest.json").read_bytes())
    assert list(fields) == ["sha256", "format", "version", "needs", "state", "files", "tensors"]
    assert (fields["format"], fields["version"]) == ("dure checkpoint", 4)


NEEDS = {
    "dure>=0.3": "pip install 'dure>=0.3'",
    "dure>=0.3; import os": "the release that wrote it, or a newer one",
    "": "the release that wrote it, or a newer one",
}


@pytest.mark.parametrize("needs", NEEDS)
def test_a_newer_format_is_refused_with_the_release_to_install(needs, tmp_path):
    shutil.copytree(STORED / "format_3" / "sharded", tmp_path, dirs_exist_ok=True)
    fields = read_manifest(tmp_path) | {"version": 5, "needs": needs}
    write_manifest(tmp_path, fields | {"tensors": "of a form that is not known"})
    with pytest.raises(CheckpointTooNew) as caught:
        catalog_of(tmp_path)
    assert caught.value.path == str(tmp_path)
    assert NEEDS[needs] in caught.value.fix
    with pytest.raises(CheckpointException) as failed:
        load({"step": 0}, checkpoint_id=tmp_path, no_dist=True)
    assert [type(e) for e, _ in failed.value.failures.values()] == [CheckpointTooNew]


def test_no_older_checkpoint_is_taken_instead_of_one_of_a_newer_format(tmp_path):
    checkpoints = Checkpointer(tmp_path)
    checkpoints.save(1, values=[0.0])
    newest = checkpoints.save(2, values=[1.0])
    write_manifest(newest, read_manifest(newest) | {"version": 5})
    with pytest.raises(CheckpointTooNew):
        Checkpointer(tmp_path).load(values=[])
    checkpoints.save(3, values=[2.0])
    assert read_manifest(newest)["version"] == 5  # it is kept


@pytest.mark.parametrize(
    ("version", "error"), [(b"2", CheckpointTooNew), (b"0", CheckpointDamaged)]
)
@pytest.mark.parametrize("name", ["weights", "weights_indexed"])
def test_weights_with_checksums_of_another_format_are_refused(name, version, error, tmp_path):
    shutil.copytree(STORED / "format_3" / name, tmp_path, dirs_exist_ok=True)
    file = tmp_path / ("model.safetensors.index.json" if "_" in name else "model.safetensors")
    text = file.read_bytes()
    changed = text.replace(b'"dure_version":"1"', b'"dure_version":"%b"' % version)
    changed = changed.replace(b'"dure_version": "1"', b'"dure_version": "%b"' % version)
    assert changed != text
    file.write_bytes(changed)
    with pytest.raises(error):
        catalog_of_weights(tmp_path)
