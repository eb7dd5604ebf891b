"""Which layouts there are, which suits, why, what would change it; what is refused."""

import re
from dataclasses import replace

import numpy as np
import pytest

from dure.errors import UsageError
from dure.plan import Job, Machine, Model, find_gpu, find_model, plan
from dure.plan.constants import Constants

SMALL = Job(Model(32_000, 1024, 8, 16, 4, 4096, 2048), 16 * 2048)
ONE_NODE = Machine(find_gpu("h100"), 1, 8)


def test_rows_are_the_fastest_of_each_mesh_and_what_fits():
    found = plan(SMALL, ONE_NODE, changes=False)
    meshes = [row.layout.mesh for row in found.rows]
    assert len(set(meshes)) == len(meshes)
    every = plan(SMALL, ONE_NODE, everything=True, changes=False)
    best = min(row.seconds for row in every.rows)
    assert found.rows[0].seconds == pytest.approx(best, rel=0.01)
    assert all(row.peak <= Constants.load().room * 80e9 for row in every.rows)


def test_a_change_alters_the_winner_and_half_of_it_does_not():
    job = Job(find_model("llama3-8b"), 2**21)
    found = plan(job, ONE_NODE)
    shape = found.rows[0].layout
    memory = next(change for change in found.changes if change.what == "memory")
    changed = plan(job, ONE_NODE.with_(memory_gb=80 * memory.factor), changes=False).rows[0]
    assert (changed.layout.strategy, changed.layout.tp, changed.layout.pp) != (
        shape.strategy,
        shape.tp,
        shape.pp,
    )
    factors = [abs(np.log(change.factor)) for change in found.changes]
    assert factors == sorted(factors)


def test_outside_of_what_was_measured_it_warns():
    wide = replace(SMALL, model=replace(SMALL.model, width=32_768, heads=256, groups=8, layers=1))
    for job, machine, said in (
        (SMALL, Machine(find_gpu("b200"), 1, 8), "b200: hardly measured"),
        (replace(wide, batch_tokens=2048 * 64), ONE_NODE, "width 32,768 is beyond"),
        (replace(SMALL, batch_tokens=2048 * 4096), Machine(find_gpu("h100"), 512, 8), "nodes 512"),
        (replace(SMALL, precision="fp8"), ONE_NODE, "8 bits"),
    ):
        assert any(said in each for each in plan(job, machine, changes=False).warnings)
    assert not plan(SMALL, ONE_NODE, changes=False).warnings


def test_nothing_fits_tells_what_would():
    job = Job(find_model("llama3-405b"), 2**22)
    with pytest.raises(UsageError, match=r"It would fit with GPUs of (\d+) GB") as refused:
        plan(job, ONE_NODE)
    told = re.search(r"GPUs of (\d+) GB, or (\d+) nodes", str(refused.value))
    memory, nodes = map(int, told.groups())
    assert plan(job, ONE_NODE.with_(memory_gb=memory), changes=False).rows
    assert plan(job, replace(ONE_NODE, nodes=nodes), changes=False).rows
    with pytest.raises(UsageError):
        plan(job, ONE_NODE.with_(memory_gb=memory - 2), changes=False)
