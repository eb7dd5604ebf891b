"""The schedules' lists against torch's own grids, without a process.

Where torch's are at fault, or refuse what can be done:

- Its 1F1B grid starts the last rank with microbatch 1 and ends with one that does not exist, where
  there are several ranks: `forward_mb` is counted up before its first use.
- Its 1F1B refuses fewer microbatches than stages; ours drains earlier.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from torch.distributed.pipelining import schedules as torch_schedules

from dure.schedules import (
    SCHEDULES,
    Action,
    Generator,
    Schedule,
    lower,
    make_schedule,
    prove_no_deadlock,
    simulate,
    validate,
)


def torch_schedule(generator: Generator, ranks: int, stages_a_rank: int, microbatches: int) -> Any:
    """Return torch's schedule object, made of stages that only say where they are."""
    kind: Any = torch_schedules.get_schedule_class(generator.torch_name)
    stages = [
        SimpleNamespace(
            group_size=ranks,
            group_rank=0,
            num_stages=ranks * stages_a_rank,
            submod=None,
            is_last=False,
        )
        for _ in range(stages_a_rank)
    ]
    return kind(stages, microbatches, loss_fn=lambda *_: None)


def torch_lists(
    generator: Generator, ranks: int, stages_a_rank: int, microbatches: int
) -> list[list[str]]:
    """Return the text of each rank's actions in torch's grid."""
    if generator.stages_a_rank == 1:
        kind: Any = torch_schedules.get_schedule_class(generator.torch_name)
        size = SimpleNamespace(_num_stages=ranks, _n_microbatches=microbatches)
        order = kind._get_pipeline_order(size)
    else:
        order = torch_schedule(generator, ranks, stages_a_rank, microbatches).pipeline_order
    return [
        [str(a) for a in order[rank] if a is not None and "REDUCE_GRAD" not in str(a)]
        for rank in range(ranks)
    ]


def texts(schedule: Schedule) -> list[list[str]]:
    return [list(map(str, schedule.actions(rank))) for rank in range(len(schedule.ranks))]


@pytest.mark.parametrize("generator", [g for g in SCHEDULES if g.trains], ids=lambda g: g.name)
@settings(max_examples=15)
@given(data=st.data())
def test_same_actions(generator: Generator, data: st.DataObject):
    ranks = data.draw(st.integers(1, 8), "ranks")
    each = generator.stages_a_rank or data.draw(st.integers(1, 4), "stages a rank")
    if generator.name.startswith("interleaved"):
        microbatches = ranks * data.draw(st.integers(1, 4), "rounds")
        if data.draw(st.booleans(), "one short round"):
            microbatches = data.draw(st.integers(1, ranks), "microbatches")
    else:
        least = ranks * each if generator.name in ("1f1b", "dualpipe-v") else 1
        microbatches = data.draw(st.integers(least, least + 20), "microbatches")
    ours = texts(
        make_schedule(generator.name, stages=ranks * each, microbatches=microbatches, ranks=ranks)
    )
    theirs = torch_lists(generator, ranks, each, microbatches)
    if generator.name == "1f1b":
        assert theirs[-1][0] == f"{ranks - 1}F1", "torch's fault is mended: compare this rank too"
        ours, theirs = ours[:-1], theirs[:-1]
    assert ours == theirs


@pytest.mark.parametrize("generator", SCHEDULES, ids=lambda g: g.name)
def test_torch_runs_our_lists(generator: Generator):
    """Its dry run, which cannot do OVERLAP_F_B, comes to the end of what `lower` wrote."""
    if generator.name == "dualpipe-v":
        return
    for ranks in (1, 2, 3, 4):
        each = generator.stages_a_rank or 2
        grid = make_schedule(
            generator.name, stages=ranks * each, microbatches=2 * ranks, ranks=ranks
        )
        for listed in (lower(grid), lower(grid, defer_receives=True)):
            order = {
                rank: [
                    torch_schedules._Action.from_str(str(action))
                    for action in listed.actions(rank)
                    if not action.kind.of_stage
                ]
                for rank in range(ranks)
            }
            torch_schedules._simulate_comms_compute(order, grid.placement.__getitem__, grid.stages)


@pytest.mark.parametrize("generator", SCHEDULES, ids=lambda g: g.name)
def test_our_transfers_wait_for_no_more_than_torchs(generator: Generator):
    """Both lowered from the same grid, of which `ideal` is what no order of receives delays."""
    if generator.stages_a_rank == 1 or not generator.trains:
        return
    each = generator.stages_a_rank or 2
    for ranks, microbatches in ((2, 4), (3, 6), (4, 8), (4, 12)):
        torchs = torch_schedule(generator, ranks, each, microbatches).pipeline_order_with_comms
        grid = make_schedule(
            generator.name, stages=ranks * each, microbatches=microbatches, ranks=ranks
        )
        theirs = grid.with_ranks(
            [
                [a for a in map(Action.parse, map(str, torchs[rank])) if not a.kind.of_stage]
                for rank in range(ranks)
            ]
        )
        validate(theirs)
        prove_no_deadlock(theirs)
        for send_time in (0.1, 0.5):
            ideal, ours, torch_takes = (
                simulate(schedule, send_time=send_time).step_time
                for schedule in (grid, lower(grid), theirs)
            )
            assert ours <= 1.02 * ideal
            assert ours <= torch_takes + 1e-9
