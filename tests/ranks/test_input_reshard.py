"""What a layer saves for backward is kept in parts, and whole again when backward asks for it."""

from __future__ import annotations

import copy
from typing import Any

import pytest
import torch
from torch import nn

from dure.tensor import DTensor, distribute_module, init_device_mesh
from dure.tensor.parallel.input_reshard import input_reshard
from dure.testing import CommRecorder, run_ranks

X = torch.linspace(-1, 1, 20).reshape(5, 4)  # five rows are uneven over two ranks
torch.manual_seed(0)
ALONE = nn.Sequential(nn.Linear(4, 4), nn.Tanh(), nn.Linear(4, 3), nn.Tanh())


@pytest.mark.parametrize("distributed", [False, True])
def test_gradients_are_those_of_the_layer_and_the_ranks_gather_in_backward(
    distributed: bool,
) -> None:
    expected = X.clone().requires_grad_()
    (ALONE(expected) ** 2).sum().backward()

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        layer = input_reshard(copy.deepcopy(ALONE), mesh, 0)
        x: Any = X.clone().requires_grad_()
        given = x
        if distributed:
            distribute_module(layer, mesh)
            given = DTensor.from_local(x, mesh)
        with CommRecorder() as seen:
            out = layer(given)
        assert seen.ops == []
        with CommRecorder() as seen:
            loss: Any = (out * out).sum()
            (loss.full_tensor() if distributed else loss).backward()
        # Of either layer what came in and what went out; the last product is not in the module.
        assert seen.ops == ["all_gather"] * 4
        torch.testing.assert_close(x.grad, expected.grad)

    run_ranks(2, body)


def test_what_is_saved_is_a_part_and_parameters_are_left_alone() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        layer = input_reshard(nn.Linear(4, 3), mesh, 0)
        node: Any = layer(X.clone().requires_grad_()).grad_fn
        with CommRecorder() as seen:
            assert node._saved_mat2.shape == (4, 3)
        assert seen.ops == []
        assert node._raw_saved_mat2 is not None
        with CommRecorder() as seen:
            assert torch.equal(node._saved_mat1, X)
        assert seen.ops == ["all_gather"]

    run_ranks(2, body)


def test_a_module_that_raises_leaves_no_hooks_behind() -> None:
    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", (2,))
        layer = input_reshard(nn.Linear(4, 3), mesh, 0)
        with pytest.raises(RuntimeError):
            layer(torch.ones(2, 7))
        w = torch.ones(4, requires_grad=True)
        with CommRecorder() as seen:
            w.exp().sum().backward()
        assert seen.ops == []
        plain = nn.Linear(2, 2)
        assert input_reshard(plain, mesh) is plain
        assert not plain._forward_hooks

    run_ranks(2, body)
