"""DTensors over processes: what thread-ranks do, and two models at once."""

from __future__ import annotations

from collections.abc import Iterator

import pytest

from dure.testing import ProcessPool
from tests.tensor.ranks import dtensor_worlds as worlds
from tests.tensor.ranks import programs

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
    for seed in range(10):
        programs.check(pool.run, *programs.drawn(seed), sizes)
    pool.run(worlds.redistributes, sizes, 40)


def test_two_models_on_two_meshes_run_at_once(pool: ProcessPool) -> None:
    for sizes in worlds.PAIRS:
        expected = worlds.losses_of_two_models(*sizes)
        assert pool.run(worlds.two_models, *sizes) == [expected] * 4
