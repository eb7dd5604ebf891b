"""DTensors over processes: what thread-ranks do, and two models at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest
import torch

from dure.errors import Desync
from dure.mesh import DeviceMesh, init_device_mesh
from dure.tensor import DTensor, Replicate, Shard, distribute_tensor
from dure.testing import ProcessPool
from tests.tensor.ranks import dtensor_worlds as worlds

pytestmark = pytest.mark.needs("engine")


@pytest.fixture(scope="module", params=["shm", "hybrid"])
def pool(request: pytest.FixtureRequest) -> Iterator[ProcessPool]:
    hosts = "aabb" if request.param == "hybrid" else None
    with ProcessPool(4, request.param, hosts=hosts) as made:
        yield made


@pytest.mark.parametrize("sizes", [(4,), (2, 2), (2, 1, 2)], ids=str)
def test_everything_is_as_plain_torch_computes_it(
    pool: ProcessPool, sizes: tuple[int, ...]
) -> None:
    worlds.check_computed(pool.run(worlds.computes, sizes, 1), sizes, 1)
    pool.run(worlds.redistributes, sizes, 40)


def test_two_models_on_two_meshes_run_at_once(pool: ProcessPool) -> None:
    for sizes in worlds.PAIRS:
        expected = worlds.losses_of_two_models(*sizes)
        assert pool.run(worlds.two_models, *sizes) == [expected] * 4


def means_other_rows(rank: int, n: int) -> dict[int, str]:
    """Mean another tensor than the other ranks, of as many bytes, on the last rank."""
    mesh = DeviceMesh("cpu", list(reversed(range(n))))  # whose group no other test uses
    shape = (6, 2) if rank == n - 1 else (2, 6)
    x = DTensor.from_local(torch.ones(shape), mesh, [Shard(0)])
    with pytest.raises(Desync) as caught:
        x.full_tensor()
    return caught.value.calls


def test_ranks_that_mean_different_tensors_learn_it(pool: ProcessPool) -> None:
    for calls in pool.run(means_other_rows, 4):
        assert sorted(calls) == [0, 1, 2, 3]
        assert "of float32[24, 2] (S(0)) to (R)" in calls[0]  # which is global rank 3
        for other in range(1, 4):
            assert "of float32[8, 6] (S(0)) to (R)" in calls[other]
            assert "test_dtensor_processes.py" in calls[other]


def drops_out_after_a_private_draw(rank: int, n: int) -> tuple[bool, list[float]]:
    """Return whether a replicated dropout raised, and the next one's values after a seed."""
    mesh = init_device_mesh("cpu", (n,))
    x = distribute_tensor(torch.ones(64), mesh, [Replicate()], src_data_rank=None)
    torch.manual_seed(1)
    torch.nn.functional.dropout(x, 0.5)
    if rank == 1:
        torch.rand(1)
    try:
        torch.nn.functional.dropout(x, 0.5)
        has_raised = False
    except Desync:
        has_raised = True
    torch.manual_seed(2)
    return has_raised, torch.nn.functional.dropout(x, 0.5).to_local().tolist()  # pyright: ignore


def test_replicated_dropout_after_a_private_draw_raises_on_all_ranks(pool: ProcessPool) -> None:
    found = pool.run(drops_out_after_a_private_draw, 4)
    assert found == [found[0]] * 4 and found[0][0]
