"""A program for ranks on hosts: collectives, RPC, and DDP and FSDP against one process.

It prints "rank R: right" as its last line.
"""

import copy

import torch
from torch import nn

import dure as dist
from dure import rpc
from dure.fsdp import fully_shard
from dure.parallel import DistributedDataParallel
from tests.comm.over_hosts import collectives

STEPS = 2


def model() -> nn.Module:
    torch.manual_seed(0)
    return nn.Sequential(nn.Linear(33, 64), nn.ReLU(), nn.Linear(64, 17))


def batches(count: int) -> torch.Tensor:
    """Return inputs [STEPS, count, 8, 33]: for each step those of all ranks."""
    return torch.randn(STEPS, count, 8, 33, generator=torch.Generator().manual_seed(1))


def train(wrapped: nn.Module, inputs: torch.Tensor) -> list[float]:
    """Train on inputs [STEPS, *, 33]; return the loss of each step."""
    optimizer = torch.optim.SGD(wrapped.parameters(), lr=0.1)
    losses = []
    for batch in inputs:
        loss = wrapped(batch).square().mean()
        loss.backward()
        optimizer.step()
        optimizer.zero_grad()
        losses.append(loss.detach())
    return [float(loss) for loss in losses]


def mean_losses(wrapped: nn.Module, inputs: torch.Tensor) -> list[float]:
    """Train as this rank's part of all; return the losses, averaged over ranks."""
    losses = torch.tensor(train(wrapped, inputs[:, dist.get_rank()]))
    dist.all_reduce(losses, op=dist.ReduceOp.AVG)
    return losses.tolist()


def triple(value: torch.Tensor) -> torch.Tensor:
    return 3 * value


def main() -> None:
    dist.init_process_group()
    rank, count = dist.get_rank(), dist.get_world_size()
    collectives(rank, "")
    inputs = batches(count)
    alone = train(model(), inputs.flatten(1, 2))
    for wrap in (DistributedDataParallel, fully_shard):
        losses = mean_losses(wrap(copy.deepcopy(model())), inputs)
        torch.testing.assert_close(losses, alone, msg=lambda text, w=wrap: f"{w}: {text}")
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=count)
    answer = rpc.rpc_sync(f"worker{(rank + 1) % count}", triple, args=(torch.arange(99_999),))
    assert torch.equal(answer, 3 * torch.arange(99_999))
    rpc.shutdown()
    dist.destroy_process_group()
    print(f"rank {rank}: right", flush=True)


if __name__ == "__main__":
    main()
