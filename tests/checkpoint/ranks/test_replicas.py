"""What ranks have under one name is the same, or the save refuses it: nothing is mixed."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn

from dure import new_group
from dure.checkpoint import (
    Checkpointer,
    CheckpointException,
    DefaultSavePlanner,
    PerRank,
    async_save,
    load,
    save,
)
from dure.errors import CheckpointMismatch
from dure.fsdp import fully_shard
from dure.tensor import DeviceMesh, Replicate, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted

SHARDED = pytest.mark.parametrize("sharded", [False, True])


def _filled(module: nn.Module, value: float) -> nn.Module:
    with torch.no_grad():
        for p in module.parameters():
            p.fill_(value)
    return module


def _stepped(module: nn.Module, lr: float = 0.5) -> torch.optim.Optimizer:
    """Return an optimizer whose moments are those of this module's values."""
    optimizer = torch.optim.Adam(module.parameters(), lr=lr)
    for p in module.parameters():
        p.grad = p.detach() + 1
    optimizer.step()
    return optimizer


def _two(rank: int) -> torch.Tensor:
    return torch.full((40,), float(rank))


# What a rank passes to Checkpointer.save, and the name that the error gives.
def _renamed(module):
    """Let a module's `state_dict` have other names than its parameters, as its older versions."""

    def rename(_, state, *__):
        for key in list(state):
            state[f"its.{key}"] = state.pop(key)

    module._register_state_dict_hook(rename)
    return module


DIFFERENT = {
    "other names": (lambda r: nn.ModuleDict({f"l{r}": _filled(nn.Linear(2, 2), 1)}), "x.l1.weight"),
    "other dtypes": (
        lambda r: _filled(nn.Linear(2, 2), 1).to([torch.float32, torch.float64][r]),
        "x.weight",
    ),
    "one parameter that differs": (
        lambda r: nn.ParameterList([torch.ones(99), torch.full((99,), float(r))]),
        "x.1",
    ),
    "parameters under other keys": (lambda r: _renamed(_filled(nn.Linear(2, 2), r)), "x.its.bias"),
    "other moments": (lambda r: _stepped(_filled(nn.Linear(2, 2), r)), "x.state.0.exp_avg"),
    "other options": (lambda r: _stepped(_filled(nn.Linear(2, 2), 1), lr=r + 1), "x.param_groups"),
    "another key": (lambda r: {f"best{r}": 1.0}, "x.best1"),
}


@SHARDED
@pytest.mark.parametrize("what", DIFFERENT)
def test_objects_that_differ_between_ranks_are_refused_by_name(tmp_path, what, sharded):
    made, name = DIFFERENT[what]

    def body(rank):
        checkpointer = Checkpointer(tmp_path, sharded=sharded)
        checkpointer.save(1, x={"before": 1})
        with pytest.raises(CheckpointMismatch) as caught:
            checkpointer.save(2, x=made(rank))
        found = caught.value.seen, "PerRank" in caught.value.fix
        del caught  # which refers to this frame, and so to the Checkpointer and its lock
        return found

    for seen, has_advice in run_ranks(2, body):
        assert seen.startswith(name) and has_advice
    assert [p.name for p in tmp_path.glob("*-step-*")] == ["000001-step-1"]


@SHARDED
def test_values_that_each_rank_has_measured_are_those_of_rank_0(tmp_path, caplog, sharded):
    """As a program's own state has them: a best loss, an average of a model with batch norm."""

    def measured(rank):
        return {
            "best": float(rank),
            "window": (1, rank),
            "last": None if rank else 1.0,
            "position": bytes([rank]),
            "mean": _two(rank + 1),
        }

    def body(rank):
        Checkpointer(tmp_path, sharded=sharded).save(1, state=measured(rank))
        state = measured(7) | {"last": 2.0}
        Checkpointer(tmp_path).load(state=state)
        return state | {"mean": state["mean"].tolist()}

    wanted = {"best": 0.0, "window": (1, 0), "last": 1.0, "position": b"\0", "mean": [1.0] * 40}
    assert run_ranks(2, body) == [wanted] * 2
    assert "different values of state.best, state.window, state.last, and 2 more" in caplog.text


@SHARDED
def test_an_object_of_each_rank_comes_back_to_it_under_a_name_of_its_own(tmp_path, sharded):
    def body(rank):
        stage = _filled(nn.Linear(2, 3 + rank), rank + 1)
        optimizer = _stepped(stage)
        named = {f"stage{rank}": stage, f"optimizer{rank}": optimizer, "head": PerRank([rank])}
        Checkpointer(tmp_path, sharded=sharded).save(5, **named, shared={"step": 5})
        again = _filled(nn.Linear(2, 3 + rank), 9)
        moments, head, shared = torch.optim.Adam(again.parameters()), [9], {"step": 0}
        named = {f"stage{rank}": again, f"optimizer{rank}": moments, "head": PerRank(head)}
        assert Checkpointer(tmp_path).load(**named, shared=shared) == 5
        kept = [
            torch.equal(a, b) for a, b in zip(again.parameters(), stage.parameters(), strict=True)
        ]
        both = zip(moments.state.values(), optimizer.state.values(), strict=True)
        return (
            all(kept),
            all(torch.equal(a["exp_avg"], b["exp_avg"]) for a, b in both),
            head,
            shared,
        )

    assert run_ranks(2, body) == [(True, True, [rank], {"step": 5}) for rank in range(2)]


@SHARDED
def test_buffers_that_differ_are_those_of_rank_0(tmp_path, sharded):
    def body(rank):
        norms = [nn.BatchNorm1d(3), nn.BatchNorm1d(4)]
        model = _filled(nn.Sequential(*norms), 1)
        for norm in norms:
            norm.running_mean.fill_(rank + 1)
        Checkpointer(tmp_path / "run", sharded=sharded).save(1, model=model)
        save({"model": model}, checkpoint_id=tmp_path / "saved")
        found = []
        for norm in norms:
            norm.running_mean.zero_()
        Checkpointer(tmp_path / "run").load(model=model)
        found += [norm.running_mean.tolist() for norm in norms]
        load({"model": model}, checkpoint_id=tmp_path / "saved")
        return found + [norm.running_mean.tolist() for norm in norms]

    assert run_ranks(2, body) == [[[1] * 3, [1] * 4] * 2] * 2


@pytest.mark.parametrize("owner", [0, 1])
def test_a_tensor_of_one_rank_that_others_have_with_other_values_is_not_lost(tmp_path, owner):
    def body(rank):
        state = {"shared": _two(rank)}
        if rank == owner:
            state["own"] = state["shared"]
        if owner == 1:
            with pytest.raises(CheckpointException, match="own of rank 1 is the tensor shared"):
                save(state, checkpoint_id=tmp_path)
            state = {name: tensor.clone() for name, tensor in state.items()}
        save(state, checkpoint_id=tmp_path)

    run_ranks(2, body)
    found = {"own": torch.zeros(40)}
    load(found, checkpoint_id=tmp_path)
    assert found["own"].equal(_two(owner))


def _optimizer_of_stage(rank: int) -> torch.optim.Optimizer:
    mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp"))
    stage = nn.Linear(4, 4)
    fully_shard(stage, mesh=mesh["dp"])
    _filled(stage, float(mesh.get_local_rank("pp")))
    return _stepped(stage)


class _Planner(DefaultSavePlanner):
    pass


SAVES: dict[str, Any] = {
    "save": lambda state, folder: save(state, checkpoint_id=folder),
    "async_save": lambda state, folder: async_save(state, checkpoint_id=folder),
    "planner": lambda state, folder: save(state, checkpoint_id=folder, planner=_Planner()),
}


@pytest.mark.parametrize("way", SAVES)
def test_sharded_optimizers_of_stages_are_not_mixed(tmp_path, way):
    def body(rank):
        with pytest.raises(CheckpointException) as caught:
            SAVES[way]({"optimizer": _optimizer_of_stage(rank)}, tmp_path)
        error = caught.value.failures[rank][0]
        return (
            type(error),
            error.seen.startswith("optimizer.state.0.exp_avg"),
            "get_optimizer_state_dict" in error.fix,
        )

    assert run_ranks(4, body) == [(CheckpointMismatch, True, True)] * 4
    assert not list(tmp_path.glob("manifest.json"))


def test_equal_tensors_of_two_meshes_are_saved(tmp_path):
    """As of a model that is cut by one axis, with replicas along the other."""

    def body(rank):
        mesh = init_device_mesh("cpu", (2, 2), mesh_dim_names=("dp", "tp"))
        weight = distribute_tensor(counted(4, 2), mesh["tp"], [Shard(0)])
        save({"w": weight}, checkpoint_id=tmp_path)
        whole = {"w": torch.zeros(4, 2)}
        load(whole, checkpoint_id=tmp_path)
        return whole["w"].flatten().tolist()

    assert run_ranks(4, body) == [list(range(8))] * 4


@pytest.mark.parametrize("way", ["save", "planner"])
def test_replicated_tensors_of_two_meshes_that_differ_are_refused_by_one_rank_of_each(
    tmp_path, way
):
    """The group that saves is as large as each mesh, but has other ranks."""

    def body(rank):
        meshes = [DeviceMesh("cpu", [0, 1]), DeviceMesh("cpu", [2, 3])]
        group = new_group([0, 2])
        if rank in (1, 3):
            return None
        state = {
            "w": distribute_tensor(_two(rank), meshes[rank // 2], [Replicate()], src_data_rank=None)
        }
        planner = {"save": None, "planner": _Planner()}[way]
        with pytest.raises(CheckpointException) as caught:
            save(state, checkpoint_id=tmp_path, process_group=group, planner=planner)
        return type(caught.value.failures[0][0])

    assert run_ranks(4, body) == [CheckpointMismatch, None] * 2


def test_tensors_in_a_planner_with_other_dtypes_are_refused(tmp_path):
    def body(rank):
        state = {"w": torch.ones(2, dtype=[torch.float32, torch.float64][rank])}
        with pytest.raises(CheckpointException) as caught:
            save(state, checkpoint_id=tmp_path, planner=_Planner())
        return {type(error) for error, _ in caught.value.failures.values()}

    assert run_ranks(2, body) == [{CheckpointMismatch}] * 2


def test_buffers_of_a_module_with_other_keys_may_differ(tmp_path):
    def body(rank):
        module = _renamed(nn.BatchNorm1d(2))
        module.running_mean.fill_(rank)
        Checkpointer(tmp_path).save(1, x=module)

    run_ranks(2, body)
    saved = {}
    Checkpointer(tmp_path).load(x=saved)
    assert saved["its.running_mean"].tolist() == [0, 0]


@SHARDED
@pytest.mark.parametrize("way", ["PerRank", "a name for each rank"])
def test_buffers_of_each_rank_come_back_to_it_although_a_module_has_them_too(
    tmp_path, sharded, way
):
    def body(rank):
        norm = nn.BatchNorm1d(3)
        norm.running_mean.fill_(rank + 1)

        def named(buffers):
            return {"own": PerRank(buffers)} if way == "PerRank" else {f"own{rank}": buffers}

        buffers = dict(norm.named_buffers())
        Checkpointer(tmp_path, sharded=sharded).save(1, model=norm, **named(buffers))
        found = {name: torch.zeros_like(buffer) for name, buffer in buffers.items()}
        Checkpointer(tmp_path).load(model=norm, **named(found))
        return norm.running_mean.tolist(), found["running_mean"].tolist()

    assert run_ranks(2, body) == [([1] * 3, [1] * 3), ([1] * 3, [2] * 3)]
