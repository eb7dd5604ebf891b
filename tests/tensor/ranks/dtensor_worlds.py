"""What DTensors must do on a mesh of any shape; for thread-ranks and for processes.

Each function runs on every rank of a world. It raises where something differs from plain torch on
full tensors.
"""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false, reportOptionalMemberAccess=false

from __future__ import annotations

import contextvars
import itertools
import math
import random
import threading
from collections.abc import Iterator, Sequence
from typing import Any

import torch
import torch.nn.functional as F
from torch import nn

from dure.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from dure.tensor.placement_types import StridedShard
from tests.tensor.ranks.parts import REDUCTIONS, made, part_of
from tests.waiting import PATIENCE_S

MESHES = [(1,), (2,), (3,), (4,), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2)]
"""Meshes of 1, 2 and 3 axes over worlds of 1 to 8 ranks."""


# ---- redistribution ------------------------------------------------------------------------------

Cuts = tuple[tuple[int, ...], ...]
"""For each dimension the axes that cut it, in their order."""


def placements_of(cuts: Cuts, sizes: Sequence[int], partial: dict[int, str]) -> list[Placement]:
    """Return placements; an axis that cuts after later ones says how many parts these have made."""
    found: list[Placement] = [
        Partial(partial[axis]) if axis in partial else Replicate() for axis in range(len(sizes))
    ]
    for dim, order in enumerate(cuts):
        for place, axis in enumerate(order):
            before = math.prod(sizes[a] for a in order[:place] if a > axis)
            found[axis] = Shard(dim) if before == 1 else StridedShard(dim, split_factor=before)
    return found


def all_cuts(sizes: Sequence[int], dims: int, ops: Sequence[str]) -> Iterator[tuple[Cuts, Any]]:
    """Yield all orders in which axes cut dimensions, and the reductions of the other axes."""
    axes = range(len(sizes))
    for chosen in itertools.product([None, *range(dims), *ops], repeat=len(sizes)):
        cutting = [[a for a in axes if chosen[a] == dim] for dim in range(dims)]
        partial = {a: chosen[a] for a in axes if isinstance(chosen[a], str)}
        for cuts in itertools.product(*map(itertools.permutations, cutting)):
            yield tuple(cuts), partial


def redistributes(rank: int, sizes: tuple[int, ...], most: int) -> None:
    """Go from all placements to all others, or `most` of the pairs."""
    mesh = init_device_mesh("cpu", sizes)
    at = mesh.get_coordinate()
    assert at is not None
    olds, news = (
        [placements_of(cuts, sizes, partial) for cuts, partial in all_cuts(sizes, 2, ops)]
        for ops in (REDUCTIONS if len(sizes) == 1 else ("sum",), ())
    )
    shapes = [(8, 6), (5, 3), (3, 1), (0, 2)]  # even, uneven, ranks without any, empty
    cases = list(itertools.product(olds, news))
    if len(cases) > most:
        cases = random.Random(0).sample(cases, most)
    for number, (old, new) in enumerate(cases):
        for shape in shapes if len(sizes) == 1 else [shapes[number % len(shapes)]]:
            whole = torch.arange(float(math.prod(shape))).reshape(shape) * 4
            x = made(mesh, whole, old)
            start = x.to_local().clone()
            got = x.redistribute(placements=new)
            told = f"{shape} on {sizes}: {x.placements} to {got.placements}"
            assert got.shape == whole.shape, told
            assert torch.equal(got.to_local(), part_of(whole, new, sizes, at)), told
            assert torch.equal(x.to_local(), start), told


# ---- meshes that live together -------------------------------------------------------------------

ROUNDS = 10
PAIRS = [((2, 2), (2, 2)), ((4, 1), (4, 1)), ((4, 1), (1, 4))]
"""Of meshes of 4 ranks: equal ones; of which both have an axis that is the world; unequal ones."""


def two_models(rank: int, *sizes: tuple[int, int]) -> list[list[float]]:
    """Train two models on two meshes, a thread each, in no order between them.

    On odd ranks the second model's thread begins first: each rank's first collective is one that
    the others come to only with their other thread.
    """
    meshes = [init_device_mesh("cpu", shape, mesh_dim_names=("dp", "tp")) for shape in sizes]
    found: list[list[float]] = [[], []]
    begun = threading.Event()

    def work(number: int) -> None:
        mesh = meshes[number]
        if number == rank % 2:
            begun.set()
        else:
            begun.wait(PATIENCE_S)
        weight = nn.Parameter(distribute_tensor(torch.ones(4, 4), mesh, [Replicate(), Shard(0)]))
        for step in range(ROUNDS):
            terms = torch.full((2, 4), float(number + step))
            x = DTensor.from_local(terms, mesh, [Partial(), Replicate()])
            loss = F.linear(x, weight).sum()
            loss.backward()
            found[number].append(loss.item())
        assert weight.grad.full_tensor().shape == (4, 4)

    contexts = [contextvars.copy_context() for _ in meshes]  # of a rank that is a thread itself
    threads = [
        threading.Thread(target=context.run, args=(work, number), daemon=True)
        for number, context in enumerate(contexts)
    ]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join(PATIENCE_S)
        assert not thread.is_alive(), "deadlock"
    return found


def losses_of_two_models(*sizes: tuple[int, int]) -> list[list[float]]:
    """Each of 2 x 4 elements is the sum of 4 elements of x, which have a term from each of dp."""
    models = enumerate(sizes)
    return [
        [8.0 * 4 * dp * (number + step) for step in range(ROUNDS)] for number, (dp, _) in models
    ]
