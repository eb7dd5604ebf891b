"""What ranks of tests of pipelines do in processes."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import torch
import torch.distributed.pipelining as theirs

import dure
import dure.device_mesh
import dure.pipelining as ours
from dure.errors import PeerLost
from dure.fsdp import fully_shard
from tests.comm.forked_ranks import Slot
from tests.parallel.pipeline.ranks.pipeline_failing import fail_everywhere
from tests.parallel.pipeline.ranks.pipeline_models import (
    CPU,
    LENGTHS,
    SCHEDULES,
    Nested,
    Pipeline,
    Trained,
    batches,
    dense,
    mse,
    of_lengths,
    of_nested,
    stages_of,
)
from tests.torch_backend import torch_worlds as torch_ranks
from tests.waiting import until


def equals_torch(rank: int, folder: str, name: str) -> float:
    """Take a step under torch's runtime on gloo, and under Dure's; return the largest difference.

    Of losses, of the output, and of gradients.
    """
    kind, each = SCHEDULES[name]
    mine = stages_of(name, rank, 2, each)
    with torch_ranks.world(rank, folder, "gloo"):
        expected = _step(theirs, getattr(theirs, kind.__name__), mine)
    found = _step(ours, kind, mine)
    pairs = zip(found, expected, strict=True)
    return max((float((a - b).abs().max()) for a, b in pairs), default=0.0)


def _step(library: Any, kind: Any, mine: list[int]) -> list[torch.Tensor]:
    parts = dense(2 * len(mine))
    stages = [library.PipelineStage(parts[i], i, len(parts), CPU) for i in mine]
    schedule = kind(stages if len(mine) > 1 else stages[0], 4, loss_fn=mse)
    x, y = batches(1, rows=8)[0]
    losses: list[torch.Tensor] = []
    last = len(parts) - 1 in mine
    for_the_last = {"target": y, "losses": losses} if last else {}
    output = schedule.step(*([x] if 0 in mine else []), **for_the_last)
    gradients = [p.grad for i in mine for p in parts[i].parameters()]
    return [*losses, *([output] if last else []), *(g for g in gradients if g is not None)]


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


def trains_shards(rank: int) -> dict[str, torch.Tensor]:
    """Train stages whose parameters two ranks share, each with half of a batch."""
    mesh = dure.device_mesh.init_device_mesh("cpu", (1, 2), mesh_dim_names=("pp", "dp"))

    def wrap(part: Any) -> Any:
        fully_shard(part.linear, mesh=mesh["dp"])
        return fully_shard(part, mesh=mesh["dp"])

    group = mesh["pp"].get_group()
    pipeline = Pipeline("interleaved", 0, 1, dense(2), 4, wrap=wrap, group=group)
    for x, y in batches(2, rows=16):
        pipeline.step(x.chunk(2)[rank], y.chunk(2)[rank])
    weights: dict[str, Any] = pipeline.weights()
    return {name: weight.full_tensor() for name, weight in weights.items()}


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
