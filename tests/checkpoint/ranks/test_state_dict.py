"""The state of models and optimizers under the user's names, taken and put back."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.algorithms._checkpoint.checkpoint_wrapper import checkpoint_wrapper

import dure
from dure.checkpoint import FileSystemReader, load, save
from dure.checkpoint.state_dict import (
    StateDictOptions,
    _patch_model_state_dict,
    _patch_optimizer_state_dict,
    get_model_state_dict,
    get_optimizer_state_dict,
    get_state_dict,
    set_model_state_dict,
    set_optimizer_state_dict,
    set_state_dict,
)
from dure.errors import CheckpointMismatch, UsageError
from dure.fsdp import fully_shard
from dure.tensor import DTensor, Replicate, Shard, distribute_tensor, init_device_mesh
from dure.testing import run_ranks
from tests.checkpoint.saved_states import counted

STRATEGIES = ["shared", "gathered"]
FULL = StateDictOptions(full_state_dict=True)


class Body(nn.Module):
    """Names: first.weight [3, 2], first.bias [3], norm.*, second.weight [2, 3]."""

    def __init__(self, wrap=lambda module: module):
        super().__init__()
        self.first = wrap(nn.Linear(2, 3))
        self.norm = nn.BatchNorm1d(3)
        self.second = wrap(nn.Linear(3, 2, bias=False))

    def forward(self, x):
        return self.second(self.norm(self.first(x)))


NAMES = ["first.weight", "first.bias", "norm.weight", "norm.bias", "norm.running_mean"]
NAMES += ["norm.running_var", "norm.num_batches_tracked", "second.weight"]
PARAMETERS = ["first.weight", "first.bias", "norm.weight", "norm.bias", "second.weight"]


def compiled(module) -> Any:
    return torch.compile(module, backend="eager")


WRAPPED = {
    "plain": Body,
    "recomputed": lambda: Body(checkpoint_wrapper),
    "compiled": lambda: compiled(Body()),
    "both": lambda: compiled(Body(lambda m: checkpoint_wrapper(compiled(m)))),
    "parallel": lambda: nn.DataParallel(Body(checkpoint_wrapper)),
}


def _stepped(model, kind: Any = torch.optim.AdamW, steps=1, **options):
    """Return an optimizer that has seen gradients of ones, so exp_avg is 0.1 after one step."""
    optimizer = kind(model.parameters(), lr=0.5, **options)
    for _ in range(steps):
        for parameter in model.parameters():
            if parameter.requires_grad:
                parameter.grad = torch.ones_like(parameter)
        optimizer.step()
        optimizer.zero_grad()
    return optimizer


@pytest.mark.parametrize("kind", WRAPPED)
def test_names_are_those_without_wrappers(kind):
    model = WRAPPED[kind]()
    optimizer = _stepped(model)
    state, optim = get_state_dict(model, optimizer)
    assert sorted(state) == sorted(NAMES)
    assert sorted(optim["state"]) == sorted(PARAMETERS)
    assert sorted(optim["param_groups"][0]["params"]) == sorted(PARAMETERS)
    for name, parameter in zip(optim["param_groups"][0]["params"], model.parameters(), strict=True):
        assert optim["state"][name]["exp_avg"] is optimizer.state[parameter]["exp_avg"]

    plain = Body()
    other = torch.optim.AdamW(reversed(list(plain.parameters())), lr=0.1)
    keys = set_state_dict(plain, other, model_state_dict=state, optim_state_dict=optim)
    assert keys == ([], []) and other.param_groups[0]["lr"] == 0.5
    for name, parameter in plain.named_parameters():
        assert parameter.equal(state[name])
        assert other.state[parameter]["exp_avg"].equal(optim["state"][name]["exp_avg"])

    again = WRAPPED[kind]()
    ones = {name: torch.ones_like(value) for name, value in state.items()}
    assert set_model_state_dict(again, ones) == ([], [])
    assert all((p == 1).all() for p in again.parameters())


def test_data_parallel_of_ours_has_the_names_of_its_module():
    def body(rank):
        ddp = dure.DistributedDataParallel(Body(checkpoint_wrapper))
        ddp(torch.ones(2, 2)).sum().backward()
        optimizer = torch.optim.SGD(ddp.parameters(), lr=0.1, momentum=0.9)
        optimizer.step()
        state, optim = get_state_dict(ddp, optimizer)
        keys = set_state_dict(ddp, optimizer, model_state_dict=state, optim_state_dict=optim)
        return sorted(state), sorted(optim["state"]), keys

    assert run_ranks(2, body) == [(sorted(NAMES), sorted(PARAMETERS), ([], []))] * 2


def _sharded(rank, frozen=()):
    model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.copy_(counted(*parameter.shape))
    for name in frozen:
        model.get_parameter(name).requires_grad_(False)
    for layer in model:
        fully_shard(layer)
    return fully_shard(model)


def _placed(rank):
    model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
    mesh = init_device_mesh("cpu", (dure.get_world_size(),))
    for name, parameter in list(model.named_parameters()):
        placement = Shard(0) if name.endswith("weight") else Replicate()
        whole = distribute_tensor(counted(*parameter.shape), mesh, [placement])
        model.get_submodule(name[0]).register_parameter(name[2:], nn.Parameter(whole))
    return model


SIZES = {"0.weight": (5, 2), "0.bias": (5,), "1.weight": (3, 5), "1.bias": (3,)}


@pytest.mark.parametrize("make", [_sharded, _placed])
@pytest.mark.parametrize("strategy", STRATEGIES)
def test_whole_tensors_of_sharded_models(monkeypatch, make, strategy):
    monkeypatch.setenv("DURE_FSDP_STRATEGY", strategy)

    def body(rank):
        model = make(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        assert all(isinstance(v, DTensor) for v in get_model_state_dict(model).values())
        state, optim = get_state_dict(model, optimizer, options=FULL)
        offload = StateDictOptions(full_state_dict=True, cpu_offload=True)
        first = get_state_dict(model, optimizer, options=offload)
        assert [bool(part) for part in first] == [rank == 0] * 2
        return (
            {name: value.tolist() for name, value in state.items()},
            {name: inner["exp_avg"].tolist() for name, inner in optim["state"].items()},
        )

    for weights, averages in run_ranks(3, body):
        assert weights == {name: counted(*size).tolist() for name, size in SIZES.items()}
        assert averages == {name: torch.zeros(size).tolist() for name, size in SIZES.items()}


@pytest.mark.parametrize("make", [_sharded, _placed])
@pytest.mark.parametrize("strategy", STRATEGIES)
@pytest.mark.parametrize("flat", [False, True])
def test_what_rank_0_has_is_cut_for_all(monkeypatch, make, strategy, flat):
    monkeypatch.setenv("DURE_FSDP_STRATEGY", strategy)
    options = StateDictOptions(
        full_state_dict=True, broadcast_from_rank0=True, flatten_optimizer_state_dict=flat
    )

    def body(rank):
        model = make(rank)
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.5)
        state, optim = get_state_dict(model, optimizer, options=options)
        state = {name: value * 10 for name, value in state.items()}
        for name, size in SIZES.items():
            if flat:
                optim[f"state.{name}.exp_avg"] = counted(*size)
                optim[f"param_groups.{name}.lr"] = 0.25
            else:
                optim["state"][name]["exp_avg"] = counted(*size)
                optim["param_groups"][0]["lr"] = 0.25
        keys = set_state_dict(
            model,
            optimizer,
            model_state_dict=state if rank == 0 else {},
            optim_state_dict=optim if rank == 0 else {},
            options=options,
        )
        assert keys == ([], []) and optimizer.param_groups[0]["lr"] == 0.25
        for name, parameter in model.named_parameters():
            average = optimizer.state[parameter]["exp_avg"]
            assert average.placements == parameter.placements
            assert average.full_tensor().equal(counted(*SIZES[name]))
            assert parameter.full_tensor().equal(counted(*SIZES[name]) * 10)

    run_ranks(3, body)


def test_rank_0_fails_for_all():
    options = StateDictOptions(full_state_dict=True, broadcast_from_rank0=True)

    def body(rank):
        model = _placed(rank)
        with pytest.raises(UsageError, match="DTensor"):
            set_model_state_dict(model, get_model_state_dict(model), options=options)

    run_ranks(2, body)
    with pytest.raises(UsageError, match="full_state_dict must be True"):
        set_model_state_dict(Body(), {}, options=StateDictOptions(broadcast_from_rank0=True))


def test_meta_models_are_filled():
    def body(rank):
        with torch.device("meta"):
            model = nn.Sequential(nn.Linear(2, 5), nn.Linear(5, 3))
        fully_shard(model)
        whole = {name: counted(*size) for name, size in SIZES.items()}
        set_model_state_dict(model, whole, options=FULL)
        return [p.full_tensor().equal(whole[n]) for n, p in model.named_parameters()]

    assert run_ranks(2, body) == [[True] * 4] * 2


# States of optimizers that have not stepped.


# Frozen, missing and new parameters.


def test_frozen_parameters_may_be_left_out():
    model = Body()
    model.first.requires_grad_(False)
    optimizer = _stepped(model)
    options = StateDictOptions(ignore_frozen_params=True)
    state, optim = get_state_dict(model, optimizer, options=options)
    assert sorted(state) == sorted(set(NAMES) - {"first.weight", "first.bias"})
    assert sorted(optim["state"]) == ["norm.bias", "norm.weight", "second.weight"]
    kept = model.first.weight.clone()
    assert set_model_state_dict(model, state, options=options) == ([], [])
    assert model.first.weight.equal(kept)
    with pytest.raises(CheckpointMismatch, match=r"first\.weight"):
        set_model_state_dict(model, state)
    loose = StateDictOptions(strict=False)
    missing = ["first.weight", "first.bias"]
    keys = set_model_state_dict(model, state | {"new": torch.ones(1)}, options=loose)
    assert keys == (missing, ["new"])


def test_state_of_parameters_that_are_new_missing_or_frozen_since():
    old = nn.ModuleDict({"a": nn.Linear(1, 2), "b": nn.Linear(1, 2), "gone": nn.Linear(1, 2)})
    optim = get_optimizer_state_dict(old, _stepped(old))
    model: Any = nn.ModuleDict({"a": nn.Linear(1, 2), "b": nn.Linear(1, 2), "new": nn.Linear(1, 2)})
    model["b"].requires_grad_(False)
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"Missing optimizer state for .*new\.weight"):
        set_optimizer_state_dict(model, optimizer, optim)
    assert not optimizer.state
    loose = StateDictOptions(strict=False)
    keys = set_optimizer_state_dict(model, optimizer, optim, options=loose)
    assert keys == (["new.weight", "new.bias"], ["gone.bias", "gone.weight"])
    assert [p in optimizer.state for p in model.parameters()] == [True] * 2 + [False] * 4
    assert (
        optimizer.state[model["a"].weight]["exp_avg"].flatten().tolist() == [pytest.approx(0.1)] * 2
    )


def test_options_of_groups():
    model = nn.ModuleDict({"a": nn.Linear(1, 1), "b": nn.Linear(1, 1)})
    groups = [{"params": model[k].parameters(), "lr": lr} for k, lr in (("a", 0.5), ("b", 0.25))]
    optim = get_optimizer_state_dict(
        model,
        torch.optim.SGD(groups),
        options=StateDictOptions(flatten_optimizer_state_dict=True),
    )
    assert optim["param_groups.a.weight.lr"] == 0.5 and optim["param_groups.b.bias.lr"] == 0.25
    one = torch.optim.SGD(model.parameters(), lr=0.1)
    with pytest.raises(CheckpointMismatch, match=r"'lr' was 0\.5 for 'a\.weight', 0\.25 for 'b"):
        set_optimizer_state_dict(model, one, optim)
    set_optimizer_state_dict(model, one, optim, options=StateDictOptions(strict=False))
    assert one.param_groups[0]["lr"] == 0.5
    with pytest.raises(CheckpointMismatch, match="not of an optimizer's state"):
        set_optimizer_state_dict(model, one, {"what.is.this": 1})


def test_shared_parameters_have_one_state_under_either_name():
    def tied(order) -> Any:
        inner = nn.Linear(2, 2, bias=False)
        model = nn.ModuleDict({name: nn.Linear(2, 2, bias=False) for name in order})
        for name in order:
            model[name].weight = inner.weight
        return model

    model = tied(["a", "b"])
    state, optim = get_state_dict(model, _stepped(model))
    assert sorted(state) == ["a.weight", "b.weight"] and list(optim["state"]) == ["a.weight"]
    other = tied(["b", "a"])
    optimizer = torch.optim.AdamW(other.parameters())
    set_state_dict(other, optimizer, model_state_dict=state, optim_state_dict=optim)
    assert optimizer.state[other["a"].weight]["step"] == 1


def test_submodules():
    model = Body(checkpoint_wrapper)
    optimizer = _stepped(model)
    for keep, prefix in ((True, "norm."), (False, "")):
        options = StateDictOptions(keep_submodule_prefixes=keep)
        state, optim = get_state_dict(model, optimizer, submodules={model.norm}, options=options)
        names = [prefix + n for n in ("bias", "weight")]
        assert sorted(n for n in state if n in names) == names and len(state) == 5
        assert sorted(optim["state"]) == names == sorted(optim["param_groups"][0]["params"])
    zeros = {model.norm: {"weight": torch.zeros(3)}}
    set_model_state_dict(model, zeros, options=StateDictOptions(strict=False))
    assert not model.norm.weight.any()
    with pytest.raises(UsageError, match="not in the model"):
        get_model_state_dict(model, submodules={nn.Linear(1, 1)})


def test_an_empty_model_state_sets_only_the_optimizer():
    model = nn.Linear(2, 3)
    before = model.weight.tolist()
    state = get_optimizer_state_dict(model, torch.optim.AdamW(model.parameters(), lr=0.5))
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.25)
    keys = set_state_dict(model, optimizer, model_state_dict={}, optim_state_dict=state)
    assert keys == ([], []) and model.weight.tolist() == before
    assert optimizer.param_groups[0]["lr"] == 0.5
    with pytest.raises(CheckpointMismatch):
        set_model_state_dict(model, {})


def test_patched_models_and_optimizers_save_and_load_by_names(tmp_path):
    def made(rank, scale):
        model = nn.Sequential(nn.Linear(2, 3))
        with torch.no_grad():
            model.get_parameter("0.weight").fill_(scale)
        fully_shard(model)
        optimizer = torch.optim.AdamW(model.parameters(), lr=scale)
        for _ in range(2):  # a second time changes nothing
            _patch_model_state_dict(model)
            _patch_optimizer_state_dict(model, optimizers=optimizer)
        model(torch.ones(1, 2)).sum().backward()
        optimizer.step()
        return model, optimizer

    def body(rank):
        model, optimizer = made(rank, 0.5)
        whole = model[0].weight.full_tensor()
        assert list(optimizer.state_dict()["state"]) == ["0.weight", "0.bias"]
        for patched in (model, optimizer):
            patched.load_state_dict(state_dict=patched.state_dict())
        save({"model": model, "optimizer": optimizer}, checkpoint_id=tmp_path)
        other, others = made(rank, 2.0)
        load({"model": other, "optimizer": others}, checkpoint_id=tmp_path)
        assert others.param_groups[0]["lr"] == 0.5
        assert other[0].weight.full_tensor().equal(whole)

    run_ranks(2, body)
    saved = FileSystemReader(tmp_path).read_metadata().state_dict_metadata
    assert "model.0.weight" in saved and "optimizer.state.0.bias.exp_avg" in saved
