"""Random programs: after each backward every parameter has the gradient that one process gives it.

A program is a model of blocks of different shapes, how it is sharded, and a loss for each step. The
same program runs on one process, unsharded, with the batches of all ranks. Where that gives a
parameter no gradient, its shard has none.
"""

from __future__ import annotations

from typing import Any

import pytest
import torch

from dure.fsdp import strategy
from dure.testing import run_ranks
from tests.parallel.fsdp.ranks.fsdp_models import full_gradients
from tests.parallel.fsdp.ranks.program_models import LOSSES, Program, batch, made, shard

SIZE, PROGRAMS = 2, 12


def expected(program: Program) -> list[Any]:
    """Return the gradients of each step of one process, which has the batches of all ranks."""
    model, found = made(program), []
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, loss in enumerate(program.losses):
        optimizer.zero_grad(program.set_to_none)
        for rank in range(SIZE):
            LOSSES[loss](model, batch(step, rank))
        for parameter in model.parameters():
            if parameter.grad is not None:
                parameter.grad /= SIZE
        found.append(
            {n: None if g is None else g.clone() for n, g in full_gradients(model).items()}
        )
        optimizer.step()
    return found


def run(program: Program, rank: int, way: str) -> list[Any]:
    """Return the same of a sharded model."""
    model, found = made(program), []
    with strategy(way):
        shard(model)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.05)
    for step, loss in enumerate(program.losses):
        optimizer.zero_grad(program.set_to_none)
        LOSSES[loss](model, batch(step, rank))
        found.append(full_gradients(model))
        optimizer.step()
    return found


@pytest.mark.parametrize("first", range(0, 12, PROGRAMS))
def test_gradients_of_random_programs_are_those_of_one_process(way: str, first: int) -> None:
    programs = {seed: Program.drawn(seed) for seed in range(first, first + PROGRAMS)}

    def body(rank: int) -> list[list[Any]]:
        return [run(program, rank, way) for program in programs.values()]

    results = run_ranks(SIZE, body)
    for number, (seed, program) in enumerate(programs.items()):
        for step, wanted in enumerate(expected(program)):
            for name, gradient in wanted.items():
                where = f"program {seed}, step {step}, {name}: {program}"
                for result in results:
                    got = result[number][step][name]
                    assert (got is None) == (gradient is None), where
                    if gradient is not None:
                        torch.testing.assert_close(
                            got, gradient, msg=lambda m, w=where: f"{w}: {m}"
                        )
