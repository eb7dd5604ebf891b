"""DTensors over processes: as over thread-ranks, two models at once, graphs, large parts."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Iterator
from typing import Any

import pytest
import torch
from torch.fx.experimental.proxy_tensor import make_fx

from dure.errors import UsageError
from dure.tensor import (
    DTensor,
    Partial,
    Placement,
    Replicate,
    Shard,
    distribute_tensor,
    init_device_mesh,
)
from dure.testing import ProcessPool
from tests.tensor.ranks import dtensor_worlds as worlds
from tests.tensor.ranks import programs
from tests.tensor.ranks.parts import part_of

pytestmark = pytest.mark.needs("engine")


@pytest.fixture(scope="module", params=["shm", "hybrid"])
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    hosts = "aabb" if request.param == "hybrid" else None
    with ProcessPool(4, request.param, hosts=hosts) as made:
        yield made


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 1, 2)], ids=str)
def test_everything_is_as_plain_torch_computes_it(pool, sizes):
    for seed in range(10):
        programs.check(pool.run, *programs.drawn(seed), sizes)
    pool.run(worlds.redistributes, sizes, 40)


def test_two_models_on_two_meshes_run_at_once(pool):
    for sizes in worlds.PAIRS:
        expected = worlds.losses_of_two_models(*sizes)
        assert pool.run(worlds.two_models, *sizes) == [expected] * 4


# --------------------------------------------------------------------------------------------------
# DTensors in captured graphs: collectives are in the graph, or the capture is refused.


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
        # `detach` of a capture is `alias` from torch 2.14 on, through which gradients pass.
        passes = graph(x.clone().requires_grad_()).requires_grad
        assert passes == (torch.__version__ >= "2.14")
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


# --------------------------------------------------------------------------------------------------
# Redistribution and `distribute_tensor` of parts so large that they are in shared memory.


N = 4
WAYS = [Shard(0), Shard(1), Shard(2), Replicate()]


def full_tensor() -> torch.Tensor:
    return torch.arange(16 * 320 * 256).remainder(1021).float().reshape(16, 320, 256)


def moves_large(rank: int) -> None:
    """Parts of more than 1 MiB, whose results are in memory that the ranks share."""
    mesh, full = init_device_mesh("cpu", (N,)), full_tensor()

    def expected(placement: Placement) -> torch.Tensor:
        return part_of(full, [placement], (N,), (rank,))

    kept: list[tuple[Any, Any]] = []
    for old, new in itertools.product([*WAYS, Partial()], WAYS):
        mine = expected(old)
        x = DTensor.from_local(mine, mesh, [old])
        y = x.redistribute(placements=[new])
        assert torch.equal(y.to_local(), expected(new)), (old, new)
        assert torch.equal(mine, expected(old))
        again = y.redistribute(placements=[Shard(1)])  # out of shared memory
        turned = DTensor.from_local(mine.transpose(1, 2), mesh, [_turned(old)])
        back = turned.redistribute(placements=[_turned(new)]).to_local()
        assert torch.equal(back, expected(new).transpose(1, 2))
        # A view keeps the memory, whatever else is freed and used again.
        kept.append((y.to_local()[1:], expected(new)[1:]))
        kept.append((again.to_local().numpy()[1:], expected(Shard(1))[1:].numpy()))
        del x, y, again, turned, back
    for view, right in kept:
        assert (view == right).all()


def _turned(placement: Placement) -> Placement:
    if isinstance(placement, Shard) and placement.dim > 0:
        return Shard(3 - placement.dim)
    return placement


def distributes_large(rank: int) -> None:
    mesh, full = init_device_mesh("cpu", (N,)), full_tensor()
    mine = full + 100 * rank
    for placement in WAYS:
        made = distribute_tensor(mine, mesh, [placement])
        assert torch.equal(made.to_local(), part_of(full, [placement], (N,), (rank,))), placement
        assert torch.equal(mine, full + 100 * rank)
        if isinstance(placement, Shard):
            made.to_local().zero_()  # not the memory of what was given
            assert torch.equal(mine, full + 100 * rank)


@pytest.mark.parametrize("backend", ["shm", "gloo"])
def test_large_parts_over_processes(process_pool, backend):
    pool = process_pool(N, backend)
    pool.run(moves_large)
    pool.run(distributes_large)
