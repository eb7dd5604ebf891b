"""Stages that raise: every rank is told, and the next step works."""

from __future__ import annotations

import pytest

import dure.pipelining as pp
from dure.errors import PipelineError
from dure.testing import run_ranks
from tests.parallel.pipeline.ranks.pipeline_failing import fail_everywhere, interrupt_stages
from tests.parallel.pipeline.ranks.pipeline_models import (
    SCHEDULES,
    Pipeline,
    batches,
    dense,
    one_process,
    verify_same,
)


@pytest.mark.parametrize("name", ["gpipe", "1f1b", "zero-bubble", "zb-v"])
def test_a_stage_that_raises_is_reported_on_all_ranks_and_the_next_step_works(name: str):
    world = 3 if SCHEDULES[name][1] == 1 else 2
    parts = dense(world * SCHEDULES[name][1])
    found = run_ranks(world, fail_everywhere, name, world, parts, eager_bytes=0)
    verify_same(found, one_process(parts, batches(2), 4))


@pytest.mark.parametrize("name", ["1f1b", "zb-v"])
def test_a_stage_that_is_interrupted_raises_that_and_the_next_step_works(name: str):
    parts = dense(2 * SCHEDULES[name][1])
    found = run_ranks(2, interrupt_stages, name, 2, parts, eager_bytes=0)
    verify_same(found, one_process(parts, batches(2), 4))


@pytest.mark.parametrize(("nan_watch", "action"), [(True, "0F1"), (False, "")])
def test_nan_watch_names_stage_and_microbatch_on_2_ranks(nan_watch: bool, action: str):
    def body(rank: int) -> str:
        options = pp.PipelineOptions(nan_watch=nan_watch)
        pipeline = Pipeline("1f1b", rank, 2, dense(2), 4, options=options)
        x, y = batches(1)[0]
        x[5] = float("nan")  # of the second microbatch
        if not nan_watch:
            pipeline.step(x, y)
            return ""
        with pytest.raises(PipelineError, match="FloatingPointError") as error:
            pipeline.step(x, y)
        return error.value.action

    assert run_ranks(2, body) == [action] * 2
