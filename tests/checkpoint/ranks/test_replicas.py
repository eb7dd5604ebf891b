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
    HuggingFaceStorageWriter,
    PerRank,
    async_save,
    load,
    save,
)
from dure.checkpoint.replicas import marks_of
from dure.checkpoint.saving import take
from dure.checkpoint.state_dict import StateDictOptions, get_optimizer_state_dict
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
    "other shapes": (lambda r: _filled(nn.Linear(2, 2 + r), 1), "x.weight"),
    "other dtypes": (
        lambda r: _filled(nn.Linear(2, 2), 1).to([torch.float32, torch.float64][r]),
        "x.weight",
    ),
    "other parameters": (lambda r: _filled(nn.Linear(2, 2, bias=False), r), "x.weight"),
    "one parameter that differs": (
        lambda r: nn.ParameterList([torch.ones(99), torch.full((99,), float(r))]),
        "x.1",
    ),
    "parameters under other keys": (lambda r: _renamed(_filled(nn.Linear(2, 2), r)), "x.its.bias"),
    "other moments": (lambda r: _stepped(_filled(nn.Linear(2, 2), r)), "x.state.0.exp_avg"),
    "other options": (lambda r: _stepped(_filled(nn.Linear(2, 2), 1), lr=r + 1), "x.param_groups"),
    "more parameters": (
        lambda r: _stepped(_filled(nn.Linear(2, 2, bias=r == 1), 1)),
        "x.state.1",
    ),
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


def test_sharded_optimizer_of_a_stage_is_refused_by_a_checkpointer(tmp_path):
    def body(rank):
        optimizer = _optimizer_of_stage(rank)
        with pytest.raises(CheckpointMismatch) as caught:
            Checkpointer(tmp_path).save(1, optimizer=optimizer)
        refused = caught.value.seen.split()[0]
        del caught  # which refers to this frame, and so to Checkpointers and their lock
        stage = init_device_mesh("cpu", (2, 2), mesh_dim_names=("pp", "dp")).get_local_rank("pp")
        Checkpointer(tmp_path).save(1, **{f"optimizer{stage}": optimizer})
        wanted = [s["exp_avg"].to_local().clone() for s in optimizer.state.values()]
        optimizer.state.clear()
        Checkpointer(tmp_path).load(**{f"optimizer{stage}": optimizer})
        found = [s["exp_avg"].to_local() for s in optimizer.state.values()]
        return refused, list(map(torch.equal, found, wanted))

    assert run_ranks(4, body) == [("optimizer.state.0.exp_avg", [True, True])] * 4


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


def test_what_differs_in_a_dict_is_that_of_the_lowest_rank_and_logged(tmp_path, caplog):
    def body(rank):
        for step in range(2):
            values = {"loss": rank, "seen": [step] * (3 - rank), "pair": ({"at": rank}, step)}
            tensors = {f"t{i}": torch.full((40,), float(rank)) for i in range(3)}
            save({**values, "tensors": tensors}, checkpoint_id=tmp_path)
        state = {**values, "tensors": {name: torch.ones(40) * 9 for name in tensors}}
        load(state, checkpoint_id=tmp_path)
        kept = sum(t.sum().item() for t in state.pop("tensors").values())
        return kept, state

    kept = 0, {"loss": 0, "seen": [1, 1, 1], "pair": ({"at": 0}, 1)}
    assert run_ranks(2, body) == [kept] * 2
    (told,) = [r.message for r in caplog.records if r.name == "dure.checkpoint"]  # once, of two
    assert "loss, seen, pair.0.at, and 3 more" in told


def test_lists_of_different_length_are_those_of_one_rank(tmp_path):
    def body(rank):
        state = {"n": [10 * rank + i for i in range(2 + rank)], "t": [_two(rank)] * (2 + rank)}
        save(state, checkpoint_id=tmp_path)
        back = {"n": [], "t": [torch.ones(40), torch.ones(40)]}
        loaded = load(back, checkpoint_id=tmp_path)
        shorter = load({"t": [torch.ones(40)]}, checkpoint_id=tmp_path)  # loads one item, as torch
        kept = back["n"], [t.sum().item() for t in back["t"]]
        return *kept, loaded[:2], shorter.unexpected_keys

    assert run_ranks(2, body) == [([0, 1], [0, 0], ([], []), ["n", "t.1"])] * 2


def test_tensors_in_a_planner_with_other_dtypes_are_refused(tmp_path):
    def body(rank):
        state = {"w": torch.ones(2, dtype=[torch.float32, torch.float64][rank])}
        with pytest.raises(CheckpointException) as caught:
            save(state, checkpoint_id=tmp_path, planner=_Planner())
        return {type(error) for error, _ in caught.value.failures.values()}

    assert run_ranks(2, body) == [{CheckpointMismatch}] * 2


def test_weights_of_modules_that_differ_are_refused_in_a_folder_of_weights(tmp_path):
    def body(rank):
        state = {"head": _filled(nn.Linear(2, 2, bias=False), rank)}
        with pytest.raises(CheckpointException) as caught:
            save(state, storage_writer=HuggingFaceStorageWriter(tmp_path))
        return caught.value.failures[rank][0].seen

    assert all(seen.startswith("head.weight of rank 1") for seen in run_ranks(2, body))
    assert not list(tmp_path.glob("*.safetensors"))


def test_state_by_names_of_parameters_fits_stages_that_have_equal_shapes(tmp_path):
    def body(rank):
        stage = nn.ModuleDict({f"layer{rank}": _filled(nn.Linear(2, 2), rank)})
        optimizer = _stepped(stage, lr=1 + rank)
        state = {"optimizer": get_optimizer_state_dict(stage, optimizer)}
        with pytest.raises(CheckpointException) as caught:  # the options of one stage would be lost
            save(state, checkpoint_id=tmp_path)
        assert "param_groups.0.params" in caught.value.failures[0][0].seen
        options = StateDictOptions(flatten_optimizer_state_dict=True)
        state = {"optimizer": get_optimizer_state_dict(stage, optimizer, options=options)}
        save(state, checkpoint_id=tmp_path)
        wanted = [s["exp_avg"].clone() for s in optimizer.state.values()]
        for s in optimizer.state.values():
            s["exp_avg"].zero_()
        state["optimizer"][f"param_groups.layer{rank}.weight.lr"] = 9
        load(state, checkpoint_id=tmp_path)
        found = [s["exp_avg"] for s in optimizer.state.values()]
        lr = state["optimizer"][f"param_groups.layer{rank}.weight.lr"]
        return list(map(torch.equal, found, wanted)), lr

    assert run_ranks(2, body) == [([True, True], 1), ([True, True], 2)]


@pytest.mark.parametrize(
    "dtype", [torch.float32, torch.bfloat16, torch.float8_e4m3fn, torch.bool, torch.complex128]
)
def test_marks_are_of_bits_and_do_not_depend_on_strides(dtype):
    values = torch.arange(96).remainder(2).reshape(8, 12)
    tensor = values.to(torch.float32).to(dtype)
    turned = values.t().contiguous().to(torch.float32).to(dtype).t()
    other = (1 - values).to(torch.float32).to(dtype)
    first, second, third, number = (
        marks_of([t]) for t in (tensor, turned, other, tensor.flatten()[0])
    )
    assert first == second != third and len(number) == 4
    assert marks_of([tensor, other]) == first + third
    assert marks_of([torch.tensor(0.0)]) != marks_of([torch.tensor(-0.0)])


def test_entries_of_two_ranks_that_read_alike_are_refused(tmp_path):
    def body(rank):
        state = {"a": {"b": 1}} if rank else {"a.b": torch.ones(1)}
        with pytest.raises(CheckpointException) as caught:
            save({**state, "c": 3}, checkpoint_id=tmp_path)
        return caught.value.failures[rank][0].seen

    assert all("a.b" in seen for seen in run_ranks(2, body))


def test_buffers_of_a_module_with_other_keys_may_differ(tmp_path):
    def body(rank):
        module = _renamed(nn.BatchNorm1d(2))
        module.running_mean.fill_(rank)
        Checkpointer(tmp_path).save(1, x=module)

    run_ranks(2, body)
    saved = {}
    Checkpointer(tmp_path).load(x=saved)
    assert saved["its.running_mean"].tolist() == [0, 0]


def test_buffers_that_a_hook_has_copied_may_differ_and_sparse_ones_are_no_obstacle(tmp_path):
    """The hook leaves frozen parameters out, and saves the others in another dtype."""

    def body(rank):
        module = nn.ModuleDict({"frozen": _filled(nn.Linear(2, 2), 1), "bn": nn.BatchNorm1d(2)})
        module.register_buffer("graph", torch.eye(2).to_sparse(), persistent=False)
        module._register_state_dict_hook(
            lambda _, state, *__: {k: v.half() for k, v in state.items() if "frozen" not in k}
        )
        module["bn"].running_mean.fill_(rank)
        Checkpointer(tmp_path).save(1, x=module)

    run_ranks(2, body)
    saved = {}
    Checkpointer(tmp_path).load(x=saved)
    assert saved["bn.running_mean"].tolist() == [0, 0]
    assert "frozen.weight" not in saved


def test_a_mesh_is_compared_with_the_ranks_that_save_once(monkeypatch):
    """Its list of ranks is made once, however many tensors there are."""
    made: list[int] = []
    mesh_of: Any = DeviceMesh.mesh

    def counting(mesh: DeviceMesh) -> torch.Tensor:
        made.append(1)
        return mesh_of.fget(mesh)

    def body(rank: int) -> int:
        mesh = init_device_mesh("cpu", (2,))
        state = {str(n): distribute_tensor(torch.ones(2), mesh, [Shard(0)]) for n in range(9)}
        monkeypatch.setattr(DeviceMesh, "mesh", property(counting))
        take(state, frozenset({0, 1}))
        return len(made)

    assert max(run_ranks(2, body)) == 2
