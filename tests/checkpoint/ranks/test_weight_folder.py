"""Folders of weights as Hugging Face has them: into any sharding, and from any."""

import json

import pytest
import torch
from safetensors import safe_open
from safetensors.torch import load_file, save_file
from torch import nn

import dure
from dure.checkpoint import (
    CheckpointException,
    FileSystemReader,
    HuggingFaceStorageReader,
    HuggingFaceStorageWriter,
    async_save,
    consolidate,
    load,
    save,
)
from dure.checkpoint.state_dict import get_model_state_dict
from dure.errors import CheckpointError, UsageError
from dure.fsdp import fully_shard
from dure.tensor import Replicate, Shard, distribute_tensor, init_device_mesh, zeros
from dure.tensor.placement_types import StridedShard
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted

R, S0, S1 = Replicate(), Shard(0), Shard(1)


WHOLE = {
    "a": counted(7, 5),
    "b": counted(3, 4, dtype=torch.bfloat16),
    "c": counted(6, dtype=torch.int64),
    "number": torch.tensor(5.0),
    "none": torch.zeros(0, 3),
}


def _as_downloaded(folder):
    """Two files and an index, the files as links into a folder of blobs."""
    blobs, snapshot = folder / "blobs", folder / "snapshot"
    blobs.mkdir()
    snapshot.mkdir()
    files = {"x-1.safetensors": ["a", "c"], "x-2.safetensors": ["b", "number", "none"]}
    for file, names in files.items():
        others = {} if "a" in names else {"a": torch.zeros(1)}  # which the index does not name
        save_file({n: WHOLE[n] for n in names} | others, blobs / file, metadata={"format": "pt"})
        (snapshot / file).symlink_to(blobs / file)
    placed = {name: file for file, names in files.items() for name in names}
    text = json.dumps({"metadata": {}, "weight_map": placed})
    (snapshot / "model.safetensors.index.json").write_text(text)
    return snapshot


@pytest.mark.parametrize("sizes", [(1,), (2,), (3,), (2, 2)])
def test_a_download_is_read_into_any_mesh(tmp_path, sizes):
    snapshot = _as_downloaded(tmp_path)

    def body(rank):
        mesh = init_device_mesh("cpu", sizes)
        for placement in (R, S0, S1):
            placements = [placement] * len(sizes)
            state = {
                "a": zeros(7, 5, device_mesh=mesh, placements=placements),
                "b": zeros(3, 4, device_mesh=mesh, placements=placements, dtype=torch.bfloat16),
                "c": torch.zeros(6, dtype=torch.int64),
                "number": torch.tensor(0.0),
                "none": torch.zeros(0, 3),
            }
            loaded = load(state, storage_reader=HuggingFaceStorageReader(snapshot))
            parts = [p.to_local().numel() * p.element_size() for p in (state["a"], state["b"])]
            assert loaded == ([], [], sum(parts) + 48 + 4)
            for name in ("a", "b"):
                assert state[name].full_tensor().equal(WHOLE[name])
            assert state["c"].equal(WHOLE["c"]) and state["number"] == 5

    run_ranks(torch.Size(sizes).numel(), body)


@pytest.mark.parametrize(
    ("sizes", "placements"),
    [((1,), [R]), ((2,), [S0]), ((3,), [S1]), ((2, 2), [StridedShard(0, split_factor=2), S0])],
    ids=str,
)
@pytest.mark.parametrize("max_bytes", [5_000_000_000, 150])
def test_any_mesh_writes_the_same_files(tmp_path, sizes, placements, max_bytes):
    writer = HuggingFaceStorageWriter(tmp_path, max_bytes=max_bytes)

    def body(rank):
        mesh = init_device_mesh("cpu", sizes)
        state = {n: distribute_tensor(WHOLE[n], mesh, placements) for n in ("a", "b")}
        rest = {n: WHOLE[n] for n in ("c", "number", "none")}
        held = save({**state, **rest}, storage_writer=writer)
        assert held.state_dict_metadata["a"].size == (7, 5)

    for _ in range(2):  # the second replaces the first
        run_ranks(torch.Size(sizes).numel(), body)
    found = {}
    paths = sorted(tmp_path.glob("*.safetensors"))
    for path in paths:
        found |= load_file(path)
        with safe_open(path, framework="pt") as file:
            assert file.metadata()["format"] == "pt"
    assert {n: t.tolist() for n, t in found.items()} == {n: t.tolist() for n, t in WHOLE.items()}
    assert found["b"].dtype == torch.bfloat16
    names = sorted(path.name for path in tmp_path.iterdir())
    if max_bytes > 150:
        assert names == ["model.safetensors"]
    else:  # 140 bytes of a; 24, 48 and 4 of b, c and number
        files = [f"model-000002-0000{i}-of-00002.safetensors" for i in (1, 2)]
        assert names == [*files, "model.safetensors.index.json"]
        fields = json.loads((tmp_path / names[-1]).read_text())
        assert fields["metadata"]["total_size"] == 140 + 24 + 48 + 4
        rest = dict.fromkeys(["b", "c", "none", "number"], files[1])
        assert fields["weight_map"] == {"a": files[0], **rest}


@pytest.mark.parametrize("strategy", ["shared", "gathered"])
def test_a_fully_sharded_model_from_a_folder_and_back(tmp_path, monkeypatch, strategy):
    monkeypatch.setenv("DURE_FSDP_STRATEGY", strategy)
    model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
    whole = {n: counted(*t.shape) for n, t in model.state_dict().items()}
    save_file(whole, tmp_path / "model.safetensors")

    def body(rank):
        sharded = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
        for layer in sharded:
            fully_shard(layer)
        state = get_model_state_dict(fully_shard(sharded))
        load(state, storage_reader=HuggingFaceStorageReader(tmp_path))
        dure.barrier()
        save(state, storage_writer=HuggingFaceStorageWriter(tmp_path / "back"))
        return [p.full_tensor().equal(whole[n]) for n, p in sharded.named_parameters()]

    assert run_ranks(2, body) == [[True] * 4] * 2
    back = load_file(tmp_path / "back" / "model.safetensors")
    assert all(back[name].equal(tensor) for name, tensor in whole.items())


def test_a_checkpoint_is_consolidated(tmp_path):
    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        model = {"w": distribute_tensor(counted(7, 5), mesh, [S1]), "v": counted(3)}
        save({"model": model, "step": 3, "other": counted(2)}, checkpoint_id=tmp_path / "saved")

    run_ranks(2, body)
    consolidate(f"{tmp_path}/saved", f"{tmp_path}/to", prefix="model.", max_bytes=100)
    held = HuggingFaceStorageReader(tmp_path / "to").read_metadata().state_dict_metadata
    assert sorted(held) == ["v", "w"]
    state = {"w": torch.zeros(7, 5), "v": torch.zeros(3)}
    load(state, storage_reader=HuggingFaceStorageReader(tmp_path / "to"))
    assert state["w"].equal(counted(7, 5)) and state["v"].equal(counted(3))
    with pytest.raises(UsageError, match=r"no tensor .* begins with 'x'.*begin with model, other"):
        consolidate(tmp_path / "saved", tmp_path / "to", prefix="x")


def test_what_a_folder_of_weights_does_not_take(tmp_path):
    writer = HuggingFaceStorageWriter(tmp_path)
    for state, told in (({"step": 1}, "is a value"), ({"z": torch.ones(1) * 1j}, "C64")):
        with pytest.raises(CheckpointException, match=told):
            save(state, storage_writer=writer)
    assert not list(tmp_path.iterdir())
    with pytest.raises(dure.UsageError, match="FileSystemWriter"):
        async_save({}, storage_writer=writer)  # pyright: ignore[reportArgumentType]
    with pytest.raises(CheckpointError, match="the folder is empty"):
        FileSystemReader(tmp_path).read_metadata()


def _header(change):
    def lying(folder):
        path = folder / "model.safetensors"
        data = path.read_bytes()
        count = int.from_bytes(data[:8], "little")
        fields = json.loads(data[8 : 8 + count])
        change(fields["w"])
        text = json.dumps(fields).encode()
        path.write_bytes(len(text).to_bytes(8, "little") + text + data[8 + count :])

    return lying


def _index(**placed):
    def lying(folder):
        text = json.dumps({"weight_map": placed})
        (folder / "model.safetensors.index.json").write_text(text)

    return lying


LIES = {
    "outside": _header(lambda w: w.update(data_offsets=[8, 24])),
    "negative": _header(lambda w: w.update(data_offsets=[-8, 8])),
    "shape": _header(lambda w: w.update(shape=[1 << 62])),
    "dtype": _header(lambda w: w.update(dtype="F31")),
    "no header": lambda folder: (folder / "model.safetensors").write_bytes(b"\xff" * 20),
    "gone": lambda folder: (folder / "model.safetensors").unlink(),
    "leaves": _index(w="../model.safetensors"),
    "absent": _index(w="other.safetensors"),
}


@pytest.mark.parametrize("lie", LIES)
def test_weights_that_lie_are_refused(tmp_path, lie):
    save_file({"w": counted(4)}, tmp_path / "model.safetensors")
    LIES[lie](tmp_path)
    with pytest.raises(CheckpointException, match=str(tmp_path)):
        load({"w": torch.zeros(4)}, storage_reader=HuggingFaceStorageReader(tmp_path))
