"""Pipelines with real processes: over shared memory, and when a rank is killed."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch

import dure
import dure.device_mesh
from dure.errors import PeerLost
from dure.testing import run_ranks
from tests.comm.forked_ranks import Ranks, Slot
from tests.parallel.pipeline.ranks.pipeline_failing import fail_everywhere
from tests.parallel.pipeline.ranks.pipeline_models import (
    LENGTHS,
    Nested,
    Pipeline,
    batches,
    dense,
    of_lengths,
    of_nested,
)
from tests.waiting import until

pytestmark = pytest.mark.needs("engine")


def hands_over(rank: int) -> list[Any]:
    """Hand over nested structures, changing shapes, and failures; as thread-ranks do."""
    parts: list[Any] = [Nested(i, 2) for i in range(2)]
    for part in parts:
        part.load_state_dict({n: torch.ones_like(p) / 9 for n, p in part.state_dict().items()})
    nested = of_nested(rank, "1f1b", 2, parts)
    lengths = of_lengths(rank, dense(2), LENGTHS)
    failed = fail_everywhere(rank, "zb-v", 2, dense(4))
    return [nested, lengths, failed]


def reuses_slots(rank: int) -> tuple[list[int], bool]:
    """Return how many slots there are after each step, and whether all are free at the end."""
    pipeline = Pipeline("1f1b", rank, 2, dense(2, width=50), 6)
    slots: Any = pipeline.schedule._executor._messages
    counts: list[int] = []
    for x, y in batches(6, rows=60, width=50):
        pipeline.step(x, y)
        counts.append(len(slots._slots))
    dure.barrier()
    return counts, all(slot.word[0] == 0 for slot in slots._slots)


def loses_one(slot: Slot, backend: str, hosts: str) -> tuple[int | None, str, str]:
    """Kill rank 1 in the backward of microbatch 2; return peer, action and text of the error."""
    os.environ["DURE_HOST_ID"] = hosts[slot.rank]
    dure.init_process_group(backend, init_method=slot.url, rank=slot.rank, world_size=slot.size)
    pipeline = Pipeline("1f1b", slot.rank, slot.size, dense(slot.size), 4)
    pipeline.step(*batches(1)[0])
    calls: list[int] = []
    arrived = Path(f"{slot.path}-gradient1")  # rank 0 has the gradient of microbatch 1

    def on_backward(*_: Any) -> None:
        calls.append(1)
        if slot.rank == 0 and len(calls) == 2:
            arrived.touch()
        if slot.rank == 1 and len(calls) == 3:
            until(arrived.exists)
            os.kill(os.getpid(), signal.SIGKILL)

    pipeline.parts[slot.rank].register_full_backward_hook(on_backward)
    try:
        pipeline.step(*batches(1)[0])
    except PeerLost as error:
        return error.peer, getattr(error, "action", ""), str(error)
    raise AssertionError("no rank was lost")


def test_slots_hand_over_what_messages_do_2_ranks(process_pool):
    found = process_pool(2, "shm").run(hands_over)
    expected = run_ranks(2, hands_over, backend="threads")
    torch.testing.assert_close(found, expected, rtol=0, atol=0, equal_nan=True)


def test_slots_are_used_again_2_ranks(process_pool):
    for counts, are_free in process_pool(2, "shm").run(reuses_slots):
        assert are_free and counts[-1] <= 3, counts  # of 36 transfers


@pytest.mark.parametrize(
    ("backend", "hosts", "actions"),
    [
        ("shm", "aa", {0: "0B2"}),
        ("hybrid", "abb", {0: "0B2", 2: "2"}),  # rank 2 may have done all that it has to
    ],
)
def test_survivors_of_a_death_name_their_action(backend, hosts, actions, tmp_path):
    with Ranks(len(hosts), tmp_path, loses_one, backend, hosts) as ranks:
        assert ranks.result(1) is None
        for rank, begin in actions.items():
            result = ranks.result(rank)
            if isinstance(result, BaseException):
                raise result
            peer, action, text = result
            assert peer == 1 and action.startswith(begin) and action in text
