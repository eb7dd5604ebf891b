"""DTensors over processes of every backend: what thread-ranks do, and two models at once."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import pytest
import torch
from torch import nn

from dure.errors import Desync
from dure.mesh import DeviceMesh
from dure.native import available as native_available
from dure.tensor import DTensor, Shard, distribute_module, distribute_tensor, init_device_mesh
from dure.testing import ProcessPool
from ranks import dtensor_worlds as worlds

pytestmark = pytest.mark.skipif(
    not native_available()[0], reason=native_available()[1] or "no engine"
)

WORLDS: dict[str, tuple[int, str, str | None]] = {
    "shm 4": (4, "shm", None),
    "gloo 4": (4, "gloo", None),
    "hybrid aabb": (4, "hybrid", "aabb"),
    "shm 8": (8, "shm", None),
}
MESHES = {4: [(4,), (2, 2), (2, 1, 2)], 8: [(2, 2, 2)]}


@pytest.fixture(scope="module", params=WORLDS)
def pool(request: pytest.FixtureRequest) -> Iterator[tuple[ProcessPool, int]]:
    n, backend, hosts = WORLDS[request.param]
    with ProcessPool(n, backend, hosts=hosts, timeout=60.0) as made:
        yield made, n


def test_everything_is_as_plain_torch_computes_it(pool: tuple[ProcessPool, int]) -> None:
    processes, n = pool
    drawn = worlds.drawn_alone()
    for sizes in MESHES[n]:
        gone = processes.run(worlds.everything, sizes, drawn)
        assert set(gone) == {12 if len(sizes) == 1 else 40}


def trains(rank: int, n: int) -> list[float]:
    mesh = init_device_mesh("cpu", (n,))
    torch.manual_seed(rank)  # the first rank's values are distributed
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))

    def cut(name: str, module: Any, mesh: Any) -> None:
        if name == "0":
            module.weight = distribute_tensor(module.weight, mesh, [Shard(0)])

    distribute_module(model, mesh, cut)
    x = distribute_tensor(torch.linspace(-1, 1, 15).reshape(5, 3), mesh, [Shard(0)])
    return losses_of(model, x)


def losses_of(model: nn.Module, x: torch.Tensor) -> list[float]:
    optimizer = torch.optim.AdamW(model.parameters(), lr=0.1, foreach=True)
    losses = []
    for _ in range(3):
        optimizer.zero_grad()
        loss = (model(x) ** 2).sum()
        loss.backward()
        optimizer.step()
        losses.append(loss.item())
    return losses


def test_a_module_of_the_first_ranks_values_trains(pool: tuple[ProcessPool, int]) -> None:
    processes, n = pool
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(3, 6), nn.ReLU(), nn.Linear(6, 2))
    expected = losses_of(model, torch.linspace(-1, 1, 15).reshape(5, 3))
    for losses in processes.run(trains, n):
        assert losses == pytest.approx(expected, rel=1e-5)


def test_two_models_on_two_meshes_run_at_once(pool: tuple[ProcessPool, int]) -> None:
    processes, n = pool
    for sizes in worlds.PAIRS if n == 4 else [((2, 4), (2, 4))]:
        expected = worlds.losses_of_two_models(*sizes)
        assert processes.run(worlds.two_models, *sizes) == [expected] * n


def means_other_rows(rank: int, n: int) -> dict[int, str]:
    """Mean another tensor than the other ranks, of as many bytes, on the last rank."""
    mesh = DeviceMesh("cpu", list(reversed(range(n))))  # whose group no other test uses
    shape = (6, 2) if rank == n - 1 else (2, 6)
    x = DTensor.from_local(torch.ones(shape), mesh, [Shard(0)])
    with pytest.raises(Desync) as caught:
        x.full_tensor()
    return caught.value.calls


def test_ranks_that_mean_different_tensors_learn_it(pool: tuple[ProcessPool, int]) -> None:
    processes, n = pool
    if processes.backend == "gloo":
        pytest.skip("gloo compares nothing, unless asked to")
    for calls in processes.run(means_other_rows, n):
        assert sorted(calls) == list(range(n))
        assert f"of float32[{6 * n}, 2] (S(0)) to (R)" in calls[0]  # which is global rank n - 1
        for other in range(1, n):
            assert f"of float32[{2 * n}, 6] (S(0)) to (R)" in calls[other]
            assert "test_dtensor_processes.py" in calls[other]
