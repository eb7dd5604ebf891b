"""DTensors in and out: what is refused, values that are read, gradients of parts."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportArgumentType=false

from __future__ import annotations

import inspect
import warnings
from collections import Counter
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import Desync, MeshError, PlacementError, ShapeError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor import (
    DTensor,
    Partial,
    Replicate,
    Shard,
    autograd,
    distribute_module,
    distribute_tensor,
    init_device_mesh,
    zeros,
)
from dure.tensor.experimental import local_map
from dure.testing import CommRecorder, run_ranks
from tests.tensor.ranks.parts import made
from tests.thread_ranks import on_mesh, on_ranks

ROWS, COLUMNS, WHOLE, TERMS = [Shard(0)], [Shard(1)], [Replicate()], [Partial()]
X = torch.arange(12.0).reshape(4, 3)


def line(*names: str) -> DeviceMesh:
    return init_device_mesh("cpu", (2,), mesh_dim_names=names or None)


def rows(mesh: DeviceMesh | None = None) -> Any:
    return distribute_tensor(X, mesh or line(), ROWS)


def from_local(part: torch.Tensor, placements: Any, **options: Any) -> DTensor:
    return DTensor.from_local(part, line(), placements, **options)


def of_shape(*shape: int) -> dict[str, Any]:
    return {"shape": torch.Size(shape), "stride": torch.empty(shape).stride()}


MESH, PLACEMENT, SHAPE, USAGE = MeshError, PlacementError, ShapeError, UsageError
Refused = tuple[Callable[[], Any], type[Exception], str]
# Each: what is called, the error, and what tells it from others of its type.
CALLS: dict[str, Refused] = {
    "no mesh": (lambda: DTensor.from_local(X), MESH, "no mesh was given"),
    "no such dimension": (lambda: rows().redistribute(placements=[Shard(2)]), PLACEMENT, "2 dim"),
    "too many placements": (lambda: from_local(X, [*ROWS, *ROWS]), PLACEMENT, "1 axes"),
    "a bare placement": (lambda: rows().redistribute(placements=Shard(0)), PLACEMENT, "a list"),
    "a text as placement": (lambda: from_local(X, ["S(0)"]), PLACEMENT, "'S(0)', a builtins.str"),
    "no such reduction": (lambda: Partial("mean"), PLACEMENT, "'mean'"),
    "reductions that do not commute": (
        lambda: DTensor.from_local(X, init_device_mesh("cpu", (2, 1)), [*TERMS, Partial("max")]),
        PLACEMENT,
        "Partial(max)",
    ),
    "a factory's Partial": (
        lambda: zeros(4, device_mesh=line(), placements=TERMS), PLACEMENT, "(zeros)"
    ),
    "meshes with other names": (
        lambda: rows(line("dp")) + rows(line("tp")), MESH, "(dp=2), 'cpu', stride=(1,)) of ranks"
    ),
    "a plain tensor": (lambda: rows() + torch.ones(4, 3), USAGE, "'other', torch.float32 [4, 3]"),
    "a plain tensor written": (lambda: torch.ones(4, 3).add_(rows()), USAGE, "'self'"),
    "a Partial product written": (
        lambda: from_local(torch.ones(3), [Partial("product")]).add_(1), PLACEMENT,
        "it writes float32[3] (P(product))",
    ),
    "data of another kind": (lambda: setattr(rows(), "data", X), USAGE, "Tensor [4, 3]"),
    "replicated to Partial": (
        lambda: from_local(X, WHOLE).redistribute(placements=TERMS), PLACEMENT, "R -> P(sum)"
    ),
    "to another mesh": (lambda: rows(line("dp")).redistribute(line("tp"), ROWS), MESH, "tp=2"),
    "a part of another shape": (
        lambda: from_local(X, ROWS, **of_shape(12, 3)), SHAPE, "[4, 3], expected [6, 3]"
    ),
    "gradients of no dimension": (
        lambda: rows().requires_grad_().to_local(grad_placements=[Shard(2)]),
        PLACEMENT,
        "(to_local)",
    ),
}  # fmt: skip


@pytest.mark.parametrize("name", CALLS)
@on_ranks(2)
def test_what_one_rank_can_see_is_refused_before_anything_is_sent(rank, name):
    call, kind, words = CALLS[name]

    with pytest.raises(kind) as caught:
        call()
    assert words in str(caught.value)


@on_ranks(2)
def test_equal_meshes_go_together(rank):
    assert torch.equal((rows(line("tp")) + rows(line("tp"))).full_tensor(), 2 * X)


def test_one_rank_alone_may_print_tensors_and_gradients(capsys):
    def body(rank: int) -> None:
        mesh = line()
        weight = rows(mesh).detach().requires_grad_()
        weight.square().sum().backward()
        if rank == 0:
            print(weight, weight.grad, repr(weight.grad), f"{weight}")
        assert torch.equal(weight.detach().full_tensor(), X)  # the next thing that is sent

    run_ranks(2, body)
    assert "placements=(Shard(dim=0),)" in capsys.readouterr().out


@on_ranks(2)
def test_gradients_of_different_parameters_are_not_added(rank):
    """Each is of one shape, and terms of a sum: what ranks reduce must be one parameter's."""

    mesh = line()
    norms = torch.nn.Sequential(torch.nn.LayerNorm(3), torch.nn.LayerNorm(3))
    distribute_module(norms, mesh)
    norms(rows(mesh)).sum().backward()
    with pytest.raises(Desync) as caught:
        _ = norms[rank].weight.grad
    assert all("test_dtensor.py:" in call for call in caught.value.calls.values())
    assert "gradient of 1.weight of a LayerNorm" in caught.value.calls[1]


@on_ranks(2)
def test_what_is_read_is_the_value_of_the_whole(rank):
    mesh = line()
    for x in (rows(mesh), DTensor.from_local(X / 2, mesh, TERMS)):
        assert int(x[3, 2]) == 11
        assert f"{x.sum():.2f} {x.mean()}" == "66.00 5.5"
        assert len(x) == 4
        with pytest.raises(RuntimeError):
            x.item()
    with CommRecorder() as seen:
        text = repr(rows(mesh).detach())
    assert "local_tensor" in text
    assert seen.ops == ["scatter"]  # of distribute_tensor, none of repr


# ---- gradients of parts --------------------------------------------------------------------------


def test_a_gradient_that_may_be_terms_is_warned_about_at_the_line_that_leaves_it_open(monkeypatch):
    monkeypatch.setattr(autograd, "_warned_lines", set())  # lines of earlier runs of this test

    def body(rank: int) -> None:
        mesh = line("tp")
        whole, terms, scale = (
            DTensor.from_local(torch.ones(shape), mesh, w).requires_grad_()
            for shape, w in ((3, WHOLE), (3, TERMS), ((), WHOLE))
        )
        cut = DTensor.from_local(torch.ones(2, 3), mesh, ROWS).requires_grad_()
        assert whole.to_local().numel() == 3  # reading warns of nothing
        for _ in range(2):
            whole.to_local().sum().backward()  # warned: (R)
        terms.to_local().sum().backward()  # warned: (P(sum))
        (scale.to_local() * X).sum().backward()  # warned: (R)
        whole.full_tensor().sum().backward()  # warned: (R)
        whole.to_local(grad_placements=WHOLE).sum().backward()
        whole.full_tensor(grad_placements=WHOLE).sum().backward()
        whole.sum().to_local().backward()
        whole.sum().full_tensor().backward()
        cut.to_local().sum().backward()
        assert cut.full_tensor().numel() == 12
        cut.full_tensor().sum().backward()  # warned: (S(0))
        cut.redistribute(placements=WHOLE).to_local().sum().backward()  # warned: (R)
        cut.full_tensor(grad_placements=TERMS).sum().backward()

    with warnings.catch_warnings(record=True) as seen:
        warnings.simplefilter("always")
        run_ranks(2, body)
    lines, first = inspect.getsourcelines(body)
    told = {one.lineno: one for one in seen}
    # Ranks are threads here: both may come to a line before either has noted it.
    assert max(Counter(one.lineno for one in seen).values()) <= 2
    assert sorted(told) == [n + first for n, code in enumerate(lines) if "# warned: " in code]
    for number, one in told.items():
        code, _, where = lines[number - first].partition("# warned: ")
        text = str(one.message)
        assert one.filename == __file__
        assert f"{where.strip()}: its gradient" in text
        assert text.startswith("full_tensor()" if "full_tensor" in code else "to_local()")
        assert "same on all ranks of tp" in text
        assert "Partial() for these axes" in text


@on_ranks(2)
def test_a_gradient_of_terms_is_summed_where_that_is_said(rank):
    weight = nn.Parameter(distribute_tensor(torch.ones(3), line(), WHOLE))
    part = weight.to_local(grad_placements=TERMS)  # pyright: ignore
    assert isinstance(part, nn.Parameter)
    (part * (rank + 1)).sum().backward()
    grad: Any = weight.grad
    assert grad.placements == tuple(WHOLE)
    assert grad.to_local().tolist() == [3, 3, 3]


@on_ranks(2)
def test_a_gradient_of_a_part_has_the_strides_that_its_spec_says(rank):
    """As experts write them: a transposed part, whose gradient comes transposed."""

    for weight, placements in (
        (torch.arange(24.0).reshape(4, 6), ROWS),
        (torch.arange(24.0).reshape(6, 4), ROWS),
        (torch.arange(24.0).reshape(6, 4).t(), COLUMNS),
        (torch.arange(24.0).reshape(4, 6), WHOLE),
    ):
        x = distribute_tensor(weight, line(), placements)
        x = (x.t() if len(weight) == 6 else x).detach().requires_grad_()
        seen: list[Any] = []
        y = x * 1
        y.register_hook(seen.append)
        part = y.to_local(grad_placements=y.placements)
        (part.t().contiguous() ** 2).sum().backward()
        for grad in (*seen, x.grad):
            assert (
                grad.part.stride() == torch.empty_strided(grad.part.shape, x.part.stride()).stride()
            )
            assert grad.stride() == x.stride()
        assert torch.equal(x.grad.part, 2 * x.part)


@on_ranks(2)
def test_from_local_says_the_strides_of_its_part(rank):
    def strides(part: torch.Tensor, placements: Any) -> tuple[int, ...]:
        return from_local(part, placements).stride()

    spread = torch.ones(4, 6)[:, ::2]
    assert strides(spread, WHOLE) == spread.stride() == (6, 2)
    assert strides(spread, ROWS) == (6, 2)
    assert strides(spread, COLUMNS) == (12, 2)
    assert strides(spread.t(), COLUMNS) == (2, 6)
    assert strides(torch.ones(3).expand(4, 3), WHOLE) == (0, 1)
    assert strides(torch.ones(1, 1, 4), ROWS) == (4, 4, 1)
    assert strides(torch.ones(4, 1).t(), ROWS) == (4, 1)  # of one row, strides say nothing
    moved = from_local(spread, ROWS).redistribute(placements=WHOLE)
    assert moved.stride() == moved.to_local().stride() == (3, 1)


# --------------------------------------------------------------------------------------------------
# Gradients of gradients, through every way into DTensors, between placements, and out.
# Most take the sum of cubes, whose gradient is ``3 x^2``; the sum of that one's squares has the
# gradient ``36 x^3``.


ONE_TO_FOUR = torch.tensor([1.0, 2.0, 3.0, 4.0])
CUBED = [36.0, 288.0, 972.0, 2304.0]
"""36 x^3 of these."""


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
def test_of_a_sharded_tensor(rank, way, size):
    """Three elements over two ranks are uneven parts, which local_map does not return."""

    x = distribute_tensor(ONE_TO_FOUR[:size], init_device_mesh("cpu", (2,)), ROWS).requires_grad_()
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
def test_of_parts_that_are_given(name):
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
def test_a_gradient_with_a_history_keeps_it_when_it_is_reduced(mesh):
    """The squares of w times 1, 2, 3 and 4 have the gradient 60 w; its squares 7200 w."""

    w = distribute_tensor(torch.tensor([1.0, 2.0]), mesh, WHOLE).requires_grad_()
    rows = distribute_tensor(ONE_TO_FOUR.reshape(4, 1).expand(4, 2).clone(), mesh, ROWS)
    (w.grad,) = torch.autograd.grad(((w * rows) ** 2).sum(), w, create_graph=True)
    grad: Any = w.grad
    assert grad.placements == (Replicate(),)
    (found,) = torch.autograd.grad((full(grad) ** 2).sum(), w)
    w.grad = None
    assert found.full_tensor().tolist() == [7200.0, 14400.0]


# --------------------------------------------------------------------------------------------------
# Gradients that torch's formulas make of nothing, as those of `sgn`: zeros without memory.


BEFORE: dict[str, Callable[[Any, Any], Any]] = {
    "nothing": lambda x, y: x,
    "a product": lambda x, y: x @ y,
    "a mean": lambda x, y: x.mean(0),
    "rows": lambda x, y: x[1:3],
    "a redistribution": lambda x, y: (x @ y).redistribute(placements=[Shard(1)]),
    "a part": lambda x, y: (
        DTensor.from_local(
            x.to_local(grad_placements=[Replicate()]) * 2, x.device_mesh, [Replicate()]
        )
        if x.placements == (Replicate(),)
        else x
    ),
}


@pytest.mark.parametrize("before", BEFORE)
@on_mesh(2)
def test_gradient_behind_sgn_is_zeros_with_the_placements_of_its_tensor(mesh, before):
    for placement in (Shard(0), Shard(1), Replicate(), Partial()):
        x = made(mesh, torch.arange(1.0, 25).reshape(6, 4), [placement]).requires_grad_()
        y = made(mesh, torch.arange(1.0, 25).reshape(4, 6), [Shard(0)]).requires_grad_()
        BEFORE[before](x, y).sgn().sum().backward()
        for one in (x, y):
            if one.grad is None:
                assert one is y
                continue
            assert isinstance(one.grad, DTensor)
            assert not any(p.is_partial() for p in one.grad.placements)
            one.grad.add_(1)  # it has memory
            assert torch.equal(one.grad.full_tensor(), torch.ones(one.shape))
