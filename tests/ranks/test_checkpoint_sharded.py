"""Sharded checkpoints: saved in any sharding, loaded in any other; who writes, what is read.

Every whole tensor here holds 0, 1, 2, ... in row-major order, so what a rank must have after a load
is known by index arithmetic alone.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import hashlib
import json
import os
from pathlib import Path

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from safetensors import safe_open
from torch import nn

import dure
from dure.checkpoint import (
    Checkpointer,
    CheckpointException,
    DefaultLoadPlanner,
    FileSystemReader,
    FileSystemWriter,
    load,
    planning,
    save,
)
from dure.errors import CheckpointMismatch, Desync, UsageError
from dure.fsdp import fully_shard
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    zeros,
)
from dure.tensor.placement_types import StridedShard
from dure.testing import run_ranks

R, S0, S1 = Replicate(), Shard(0), Shard(1)
ONE_AXIS = [[R], [S0], [S1]]
TWO_AXES = [
    [R, R],
    [S0, R],
    [R, S1],
    [S0, S1],
    [S1, S0],
    [S0, S0],
    [StridedShard(0, split_factor=2), S0],
]
SHAPE = (7, 5)  # divides by none of the worlds


def counted(*shape):
    return torch.arange(float(torch.Size(shape).numel())).reshape(shape)


def _save_one(rank, folder, sizes, placements, shape=SHAPE):
    mesh = init_device_mesh("cpu", sizes)
    save({"w": distribute_tensor(counted(*shape), mesh, placements)}, checkpoint_id=folder)


def _load_one(rank, folder, sizes, placements, shape=SHAPE):
    mesh = init_device_mesh("cpu", sizes)
    state = {"w": zeros(*shape, device_mesh=mesh, placements=placements)}
    part = state["w"].to_local()
    wanted = distribute_tensor(counted(*shape), mesh, placements).to_local()
    loaded = load(state, checkpoint_id=folder)
    assert isinstance(state["w"], DTensor)
    assert part.equal(wanted), f"{part} is not {wanted}"  # the memory that was there
    return loaded.num_bytes, part.numel() * 4


@pytest.mark.parametrize("placements", [[R], [S0], [S1]], ids=str)
def test_what_four_have_saved_is_loaded_in_every_sharding(tmp_path, placements):
    run_ranks(4, _save_one, tmp_path, (4,), placements)
    for sizes in [(1,), (2,), (3,)]:
        for wanted in ONE_AXIS:
            read = run_ranks(sizes[0], _load_one, tmp_path, sizes, wanted)
            assert [num for num, _ in read] == [size for _, size in read]
    for wanted in TWO_AXES:
        read = run_ranks(4, _load_one, tmp_path, (2, 2), wanted)
        assert [num for num, _ in read] == [size for _, size in read]


@pytest.mark.parametrize("placements", TWO_AXES, ids=str)
def test_what_a_mesh_of_two_axes_has_saved_is_loaded_by_others(tmp_path, placements):
    run_ranks(4, _save_one, tmp_path, (2, 2), placements)
    for sizes in [(1,), (3,)]:
        for wanted in ONE_AXIS:
            run_ranks(sizes[0], _load_one, tmp_path, sizes, wanted)
    run_ranks(4, _load_one, tmp_path, (2, 2), [S1, R])


axes = st.lists(st.integers(1, 3), min_size=1, max_size=2).filter(lambda n: n[0] * n[-1] <= 6)
shardings = st.sampled_from([R, S0, S1, StridedShard(0, split_factor=2)])
meshes = axes.flatmap(
    lambda sizes: st.tuples(
        st.just(tuple(sizes)), st.lists(shardings, min_size=len(sizes), max_size=len(sizes))
    )
)


@settings(max_examples=25, deadline=None)
@given(meshes, meshes, st.tuples(st.integers(0, 6), st.integers(0, 6)))
def test_any_mesh_into_any_other(tmp_path_factory, saved, loaded, shape):
    folder = tmp_path_factory.mktemp("any")
    (sizes, placements), (others, wanted) = saved, loaded
    run_ranks(torch.Size(sizes).numel(), _save_one, folder, sizes, placements, shape)
    run_ranks(torch.Size(others).numel(), _load_one, folder, others, wanted, shape)


def test_parts_are_safetensors_with_the_rows_of_each_rank(tmp_path):
    run_ranks(4, _save_one, tmp_path, (4,), [S0], (6, 2))
    rows = {}
    for path in sorted(tmp_path.glob("part-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            rows |= {name: file.get_tensor(name).tolist() for name in file.keys()}  # noqa: SIM118
    assert rows == {  # chunks of 2, 2, 2 and no rows
        "w[0:2, 0:2]": [[0, 1], [2, 3]],
        "w[2:4, 0:2]": [[4, 5], [6, 7]],
        "w[4:6, 0:2]": [[8, 9], [10, 11]],
    }


def test_tied_tensors_are_written_once_and_loaded_by_each_name(tmp_path):
    weight = counted(3)
    save({"a": weight, "b": {"c": weight}, "d": weight[:2]}, checkpoint_id=tmp_path)
    (part,) = tmp_path.glob("part-*")
    with safe_open(part, framework="pt") as file:
        assert sorted(file.keys()) == ["a", "d"]
    state = {"b": {"c": torch.zeros(3)}, "a": torch.zeros(3)}
    loaded = load(state, checkpoint_id=tmp_path)
    assert state["a"].tolist() == state["b"]["c"].tolist() == [0, 1, 2]
    assert loaded[:2] == ([], ["d"])
    held = FileSystemReader(tmp_path).read_metadata()
    assert sorted(held.state_dict_metadata) == ["a", "b.c", "d"]


def test_what_ranks_share_is_written_once_and_spread(tmp_path):
    def body(rank):
        save({f"w{i}": counted(4, 4) for i in range(4)}, checkpoint_id=tmp_path)

    run_ranks(2, body)
    names = []
    for path in sorted(tmp_path.glob("part-*.safetensors")):
        with safe_open(path, framework="pt") as file:
            names.append(sorted(file.keys()))
    assert sorted(names[0] + names[1]) == ["w0", "w1", "w2", "w3"]
    assert [len(n) for n in names] == [2, 2]


def test_only_the_wanted_rows_are_read_from_the_disk(tmp_path, monkeypatch):
    run_ranks(1, _save_one, tmp_path, (1,), [R], (8, 100))
    counts = []
    preadv = os.preadv

    def counting(descriptor, buffers, at):
        count = preadv(descriptor, buffers, at)
        counts.append(count)
        return count

    monkeypatch.setattr(os, "preadv", counting)
    run_ranks(4, _load_one, tmp_path, (4,), [S0], (8, 100))
    assert counts == [800] * 4  # 2 rows of 100 floats


def test_nested_state_plain_tensors_numbers_and_dtypes(tmp_path):
    def state(filled):
        k = 1 if filled else 0
        return {
            "a": {"b": [torch.full((2,), 3.0 * k), {"c": 7 * k}], "plain": [1 * k, 2 * k]},
            "number": torch.tensor(5 * k),
            "half": torch.full((3,), 1.5 * k, dtype=torch.bfloat16),
            "complex": torch.full((2,), (1 + 2j) * k, dtype=torch.complex64),
            "column": torch.arange(6.0).reshape(2, 3).t() * k,
            "none": torch.full((0, 3), 0.0),
            "words": "yes" if filled else "no",
            "betas": (0.5 * k, 0.25 * k),
            "pair": (torch.full((1,), 9.0 * k), 8 * k),
            "keys": {0: 4 * k},
        }

    save(state(True), checkpoint_id=tmp_path)
    found = state(False)
    inner, column = found["a"]["b"][0], found["column"]
    assert load(found, checkpoint_id=tmp_path)[:2] == ([], [])
    assert found["a"]["b"][0] is inner and inner.tolist() == [3, 3]
    assert found["a"]["b"][1] == {"c": 7} and found["a"]["plain"] == [1, 2]
    assert found["number"].item() == 5 and found["half"].tolist() == [1.5] * 3
    assert found["complex"].tolist() == [1 + 2j] * 2
    assert found["pair"][0].item() == 9 and found["pair"][1] == 8
    assert found["column"] is column and column.tolist() == [[0, 3], [1, 4], [2, 5]]
    assert (found["words"], found["betas"], found["keys"]) == ("yes", (0.5, 0.25), {0: 4})
    held = FileSystemReader(tmp_path).read_metadata()
    assert held.state_dict_metadata["a.b.0"].size == (2,)
    assert held.planner_data["keys.0"] == ("keys", 0)


def test_elements_are_converted_to_the_dtype_that_is_there(tmp_path):
    save({"w": counted(2, 3)}, checkpoint_id=tmp_path)
    state = {"w": torch.zeros(2, 3, dtype=torch.bfloat16)}
    load(state, checkpoint_id=tmp_path)
    assert state["w"].dtype == torch.bfloat16 and state["w"].tolist() == [[0, 1, 2], [3, 4, 5]]


def _trained(rank):
    mesh = init_device_mesh("cpu", (dure.get_world_size(),))
    model = nn.Linear(3, 5)
    for name, parameter in list(model.named_parameters()):
        whole = counted(*parameter.shape)
        model.register_parameter(name, nn.Parameter(distribute_tensor(whole, mesh, [S0])))
    return model, torch.optim.AdamW(model.parameters(), lr=0.5)


def _step(model, optimizer, by):
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter) * by
    optimizer.step()


def test_modules_and_optimizers_into_another_world(tmp_path):
    def saving(rank):
        model, optimizer = _trained(rank)
        _step(model, optimizer, 2.0)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        return model.weight.full_tensor().tolist()

    def loading(rank):
        model, optimizer = _trained(rank)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        state = optimizer.state[model.weight]
        assert state["exp_avg"].full_tensor().flatten().tolist() == pytest.approx([0.2] * 15)
        assert state["step"].item() == 1
        return model.weight.full_tensor().tolist()

    (weights, *_) = run_ranks(4, saving)
    assert run_ranks(3, loading) == [weights] * 3


def _fully_sharded(scale):
    model = nn.Sequential(nn.Linear(5, 7), nn.Linear(7, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(counted(*parameter.shape) * scale)
    for layer in model:
        fully_shard(layer)
    fully_shard(model)
    return model, torch.optim.AdamW(model.parameters(), lr=0.1)


def _losses(model, optimizer, steps):
    inputs = torch.arange(10.0).reshape(2, 5) / 10
    losses = []
    for _ in range(steps):
        loss = model(inputs).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.item())
    return losses


@pytest.mark.parametrize("name", ["shared", "gathered"])
def test_fully_sharded_training_goes_on_in_another_world(tmp_path, monkeypatch, name):
    monkeypatch.setenv("DURE_FSDP_STRATEGY", name)

    def saving(rank):
        model, optimizer = _fully_sharded(0.01)
        _losses(model, optimizer, 2)
        save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        return _losses(model, optimizer, 3)

    def loading(rank):
        model, optimizer = _fully_sharded(0.5)
        _losses(model, optimizer, 1)
        load({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        return _losses(model, optimizer, 3)

    (undisturbed, *_) = run_ranks(4, saving)
    for ranks in (1, 2, 3):
        for losses in run_ranks(ranks, loading):
            assert losses == pytest.approx(undisturbed, rel=1e-5)


@pytest.mark.parametrize("sharded", [False, True])
def test_a_fully_sharded_run_goes_on_in_another_world(tmp_path, monkeypatch, sharded):
    monkeypatch.setenv("DURE_FSDP_STRATEGY", "shared" if sharded else "gathered")

    def saving(rank):
        model, optimizer = _fully_sharded(0.01)
        _losses(model, optimizer, 2)
        Checkpointer(tmp_path, sharded=sharded).save(2, model=model, optimizer=optimizer)
        return _losses(model, optimizer, 3)

    def loading(rank):
        model, optimizer = _fully_sharded(0.5)  # which has not stepped
        assert Checkpointer(tmp_path).load(model=model, optimizer=optimizer) == 2
        return _losses(model, optimizer, 3)

    (undisturbed, *_) = run_ranks(3, saving)
    for losses in run_ranks(2, loading):
        assert losses == pytest.approx(undisturbed, rel=1e-5)


def test_missing_and_unexpected_keys(tmp_path):
    save({"a": counted(2), "b": 1}, checkpoint_id=tmp_path)
    state = {"a": torch.zeros(2), "c": torch.zeros(1)}
    with pytest.raises(
        CheckpointException, match=r"Missing key in checkpoint state_dict: c\."
    ) as caught:
        load(state, checkpoint_id=tmp_path)
    assert list(caught.value.failures) == [0] and state["a"].tolist() == [0, 0]
    partial = DefaultLoadPlanner(allow_partial_load=True)
    loaded = load(state, storage_reader=FileSystemReader(tmp_path), planner=partial)
    assert (loaded.missing_keys, loaded.unexpected_keys) == (["c"], ["b"])
    assert state["a"].tolist() == [0, 1] and state["c"].tolist() == [0]


def test_shapes_and_kinds_that_differ_change_nothing(tmp_path):
    save({"a": counted(2), "w": counted(2, 2)}, checkpoint_id=tmp_path)
    for other in (torch.zeros(4), 3):
        state = {"a": torch.zeros(2), "w": other}
        with pytest.raises(CheckpointException) as caught:
            load(state, checkpoint_id=tmp_path)
        assert isinstance(caught.value.failures[0][0], CheckpointMismatch)
        assert state["a"].tolist() == [0, 0]


def test_a_failure_of_one_rank_is_that_of_all_and_what_was_saved_stays(tmp_path):
    def body(rank):
        save({"w": counted(3)}, checkpoint_id=tmp_path)
        bad = {"w": object() if rank == 1 else torch.zeros(3)}
        with pytest.raises(CheckpointException) as caught:
            save(bad, checkpoint_id=tmp_path)
        error, where = caught.value.failures[1]
        assert isinstance(error, UsageError) and where
        state = {"w": torch.zeros(3)}
        load(state, checkpoint_id=tmp_path)
        return list(caught.value.failures), state["w"].tolist()

    assert run_ranks(2, body) == [([1], [0, 1, 2])] * 2
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "manifest.json",
        "part-000001-00000.safetensors",
    ]


def test_a_full_disk_leaves_the_checkpoint_before(tmp_path, monkeypatch):
    save({"w": counted(3)}, checkpoint_id=tmp_path)
    before = sorted(p.name for p in tmp_path.iterdir())

    def full(descriptor):
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(os, "fsync", full)
    with pytest.raises(CheckpointException, match="No space left"):
        save({"w": torch.zeros(3)}, checkpoint_id=tmp_path)
    monkeypatch.undo()
    assert sorted(p.name for p in tmp_path.iterdir()) == before
    state = {"w": torch.zeros(3)}
    load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == [0, 1, 2]


def test_a_save_into_the_same_folder_replaces_what_was_there(tmp_path):
    for value in (1.0, 2.0):
        save({"w": torch.full((2,), value)}, storage_writer=FileSystemWriter(tmp_path))
    state = {"w": torch.zeros(2)}
    load(state, checkpoint_id=tmp_path)
    assert state["w"].tolist() == [2, 2]
    assert sorted(p.name for p in tmp_path.iterdir()) == [
        "manifest.json",
        "part-000002-00000.safetensors",
    ]


def test_plans_are_made_once_for_states_that_are_alike(tmp_path, monkeypatch):
    made = []
    divide = planning.divide
    monkeypatch.setattr(planning, "divide", lambda offers: made.append(1) or divide(offers))

    known = []
    division = planning.Known.division

    def told(self, offers):
        known.append(sum(offer is None for _, offer in offers))
        return division(self, offers)

    monkeypatch.setattr(planning.Known, "division", told)

    def body(rank):
        for value in (1.0, 2.0, 3.0):
            save({"w": torch.full((2,), value), "step": value}, checkpoint_id=tmp_path)
        save({"v": torch.zeros(2)}, checkpoint_id=tmp_path / "other")
        state = {"w": torch.zeros(2), "step": 0}
        load(state, checkpoint_id=tmp_path)
        return state["w"].tolist(), state["step"]

    assert run_ranks(2, body) == [([3, 3], 3)] * 2
    assert len(made) == 2 * 2  # two states, two ranks
    assert sorted(known) == [0] * 4 + [2] * 4  # the second and third save sent digests only


def test_ranks_that_do_not_all_save(tmp_path):
    def body(rank):
        def call():
            if rank == 0:
                save({"w": counted(3)}, checkpoint_id=tmp_path)
            else:
                dure.all_reduce(torch.zeros(3))

        with pytest.raises(Desync):
            call()

    run_ranks(2, body)
    assert not (tmp_path / "manifest.json").exists()


def test_what_cannot_be_saved_is_refused_by_name(tmp_path):
    def body(rank):
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

    run_ranks(2, body)


def _lies(folder, change):
    path = folder / "manifest.json"
    fields = json.loads(path.read_bytes().partition(b"\n")[2])
    change(fields, fields["tensors"]["w"]["slices"])
    body = json.dumps(fields).encode()
    path.write_bytes(hashlib.sha256(body).hexdigest().encode() + b"\n" + body)


LIES = {
    "leaves the folder": lambda f, s: s[0].update(file="../part-000001-00000.safetensors"),
    "no such name": lambda f, s: s[0].update(file="/etc/passwd"),
    "another file": lambda f, s: s[0].update(file="part-000009-00000.safetensors"),
    "overlap": lambda f, s: s[1].update(offsets=[1, 0]),
    "twice": lambda f, s: s.append(s[0]),
    "missing": lambda f, s: s.pop(),
    "outside": lambda f, s: s[1].update(offsets=[9, 0]),
    "negative": lambda f, s: s[0].update(offsets=[-1, 0]),
    "shape": lambda f, s: f["tensors"]["w"].update(shape=[1 << 60, 2]),
    "dtype": lambda f, s: f["tensors"]["w"].update(dtype="I32"),
    "unknown dtype": lambda f, s: f["tensors"]["w"].update(dtype="F31"),
    "sum": lambda f, s: s[0].update(crc32c=s[0]["crc32c"] ^ 1),
    "no number": lambda f, s: s[0].update(crc32c="8"),
    "form": lambda f, s: f.pop("tensors"),
    "version": lambda f, s: f.update(version=99),
}


@pytest.mark.parametrize("lie", LIES)
def test_a_manifest_that_lies_is_refused(tmp_path, lie):
    run_ranks(2, _save_one, tmp_path, (2,), [S0], (4, 2))
    _lies(tmp_path, LIES[lie])
    with pytest.raises(CheckpointException, match=str(tmp_path)):
        load({"w": torch.zeros(4, 2)}, checkpoint_id=tmp_path)


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


def test_arguments(tmp_path):
    with pytest.raises(UsageError):
        save({})
    with pytest.raises(UsageError):
        save({}, checkpoint_id="s3://bucket/x")
    with pytest.raises(UsageError):
        load({}, checkpoint_id=tmp_path, planner=object())  # pyright: ignore[reportArgumentType]
    with pytest.raises(UsageError):
        save({}, checkpoint_id=tmp_path, use_collectives=False)
    with pytest.raises(UsageError):
        DefaultLoadPlanner(flatten_state_dict=False)
    with pytest.raises(CheckpointException, match="manifest"):
        load({}, checkpoint_id=tmp_path)
    once = FileSystemWriter(tmp_path, overwrite=False)
    save({"a": 1}, storage_writer=once)
    with pytest.raises(CheckpointException, match="already"):
        save({"a": 2}, storage_writer=once)
