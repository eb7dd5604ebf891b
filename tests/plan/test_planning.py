"""Which layouts there are, which suits, why, what would change it; what is refused."""

from __future__ import annotations

import re
from dataclasses import replace

import numpy as np
import pytest

from dure.errors import UsageError
from dure.plan import Job, Layout, Machine, Model, find_gpu, find_model, plan
from dure.plan.constants import Constants
from dure.plan.cost import step_time
from dure.plan.layouts import columns
from dure.plan.planning import costed

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


def test_a_simulated_pipeline_is_near_the_closed_form():
    job, machine = Job(find_model("llama3-8b"), 2**22), Machine(find_gpu("h100"), 4, 8)
    for text in (
        "zero1=8,tp=2,pp=2,mb=1",
        "zero1=4,tp=2,pp=4,interleaved=2,mb=1",
        "fsdp=4,pp=8,mb=1",
        "ddp=2,tp=2,pp=8,interleaved=2,mb=2",
    ):
        layout = Layout.parse(text, job)
        row, jobs = costed(job, machine, layout), columns(job, machine, [layout])
        closed = sum(step_time(jobs, Constants.load()).values())
        assert row.simulated
        assert row.seconds == pytest.approx(closed, rel=0.02)


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
    assert told is not None
    memory, nodes = map(int, told.groups())
    assert plan(job, ONE_NODE.with_(memory_gb=memory), changes=False).rows
    assert plan(job, replace(ONE_NODE, nodes=nodes), changes=False).rows
    with pytest.raises(UsageError):
        plan(job, ONE_NODE.with_(memory_gb=memory - 2), changes=False)
