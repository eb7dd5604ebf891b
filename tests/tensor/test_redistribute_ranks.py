"""What a rank does to distribute and redistribute a tensor does not grow with the ranks."""

# What operators on DTensors return is a torch.Tensor to pyright.
# pyright: reportArgumentType=false, reportAttributeAccessIssue=false

from __future__ import annotations

import pytest
import torch
from torch import nn

from dure.mesh import DeviceMesh
from dure.tensor import DTensor, Partial, Placement, Replicate, Shard, distribute_tensor
from dure.tensor.parallel import ColwiseParallel, RowwiseParallel, parallelize_module
from tests.work_counts import kept_bytes, num_calls, one_rank_of

R, S0, S1, SUM = Replicate(), Shard(0), Shard(1), Partial("sum")
LAYERS = 20


def _calls(mesh: DeviceMesh, shape: tuple[int, int], old: Placement, new: Placement) -> int:
    """Return the calls of functions in a redistribution whose plan is known."""
    whole = torch.ones(shape)
    x = (
        DTensor.from_local(whole, mesh, [SUM])
        if old == SUM
        else distribute_tensor(whole, mesh, [old], src_data_rank=None)
    )

    def move() -> None:
        x.redistribute(placements=[new])

    move()
    return num_calls(move)


@pytest.mark.parametrize("shape", [(512, 512), (513, 517), (3, 5)], ids=["even", "uneven", "few"])
@pytest.mark.parametrize(
    ("old", "new"),
    [(S0, R), (S1, R), (R, S0), (R, S1), (SUM, R), (SUM, S0), (SUM, S1), (S0, S1), (S1, S0)],
    ids=str,
)
def test_redistribution_takes_the_same_calls_on_256_ranks_as_on_16(shape, old, new):
    counts: dict[int, int] = {}
    for ranks in (16, 256):
        with one_rank_of(ranks) as mesh:
            counts[ranks] = _calls(mesh, shape, old, new)
    assert counts[256] <= counts[16] + 20


@pytest.mark.parametrize("rows", [512, 513])
@pytest.mark.parametrize("source", [None, 0])
def test_distribution_takes_the_same_calls_on_256_ranks_as_on_16(rows, source):
    """On each rank but the source."""
    counts: dict[int, int] = {}
    for ranks in (16, 256):
        with one_rank_of(ranks) as mesh:
            whole = torch.ones(rows, 2)

            def cut(mesh: DeviceMesh = mesh, whole: torch.Tensor = whole) -> None:
                distribute_tensor(whole, mesh, [S0], src_data_rank=source)

            cut()
            counts[ranks] = num_calls(cut)
    assert counts[256] <= counts[16] + 20


def test_parallel_modules_keep_no_table_of_all_ranks_per_parameter():
    def parallel(mesh: DeviceMesh) -> nn.Module:
        with torch.device("meta"):
            model = nn.Sequential(
                *(nn.Sequential(nn.Linear(8, 600), nn.Linear(600, 8)) for _ in range(LAYERS))
            )
        return parallelize_module(model, mesh, {"*.0": ColwiseParallel(), "*.1": RowwiseParallel()})

    kept: dict[int, int] = {}
    calls: dict[int, int] = {}
    for ranks in (16, 256):
        with one_rank_of(ranks) as mesh:
            parallel(mesh)
            kept[ranks] = kept_bytes(lambda m=mesh: parallel(m))
            calls[ranks] = num_calls(lambda m=mesh: parallel(m))
    # A list of 256 numbers per parameter would be 2,048 bytes each.
    assert kept[256] - kept[16] < LAYERS * 4 * 256
    assert calls[256] < calls[16] * 1.05
