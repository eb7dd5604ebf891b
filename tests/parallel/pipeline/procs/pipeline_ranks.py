"""What ranks of tests of pipelines do in processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch

import dure
import dure.device_mesh
from dure.errors import PeerLost
from tests.comm.forked_ranks import Slot
from tests.parallel.pipeline.ranks.pipeline_failing import fail_everywhere
from tests.parallel.pipeline.ranks.pipeline_models import (
    LENGTHS,
    SCHEDULES,
    Nested,
    Pipeline,
    Trained,
    batches,
    dense,
    of_lengths,
    of_nested,
)
from tests.waiting import until


def large_parts(name: str) -> list[Any]:
    return dense(2 * SCHEDULES[name][1], width=200)


def large_batches() -> list[tuple[torch.Tensor, torch.Tensor]]:
    """Large microbatches, of uneven lengths."""
    return batches(2, rows=402, width=200)


def trains(rank: int, name: str) -> Trained:
    pipeline = Pipeline(name, rank, 2, large_parts(name), 4)
    losses: list[list[float]] = []
    for x, y in large_batches():
        pipeline.eval(x)
        losses.append(pipeline.step(x, y))
    return losses, pipeline.weights()


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
