"""What is refused, and in which words: each names what is wrong, who has it, and what to do."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import inspect
import re
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dure.device_mesh import DeviceMesh
from dure.errors import Desync, MeshError, PlacementError, ShapeError, UsageError
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
    zeros,
)
from dure.tensor.experimental import implicit_replication
from dure.testing import CommRecorder, run_ranks

ROWS, COLUMNS, WHOLE, TERMS = [Shard(0)], [Shard(1)], [Replicate()], [Partial()]
X = torch.arange(12.0).reshape(4, 3)


def line(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=names or None)


def rows(mesh: DeviceMesh | None = None) -> Any:
    return distribute_tensor(X, mesh or line(), ROWS)


def vector_by_columns() -> None:
    distribute_tensor(torch.ones(4), line(), COLUMNS)


# Each: what is called, the error, and what its words must have in them.
CALLS: dict[str, tuple[Callable[[], Any], type[Exception], list[str]]] = {
    "larger than the world": (
        lambda: init_device_mesh("cpu", (2, 2)),
        MeshError,
        ["larger than the world", "(2, 2) has 4 ranks", "world 2", "Start 4 ranks"],
    ),
    "a rank twice": (lambda: DeviceMesh("cpu", [0, 0]), MeshError, ["twice", "[0]"]),
    "no such rank": (lambda: DeviceMesh("cpu", [0, 7]), MeshError, ["no such rank", "[7]"]),
    "a name twice": (
        lambda: init_device_mesh("cpu", (2, 1), mesh_dim_names=("tp", "tp")),
        MeshError,
        ["name of its own", "('tp', 'tp')"],
    ),
    "no such dimension": (vector_by_columns, PlacementError, ["no such dimension", "1 dimensions"]),
    "too many placements": (
        lambda: distribute_tensor(X, line(), [Shard(0), Shard(1)]),
        PlacementError,
        ["one placement for each mesh axis", "1 axes"],
    ),
    "placements that are none": (
        lambda: distribute_tensor(X, line(), ["S(0)"]),  # pyright: ignore
        PlacementError,
        ["Shard, Replicate or Partial", "'S(0)'"],
    ),
    "factories": (
        lambda: zeros(4, device_mesh=line(), placements=COLUMNS),
        PlacementError,
        ["no such dimension", "(zeros)"],
    ),
    "meshes with other names": (
        lambda: rows(line("dp")) + rows(line("tp")),
        MeshError,
        ["aten.add.Tensor", "different meshes", "dp=2", "tp=2", "full_tensor"],
    ),
    "meshes in another order": (
        lambda: rows(DeviceMesh("cpu", [0, 1])) + rows(DeviceMesh("cpu", [1, 0])),
        MeshError,
        ["different meshes", "ranks [0, 1]", "ranks [1, 0]"],
    ),
    "a plain tensor": (
        lambda: rows() + torch.ones(4, 3),
        UsageError,
        ["plain tensor", "'other'", "float32 [4, 3]", "distribute_tensor", "implicit_replication"],
    ),
    "a plain tensor written": (
        lambda: torch.ones(4, 3).add_(rows()),
        UsageError,
        ["plain tensor", "'self'", "distribute_tensor"],
    ),
    "terms written": (
        lambda: DTensor.from_local(torch.ones(3), line(), TERMS).sqrt_(),
        PlacementError,
        ["aten.sqrt_", "float32[3] (P(sum))", "redistribute()", "returns a new tensor"],
    ),
    "a sharded dimension written by its sums": (
        lambda: torch.cumsum(rows(), 0, out=rows()),
        PlacementError,
        ["cumsum", "S(0)"],
    ),
    "data of another kind": (
        lambda: setattr(rows(), "data", X),
        UsageError,
        ["data of a DTensor", "Tensor [4, 3]", "distribute_tensor"],
    ),
    "to terms": (
        lambda: rows().redistribute(placements=TERMS),
        PlacementError,
        ["to Partial", "from_local"],
    ),
    "to another mesh": (
        lambda: rows(line("dp")).redistribute(line("tp"), ROWS),
        MeshError,
        ["stays on its mesh", "dp=2", "tp=2"],
    ),
    "reductions that do not commute": (
        lambda: DTensor.from_local(
            X, init_device_mesh("cpu", (2, 1)), [Partial("sum"), Partial("max")]
        ),
        PlacementError,
        ["do not commute", "Partial(sum)", "Partial(max)"],
    ),
    "a part of another shape": (
        lambda: DTensor.from_local(X, line(), ROWS, shape=torch.Size([12, 3]), stride=(3, 1)),
        ShapeError,
        ["another shape", "[4, 3]", "float32[12, 3] (S(0))", "rank"],
    ),
    "gradients that lie nowhere": (
        lambda: rows().requires_grad_().to_local(grad_placements=[Shard(2)]),
        PlacementError,
        ["no such dimension", "(to_local)"],
    ),
}


@pytest.mark.parametrize("name", CALLS)
def test_what_one_rank_can_see_is_refused_before_anything_is_sent(name: str) -> None:
    call, kind, words = CALLS[name]

    def body(rank: int) -> None:
        with pytest.raises(kind) as caught:
            call()
        for word in words:
            assert word in str(caught.value), (word, str(caught.value))

    run_ranks(2, body)


def test_equal_meshes_go_together_and_plain_tensors_where_that_is_said() -> None:
    def body(rank: int) -> None:
        x, y = rows(line("tp")), rows(line("tp"))
        assert torch.equal((x + y).full_tensor(), 2 * X)
        with implicit_replication():
            assert torch.equal((x + X).full_tensor(), 2 * X)

    run_ranks(2, body)


def test_ranks_that_mean_different_tensors_learn_both_lines() -> None:
    def body(rank: int) -> None:
        mesh = line("tp")
        shape = (4 + rank, 3)
        with pytest.raises(Desync) as caught:
            distribute_tensor(torch.ones(shape), mesh, ROWS)
        with pytest.raises(Desync) as other:
            distribute_tensor(torch.ones(4, 4), line("tp"), [Shard(rank)])
        with pytest.raises(Desync) as unlike:
            DTensor.from_local(torch.ones(shape), line("tp"), ROWS, run_check=True)
        for error in (caught, other, unlike):
            assert sorted(error.value.calls) == [0, 1]
            for text in error.value.calls.values():
                assert re.search(r"test_dtensor_refused.py:\d+", text), text
        assert "float32[4, 3]" in str(caught.value)
        assert "float32[5, 3]" in str(caught.value)
        assert "(S(0))" in str(other.value)
        assert "(S(1))" in str(other.value)
        assert "shape= and stride=" in str(unlike.value)

    run_ranks(2, body)


UNLIKE: dict[str, Callable[[int, Any], Any]] = {
    "other shapes": lambda rank, mesh: zeros(4 + 2 * rank, device_mesh=mesh, placements=ROWS),
    "other uneven shapes": lambda rank, mesh: zeros(5 + rank, device_mesh=mesh, placements=ROWS),
    "unequal parts": lambda rank, mesh: DTensor.from_local(torch.ones(2 + rank, 3), mesh, ROWS),
    "unequal terms": lambda rank, mesh: DTensor.from_local(torch.ones(2 + rank, 3), mesh, TERMS),
    "other reductions": lambda rank, mesh: DTensor.from_local(
        torch.ones(2), mesh, [Partial("max" if rank else "sum")]
    ),
    "other placements": lambda rank, mesh: DTensor.from_local(
        torch.ones(2, 2), mesh, TERMS if rank else ROWS
    ),
    "other dtypes": lambda rank, mesh: DTensor.from_local(
        torch.ones(2, dtype=torch.float64 if rank else torch.float32), mesh, ROWS
    ),
    "other operators": lambda rank, mesh: rows(mesh).sum(0) if rank else rows(mesh).sum(1),
    # As many bytes on both ranks, so that only what is meant differs.
    "other shapes of one length": lambda rank, mesh: DTensor.from_local(
        torch.ones(4, 2) if rank else torch.ones(2, 4), mesh, ROWS
    ),
    "terms of other shapes": lambda rank, mesh: DTensor.from_local(
        torch.ones(4, 2) if rank else torch.ones(2, 4), mesh, TERMS
    ),
    "other dimensions": lambda rank, mesh: DTensor.from_local(
        torch.ones(2, 2), mesh, [Shard(rank)]
    ),
    "other strides": lambda rank, mesh: DTensor.from_local(
        torch.ones(2, 2).t() if rank else torch.ones(2, 2), mesh, TERMS
    ),
}


@pytest.mark.parametrize("name", UNLIKE)
def test_ranks_that_differ_learn_it_at_the_first_call_that_communicates(name: str) -> None:
    def body(rank: int) -> tuple[str, dict[int, str]]:
        x = UNLIKE[name](rank, line("tp"))
        with pytest.raises(Desync) as caught:
            x.full_tensor()
        assert sorted(caught.value.calls) == [0, 1]
        for text in caught.value.calls.values():
            assert re.search(r"test_dtensor_refused.py:\d+", text), text
        return str(x.spec), caught.value.calls

    for _, calls in (found := run_ranks(2, body)):
        for rank, (spec, _) in enumerate(found):
            assert f"of {spec}" in calls[rank]


# Each: how the tensor lies, the shapes of the ranks' parts, and what communicates.
MOVES: dict[str, tuple[list[Any], list[tuple[int, int]], Callable[[DTensor], Any]]] = {
    "all_to_all": (ROWS, [(4, 2), (2, 4)], lambda x: x.redistribute(placements=COLUMNS)),
    "reduce_scatter": (TERMS, [(4, 2), (2, 4)], lambda x: x.redistribute(placements=ROWS)),
    "an operator's own": (COLUMNS, [(4, 2), (4, 3)], lambda x: x.log_softmax(1)),
    "another target": (
        TERMS,
        [(4, 4), (4, 4)],
        lambda x: x.redistribute(placements=[Shard(x.device_mesh.get_rank())]),
    ),
}


@pytest.mark.parametrize("verified", [False, True])
@pytest.mark.parametrize("name", MOVES)
def test_every_way_to_communicate_compares_what_is_meant(name: str, verified: bool) -> None:
    def body(rank: int) -> dict[int, str]:
        gloo: Any = {0: ("gloo", {"verify": True})} if verified else None
        mesh = init_device_mesh("cpu", (2,), backend_override=gloo)
        placements, shapes, move = MOVES[name]
        x = DTensor.from_local(torch.ones(shapes[rank]), mesh, placements)
        with pytest.raises(Desync) as caught:
            move(x)
        assert sorted(caught.value.calls) == [0, 1]
        assert f"of {x.spec} to" in caught.value.calls[rank]
        return caught.value.calls

    one, other = run_ranks(2, body)
    assert one == other


def test_checked_parts_that_fit_are_taken_and_copies_are_made_equal() -> None:
    def body(rank: int) -> None:
        mesh = line()
        parts = torch.full((2 - rank, 3), float(rank))
        made = DTensor.from_local(
            parts, mesh, ROWS, run_check=True, shape=torch.Size([3, 3]), stride=(3, 1)
        )
        assert made.full_tensor().sum() == 3
        copies = DTensor.from_local(torch.full((2,), float(rank)), mesh, WHOLE, run_check=True)
        assert copies.to_local().tolist() == [0, 0]

    run_ranks(2, body)


# ---- values of the whole -------------------------------------------------------------------------


def test_what_is_read_is_the_value_of_the_whole() -> None:
    def body(rank: int) -> None:
        mesh = line()
        for x in (rows(mesh), DTensor.from_local(X / 2, mesh, TERMS)):
            assert x.sum().item() == 66
            assert float(x.mean()) == 5.5
            assert int(x.max()) == 11
            assert x[3, 2].item() == 11
            assert bool((x > 10).any())
            assert not bool((x > 10).all())
            assert f"{x.sum():.2f} {x.mean()}" == "66.00 5.5"
            assert "11." in str(x)
            assert "11." in f"{x}"
            assert x.shape == X.shape
            assert len(x) == 4
            assert torch.equal(x, rows(mesh))
            with pytest.raises(RuntimeError, match="12 elements"):
                x.item()
        with CommRecorder() as seen:
            text = repr(rows(mesh).detach())
        assert "local_tensor" in text
        assert seen.ops == ["scatter"]  # of distribute_tensor, none of repr

    run_ranks(2, body)


# ---- gradients that would be lost ----------------------------------------------------------------


def test_a_gradient_that_may_be_terms_is_told_at_the_line_of_to_local() -> None:
    def body(rank: int) -> list[str]:
        mesh = line("tp")
        whole, terms = (
            DTensor.from_local(torch.ones(3), mesh, w).requires_grad_() for w in (WHOLE, TERMS)
        )
        with warnings.catch_warnings(record=True) as seen:
            warnings.simplefilter("always")
            if rank == 0:  # filters are those of the process, and so is who was told
                assert whole.to_local().numel() == 3  # who reads learns nothing
                for _ in range(2):
                    whole.to_local().sum().backward()
                terms.to_local().sum().backward()
                whole.to_local(grad_placements=WHOLE).sum().backward()
                whole.full_tensor().sum().backward()
                whole.sum().to_local().backward()
                cut = distribute_tensor(X, mesh, ROWS, src_data_rank=None).requires_grad_()
                cut.to_local().sum().backward()
            return [f"{one.filename}:{one.lineno}: {one.message}" for one in seen]

    lines, first = inspect.getsourcelines(body)
    told = run_ranks(2, body)[0]
    assert len(told) == 2
    for text, where, code in zip(told, ("(R)", "(P(sum))"), ("whole", "terms"), strict=True):
        number = int(text.split(":")[1])
        assert lines[number - first].strip() == f"{code}.to_local().sum().backward()"
        assert "test_dtensor_refused.py" in text
        assert f"float32[3] {where}" in text
        assert "same on all ranks of tp" in text
        assert "Partial() for these axes" in text


def test_gradients_of_sums_of_parts_add_up() -> None:
    def body(rank: int) -> None:
        x = DTensor.from_local(torch.ones(3, 2), line(), ROWS).requires_grad_()
        for _ in range(3):
            x.to_local().sum().backward()  # a gradient whose elements are one in memory
        grad: Any = x.grad
        assert grad.to_local().tolist() == [[3, 3]] * 3

    run_ranks(2, body)


def test_a_gradient_of_terms_is_summed_where_that_is_said() -> None:
    def body(rank: int) -> None:
        weight = nn.Parameter(distribute_tensor(torch.ones(3), line(), WHOLE))
        part = weight.to_local(grad_placements=TERMS)  # pyright: ignore
        assert isinstance(part, nn.Parameter)
        (part * (rank + 1)).sum().backward()
        grad: Any = weight.grad
        assert grad.placements == tuple(WHOLE)
        assert grad.to_local().tolist() == [3, 3, 3]

    run_ranks(2, body)
