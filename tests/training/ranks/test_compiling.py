"""DDP and torch.compile, with a backend that runs the graphs as they are."""

from __future__ import annotations

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.testing import run_ranks


def counting(graphs: list[Any]) -> Callable[..., Any]:
    """A compiler that notes the graphs it gets."""

    def backend(graph: torch.fx.GraphModule, _: Any) -> Any:
        graphs.append(graph)
        return graph.forward

    return backend


@pytest.mark.parametrize("compiled", ["module", "wrapper"])
def test_compiled_module_is_cut_and_makes_the_same_steps_1_rank(compiled: str) -> None:
    torch._dynamo.reset()  # pyright: ignore
    torch._dynamo.utils.counters.clear()  # pyright: ignore
    graphs: list[Any] = []
    # More than a MiB a layer: the compiler cuts below the second.
    module = nn.Sequential(nn.Linear(520, 520), nn.Tanh(), nn.Linear(520, 520))
    expected = copy.deepcopy(module)
    x = torch.rand(2, 520)

    def rank_main(rank: int) -> None:
        options: dict[str, Any] = {"bucket_cap_mb": 1}
        if compiled == "module":
            whole: Any = torch.compile(module, backend=counting(graphs))
            ddp = dist.DistributedDataParallel(whole, **options)
            run: Any = ddp
        else:
            ddp = dist.DistributedDataParallel(module, **options)
            run = torch.compile(ddp, backend=counting(graphs))
        for _ in range(2):
            ddp.zero_grad()
            expected.zero_grad()
            run(x).sum().backward()
            expected(x).sum().backward()
            for p, q in zip(module.parameters(), expected.parameters(), strict=True):
                torch.testing.assert_close(p.grad, q.grad)
        assert ddp.reducer.num_reduced == 2

    run_ranks(1, rank_main)
    assert len(graphs) == 2
    assert not torch._dynamo.utils.counters["graph_break"]  # pyright: ignore
