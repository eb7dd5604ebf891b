"""Training with random layouts, placements, optimizers and forms, against full tensors."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportAttributeAccessIssue=false

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import nn

from dure.tensor import (
    DTensor,
    Replicate,
    Shard,
    clip_grad_norm_,
    distribute_tensor,
    init_device_mesh,
)
from dure.testing import run_ranks
from tests.tensor.ranks.optimizers import FORMS, optimizer_of
from tests.tensor.ranks.parts import ORDERS


@dataclass(frozen=True)
class Weight:
    """A parameter: how it is divided, in which order its parts are stored, how it is used."""

    shape: tuple[int, ...]
    placements: tuple[Any, ...]
    order: str
    use: str


@st.composite
def weights(draw: Any, axes: int) -> Weight:
    shape = tuple(draw(st.lists(st.integers(1, 5), min_size=2, max_size=3)))
    places = [Replicate(), *(Shard(dim) for dim in range(len(shape)))]
    placements = tuple(draw(st.sampled_from(places)) for _ in range(axes))
    use = draw(st.sampled_from(["operators", "part", *ORDERS]))
    return Weight(shape, placements, draw(st.sampled_from([*ORDERS])), use)


@st.composite
def jobs(draw: Any) -> tuple[tuple[int, ...], list[Weight], tuple[str, str], bool]:
    mesh = draw(st.sampled_from([(2,), (3,), (2, 2)]))
    some = draw(st.lists(weights(len(mesh)), min_size=1, max_size=4))
    return mesh, some, draw(st.sampled_from(FORMS)), draw(st.booleans())


def values(shape: tuple[int, ...], seed: int) -> torch.Tensor:
    numbers = torch.arange(math.prod(shape), dtype=torch.float64)
    return torch.cos(numbers * 3 + seed).reshape(shape)


def fill_gradient(own: Any, weight: Weight, factor: torch.Tensor) -> None:
    """Let backward, or the program, give the parameter the gradient 2 w factor^2."""
    spread = distribute_tensor(factor, own.device_mesh, weight.placements)
    if weight.use == "operators":
        (own.transpose(-2, -1) * spread.transpose(-2, -1)).square().sum().backward()
    elif weight.use == "part":
        part = own.to_local(grad_placements=weight.placements).transpose(-2, -1)
        (part.contiguous() * spread.to_local().transpose(-2, -1)).square().sum().backward()
    else:
        part = ORDERS[weight.use](own.detach().to_local() * spread.to_local().square() * 2)
        own.grad = DTensor.from_local(
            part, own.device_mesh, weight.placements, shape=own.shape, stride=factor.stride()
        )


def trained_alone(
    some: list[Weight], name: str, clips: bool
) -> tuple[list[nn.Parameter], list[torch.Tensor]]:
    full = [nn.Parameter(values(w.shape, n)) for n, w in enumerate(some)]
    optimizer, norms = optimizer_of(name, "loop", full), []
    for step in range(2):
        optimizer.zero_grad()
        for n, (one, weight) in enumerate(zip(full, some, strict=True)):
            (one * values(weight.shape, n + step + 9)).square().sum().backward()
        norms += [nn.utils.clip_grad_norm_(full, 0.5)] if clips else []
        optimizer.step()
    return full, norms


def check(job: tuple[tuple[int, ...], list[Weight], tuple[str, str], bool]) -> None:
    shape, some, (name, form), clips = job
    expected, norms = trained_alone(some, name, clips)

    def body(rank: int) -> None:
        mesh = init_device_mesh("cpu", shape)
        ours: list[Any] = []
        for n, w in enumerate(some):
            full = values(w.shape, n)
            part = distribute_tensor(full, mesh, w.placements).to_local()
            own = DTensor.from_local(
                ORDERS[w.order](part), mesh, w.placements, shape=full.shape, stride=full.stride()
            )
            ours.append(nn.Parameter(own))
        optimizer, found = optimizer_of(name, form, ours), []
        for step in range(2):
            optimizer.zero_grad()
            for n, (own, weight) in enumerate(zip(ours, some, strict=True)):
                fill_gradient(own, weight, values(weight.shape, n + step + 9))
            found += [clip_grad_norm_(ours, 0.5)] if clips else []
            optimizer.step()
        torch.testing.assert_close(found, norms)
        for own, one in zip(ours, expected, strict=True):
            # Sums of other order, and roots and quotients of them: some rounding errors.
            torch.testing.assert_close(
                own.detach().full_tensor(), one.detach(), rtol=1e-6, atol=1e-6
            )

    run_ranks(math.prod(shape), body)


@settings(max_examples=15, deadline=None)
@given(jobs())
def test_random_training_gives_the_weights_of_full_tensors(job: Any) -> None:
    check(job)


@pytest.mark.slow
@settings(max_examples=1000, deadline=None)
@given(jobs())
def test_much_random_training_gives_the_weights_of_full_tensors(job: Any) -> None:
    check(job)
