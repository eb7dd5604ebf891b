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

from dure.schedules import SCHEDULES, Generator, Schedule, make_schedule


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
