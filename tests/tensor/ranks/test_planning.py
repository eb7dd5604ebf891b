"""What operators write keeps its placements: values that had to be moved are moved back."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any

import pytest
import torch

from dure.errors import PlacementError
from dure.mesh import DeviceMesh
from dure.tensor import DTensor, Partial, Replicate, Shard
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh


@pytest.mark.parametrize("op", ["sum", "avg", "max", "min"])
@pytest.mark.parametrize("n", [2, 3])
def test_a_write_keeps_partial_values_partial(op: str, n: int) -> None:
    @on_mesh(n)
    def run(mesh: DeviceMesh) -> None:
        for _ in range(2):  # the rule is asked, then the plan is known
            x = made(mesh, torch.tensor([1.0, 4.0, 9.0, 16.0]), [Partial(op)])
            part, view = x.to_local(), x.view(2, 2)
            assert x.sqrt_() is x
            assert x.placements == (Partial(op),)
            assert x.full_tensor().tolist() == [1, 2, 3, 4]
            assert view.full_tensor().tolist() == [[1, 2], [3, 4]]
            assert DTensor.from_local(part, mesh, [Partial(op)]).full_tensor().tolist() == (
                [1, 2, 3, 4]
            )

    run()


@on_mesh(2)
def test_what_cannot_be_moved_back_is_refused_and_stays_as_it_is(mesh: DeviceMesh) -> None:
    for x in (
        DTensor.from_local(torch.full((2,), 3.0), mesh, [Partial("product")]),
        DTensor.from_local(torch.full((2,), 9), mesh, [Partial("avg")]),
    ):
        with pytest.raises(
            PlacementError, match="would have to redistribute an operand that it writes"
        ):
            x.add_(1)
        assert x.full_tensor().tolist() == [9, 9]


@pytest.mark.parametrize("held", [False, True])
@on_mesh(2)
def test_a_gradient_is_added_to_one_with_other_placements(mesh: DeviceMesh, held: bool) -> None:
    # The first gradient is Partial, the second sharded: autograd adds it to the first in place.
    weight = made(mesh, torch.ones(2, 1, requires_grad=True), [Replicate()])
    parts: list[torch.Tensor] = []
    if held:
        weight.register_hook(lambda g: parts.append(g.to_local()))
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def learn(placement: Any) -> None:
        (made(mesh, rows, [placement]) @ weight).sum().backward()

    learn(Shard(0))
    learn(Shard(1))
    assert weight.grad.full_tensor().tolist() == [[8], [12]]


@on_mesh(2)
def test_an_operator_without_a_rule_writes_what_is_sharded(mesh: DeviceMesh) -> None:
    x = made(mesh, torch.tensor([1.0, 2.0, 3.0, 4.0]), [Shard(0)])
    part = x.to_local()
    x.cumsum_(0)
    assert x.placements == (Shard(0),)
    assert part.tolist() == [[1, 3], [6, 10]][mesh.get_rank()]


@pytest.mark.filterwarnings("ignore:Use of :UserWarning")  # torch's, of writes to expanded tensors
@on_mesh(3)
def test_an_operator_without_a_rule_writes_elements_that_share_memory(mesh: DeviceMesh) -> None:
    mask = made(mesh, torch.tensor([[True, False], [False, False]]), [Replicate()])
    x = made(mesh, torch.zeros(2, 1), [Replicate()])
    x.expand(2, 2)[mask] = 1.0
    assert x.full_tensor().tolist() == [[1], [0]]
    x = made(mesh, torch.zeros(2, 1), [Shard(0)])  # two ranks have a row each, one has none
    # `x.expand(2, 2)[mask] = 1.0` is this until torch 2.14; later ones fill by masked_fill_.
    one = made(mesh, torch.tensor(1.0), [Replicate()])
    with pytest.raises(PlacementError, match="elements share memory") as caught:
        x.expand(2, 2).index_put_((mask,), one)
    assert "clone()" in caught.value.fix
    assert x.full_tensor().tolist() == [[0], [0]]
