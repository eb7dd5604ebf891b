"""Functions on parts, and custom sharding rules."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

from typing import Any

import pytest
import torch

from dure.errors import MeshError, PlacementError, UsageError
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    registry,
)
from dure.tensor.experimental import local_map, register_sharding
from dure.testing import CommRecorder, run_ranks
from tests.thread_ranks import on_mesh, on_ranks

LEFT = torch.arange(12.0).reshape(3, 4)
RIGHT = torch.arange(8.0).reshape(4, 2)
COLUMNS, ROWS, WHOLE, TERMS = [Shard(1)], [Shard(0)], [Replicate()], [Partial()]


@on_mesh(2)
def test_a_function_runs_on_the_parts(mesh):

    @local_map(out_placements=TERMS, in_placements=(COLUMNS, ROWS), redistribute_inputs=True)
    def product(a: torch.Tensor, b: torch.Tensor) -> torch.Tensor:
        assert not isinstance(a, DTensor)
        assert a.shape == (3, 2)
        return a @ b

    left = distribute_tensor(LEFT, mesh, WHOLE).requires_grad_()
    right = distribute_tensor(RIGHT, mesh, ROWS)
    made = product(left, right)
    assert made.placements == (Partial(),)
    assert torch.equal(made.full_tensor(), LEFT @ RIGHT)
    made.redistribute(placements=WHOLE).backward(distribute_tensor(torch.ones(3, 2), mesh))
    assert left.grad is not None
    grad: Any = left.grad
    assert torch.equal(grad.full_tensor(), torch.ones(3, 2) @ RIGHT.t())
    assert product.__name__ == "product"


@on_mesh(2)
def test_the_gradient_of_a_replicated_argument_is_terms_where_that_is_said(mesh):
    weight = distribute_tensor(torch.ones(4), mesh, WHOLE).requires_grad_()
    data = distribute_tensor(torch.arange(4.0).reshape(4, 1), mesh, ROWS)
    mapped = local_map(lambda w, x: x * w, ROWS, (WHOLE, ROWS), in_grad_placements=(TERMS, ROWS))
    out = mapped(weight, data)
    out.backward(distribute_tensor(torch.ones(4, 4), mesh, ROWS))
    grad: Any = weight.grad
    assert grad.placements == (Replicate(),)
    assert torch.equal(grad.to_local(), torch.full((4,), 6.0))


# Each: a function of a DTensor sharded by rows, and the error.
REFUSED: dict[str, tuple[Any, type[Exception]]] = {
    "other placements": (local_map(torch.relu, COLUMNS, (COLUMNS,)), PlacementError),
    "too many arguments": (local_map(torch.relu, ROWS, (ROWS, ROWS)), UsageError),
    "too many results": (local_map(torch.relu, (ROWS, ROWS)), UsageError),
    "no placements of an argument": (local_map(torch.relu, ROWS, (None,)), UsageError),
    "a number with placements": (
        lambda x: local_map(lambda a, b: a, ROWS, (ROWS, ROWS))(x, 3), UsageError
    ),
    "no tensor returned": (local_map(lambda a: 3, ROWS, (ROWS,)), UsageError),
}  # fmt: skip


@pytest.mark.parametrize("name", REFUSED)
@on_ranks(2)
def test_what_does_not_fit_a_local_map_is_refused(rank, name):
    function, error = REFUSED[name]

    with pytest.raises(UsageError) as caught:
        function(distribute_tensor(LEFT, init_device_mesh("cpu", (2,)), ROWS))
    assert caught.type is error


@on_ranks(2)
def test_arguments_of_a_local_map_are_of_one_mesh(rank):
    x = distribute_tensor(LEFT, init_device_mesh("cpu", (2,)), ROWS)
    y = distribute_tensor(LEFT, init_device_mesh("cpu", (2, 1)), [Shard(0), Replicate()])
    with pytest.raises(MeshError):
        local_map(torch.add, ROWS)(x, y)


def test_a_rule_may_count_dimensions_from_the_end(monkeypatch):
    monkeypatch.setattr(registry, "_rules", dict(registry._rules))  # what is registered here goes

    @torch.library.custom_op("duretest::last_halves", mutates_args=())
    def last_halves(x: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        return [x + row, row.clone()]

    @last_halves.register_fake
    def _(x: torch.Tensor, row: torch.Tensor) -> list[torch.Tensor]:
        return [torch.empty_like(x), torch.empty_like(row)]

    op = torch.ops.duretest.last_halves.default
    rules = {
        "last": [([Shard(-1), Shard(-1)], [Shard(-1), Shard(-1)])],
        "too far": [([Shard(-1), Shard(-1)], [Shard(-3), Shard(-1)])],
        "beyond the result": [([Shard(-1), Shard(1)], [Shard(-1), Shard(-1)])],
        "a text": [(["S(0)", Shard(-1)], [Shard(-1), Shard(-1)])],
    }

    def body(rank: int, name: str) -> None:
        mesh = init_device_mesh("cpu", (2,))
        x, row = distribute_tensor(LEFT, mesh, COLUMNS), distribute_tensor(LEFT[0], mesh, ROWS)
        if name != "last":
            with pytest.raises(PlacementError):
                op(x, row)
            return
        with CommRecorder() as seen:
            total, copy = op(x, row)
        assert seen.ops == []
        assert (total.placements, copy.placements) == ((Shard(1),), (Shard(0),))
        assert total.to_local().shape == (3, 2)
        assert torch.equal(total.full_tensor(), LEFT + LEFT[0])
        assert torch.equal(copy.full_tensor(), LEFT[0])

    for name, found in rules.items():
        register_sharding(op)(lambda x, row, found=found: found)
        run_ranks(2, body, name)
