"""What the results of an operator are: dtypes, values and strides of one process."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from itertools import product

import torch
from torch.nn import functional

from dure.mesh import DeviceMesh
from dure.tensor import Replicate, Shard, init_device_mesh
from dure.testing import run_ranks
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh


@on_mesh(1)
def test_results_of_the_default_dtype(mesh):
    # What it is may change between two calls of one kind.
    count = made(mesh, torch.tensor([1, 2]), [Replicate()])
    assert (count / 2).dtype == (count / 2).dtype == torch.float32
    torch.set_default_dtype(torch.float64)
    try:
        assert (count / 2).dtype == (count / 2).to_local().dtype == torch.float64
    finally:
        torch.set_default_dtype(torch.float32)


@on_mesh(2)
def test_losses_of_nothing_are_nan_and_have_gradients_of_nothing(mesh: DeviceMesh) -> None:
    losses = (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss)
    for loss, placement in product(losses, (Shard(0), Shard(1), Replicate())):
        learned = made(mesh, torch.ones(6, 3), [placement]).requires_grad_()
        wanted = made(mesh, torch.zeros(6, 3), [placement])
        found = loss(learned[:0], wanted[:0])
        found.backward()
        assert found.full_tensor().isnan()
        assert torch.equal(learned.grad.full_tensor(), torch.zeros(6, 3))


def test_batch_norm_of_transposed_inputs_has_the_strides_of_one_process() -> None:
    given = torch.arange(240.0).reshape(4, 5, 6, 2).transpose(1, 2)
    expected = {"rows": (60, 10, 2, 1), "channels last": (60, 1, 12, 6)}

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        for placement in (Shard(0), Shard(1), Replicate()):
            rows = made(mesh, given, [placement], "as it is").requires_grad_()
            found = functional.batch_norm(rows, None, None, training=True)
            assert found.stride() == expected["rows"]
            last = made(mesh, given.contiguous(memory_format=torch.channels_last), [placement])
            found = functional.batch_norm(last, None, None, training=True)
            assert found.stride() == expected["channels last"]

    run_ranks(2, body)
