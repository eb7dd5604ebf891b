"""Gradients of gradients, through every way into DTensors, between placements, and out.

Most take the sum of cubes, whose gradient is ``3 x^2``; the sum of that one's squares has the
gradient ``36 x^3``.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import pytest
import torch

from dure.mesh import DeviceMesh
from dure.tensor import DTensor, Partial, Replicate, Shard, distribute_tensor, init_device_mesh
from dure.tensor.experimental import local_map
from dure.testing import run_ranks
from tests.thread_ranks import on_mesh, on_ranks

ROWS, WHOLE, TERMS = [Shard(0)], [Replicate()], [Partial()]
X = torch.tensor([1.0, 2.0, 3.0, 4.0])
CUBED = [36.0, 288.0, 972.0, 2304.0]
"""36 x^3 of X."""


def penalized(x: Any, cubes: Callable[[Any], Any], squares: Callable[[Any], Any]) -> Any:
    """Return the gradient of the squares of the gradient of the cubes."""
    (slope,) = torch.autograd.grad(cubes(x), x, create_graph=True)
    (found,) = torch.autograd.grad(squares(slope), x)
    return found


def full(x: Any) -> torch.Tensor:
    return x.full_tensor(grad_placements=WHOLE)


# Each: how a DTensor is left, or moved, before it is raised to a power and summed.
WAYS: dict[str, Callable[[Any], Any]] = {
    "full_tensor": full,
    "to_local": lambda x: x.to_local(grad_placements=ROWS),
    "redistribute": lambda x: x.redistribute(placements=WHOLE),
    "moved and left": lambda x: x.redistribute(placements=WHOLE).to_local(grad_placements=WHOLE),
    "moved twice": lambda x: x.redistribute(placements=WHOLE).redistribute(placements=ROWS),
    "cast": lambda x: x.redistribute(placements=WHOLE, forward_dtype=torch.float64),
    "local_map": local_map(lambda x: x * 1, ROWS, (ROWS,), in_grad_placements=(ROWS,)),
}


@pytest.mark.parametrize(
    ("way", "size"),
    [*((way, 4) for way in WAYS), *((way, 3) for way in WAYS if way != "local_map")],
)
@on_ranks(2)
def test_of_a_sharded_tensor(rank: int, way: str, size: int) -> None:
    """Three elements over two ranks are uneven parts, which local_map does not return."""

    x = distribute_tensor(X[:size], init_device_mesh("cpu", (2,)), ROWS).requires_grad_()
    got = penalized(x, lambda x: (WAYS[way](x) ** 3).sum(), lambda g: (WAYS[way](g) ** 2).sum())
    assert got.full_tensor().tolist() == CUBED[:size]


# Each: what the two ranks give, the placement, and what each gets where every rank adds the
# squares of the gradient that it got.
GIVEN: dict[str, tuple[Any, Any, Any]] = {
    "parts": ([[1.0, 2.0], [3.0, 4.0]], ROWS, [CUBED[:2], CUBED[2:]]),
    "copies": ([[1.0, 2.0]] * 2, WHOLE, [CUBED[:2]] * 2),
    # v = [3, 3]; both get 3 v^2, so the squares are 18 v^4 in all.
    "terms of a sum": ([[1.0, 2.0], [2.0, 1.0]], TERMS, [[1944.0] * 2] * 2),
    # v = [2, 2]; both get 3 v^2 / 2: 9/2 v^4, of whose gradient 18 v^3 each has half.
    "terms of an average": ([[1.0, 3.0], [3.0, 1.0]], [Partial("avg")], [[72.0] * 2] * 2),
    "terms of a maximum": ([[1.0, 3.0], [2.0, 1.0]], [Partial("max")], [[0, 972.0], [288.0, 0]]),
}


@pytest.mark.parametrize("name", GIVEN)
def test_of_parts_that_are_given(name: str) -> None:
    parts, placements, expected = GIVEN[name]

    def body(rank: int) -> list[float]:
        mesh = init_device_mesh("cpu", (2,))
        return penalized(
            torch.tensor(parts[rank], requires_grad=True),
            lambda part: (full(DTensor.from_local(part, mesh, placements)) ** 3).sum(),
            lambda slope: (slope**2).sum(),
        ).tolist()

    assert run_ranks(2, body) == expected


@on_mesh(2)
def test_a_gradient_with_a_history_keeps_it_when_it_is_reduced(mesh: DeviceMesh) -> None:
    """The squares of w times 1, 2, 3 and 4 have the gradient 60 w; its squares 7200 w."""

    w = distribute_tensor(torch.tensor([1.0, 2.0]), mesh, WHOLE).requires_grad_()
    rows = distribute_tensor(X.reshape(4, 1).expand(4, 2).clone(), mesh, ROWS)
    (w.grad,) = torch.autograd.grad(((w * rows) ** 2).sum(), w, create_graph=True)
    grad: Any = w.grad
    assert grad.placements == (Replicate(),)
    (found,) = torch.autograd.grad((full(grad) ** 2).sum(), w)
    w.grad = None
    assert found.full_tensor().tolist() == [7200.0, 14400.0]
