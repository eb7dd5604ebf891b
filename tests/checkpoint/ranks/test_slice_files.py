"""Files of slices: what is in them, and damage."""

import os
import shutil
from pathlib import Path

import pytest
import torch

from dure.checkpoint import CheckpointException, load, save, slice_files
from dure.checkpoint.catalog import catalog_of
from dure.checkpoint.slice_files import SliceFile
from dure.errors import CheckpointDamaged
from dure.tensor import Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted, parts, save_one

S0 = Shard(0)
STORED = Path(__file__).parents[1] / "stored"


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


def _refused(folder, shape):
    with pytest.raises(CheckpointException) as caught:
        load({"w7": torch.zeros(*shape)}, checkpoint_id=folder, no_dist=True)
    return str(caught.value)


@pytest.mark.parametrize("longest", [1 << 20, 1 << 10])
def test_a_part_of_another_checkpoint_is_refused_by_a_load_of_one_tensor(
    tmp_path, monkeypatch, longest
):
    """The checksums of its slices are its own; a long header is not read."""
    for folder, value in (("old", 1.0), ("new", 2.0)):
        state = {f"w{n}": torch.full((3,), value) for n in range(1000)}
        save(state, checkpoint_id=tmp_path / folder, no_dist=True)
    monkeypatch.setattr(slice_files, "_SHORT_HEADER", longest)
    old, new = (tmp_path / name / "part-000001-00000.safetensors" for name in ("old", "new"))
    assert 50_000 < new.stat().st_size == old.stat().st_size < 100_000
    new.write_bytes(old.read_bytes())
    seen = _refused(tmp_path / "new", [3])
    assert "part-000001-00000.safetensors is of another save, or of another rank" in seen


def test_the_part_of_another_rank_is_refused_by_a_load_of_one_tensor(tmp_path, monkeypatch):
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        state = {f"w{n}": distribute_tensor(counted(4, 2), mesh, [S0]) for n in range(100)}
        save(state, checkpoint_id=tmp_path)

    run_ranks(2, body)
    monkeypatch.setattr(slice_files, "_SHORT_HEADER", 1 << 10)
    first, second = (tmp_path / f"part-000001-0000{rank}.safetensors" for rank in range(2))
    assert first.stat().st_size == second.stat().st_size
    second.write_bytes(first.read_bytes())
    seen = _refused(tmp_path, [4, 2])
    assert "part-000001-00001.safetensors is of another save, or of another rank" in seen


def test_a_file_that_is_replaced_before_it_is_opened_again_is_refused(tmp_path):
    for folder, value in (("old", 1.0), ("new", 2.0)):
        save({"w": torch.full((3,), value)}, checkpoint_id=tmp_path / folder, no_dist=True)
    catalog, part = catalog_of(tmp_path / "new"), "part-000001-00000.safetensors"
    file = SliceFile(tmp_path / "new" / part, catalog.files[0].record, stays_open=False)
    (tmp_path / "new" / part).write_bytes((tmp_path / "old" / part).read_bytes())
    ((slice_of_w, stored),) = catalog.parts("w")
    with pytest.raises(CheckpointDamaged, match="of another save"):
        file.read(slice_of_w, stored, torch.float32, slice_of_w.box, torch.zeros(3))


def test_an_open_file_that_becomes_shorter_is_damaged(tmp_path):
    save({"w": torch.ones(3)}, checkpoint_id=tmp_path, no_dist=True)
    catalog, path = catalog_of(tmp_path), tmp_path / "part-000001-00000.safetensors"
    ((part, stored),) = catalog.parts("w")
    with SliceFile(path, catalog.files[0].record) as file:
        os.truncate(path, stored.begin + 4)
        with pytest.raises(CheckpointDamaged, match="became shorter"):
            file.read(part, stored, torch.float32, part.box, torch.zeros(3))


@pytest.mark.parametrize("format", [2, 3])
def test_a_long_header_of_an_older_format_is_read(tmp_path, monkeypatch, format):
    """Its files have no identity: here the slices have other names than in the manifest."""
    shutil.copytree(STORED / f"format_{format}" / "sharded", tmp_path, dirs_exist_ok=True)
    for path in tmp_path.glob("part-*"):
        path.write_bytes(path.read_bytes().replace(b"w[", b"v["))
    monkeypatch.setattr(slice_files, "_SHORT_HEADER", 0)
    with pytest.raises(CheckpointException, match="another header"):
        load({"w": torch.zeros(7, 5)}, checkpoint_id=tmp_path, no_dist=True)
