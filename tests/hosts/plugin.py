"""A program of stock torch for ranks on hosts, on the backend "dure": values against one process.

It prints "rank R: right" as its last line.
"""

import copy
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as td
from torch.distributed.fsdp import fully_shard
from torch.nn.parallel import DistributedDataParallel

import dure.torch_backend  # noqa: F401 (where the package is not installed)
from tests.hosts.job import STEPS, batches, model, train


def compute(rank: int, count: int) -> None:
    total = float(sum(range(count)))
    for numel in (1, 300_001):
        value = torch.full((numel,), float(rank))
        td.all_reduce(value)
        assert (value == total).all()
        parts = [torch.empty(numel) for _ in range(count)]
        td.all_gather(parts, torch.full((numel,), float(rank)))
        assert [part[-1].item() for part in parts] == list(range(count))
    pair = td.new_group([0, count - 1])
    if rank in (0, count - 1):
        value = torch.full((1000,), float(rank))
        td.all_reduce(value, group=pair)
        assert (value == count - 1).all()
    inputs = batches(count)
    alone = train(model(), inputs.flatten(1, 2))
    wraps: tuple[Any, ...] = (DistributedDataParallel, fully_shard)
    for wrap in wraps:
        losses = torch.tensor(train(wrap(copy.deepcopy(model())), inputs[:, rank]))
        td.all_reduce(losses)
        torch.testing.assert_close((losses / count).tolist(), alone)
        assert len(alone) == STEPS


def main() -> None:
    td.init_process_group("dure", timeout=timedelta(seconds=60))
    rank, count = td.get_rank(), td.get_world_size()
    world: Any = td.group.WORLD
    assert world.ours.backend_name == "hybrid"
    compute(rank, count)
    td.destroy_process_group()
    print(f"rank {rank}: right", flush=True)


if __name__ == "__main__":
    main()
