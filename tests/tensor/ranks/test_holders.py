"""Who holds a tensor: what a program has is not moved, what only torch's formulas have is.

What an operator writes stays where it is, and a program's plain tensor is not taken as replicated.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import contextlib
import sys
from typing import Any, cast

import pytest
import torch
import torch.nn.functional as F

from dure.errors import PlacementError, UsageError
from dure.mesh import DeviceMesh
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


@on_mesh(2)
def test_plain_tensors_beside_dtensors(mesh):
    """A program's are refused; an index made of a Python list, and what gradients need, are not."""

    x = made(mesh, torch.ones(4, 2, requires_grad=True), [Shard(0)])
    weight, rows = torch.ones(3, 2), torch.tensor([0, 1])

    class Mixes(torch.autograd.Function):
        @staticmethod
        def forward(ctx, x):
            return x * 2

        @staticmethod
        def backward(ctx, grad):
            return grad * torch.ones(4, 2)

    mixed = (
        lambda: x[rows],
        lambda: x[torch.tensor([0, 1])],
        lambda: F.linear(x, weight),
        lambda: F.linear(x, torch.ones(3, 2)),
        lambda: Mixes.apply(x).sum().backward(),
    )
    for mix in mixed:
        with pytest.raises(UsageError) as caught:
            mix()
        assert caught.type is UsageError
    with torch.autocast("cpu", dtype=torch.bfloat16), pytest.raises(UsageError):
        F.linear(x, torch.nn.Parameter(weight))
    (grad,) = torch.autograd.grad(x[[0, 2]].sum(), x)
    assert torch.equal(grad.full_tensor(), torch.tensor([[1.0] * 2, [0.0] * 2] * 2))


@on_mesh(2)
def test_a_debugger_that_holds_frames_makes_nothing_wrong(mesh: DeviceMesh) -> None:
    """References of a tracer's make tensors count as seen: refused at most."""

    x = made(mesh, torch.ones(4, 6), [Partial()])
    kept: list[Any] = []

    def trace(frame: Any, event: str, arg: Any) -> Any:
        kept.append((dict(frame.f_locals), arg))
        return trace

    sys.settrace(trace)
    try:
        with contextlib.suppress(PlacementError):
            y = F.rms_norm(x, (6,))
            sys.settrace(None)
            torch.testing.assert_close(y.full_tensor(), torch.ones(4, 6))
    finally:
        sys.settrace(None)
    assert kept


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


@on_mesh(2)
def test_terms_are_not_copied_to_what_rounds_them(mesh):
    # 0.5 + 0.5 is 1; the terms as integers are 0 and 0.
    halves = DTensor.from_local(torch.full((3,), 0.5), mesh, [Partial()])
    whole = DTensor.from_local(torch.zeros(3, dtype=torch.int64), mesh)
    terms = DTensor.from_local(torch.zeros(3, dtype=torch.int64), mesh, [Partial()])
    assert whole.copy_(halves).full_tensor().tolist() == [1, 1, 1]
    with pytest.raises(PlacementError):
        terms.copy_(halves)
    floats = DTensor.from_local(torch.zeros(3), mesh, [Partial()])
    assert floats.copy_(halves).placements == (Partial(),)
    assert floats.full_tensor().tolist() == [1, 1, 1]


@on_mesh(2)
def test_a_gradient_that_is_written_is_moved(mesh):
    # The second gradient is whole where the first one is terms of a sum.
    x = made(mesh, torch.ones(2, requires_grad=True), [Shard(0)])
    whole = x.redistribute(placements=[Shard(0)])
    (whole.sum() * 3).backward()
    (whole.sum() * 4).backward()
    assert x.grad.full_tensor().tolist() == [7, 7]


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


@on_mesh(3)
def test_writing_by_index_to_what_shares_memory_is_refused_on_all_ranks(mesh):
    # torch would refuse on the ranks whose parts overlap, and the others would go on.
    tall = DTensor.from_local(torch.zeros(4, 2), mesh, [Shard(1)]).expand(2, 4, 6)
    mask = DTensor.from_local(torch.ones(2, 4, 6, dtype=torch.bool), mesh)
    with pytest.raises(PlacementError, match="writes its operand"):
        tall[mask] = 1.0
