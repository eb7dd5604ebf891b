"""Collectives as linear maps: gradients of first and second order."""

from __future__ import annotations

from collections.abc import Callable, Sequence

import pytest
import torch

import dure as dist
from dure.comm import functional as F
from dure.comm.world import new_world
from dure.nn import functional as nnF
from dure.testing import run_ranks


def test_backward_in_another_world_uses_the_group_of_the_call():
    def body(rank):
        x = torch.tensor([1.0], requires_grad=True)
        group = dist.new_group([0, 1])
        y = F.all_reduce(x * x, "sum", group)
        with new_world():
            y.backward()
        assert x.grad is not None
        return x.grad.item()

    assert run_ranks(2, body) == [4.0, 4.0]


# Each is linear in x, which is [2, 2] on each of 2 ranks.
MAPS: dict[str, Callable[[int, torch.Tensor], Sequence[torch.Tensor]]] = {
    "all_reduce": lambda r, x: [F.all_reduce(x, "sum")],
    "all_reduce_avg": lambda r, x: [F.all_reduce(x, "avg")],
    "all_reduce_premul": lambda r, x: [F.all_reduce(x, dist.ReduceOp.premul_sum(r + 2.0))],
    "broadcast": lambda r, x: [F.broadcast(x, 1)],
    "all_gather_0": lambda r, x: [F.all_gather_tensor(x, 0)],
    "all_gather_1": lambda r, x: [F.all_gather_tensor(x, 1)],
    "reduce_scatter_0": lambda r, x: [F.reduce_scatter_tensor(x, "sum", 0)],
    "reduce_scatter_1": lambda r, x: [F.reduce_scatter_tensor(x.T, "avg", 1)],
    "all_to_all": lambda r, x: [F.all_to_all_single(x, None, None)],
    "all_to_all_uneven": lambda r, x: [
        F.all_to_all_single(x, *(((0, 1), (0, 2)), ((2, 1), (1, 1)))[r])
    ],
    "permute": lambda r, x: [F.permute_tensor(x, [1, 0])],
    "nn_all_reduce": lambda r, x: [nnF.all_reduce(x)],
    "nn_broadcast": lambda r, x: [nnF.broadcast(x, 1)],
    "nn_reduce": lambda r, x: [nnF.reduce(x, 1)],
    "nn_reduce_avg": lambda r, x: [nnF.reduce(x, 0, dist.ReduceOp.AVG)],
    "nn_gather": lambda r, x: nnF.gather(x, 1),
    "nn_scatter": lambda r, x: [nnF.scatter(x.unbind(0), 1)],
    "nn_all_gather": lambda r, x: nnF.all_gather(x),
    "nn_reduce_scatter": lambda r, x: [nnF.reduce_scatter(x.new_empty(1), [x[0, :1], x[1, :1]])],
    "nn_all_to_all": lambda r, x: nnF.all_to_all(
        [x.new_empty(1), x.new_empty(1 + r)], [x[0, :1], x[1, : 1 + r]]
    ),
    "nn_all_to_all_single": lambda r, x: [
        nnF.all_to_all_single(x.new_empty(2, 2), x, [1, 1], [1, 1])
    ],
}


def _dot(xs: Sequence[torch.Tensor], ys: Sequence[torch.Tensor]) -> float:
    return sum((x * y).sum().item() for x, y in zip(xs, ys, strict=True))


@pytest.mark.parametrize("name", MAPS)
def test_gradients_of_first_and_second_order(name):
    """Over all ranks y = A x; so the gradient g of the sum of w y is A' w, and w y = x g.

    The gradient of the sum of u g by w is A u: what the map makes of u. All numbers are exact.
    """

    def body(rank):
        generator = torch.Generator().manual_seed(rank)

        def draw(like: torch.Tensor) -> torch.Tensor:
            return torch.randint(-99, 99, like.shape, generator=generator).double()

        x = draw(torch.empty(2, 2)).requires_grad_()
        ys = MAPS[name](rank, x)
        ws = [draw(y).requires_grad_() for y in ys]
        (g,) = torch.autograd.grad(ys, x, ws, create_graph=True)
        u = draw(x)
        seconds = torch.autograd.grad(g, ws, u)
        assert all(map(torch.equal, seconds, MAPS[name](rank, u)))
        return _dot(ys, ws), _dot([x], [g])

    forward, backward = zip(*run_ranks(2, body), strict=True)
    assert sum(forward) == sum(backward) != 0
