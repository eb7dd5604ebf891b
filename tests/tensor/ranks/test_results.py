"""What the results of an operator are: dtypes, values and strides of one process."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from collections.abc import Callable
from itertools import product
from typing import Any

import pytest
import torch
from torch.nn import functional

from dure.mesh import DeviceMesh
from dure.tensor import DTensor, Replicate, Shard, init_device_mesh
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
def test_losses_of_nothing_are_nan_and_have_gradients_of_nothing(mesh):
    losses = (functional.mse_loss, functional.smooth_l1_loss, functional.huber_loss)
    for loss, placement in product(losses, (Shard(0), Shard(1), Replicate())):
        learned = made(mesh, torch.ones(6, 3), [placement]).requires_grad_()
        wanted = made(mesh, torch.zeros(6, 3), [placement])
        found = loss(learned[:0], wanted[:0])
        found.backward()
        assert found.full_tensor().isnan()
        assert torch.equal(learned.grad.full_tensor(), torch.zeros(6, 3))


def test_batch_norm_of_transposed_inputs_has_the_strides_of_one_process():
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


# Shapes and strides of two operands, and the strides of what torch's kernels for the CPU give. Its
# formulas for tensors without memory give other strides.
LAYOUTS: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "two orders": (((3, 1, 5), (1, 3, 3)), ((3, 5), (5, 1)), (1, 3, 9)),
    "two columns": (((10, 1, 5), (1, 10, 10)), ((10, 5), (1, 10)), (10, 1, 100)),
}
OF_TWO: dict[str, dict[str, Callable[[Any, Any], Any]]] = {
    "two orders": {
        "add": lambda a, b: torch.add(a, b, alpha=2),
        "sub": lambda a, b: torch.sub(a, b, alpha=2),
        "rsub": lambda a, b: torch.rsub(a, b, alpha=2),
        "divide and round": lambda a, b: torch.div(a, b, rounding_mode="floor"),
        "floor_divide": torch.floor_divide,
        "copysign": torch.copysign,
        "xlogy": torch.xlogy,
        "xlog1py": torch.special.xlog1py,
        "binary_cross_entropy": lambda a, b: functional.binary_cross_entropy(
            a.expand(3, 3, 5), b.expand(3, 3, 5), reduction="none"
        ),
    },
    "two columns": {
        "rsub": lambda a, b: torch.rsub(a, b, alpha=2),
        "heaviside": torch.heaviside,
        "logaddexp": torch.logaddexp,
        "logical_and": torch.logical_and,
        "logical_or": torch.logical_or,
        "logical_xor": torch.logical_xor,
    },
}


def _halves(mesh: DeviceMesh, shape: tuple[int, ...], stride: tuple[int, ...]) -> DTensor:
    full = torch.empty_strided(shape, stride).fill_(0.5)
    return DTensor.from_local(full, mesh, [Replicate()], shape=full.shape, stride=stride)


@pytest.mark.parametrize("layout", LAYOUTS)
@on_mesh(1)
def test_results_of_two_tensors_in_different_orders_have_the_strides_of_one_process(mesh, layout):
    *operands, stride = LAYOUTS[layout]
    first, second = (_halves(mesh, *each) for each in operands)
    for name, run in OF_TWO[layout].items():
        found = run(first, second)
        assert found.stride() == found.to_local().stride() == stride, name


@on_mesh(1)
def test_results_that_are_not_stored_as_a_sum_have_the_strides_of_one_process(mesh):
    rows, columns = _halves(mesh, (3, 5), (5, 1)), _halves(mesh, (3, 5), (1, 3))
    numbers, expanded = columns.long(), _halves(mesh, (5,), (1,)).long().expand(3, 5)
    for run, *operands in (
        (lambda a, b: a.masked_fill(b, 0.0), columns, columns > 0),
        (lambda a, b: a.masked_fill(b, 0.0), columns, rows > 0),
        (lambda a, b: torch.ops.aten.threshold_backward(a, b, 0), rows, columns),
        (lambda a, b: torch.ops.aten.threshold_backward(a, b, 0), columns, rows),
        (torch.rsub, rows, columns),
        (lambda a, b: torch.rsub(a, b, alpha=2), columns, rows),
        (torch.true_divide, expanded, numbers),
        (torch.atan2, numbers, expanded),
    ):
        found, alone = run(*operands), run(*(t.to_local() for t in operands))
        assert found.stride() == found.to_local().stride() == alone.stride(), operands


@on_mesh(1)
def test_losses_of_images_and_dropped_gradients_have_the_strides_of_one_process(mesh):
    scores, chosen = _halves(mesh, (2, 3, 2, 2), (12, 1, 3, 6)), _halves(mesh, (2, 2, 2), (4, 1, 2))
    assert functional.nll_loss(scores, chosen.long(), reduction="none").stride() == (4, 2, 1)
    kept = torch.ops.aten.native_dropout_backward(scores, scores > 0, 2.0)
    assert kept.stride() == (12, 1, 3, 6)
