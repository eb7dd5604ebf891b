"""DTensors in captured graphs: collectives are in the graph, or the capture is refused."""

from __future__ import annotations

import warnings
from collections.abc import Callable

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dure.errors import UsageError
from dure.mesh import init_device_mesh
from dure.tensor import DTensor, Partial, Shard

Program = Callable[[torch.Tensor], torch.Tensor]


def _programs(rank: int) -> dict[str, Program]:
    mesh = init_device_mesh("cpu", (2,))

    def of(x: torch.Tensor, *placement: Shard | Partial) -> DTensor:
        return DTensor.from_local(x * 2, mesh, placement)

    def uneven(x: torch.Tensor) -> DTensor:
        shape = torch.Size((3, 2))
        return DTensor.from_local(x[: 2 - rank], mesh, [Shard(0)], shape=shape, stride=(2, 1))

    return {
        "gather": lambda x: of(x, Shard(0)).full_tensor(),
        "reduce": lambda x: of(x, Partial()).full_tensor(),
        "reduce_scatter": lambda x: of(x, Partial()).redistribute(mesh, [Shard(0)]).to_local(),
        "exchange": lambda x: of(x, Shard(0)).redistribute(mesh, [Shard(1)]).to_local(),
        "uneven gather": lambda x: uneven(x).full_tensor(),
        "uneven exchange": lambda x: uneven(x).redistribute(mesh, [Shard(1)]).to_local(),
        "operator": lambda x: of(x, Shard(0)).sum().full_tensor(),
    }


# x is [[1, 2], [3, 4]] on rank 0, and ten times that on rank 1.
_BOTH = [
    [[2, 4], [6, 8], [20, 40], [60, 80]],
    [[22, 44], [66, 88]],
]
EXPECTED = [
    [*_BOTH, [[22, 44]], [[2], [6], [20], [60]], [[1, 2], [3, 4], [10, 20]], [[1], [3], [10]], 220],
    [*_BOTH, [[66, 88]], [[4], [8], [40], [80]], [[1, 2], [3, 4], [10, 20]], [[2], [4], [20]], 220],
]


def _captured(rank: int, mode: str) -> list[object]:
    x = torch.tensor([[1.0, 2.0], [3.0, 4.0]]) * 10**rank
    found: list[object] = []
    for program in _programs(rank).values():
        graph = make_fx(program, tracing_mode=mode)(torch.ones(2, 2, requires_grad=True))  # pyright: ignore
        found.append(graph(x).detach().tolist())
        assert not graph(x.clone().requires_grad_()).requires_grad
    return found


@pytest.mark.parametrize("mode", ["real", "fake"])
def test_graph_of_dtensors_communicates(process_pool, mode):
    assert process_pool(2, "shm").run(_captured, mode) == EXPECTED


def _refused(rank: int) -> None:
    program = _programs(rank)["operator"]
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # it is deprecated
        with pytest.raises(UsageError, match=r"jit\.trace"):
            torch.jit.trace(program, torch.ones(2, 2), check_trace=False)
    with pytest.raises(UsageError, match="symbols"):
        make_fx(program, tracing_mode="symbolic")(torch.ones(2, 2))


def test_captures_that_do_not_see_parts_are_refused(process_pool):
    process_pool(2, "shm").run(_refused)
