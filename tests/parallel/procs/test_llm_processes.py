"""Models cut over axes of a mesh, in processes: the stages of examples/llm, and tensor parallel."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

import dure
from dure.testing import ProcessPool
from tests.parallel.ranks.llm_program import BASE, Losses, assert_same, trained, trained_by_threads
from tests.tensor.parallel.ranks import tensor_models

STEPS = 2
INTERLEAVED = {"pp": 2, "fsdp": 2, "schedule": "Interleaved1F1B"}
DEEP = {"pp": 4, "schedule": "1F1B"}
V_SHAPED = {"pp": 2, "tp": 2, "schedule": "ZBVZeroBubble"}


def _trained(rank: int, meshes: list[dict[str, Any]]) -> tuple[str, list[Losses]]:
    return dure.get_backend(), [trained(replace(BASE, **sizes), STEPS) for sizes in meshes]


@pytest.mark.parametrize(
    ("backend", "hosts", "meshes"),
    [
        ("shm", None, [INTERLEAVED, DEEP, V_SHAPED]),
        ("gloo", None, [V_SHAPED]),
        ("hybrid", "aabb", [INTERLEAVED]),
        ("hybrid", "abab", [V_SHAPED]),
    ],
)
def test_stages_in_processes_find_what_one_rank_finds(backend, hosts, meshes):
    expected = trained_by_threads(BASE, STEPS)[0]
    with ProcessPool(4, None if hosts else backend, hosts=hosts) as pool:
        for used, each in pool.run(_trained, meshes):
            assert used == backend
            for found in each:
                assert_same(found, expected)


def test_tensor_parallel_of_4_and_ddp_over_2_of_2_train_as_one_rank():
    with ProcessPool(4, "shm") as pool:
        pool.run(tensor_models.over_hosts, "")
