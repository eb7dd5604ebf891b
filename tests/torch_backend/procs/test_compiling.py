"""The plug-in in compiled programs."""

from __future__ import annotations

import torch
from torch.distributed import _functional_collectives as functional

from tests.torch_backend.torch_worlds import in_pool, td, world


def compiled(rank: int, folder: str) -> None:
    with world(rank, folder) as group:

        @torch.compile(backend="eager")
        def step(x: torch.Tensor) -> torch.Tensor:
            y = x * 2
            td.all_reduce(y)
            work = td.broadcast(y, 0, async_op=True)
            work.wait()
            return functional.all_reduce(y, "sum", group) + 1

        assert step(torch.ones(2)).tolist() == [9.0] * 2
        assert step(torch.ones(2)).tolist() == [9.0] * 2


test_compiled = in_pool(compiled)
