"""Random programs of collectives: `import dure as dist` against torch.distributed over Gloo."""

from __future__ import annotations

import random
from datetime import timedelta
from typing import Any

import pytest
import torch
import torch.distributed as torch_dist

import dure
from tests.waiting import PATIENCE_S

DTYPES = (torch.float32, torch.float64, torch.int32, torch.int64, torch.uint8, torch.int8)
CALLS_A_PROGRAM = 40


class Program:
    """A random program; every rank of every library makes the same one from its seed."""

    def __init__(self, dist: Any, seed: int, rank: int, n: int) -> None:
        self.dist, self.rank, self.n = dist, rank, n
        self.random = random.Random(seed)
        self.results: list[torch.Tensor] = []
        self.drawn: set[str] = set()

    def run(self) -> list[torch.Tensor]:
        for _ in range(CALLS_A_PROGRAM):
            self.dtype = self.random.choice(DTYPES)
            self.count = self.random.choice((1, self.n, 7, 1000, 20_011))
            self.root = self.random.randrange(self.n)
            self.async_op = self.random.random() < 0.5
            form = self.random.choice(FORMS)
            self.drawn.add(form)
            getattr(self, form)()
        return self.results

    def data(self, count: int | None = None) -> torch.Tensor:
        """Return this rank's next input: small integers, so that sums are exact in any order."""
        seed = self.random.randrange(1 << 30) + self.rank
        generator = torch.Generator().manual_seed(seed)
        size = (self.count if count is None else count,)
        return torch.randint(0, 4, size, generator=generator).to(self.dtype)

    def reduction(self) -> Any:
        names = ["SUM", "PRODUCT", "MIN", "MAX"]
        names += [] if self.dtype.is_floating_point else ["BAND", "BOR", "BXOR"]
        return getattr(self.dist.ReduceOp, self.random.choice(names))

    def finish(self, work: Any, *results: torch.Tensor) -> None:
        if work is not None:
            work.wait()
        self.results.extend(results)

    def do_all_reduce(self):
        t = self.data()
        self.finish(self.dist.all_reduce(t, self.reduction(), async_op=self.async_op), t)

    def do_reduce(self):
        t = self.data()
        work = self.dist.reduce(t, self.root, self.reduction(), async_op=self.async_op)
        # torch leaves the other ranks' tensors in no particular state
        self.finish(work, *([t] if self.rank == self.root else []))

    def do_broadcast(self):
        t = self.data()
        self.finish(self.dist.broadcast(t, self.root, async_op=self.async_op), t)

    def do_all_gather(self):
        t = self.data()
        out = [torch.empty_like(t) for _ in range(self.n)]
        self.finish(self.dist.all_gather(out, t, async_op=self.async_op), *out)

    def do_all_gather_single(self):
        t = self.data()
        out = t.new_empty(self.n * self.count)
        self.finish(self.dist.all_gather_single(out, t, async_op=self.async_op), out)

    def do_gather(self):
        t = self.data()
        out = [torch.empty_like(t) for _ in range(self.n)] if self.rank == self.root else None
        self.finish(self.dist.gather(t, out, self.root, async_op=self.async_op), *(out or []))

    def do_scatter(self):
        given = [self.data() for _ in range(self.n)]
        t = torch.empty_like(given[0])
        slots = given if self.rank == self.root else None
        self.finish(self.dist.scatter(t, slots, self.root, async_op=self.async_op), t)

    def do_reduce_scatter(self):
        given = [self.data() for _ in range(self.n)]
        t = torch.empty_like(given[0])
        op = self.reduction()
        self.finish(self.dist.reduce_scatter(t, given, op, async_op=self.async_op), t)

    def do_reduce_scatter_single(self):
        given = self.data(self.n * self.count)
        t = given.new_empty(self.count)
        op = self.reduction()
        self.finish(self.dist.reduce_scatter_single(t, given, op, async_op=self.async_op), t)

    def do_all_to_all_single(self):
        cuts = [[self.random.randrange(5) for _ in range(self.n)] for _ in range(self.n)]
        gives, takes = cuts[self.rank], [row[self.rank] for row in cuts]
        given = self.data(sum(gives))
        out = given.new_empty(sum(takes))
        work = self.dist.all_to_all_single(out, given, takes, gives, async_op=self.async_op)
        self.finish(work, out)

    def do_messages(self):
        if self.n == 1:
            return
        t, got = self.data(), self.data()
        sent = self.dist.isend(t, (self.rank + 1) % self.n)
        self.finish(self.dist.irecv(got, (self.rank - 1) % self.n), got)
        sent.wait()

    def do_objects(self):
        everyone: list[Any] = [None] * self.n
        self.dist.all_gather_object(everyone, (self.rank, self.random.random()))
        self.results.append(torch.tensor(everyone))


FORMS = [name for name in sorted(vars(Program)) if name.startswith("do_")]


def compare(rank: int, seeds: list[int], path: str) -> set[str]:
    """Run the programs on both libraries; return the forms that were compared."""
    n, drawn = dure.get_world_size(), set()
    torch_dist.init_process_group(
        "gloo",
        init_method=f"file://{path}",
        rank=rank,
        world_size=n,
        timeout=timedelta(seconds=PATIENCE_S),
    )
    try:
        for seed in seeds:
            program = Program(dure, seed, rank, n)
            ours = program.run()
            theirs = Program(torch_dist, seed, rank, n).run()
            assert len(ours) == len(theirs)
            for i, (a, b) in enumerate(zip(ours, theirs, strict=True)):
                assert a.dtype == b.dtype, (seed, i)
                assert torch.equal(a, b), (seed, i, a, b)
            drawn |= program.drawn
    finally:
        torch_dist.destroy_process_group()
    return drawn


@pytest.mark.parametrize("n", [2, 3])
@pytest.mark.parametrize(
    "backend", [pytest.param("shm", marks=pytest.mark.needs("engine")), "gloo"]
)
def test_random_programs_equal_torch_distributed(backend, n, process_pool, tmp_path):
    drawn = process_pool(n, backend).run(compare, [11, 12, 13], str(tmp_path / "torch"))
    assert drawn == [set(FORMS)] * n, "a form that is never drawn proves nothing"
