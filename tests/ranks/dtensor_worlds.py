"""What DTensors are to do on a mesh of any shape, against plain torch; for any kind of ranks.

Each function runs on every rank of a world and raises where something differs. What is expected is
computed by plain torch on whole tensors; which rank has what, by `torch.chunk`, cut after cut.
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
from dataclasses import dataclass
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
    empty,
    full,
    init_device_mesh,
    ones,
    rand,
    randn,
    zeros,
)
from dure.tensor.placement_types import StridedShard
from ranks.rule_checks import made, results_and_gradients, whole_of

MESHES = [
    (1,), (2,), (3,), (4,), (6,), (8,),
    (1, 1), (2, 1), (1, 3), (2, 2), (3, 2), (2, 4),
    (1, 1, 1), (1, 2, 1), (2, 1, 2), (1, 3, 2), (2, 2, 2),
]  # fmt: skip
"""Meshes of 1, 2 and 3 axes over worlds of 1, 2, 3, 4, 6 and 8 ranks."""


# ---- redistribution ------------------------------------------------------------------------------


@dataclass(frozen=True)
class Way:
    """How a tensor lies: which axes cut each dimension, in which order, and which have terms."""

    cuts: tuple[tuple[int, ...], ...]
    terms: tuple[int, ...] = ()

    def placements(self, sizes: Sequence[int]) -> list[Placement]:
        """An axis that cuts after later ones says in how many parts these have cut before."""
        found: list[Placement] = [Partial() if a in self.terms else Replicate() for a in
                                  range(len(sizes))]  # fmt: skip
        for dim, order in enumerate(self.cuts):
            for place, axis in enumerate(order):
                before = math.prod(sizes[a] for a in order[:place] if a > axis)
                found[axis] = Shard(dim) if before == 1 else StridedShard(dim, split_factor=before)
        return found

    def part(self, whole: torch.Tensor, sizes: Sequence[int], at: Sequence[int]) -> torch.Tensor:
        """The part of the rank that stands at `at`."""
        for dim, order in enumerate(self.cuts):
            for axis in order:
                chunks = whole.chunk(sizes[axis], dim)
                here = at[axis] < len(chunks)
                whole = chunks[at[axis]] if here else whole.narrow(dim, 0, 0)
        for axis in self.terms:
            whole = whole * sizes[axis] if at[axis] == 0 else -whole
        return whole.contiguous()


def ways(axes: int, dims: int, terms: bool) -> Iterator[Way]:
    """Every way for a tensor to lie on a mesh."""
    kinds: list[Any] = [None, *range(dims), *(["terms"] if terms else [])]
    for chosen in itertools.product(kinds, repeat=axes):
        cutting = [[a for a in range(axes) if chosen[a] == dim] for dim in range(dims)]
        summed = tuple(a for a in range(axes) if chosen[a] == "terms")
        for cuts in itertools.product(*map(itertools.permutations, cutting)):
            yield Way(tuple(cuts), summed)


def redistributes(rank: int, sizes: tuple[int, ...], most: int) -> int:
    """Go from every way to lie to every other, or `most` of them; return how many."""
    mesh = init_device_mesh("cpu", sizes)
    at = mesh.get_coordinate()
    assert at is not None
    olds, news = (list(ways(len(sizes), 2, terms)) for terms in (True, False))
    pairs = list(itertools.product(olds, news))
    if len(pairs) > most:
        pairs = random.Random(0).sample(pairs, most)
    shapes = [(8, 6), (5, 3), (3, 1), (0, 2)]  # even, uneven, ranks without any, empty
    for number, (old, new) in enumerate(pairs):
        shape = shapes[number % len(shapes)]
        whole = torch.arange(float(math.prod(shape))).reshape(shape)
        start = old.part(whole, sizes, at)
        x = DTensor.from_local(
            start, mesh, old.placements(sizes), shape=whole.shape, stride=whole.stride()
        )
        got = x.redistribute(placements=new.placements(sizes))
        told = f"{shape} on {sizes}: {x.placements} to {got.placements}"
        assert torch.equal(got.to_local(), new.part(whole, sizes, at)), told
        assert torch.equal(x.to_local(), start), told
        assert torch.equal(got.full_tensor(), whole), told
    return len(pairs)


# ---- operators -----------------------------------------------------------------------------------


def ramp(*shape: int) -> torch.Tensor:
    return torch.arange(1.0, math.prod(shape) + 1, dtype=torch.float64).reshape(shape) / 8


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
}  # fmt: skip


def computes(rank: int, sizes: tuple[int, ...], each: int) -> None:
    """Compare operators, forward and backward, for `each` choices of placements."""
    mesh = init_device_mesh("cpu", sizes)
    wholes = [t.requires_grad_() for t in (ramp(5, 4), ramp(4, 2), ramp(4))]
    single = [[[Replicate(), *map(Shard, range(t.ndim)), Partial()] for _ in sizes] for t in wholes]
    chooser = random.Random(len(sizes))
    for name, function in OPERATORS.items():
        expected = results_and_gradients(function, wholes)
        for _ in range(each):
            placements = [[chooser.choice(axis) for axis in one] for one in single]
            if name == "written":  # terms would have to be reduced first
                placements[0] = [Replicate() if p.is_partial() else p for p in placements[0]]
            given = [made(mesh, t, p) for t, p in zip(wholes, placements, strict=True)]
            for got, right in zip(results_and_gradients(function, given), expected, strict=True):
                told = f"{name} of {placements} on {sizes}"
                if right is None:
                    assert got is None, told
                else:
                    torch.testing.assert_close(
                        whole_of(got), right, msg=lambda m, t=told: f"{t}: {m}"
                    )


# ---- made from nothing, and drawn ----------------------------------------------------------------


def some_placements(sizes: Sequence[int], dims: int, count: int) -> list[list[Placement]]:
    every = list(itertools.product([Replicate(), *map(Shard, range(dims))], repeat=len(sizes)))
    return [list(one) for one in random.Random(3).sample(every, min(count, len(every)))]


def random_values(x: Any, factory: Any) -> list[Any]:
    """What is drawn after a seed: by factories, in place, by a layer, by initialisation."""
    torch.manual_seed(7)
    found = factory()
    found += [x.clone().normal_(), x.clone().bernoulli_(0.3), F.dropout(x, 0.4)]
    found += [nn.init.xavier_uniform_(x.clone()), torch.randn_like(x)]
    return found


def drawn_alone() -> list[torch.Tensor]:
    """What plain torch draws. Not on thread-ranks: they share the generator."""
    return random_values(ramp(5, 3), lambda: [torch.rand(5, 3), torch.randn(2, 5, 3)[0]])


def makes(rank: int, sizes: tuple[int, ...], drawn: list[torch.Tensor]) -> None:
    """Make DTensors of whole tensors, of nothing, and of random values."""
    mesh = init_device_mesh("cpu", sizes)
    for placements in some_placements(sizes, 2, 5):
        where: Any = {"device_mesh": mesh, "placements": placements}
        whole = ramp(5, 3)
        for source in (None, 0):
            own = whole if source is None or rank == 0 else torch.zeros_like(whole)
            x = distribute_tensor(own, mesh, placements, src_data_rank=source)
            assert torch.equal(x.full_tensor(), whole)
        assert torch.equal(ones(5, 3, **where).full_tensor(), torch.ones(5, 3))
        assert torch.equal(zeros((5, 3), **where).full_tensor(), torch.zeros(5, 3))
        assert torch.equal(full((5, 3), 2.5, **where).full_tensor(), torch.full((5, 3), 2.5))
        assert empty(5, 3, **where).to_local().shape == x.to_local().shape
        cube = [Shard(p.dim + 1) if isinstance(p, Shard) else p for p in placements]

        def factories(where: Any = where, cube: Any = cube) -> list[Any]:
            return [rand(5, 3, **where), randn(2, 5, 3, device_mesh=mesh, placements=cube)[0]]

        for one, right in zip(random_values(x, factories), drawn, strict=True):
            assert torch.equal(one.full_tensor(), right), (sizes, placements)


# ---- training ------------------------------------------------------------------------------------


def steps(parameters: list[Any], batches: list[Any], foreach: bool, clip: Any) -> list[float]:
    """Train two layers; return the losses and the norms of the gradients."""
    optimizer = torch.optim.AdamW(parameters, lr=0.1, foreach=foreach)
    told = []
    up, bias, down = parameters
    for x in batches:
        optimizer.zero_grad()
        loss = (torch.tanh(F.linear(x, up, bias)) @ down).square().mean()
        loss.backward()
        told += [loss.item(), float(clip(parameters, 0.5))]
        optimizer.step()
    return told


def trains(rank: int, sizes: tuple[int, ...]) -> None:
    """Compare three steps of AdamW, with clipping, with those of whole tensors."""
    mesh = init_device_mesh("cpu", sizes)
    wholes = [ramp(6, 4).sin(), ramp(6).sin(), ramp(6, 2).cos()]
    inputs = [ramp(5, 4) / (1 + step) for step in range(3)]
    chooser = random.Random(5)
    for foreach in (False, True):
        alone = [nn.Parameter(t.clone()) for t in wholes]
        expected = steps(alone, inputs, foreach, nn.utils.clip_grad_norm_)
        places = [chooser.choice(some_placements(sizes, t.ndim, 9)) for t in (*wholes, inputs[0])]
        own: list[Any] = [
            nn.Parameter(made(mesh, t.clone(), p)) for t, p in zip(wholes, places[:3], strict=True)
        ]
        batches = [made(mesh, x, places[3]) for x in inputs]
        got = steps(own, batches, foreach, clip_grad_norm_)
        torch.testing.assert_close(
            torch.tensor(got), torch.tensor(expected), msg=lambda m, p=places: f"{p}: {m}"
        )
        for one, right in zip(own, alone, strict=True):
            torch.testing.assert_close(
                one.full_tensor(), right.data, msg=lambda m, p=places: f"{p}: {m}"
            )


def everything(rank: int, sizes: tuple[int, ...], drawn: list[torch.Tensor]) -> int:
    """Run all of it on one mesh, with fewer cases each; return how many ways were gone."""
    computes(rank, sizes, 1)
    makes(rank, sizes, drawn)
    trains(rank, sizes)
    return redistributes(rank, sizes, 40)


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
            begun.wait(20)
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
        thread.join(20)
        assert not thread.is_alive(), "deadlock"
    return found


def losses_of_two_models(*sizes: tuple[int, int]) -> list[list[float]]:
    """Each of 2 x 4 elements is the sum of 4 elements of x, which have a term from each of dp."""
    models = enumerate(sizes)
    return [
        [8.0 * 4 * dp * (number + step) for step in range(ROUNDS)] for number, (dp, _) in models
    ]
