"""Activations that are kept in parts: the same gradients, less memory."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

import gc

import pytest
import torch
from torch import nn
from torch.multiprocessing.reductions import StorageWeakRef

from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Replicate, distribute_module
from dure.tensor.debug import CommDebugMode
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from dure.tensor.parallel.input_reshard import input_reshard
from dure.testing import run_ranks
from tests.thread_ranks import on_mesh, on_ranks


@pytest.mark.parametrize(("n", "dim"), [(2, 0), (2, -1), (2, -3), (3, 1), (3, 2)])
def test_gradients_are_the_same_to_the_bit(n, dim):
    def body(rank):
        mesh = init_device_mesh("cpu", (n,))
        grads = []
        for dims in (None, dim):
            model = nn.Sequential(nn.Linear(6, 12), nn.GELU(), nn.Linear(12, 5), nn.Tanh())
            generator = torch.Generator().manual_seed(0)
            for parameter in model.parameters():
                parameter.data.normal_(generator=generator)
            parallelize_module(model, mesh, {"0": ColwiseParallel(), "2": RowwiseParallel()})
            x = torch.randn(4, 5, 6, generator=generator, requires_grad=True)
            y = input_reshard(model, mesh, dims)(x * 2)
            (y * y).sum().backward()
            grads.append([x.grad, *(p.grad.full_tensor() for p in model.parameters())])
        assert all(torch.equal(one, two) for one, two in zip(*grads, strict=True))

    run_ranks(n, body)


@on_mesh(2)
def test_a_rank_keeps_its_part_once_and_backward_gathers(mesh):
    alive, gathers = [], []
    for dim in (None, 2):
        two = nn.ModuleList(nn.Linear(8, 4, bias=False) for _ in range(2))
        parallelize_module(two, mesh, {"*": ColwiseParallel()})

        class Both(nn.Module):
            def __init__(self, two):
                super().__init__()
                self.two = two

            def forward(self, x):
                return self.two[0](x) + self.two[1](x)

        model = input_reshard(Both(two), mesh, dim)
        x = torch.ones(2, 4, 8, requires_grad=True) * 1
        storage = StorageWeakRef(x.untyped_storage())
        y = model(x)
        del x
        gc.collect()  # cycles of other tests
        alive.append(not storage.expired())
        with CommDebugMode() as mode:
            y.sum().backward()
        gathers.append(mode.get_comm_counts()[torch.ops.c10d_functional.all_gather_into_tensor])
    assert (alive, gathers) == ([True, False], [0, 2])


@on_ranks(2)
def test_parameters_and_plain_tensors_are_left_as_they_are(rank):
    """Other ranks may have another plain tensor; here each rank has its own."""

    mesh = init_device_mesh("cpu", (2,))
    plain = nn.Sequential(nn.Linear(4, 4), nn.Tanh())
    x = torch.full((3, 4), float(rank), requires_grad=True)
    with CommDebugMode() as mode:
        input_reshard(plain, mesh, 0)(x).sum().backward()
    assert mode.get_total_counts() == 0
    layer = distribute_module(nn.Sequential(nn.Linear(4, 4), nn.Tanh()), mesh)
    given = DTensor.from_local(torch.ones(3, 4, requires_grad=True), mesh)
    with CommDebugMode() as mode:
        input_reshard(layer, mesh, 0)(given).sum().backward()
    # The input and the output; the weight is replicated.
    assert mode.get_total_counts() == 2
    assert input_reshard(nn.Tanh(), mesh)._forward_hooks == {}


@pytest.mark.parametrize("error", [KeyboardInterrupt, SystemExit, ValueError])
def test_a_forward_that_is_interrupted_leaves_nothing_switched_on(error):
    """What autograd saves later, of any operator, is not divided."""

    class Raises(nn.Module):
        def forward(self, x):
            raise error

    def body(rank):
        mesh = init_device_mesh("cpu", (2,))
        model = input_reshard(Raises(), mesh, 0)
        assert type(model).__name__ == "Raises"
        with pytest.raises(error):
            model(torch.ones(2))
        x = DTensor.from_local(torch.ones(4), mesh, [Replicate()]).requires_grad_()
        with CommDebugMode() as mode:
            (x * x).exp().sum().backward()
        assert mode.get_total_counts() == 0

    run_ranks(2, body)
