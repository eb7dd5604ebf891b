"""Who holds a tensor: what a program has is not moved, what only torch's formulas have is.

What an operator writes stays where it is, and a program's plain tensor is not taken as replicated.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

from typing import Any, cast

import pytest
import torch

from dure.errors import PlacementError, UsageError
from dure.tensor import DTensor, Partial, Replicate, Shard, holders, init_device_mesh
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh, on_ranks

aten = torch.ops.aten


@on_ranks(2)
def test_a_plain_tensor_of_the_program_is_refused_however_it_is_held(rank: int) -> None:
    x = made(init_device_mesh("cpu", (2,)), torch.arange(4), [Shard(0)])
    held = torch.ones(4, dtype=torch.int64)
    ways = {
        "name": lambda: torch.add(x, held),
        "expression": lambda: torch.add(x, torch.ones(4, dtype=torch.int64)),
        "operator": lambda: x + torch.ones(4, dtype=torch.int64),
        "tuple": lambda: torch.add(*(x, torch.ones(4, dtype=torch.int64))),
        "generator": lambda: next(map(torch.add, [x], iter([held * 1]))),
        "overload": lambda: aten.add.Tensor(x, torch.ones(4, dtype=torch.int64)),
        "list": lambda: torch.cat([x, torch.ones(4, dtype=torch.int64)]),
    }
    for name, use in ways.items():
        with pytest.raises(UsageError) as caught:
            pytest.fail(f"{name}: {use()}")
        assert caught.type is UsageError


def test_what_counts_as_nobodys_is_measured() -> None:
    assert holders._references_of_none() == holders._REFERENCES == 3


@pytest.mark.parametrize("held", [False, True])
@on_ranks(2)
def test_a_part_that_the_program_has_is_not_moved_away(rank: int, held: bool) -> None:
    # The first gradient is terms, the second one sharded: autograd adds it to the first in place.
    mesh = init_device_mesh("cpu", (2,))
    weight = made(mesh, torch.ones(2, 1, requires_grad=True), [Replicate()])
    parts: list[torch.Tensor] = []
    if held:
        weight.register_hook(lambda g: parts.append(g.to_local()))
    rows = torch.tensor([[1.0, 2.0], [3.0, 4.0]])

    def learn(placement: Any) -> None:
        (made(mesh, rows, [placement]) @ weight).sum().backward()

    learn(Shard(0))
    if not held:
        learn(Shard(1))
        assert weight.grad.full_tensor().tolist() == [[8], [12]]
        return
    with pytest.raises(PlacementError):
        learn(Shard(1))
    assert parts[0].tolist() == [[[1], [2]], [[3], [4]]][rank]


@on_ranks(1)
def test_a_part_is_someones_else_as_an_object_and_as_memory(rank: int) -> None:
    x = made(init_device_mesh("cpu", (1,)), torch.ones(4), [Shard(0)])
    y = cast(DTensor, x + x)
    assert holders.has_its_part_alone(y)
    part = y.to_local()
    assert not holders.has_its_part_alone(y)
    del part
    assert holders.has_its_part_alone(y)
    view = cast(DTensor, y.view(2, 2))
    assert not holders.has_its_part_alone(y)
    assert not holders.has_its_part_alone(view)


# ---- writes --------------------------------------------------------------------------------------


@pytest.mark.parametrize("how", ["name", "result", "view"])
@on_mesh(2)
def test_what_a_program_has_is_not_moved(mesh, how):
    x = made(mesh, torch.ones(4), [Partial()])
    write = {
        "name": lambda: x.add_(1),
        "result": lambda: (x + x).add_(1),
        "view": lambda: x.view(2, 2).add_(1),
    }
    with pytest.raises(PlacementError):
        write[how]()
    assert x.placements == (Partial(),)
    assert x.full_tensor().tolist() == [1, 1, 1, 1]
