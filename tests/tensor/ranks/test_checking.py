"""Ranks that mean different tensors learn it, at the first call that communicates."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import re
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch

from dure.device_mesh import DeviceMesh
from dure.errors import Desync
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    zeros,
)
from dure.testing import run_ranks
from tests.thread_ranks import on_ranks

ROWS, COLUMNS, WHOLE, TERMS = [Shard(0)], [Shard(1)], [Replicate()], [Partial()]
X = torch.arange(12.0).reshape(4, 3)


def line(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=names or None)


@on_ranks(2)
def test_checked_parts_that_fit_are_taken_and_copies_are_made_equal(rank):
    mesh = line()
    parts = torch.full((2 - rank, 3), float(rank))
    made = DTensor.from_local(
        parts, mesh, ROWS, run_check=True, shape=torch.Size([3, 3]), stride=(3, 1)
    )
    assert made.full_tensor().sum() == 3
    copies = DTensor.from_local(torch.full((2,), float(rank)), mesh, WHOLE, run_check=True)
    assert copies.to_local().tolist() == [0, 0]


@on_ranks(2)
def test_ranks_that_mean_different_tensors_learn_both_lines(rank):
    mesh = line("tp")
    shape = (4 + rank, 3)
    with pytest.raises(Desync) as caught:
        distribute_tensor(torch.ones(shape), mesh, ROWS)
    with pytest.raises(Desync) as other:
        distribute_tensor(torch.ones(4, 4), line("tp"), [Shard(rank)])
    with pytest.raises(Desync) as unlike:
        DTensor.from_local(torch.ones(shape), line("tp"), ROWS, run_check=True)
    with pytest.raises(Desync) as kinds:
        distribute_tensor(X.double() if rank else X, line("tp"), ROWS)
    for error in (caught, other, unlike, kinds):
        assert sorted(error.value.calls) == [0, 1]
        for text in error.value.calls.values():
            assert re.search(rf"{Path(__file__).name}:\d+", text), text
    assert "float32[4, 3]" in str(caught.value)
    assert "float32[5, 3]" in str(caught.value)
    assert "(S(0))" in str(other.value)
    assert "(S(1))" in str(other.value)
    assert "float64[4, 3]" in str(kinds.value)


Case = tuple[Callable[[int, Any], Any], Callable[[Any], Any]]


def parts(placements: list[Any], *shapes: tuple[int, ...]) -> Callable[[int, Any], Any]:
    """Return what makes a DTensor of parts of one, of these shapes on the two ranks."""
    return lambda rank, mesh: DTensor.from_local(torch.ones(shapes[rank]), mesh, placements)


def move(placements: list[Any]) -> Callable[[Any], Any]:
    return lambda x: x.redistribute(placements=placements)


# Each: what a rank has, and what communicates.
UNLIKE: dict[str, Case] = {
    "other shapes": (
        lambda rank, mesh: zeros(4 + 2 * rank, device_mesh=mesh, placements=ROWS),
        DTensor.full_tensor,
    ),
    "unequal parts": (parts(ROWS, (2, 3), (3, 3)), DTensor.full_tensor),
    "other reductions": (
        lambda rank, mesh: DTensor.from_local(
            torch.ones(2), mesh, [Partial("max" if rank else "sum")]
        ),
        DTensor.full_tensor,
    ),
    "other operators": (
        lambda rank, mesh: distribute_tensor(X, mesh, ROWS).sum(rank),
        DTensor.full_tensor,
    ),
    # As many bytes on both ranks, so that only what is meant differs.
    "other shapes of one length": (parts(ROWS, (2, 4), (4, 2)), DTensor.full_tensor),
    "other strides": (
        lambda rank, mesh: DTensor.from_local(
            torch.ones(2, 2).t() if rank else torch.ones(2, 2), mesh, TERMS
        ),
        DTensor.full_tensor,
    ),
    "all_to_all": (parts(ROWS, (4, 2), (2, 4)), move(COLUMNS)),
    "reduce_scatter": (parts(TERMS, (4, 2), (2, 4)), move(ROWS)),
    "an operator's own": (parts(COLUMNS, (4, 2), (4, 3)), lambda x: x.log_softmax(1)),
    "another target": (
        parts(TERMS, (4, 4), (4, 4)),
        lambda x: move([Shard(x.device_mesh.get_rank())])(x),
    ),
}


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_differ_learn_it_at_the_first_call_that_communicates(name, verified):
    make, communicate = UNLIKE[name]

    def body(rank: int) -> tuple[str, dict[int, str]]:
        gloo: Any = {0: ("gloo", {"verify": True})} if verified else None
        x = make(rank, init_device_mesh("cpu", (2,), backend_override=gloo))
        with pytest.raises(Desync) as caught:
            communicate(x)
        assert sorted(caught.value.calls) == [0, 1]
        for text in caught.value.calls.values():
            assert verified or re.search(rf"{Path(__file__).name}:\d+", text), text
        return str(x.spec), caught.value.calls

    for _, calls in (found := run_ranks(2, body)):
        for rank, (spec, _) in enumerate(found):
            assert f"of {spec}" in calls[rank]
