"""What DTensors must do on a mesh of any shape; for thread-ranks and for processes.

Each function runs on every rank of a world. It raises where something differs from plain torch on
full tensors, or returns what the test compares (`computes`).
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
    clip_grad_norm_,
    distribute_tensor,
    init_device_mesh,
)
from dure.tensor.placement_types import StridedShard
from tests.tensor.ranks.operators import RIGHT, Run, Sample, Way, judge, run
from tests.tensor.ranks.parts import REDUCTIONS, made, part_of
from tests.waiting import PATIENCE_S

MESHES = [(1,), (3,), (2, 2), (3, 2), (2, 1, 2), (2, 2, 2)]
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


def redistributes(rank: int, sizes: tuple[int, ...], most: int) -> int:
    """Go from all placements to all others, or `most` of the pairs; return how many."""
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
    return len(cases)


# ---- operators -----------------------------------------------------------------------------------


def ramp(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape) / 8


def drawn(x: Any, w: Any, b: Any) -> list[Any]:
    """Draw random values after a seed: in place, by a layer, by an initialization."""
    torch.manual_seed(7)
    x = x.detach()
    return [x.clone().normal_(), F.dropout(x, 0.4), nn.init.xavier_uniform_(torch.zeros_like(w))]


def trained(x: Any, w: Any, b: Any) -> list[Any]:
    """Train two parameters for two steps of AdamW, with clipping."""
    parameters = [nn.Parameter(w.detach().clone()), nn.Parameter(b.detach().clone())]
    optimizer = torch.optim.AdamW(parameters, lr=0.1)
    for _ in range(2):
        optimizer.zero_grad()
        ((x.detach() * parameters[1]).sin() @ parameters[0]).square().mean().backward()
        norm = clip_grad_norm_(parameters, 0.5)
        optimizer.step()
    return [*parameters, norm]


OPERATORS: dict[str, Any] = {
    "sums": lambda x, w, b: (x.sum(), x.sum(0), x.mean(1), x.amax(0), x.prod(1)),
    "arithmetic": lambda x, w, b: (x * 2 + b, x / (x + 1), (x - b) ** 2),
    "linear": lambda x, w, b: F.linear(x, w.t(), b[:2].clone()),
    "product": lambda x, w, b: (x @ w, (x @ w).sum(1)),
    "views": lambda x, w, b: (x.t(), x.reshape(-1), x.unflatten(1, (2, 2)), x.flatten()),
    "chunks": lambda x, w, b: (*x.chunk(2, 1), *x.split(2), x[1:4], x[:, -1]),
    "joined": lambda x, w, b: (torch.cat([x, x * 2]), torch.stack([x, x + 1], 1)),
    "softmax": lambda x, w, b: (x.softmax(1), x.log_softmax(0), x.logsumexp(1)),
    "norms": lambda x, w, b: (F.layer_norm(x, (4,), b), x.var(0), torch.linalg.vector_norm(x)),
    "chosen": lambda x, w, b: (x[4], x.where(x > 1, -x), x.sort(0).values, x.cumsum(0)),
    "loss": lambda x, w, b: F.mse_loss(x @ w, (x @ w).detach() * 2),
    "written": lambda x, w, b: x.clone().mul_(2).add_(1).relu_(),
    "drawn": drawn,
    "trained": trained,
}  # fmt: skip


def operator_tries(sizes: Sequence[int], each: int) -> list[tuple[Sample, Way]]:
    """Return calls of all operators, with `each` choices of placements."""
    tensors = tuple(t.requires_grad_() for t in (ramp(5, 4), ramp(4, 2), ramp(4)))
    options = [[Replicate(), *map(Shard, range(t.ndim)), Partial()] for t in tensors]
    chooser = random.Random(len(sizes))
    found: list[tuple[Sample, Way]] = []
    for name, function in OPERATORS.items():
        sample = Sample(name, function, tensors)
        for _ in range(each):
            way = [[chooser.choice(one) for _ in sizes] for one in options]
            if name in ("written", "drawn", "trained"):  # Partial cannot be written
                way = [[Replicate() if p.is_partial() else p for p in one] for one in way]
            found.append((sample, tuple(map(tuple, way))))
    return found


def computes(rank: int, sizes: tuple[int, ...], each: int) -> list[Run]:
    """Run the operators, forward and backward."""
    mesh = init_device_mesh("cpu", sizes)
    return [run(sample, way, mesh) for sample, way in operator_tries(sizes, each)]


def check_computed(found: Sequence[list[Run]], sizes: Sequence[int], each: int) -> None:
    """Compare what `computes` returned on all ranks with the unsharded operators."""
    tries = operator_tries(sizes, each)
    results = [
        judge(sample.compute(), way, runs, sizes)
        for (sample, way), *runs in zip(tries, *found, strict=True)
    ]
    assert [str(result) for result in results if result.outcome != RIGHT] == []


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
