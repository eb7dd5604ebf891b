"""Files of slices: what is in them, and damage."""

import os
from pathlib import Path

import pytest
import torch

from dure.checkpoint import CheckpointException, load, save
from dure.tensor import Shard
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted, parts, save_one

S0 = Shard(0)


def test_parts_are_safetensors_with_the_rows_of_each_rank(tmp_path):
    run_ranks(4, save_one, tmp_path, (4,), [S0], (6, 2))
    rows = {name: tensor.tolist() for part in parts(tmp_path) for name, tensor in part.items()}
    assert rows == {  # chunks of 2, 2, 2 and no rows
        "w[0:2, 0:2]": [[0, 1], [2, 3]],
        "w[2:4, 0:2]": [[4, 5], [6, 7]],
        "w[4:6, 0:2]": [[8, 9], [10, 11]],
    }


def _pipe(path):
    path.unlink()
    os.mkfifo(path)


def _link(path):
    path.rename(path.with_suffix(".moved"))
    path.symlink_to(path.with_suffix(".moved"))


def _folder(path):
    path.unlink()
    path.mkdir()


def _flipped(path):
    data = bytearray(path.read_bytes())
    data[-1] ^= 1
    path.write_bytes(data)


DAMAGES = {
    "pipe": _pipe,
    "link": _link,
    "folder": _folder,
    "gone": Path.unlink,
    "flipped": _flipped,
    "shorter": lambda path: path.write_bytes(path.read_bytes()[:-1]),
    "longer": lambda path: path.write_bytes(path.read_bytes() + b"x"),
    "header": lambda path: path.write_bytes(path.read_bytes().replace(b"F32", b"I32")),
}


@pytest.mark.parametrize("file", ["manifest.json", "part-000001-00000.safetensors"])
@pytest.mark.parametrize("damage", DAMAGES)
def test_damaged_files_are_refused(tmp_path, damage, file):
    save({"w": counted(4, 2)}, checkpoint_id=tmp_path)
    DAMAGES[damage](tmp_path / file)
    with pytest.raises(CheckpointException, match=str(tmp_path)):
        load({"w": torch.zeros(4, 2)}, checkpoint_id=tmp_path)


def test_a_part_of_another_checkpoint_is_refused_by_a_load_of_one_tensor(tmp_path):
    """The checksums of its slices are its own; only its header differs."""
    for folder, value in (("old", 1.0), ("new", 2.0)):
        state = {f"w{n}": torch.full((3,), value) for n in range(1000)}
        save(state, checkpoint_id=tmp_path / folder, no_dist=True)
    part = "part-000001-00000.safetensors"
    (tmp_path / "new" / part).write_bytes((tmp_path / "old" / part).read_bytes())
    with pytest.raises(CheckpointException) as caught:
        load({"w7": torch.zeros(3)}, checkpoint_id=tmp_path / "new", no_dist=True)
    assert "another header" in str(caught.value)
