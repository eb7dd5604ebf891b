"""Tensor parallelism over processes: every plan, and two axes."""

from __future__ import annotations

import pytest

import dure
from dure.testing import ProcessPool
from tests.tensor.parallel.ranks.tensor_models import (
    PLANS,
    assert_trained_alike,
    train_on,
    trained_alone,
)


def _backend(rank: int) -> str:
    return dure.get_backend()


@pytest.mark.parametrize(
    ("backend", "hosts", "plans"),
    [("shm", None, list(PLANS)), ("gloo", None, ["loss"]), ("hybrid", "aabb", ["loss"])],
)
def test_a_llama_trains_over_processes_as_on_one_rank(backend, hosts, plans):
    """Cut over four ranks, and over two beside its replica."""
    expected = trained_alone(heads=8, kv_heads=4)
    with ProcessPool(4, None if hosts else backend, hosts=hosts) as pool:
        assert set(pool.run(_backend)) == {backend}
        for plan in plans:
            for shape in ((1, 4), (2, 2)):
                for found in pool.run(train_on, shape, plan, False, 8, 4):
                    assert_trained_alike(found, expected)
