"""`distribute_tensor` and `distribute_module`: DTensors made of full tensors and of modules."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import copy
import math
from typing import Any

import pytest
import torch
import torch.distributed.tensor
from torch import nn
from torch.testing._internal.two_tensor import TwoTensor

from dure.errors import DimError, MeshError, ModuleError, PlacementError, UsageError
from dure.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
)
from dure.tensor.placement_types import StridedShard
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_ranks

R = Replicate()
WAYS: list[tuple[tuple[int, ...], tuple[Placement, ...], list[str]]] = [
    ((4,), (Shard(0),), ["scatter"]),
    ((4,), (Shard(-1),), ["scatter"]),
    ((4,), (R,), ["broadcast"]),
    ((2, 2), (Shard(0), Shard(1)), ["scatter", "scatter"]),
    ((2, 2), (Shard(0), Shard(0)), ["scatter", "scatter"]),
    ((2, 2), (StridedShard(0, split_factor=2), Shard(0)), ["scatter", "scatter"]),
    ((2, 2), (R, Shard(1)), ["scatter", "broadcast"]),
    ((2, 2), (Shard(1), R), ["scatter", "broadcast"]),
    ((1, 4), (R, R), ["broadcast", "broadcast"]),
]


@pytest.mark.parametrize("size", [8, 5, 0])
@pytest.mark.parametrize(("shape", "placements", "calls"), WAYS)
def test_the_first_ranks_values_are_distributed(shape, placements, calls, size):
    whole = torch.arange(size * 3.0).reshape(size, 3)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        mine = whole + 100 * rank  # only those of rank 0 count
        with CommRecorder() as seen:
            made = distribute_tensor(mine, mesh, placements)
        assert [op for op in seen.ops if op != "all_gather_single"] == calls
        assert made.shape == whole.shape
        assert made.to_local().shape == made.spec.local_shape
        assert torch.equal(made.full_tensor(), whole)
        with CommRecorder() as seen:
            own = distribute_tensor(whole, mesh, placements, src_data_rank=None)
        assert seen.ops == []
        assert torch.equal(own.to_local(), made.to_local())
        assert torch.equal(mine, whole + 100 * rank)  # what was given is left alone

    run_ranks(math.prod(shape), body)


@on_ranks(2)
def test_what_a_tensor_is_it_stays(rank):
    mesh = init_device_mesh("cpu", (2,))
    with mesh:
        parameter = distribute_tensor(nn.Parameter(torch.ones(3)), placements=[Shard(0)])
    assert isinstance(parameter, nn.Parameter)
    assert isinstance(parameter, DTensor)
    assert parameter.requires_grad
    assert parameter.is_leaf
    frozen = nn.Parameter(torch.ones(3), requires_grad=False)
    assert not distribute_tensor(frozen, mesh, [Shard(0)]).requires_grad
    leaf = distribute_tensor(torch.ones(3, requires_grad=True), mesh)
    assert leaf.requires_grad
    assert leaf.is_leaf
    assert leaf.placements == (R,)
    assert distribute_tensor(leaf, mesh, [R]) is leaf
    with CommRecorder() as seen:
        bare = distribute_tensor(torch.empty(5, 4, device="meta"), mesh, [Shard(0)])
    assert bare.is_meta
    assert bare.to_local().shape == (3 - rank, 4)
    assert seen.ops == []
    second = distribute_tensor(torch.full((2,), float(rank)), mesh, src_data_rank=1)
    assert torch.equal(second.to_local(), torch.ones(2))


@on_ranks(3)
def test_a_tensor_is_split_into_terms(rank):
    """Equal shares where they are exact; integers, and shares of three, stay on the first rank."""

    meshes = {2: init_device_mesh("cpu", (2, 1)), 3: init_device_mesh("cpu", (3,))}
    for size, op, dtype, share in (
        (2, "sum", torch.float32, [0.5, 1.5]),
        (2, "sum", torch.int64, [1, 3] if rank == 0 else [0, 0]),
        (3, "sum", torch.float64, [1, 3] if rank == 0 else [0, 0]),
        (3, "avg", torch.float64, [1, 3]),
        (2, "max", torch.int64, [1, 3]),
        (2, "min", torch.float32, [1, 3]),
    ):
        mesh = meshes[size]
        full = torch.tensor([1, 3], dtype=dtype) * (1 if rank == 0 else -5)
        terms: list[Placement] = [Partial(op), R]
        x = distribute_tensor(full, mesh, terms[: mesh.ndim])
        if rank < size:
            assert x.to_local().tolist() == share, (size, op, dtype)
            assert x.full_tensor().tolist() == [1, 3]
            assert x.dtype == x.to_local().dtype == dtype


@on_ranks(2)
def test_a_subclass_without_memory_is_distributed_by_its_tensors(rank):
    full = torch.arange(10.0).reshape(5, 2)
    for placement in (Shard(0), Shard(1), R, Partial("max")):
        given = TwoTensor(full + 100 * rank, -full - 100 * rank)
        x = distribute_tensor(given, init_device_mesh("cpu", (2,)), [placement])
        part = x.to_local()
        own = full.chunk(2, placement.dim)[rank] if isinstance(placement, Shard) else full
        assert isinstance(part, TwoTensor)
        assert torch.equal(part.a, own)
        assert torch.equal(part.b, -own)
        assert given.a[0, 0] == 100 * rank  # what the ranks gave is not written


# Each: tensor, placements, options, and the error.
REFUSED: dict[str, tuple[Any, Any, dict[str, Any], type[Exception]]] = {
    "terms of a product": (torch.ones(4), [Partial("product")], {}, PlacementError),
    "no such dimension": (torch.ones(4), [Shard(1)], {}, DimError),
    "a placement of torch's without a list": (
        torch.ones(4),
        torch.distributed.tensor.Shard(0),
        {},
        PlacementError,
    ),
    "the result of an operator": (torch.ones(2, requires_grad=True) * 2, [R], {}, UsageError),
    "no such source": (torch.ones(4), [R], {"src_data_rank": 2}, UsageError),
}


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_does_not_fit_is_refused_at_the_call(rank, name):
    tensor, placements, options, error = REFUSED[name]

    with pytest.raises(UsageError) as caught:
        distribute_tensor(tensor, init_device_mesh("cpu", (2,)), placements, **options)
    assert caught.type is error


@on_ranks(2)
def test_a_dtensor_is_not_distributed_again(rank):
    made = distribute_tensor(torch.ones(4, 4), init_device_mesh("cpu", (2,)), [Shard(0)])
    with pytest.raises(PlacementError):
        distribute_tensor(made, made.device_mesh, [Shard(1)])
    with pytest.raises(MeshError):
        distribute_tensor(made, init_device_mesh("cpu", (1, 2)), [R, Shard(0)])
    with pytest.raises(MeshError):
        distribute_tensor(torch.ones(4, 4))
    torch_shard = type("Shard", (), {"__module__": "torch.distributed.tensor.placement_types"})
    with pytest.raises(PlacementError) as caught:
        distribute_tensor(torch.ones(4), made.device_mesh, [torch_shard()])
    assert caught.value.fix.startswith("Import Shard from dure.tensor ")


# ---- modules -------------------------------------------------------------------------------------


class Model(nn.Module):
    scale: torch.Tensor

    def __init__(self) -> None:
        super().__init__()
        self.first = nn.Linear(4, 4, bias=False)
        self.second = nn.Linear(4, 4, bias=False)
        self.second.weight = self.first.weight
        self.register_buffer("scale", torch.full((1,), 2.0))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return self.second(self.first(x)) * self.scale


def test_a_module_is_distributed_as_its_functions_say():
    torch.manual_seed(0)
    alone = Model()
    models = [copy.deepcopy(alone), Model()]  # the second rank's values do not count
    x = torch.arange(12.0).reshape(3, 4)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        model, names = models[rank], []

        def partition(name: str, module: nn.Module, given: Any) -> None:
            names.append(name)
            assert given is mesh

        def enter(module: nn.Module, inputs: Any, given: Any) -> Any:
            assert module is model
            return distribute_tensor(inputs[0], given, [Shard(0)])

        def leave(module: nn.Module, outputs: DTensor, given: Any) -> Any:
            assert outputs.placements == (Shard(0),)
            return outputs.full_tensor()

        assert distribute_module(model, mesh, partition, enter, leave) is model
        assert names == ["", "first", "second"]
        assert model.first.weight is model.second.weight
        assert isinstance(model.first.weight, nn.Parameter)
        assert isinstance(model.scale, DTensor)
        torch.testing.assert_close(model(x), alone(x))
        with pytest.raises(ModuleError):
            distribute_module(model, mesh)
        with pytest.raises(UsageError):
            distribute_module(nn.Linear(2, 2), mesh, input_fn=lambda x: x)

    run_ranks(2, body)
