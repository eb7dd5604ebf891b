"""Compares operators on DTensors with the same operators on whole tensors, for every placement."""

# pyright: reportReturnType=false

from __future__ import annotations

import itertools
import random
from collections.abc import Callable, Sequence
from typing import Any

import torch

from dure.tensor import DTensor, Partial, Replicate, Shard, init_device_mesh
from dure.testing import run_ranks
from ranks.test_redistribute import part_of

MESHES = ((4,), (2, 2))


def made(mesh: Any, whole: torch.Tensor, placements: Sequence[Any]) -> DTensor:
    """Make a DTensor whose whole is `whole`; the terms of a Partial differ between ranks."""
    part = part_of(whole.detach(), placements, mesh.shape, mesh.get_coordinate())
    x = DTensor.from_local(part, mesh, placements, shape=whole.shape, stride=whole.stride())
    return x.requires_grad_(whole.requires_grad)


def leaves(value: Any) -> list[Any]:
    """Return the tensors and numbers in a result."""
    if isinstance(value, (list, tuple)):
        return [leaf for one in value for leaf in leaves(one)]
    return [value]


def whole_of(value: Any) -> Any:
    """Return a result as one rank would have it."""
    return value.full_tensor() if isinstance(value, DTensor) else value


def results_and_gradients(function: Callable[..., Any], operands: Sequence[torch.Tensor]) -> Any:
    """Return what a function gives, and its operands' gradients for certain gradients of that."""
    results = leaves(function(*operands))
    taught = [r for r in results if isinstance(r, torch.Tensor) and r.requires_grad]
    learners = [t for t in operands if t.requires_grad]
    if not taught or not learners:
        return results
    gradients = []
    for result in taught:
        shape = result.shape
        ramp = torch.arange(1.0, shape.numel() + 1, dtype=result.dtype).reshape(shape) / 7
        if isinstance(result, DTensor):
            ramp = made(result.device_mesh, ramp, [Replicate()] * result.device_mesh.ndim)
        gradients.append(ramp)
    return results + list(torch.autograd.grad(taught, learners, gradients, allow_unused=True))


def commute(placements: Sequence[Any]) -> bool:
    """Tell whether terms may be reduced in any order of the axes."""
    reductions = {p.reduce_op for p in placements if p.is_partial()}
    return len(reductions) < 2 or reductions == {"sum", "avg"}


def check(
    function: Callable[..., Any],
    *operands: torch.Tensor,
    terms: Sequence[str] = (),
    meshes: Sequence[tuple[int, ...]] = MESHES,
    most: int = 30,
    rtol: float | None = None,
    atol: float | None = None,
) -> None:
    """Compare a function on DTensors with the function on wholes.

    Args:
        function: Takes the operands and returns tensors or numbers.
        operands: Whole tensors.
        terms: Reductions whose terms the first floating operand is given as, too.
        meshes: Meshes of thread-ranks.
        most: At most so many combinations of placements, a sample beyond.
        rtol, atol: As `torch.testing.assert_close`.
    """
    expected = results_and_gradients(function, operands)
    first = next(i for i, t in enumerate(operands) if t.is_floating_point() or terms == ())
    ways = []
    for number, whole in enumerate(operands):
        partial = [Partial(op) for op in terms] if number == first else []
        ways.append([Replicate(), *map(Shard, range(whole.ndim)), *partial])

    def body(sizes):
        mesh = init_device_mesh("cpu", sizes)
        single = [list(filter(commute, itertools.product(way, repeat=len(sizes)))) for way in ways]
        combinations = list(itertools.product(*single))
        if len(combinations) > most:
            combinations = random.Random(0).sample(combinations, most)
        for placements in combinations:
            given = [made(mesh, t, p) for t, p in zip(operands, placements, strict=True)]
            got = results_and_gradients(function, given)
            assert len(got) == len(expected)
            for one, right in zip(got, expected, strict=True):
                if right is None:
                    assert one is None
                    continue
                if isinstance(one, DTensor):
                    assert one.stride() == right.stride() or 1 in one.shape, placements
                torch.testing.assert_close(
                    whole_of(one),
                    right,
                    rtol=rtol,
                    atol=atol,
                    equal_nan=True,
                    msg=lambda m, p=placements: f"{p} on {sizes}: {m}",
                )

    for sizes in meshes:
        run_ranks(torch.Size(sizes).numel(), lambda rank, sizes=sizes: body(sizes))


def placed(
    function: Callable[..., Any], *operands: tuple[torch.Tensor, Sequence[Any]], n: int = 2
) -> list[list[Any]]:
    """Return the placements of each result of a function, on a mesh of one axis."""

    def body(rank):
        mesh = init_device_mesh("cpu", (n,))
        given = [made(mesh, whole, placements) for whole, placements in operands]
        return [list(r.placements) for r in leaves(function(*given)) if isinstance(r, DTensor)]

    return run_ranks(n, body)[0]
