"""Strategy *gathered*: collectives of the program's own, and neighbors that keep what they need."""

from __future__ import annotations

import copy
import pickle
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

import dure as dist
from dure.errors import ModuleError
from dure.fsdp import fully_shard, strategy
from dure.mesh import DeviceMesh
from dure.tensor import Replicate, distribute_tensor
from dure.testing import CommRecorder
from tests.parallel.fsdp.ranks.fsdp_models import by_parts, compare, shard
from tests.thread_ranks import on_mesh, on_ranks


class Comm:
    """Torch's interfaces, over Dure's collectives; counts calls.

    Args:
        op: The collective.
        returns_work: It returns what waits for it; else it has ended when it returns.
    """

    def __init__(self, op: Any, returns_work: bool) -> None:
        self.allocated, self.called, self.op, self.returns_work = 0, 0, op, returns_work

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        self.allocated += 1
        return torch.full(tuple(size), 77, dtype=dtype, device=device)

    def __call__(
        self, output: Any, input: Any, group: Any, op: Any = None, async_op: bool = False
    ) -> Any:
        self.called += 1
        more = {} if op is None else {"op": op}
        work = self.op(output, input, group=group, async_op=True, **more)
        if self.returns_work:
            return work
        work.wait()
        return None


@pytest.mark.parametrize("returns_work", [True, False])
def test_collectives_of_the_program(way: str, returns_work: bool) -> None:
    counts: list[tuple[int, int, int]] = []

    def prepare(model: Any) -> None:
        shard(model)
        gather = Comm(dist.all_gather_single, returns_work)
        scatter = Comm(dist.reduce_scatter_single, returns_work)
        model.blocks[1].set_custom_all_gather(gather)
        model.blocks[1].set_custom_reduce_scatter(scatter)
        model.counts = lambda: (gather.called, gather.allocated, scatter.called)

    def note(model: Any) -> None:
        if hasattr(model, "counts"):
            counts.append(model.counts())

    compare(way, 3, prepare=prepare, before_step=note)
    # A step gathers for forward and for backward, and reduces once; each has an input, an output.
    assert max(counts) == (6, 12, 3)


# ---------------------------------------------------------------- a smaller number of ranks


@pytest.mark.parametrize("neighbors", [2, 4])
def test_neighbors_keep_parameters_until_backward(neighbors: int) -> None:
    compare("gathered", 4, prepare=partial(shard, reshard_after_forward=neighbors))


@on_ranks(4)
def test_neighbors_gather_among_themselves(rank: int) -> None:
    """Of four ranks: forward gathers from all, backward from two."""

    model = nn.Sequential(nn.Linear(4, 4, bias=False), nn.Linear(4, 4, bias=False))
    with strategy("gathered"):
        fully_shard(model[0], reshard_after_forward=2)
        fully_shard(model)
    with CommRecorder() as recorder:
        model(torch.ones(2, 4, requires_grad=True)).sum().backward()
    assert [e.world_size for e in recorder.events if e.op == "all_gather_single"] == [4, 4, 2]


@pytest.mark.parametrize("inner", [False, True])
@on_mesh(2, 1, names=("dp", "tp"))
def test_a_parameter_that_was_freed_is_not_read(mesh: DeviceMesh, inner: bool) -> None:
    """Torch's kernels would end the process; the values may be part of a DTensor."""

    model: Any = nn.Linear(2, 2, bias=False)
    nn.init.ones_(model.weight)
    if inner:
        model.weight = nn.Parameter(distribute_tensor(model.weight, mesh["tp"], [Replicate()]))
    by_parts("gathered", model, mesh=mesh["dp"])
    model.unshard()
    weight = model.weight
    model.reshard()
    reads: list[Callable[[], object]] = [
        weight.t,
        weight.sum,
        lambda: weight @ weight,
        lambda: weight.data + 1,
        lambda: weight.T + 1,
        lambda: weight.type(torch.float64),
        lambda: copy.deepcopy(weight),
        lambda: pickle.dumps(weight),
    ]
    for read in reads:
        with pytest.raises(ModuleError, match="after its module was resharded"):
            read()
    assert "freed" in repr(weight)
    assert weight.shape == (2, 2) and weight.grad is None
    model.unshard()
    assert weight is model.weight
    values = weight.to_local() if inner else weight
    assert values.tolist() == [[1, 1], [1, 1]] and "freed" not in repr(weight)
