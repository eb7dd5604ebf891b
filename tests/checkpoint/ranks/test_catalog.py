"""A manifest that lies, or is absent: refused by name."""

from __future__ import annotations

import pytest
import torch

from dure.checkpoint import Checkpointer, CheckpointException, load
from dure.checkpoint.catalog import catalog_of
from dure.errors import CheckpointDamaged
from dure.tensor import Shard
from dure.testing import run_ranks
from tests.checkpoint.manifests import read_manifest, write_manifest
from tests.checkpoint.saved_states import save_one

S0 = Shard(0)


def _lies(folder, change):
    fields = read_manifest(folder)
    change(fields, fields["tensors"]["w"]["slices"])
    write_manifest(folder, fields)


LIES = {
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


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path, lie):
    run_ranks(2, save_one, tmp_path, (2,), [S0], (4, 2))
    _lies(tmp_path, LIES[lie])
    with pytest.raises(CheckpointException, match=str(tmp_path)):
        load({"w": torch.zeros(4, 2)}, checkpoint_id=tmp_path)


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
