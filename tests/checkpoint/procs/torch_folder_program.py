"""Two ranks of stock torch over Gloo save what torch shards: FSDP1, FSDP2, TP, a stage each."""

from __future__ import annotations

import os
import sys
from pathlib import Path

import torch
import torch.distributed as td
from torch import nn
from torch.distributed.checkpoint import save
from torch.distributed.checkpoint.state_dict import get_model_state_dict, get_state_dict
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import FullyShardedDataParallel, StateDictType, fully_shard
from torch.distributed.tensor.parallel import (
    ColwiseParallel,
    RowwiseParallel,
    parallelize_module,
)


def model() -> nn.Sequential:
    """Weights that the test writes down: 0, 1, 2, ... in each."""
    made = nn.Sequential(nn.Linear(5, 7), nn.Conv2d(2, 4, 3), nn.Linear(7, 3, bias=False))
    with torch.no_grad():
        for parameter in made.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    return made


def main(folder: Path) -> None:
    """Save four checkpoints."""
    td.init_process_group("gloo")
    rank, mesh = td.get_rank(), init_device_mesh("cpu", (2,))

    whole = model()
    for layer in whole:
        fully_shard(layer, mesh=mesh)
    fully_shard(whole, mesh=mesh)
    optimizer = torch.optim.SGD(whole.parameters(), lr=0.0, momentum=0.5)
    for parameter in whole.parameters():
        parameter.grad = torch.full_like(parameter, 2.0)
    optimizer.step()
    weights, optim = get_state_dict(whole, optimizer)
    state = {"model": weights, "optim": optim, "step": 7, "names": ["a", {"b": (1, 2.5, None)}]}
    save(state, checkpoint_id=folder / "fsdp2")

    flat = FullyShardedDataParallel(model(), device_id=torch.device("cpu"), use_orig_params=True)
    with FullyShardedDataParallel.state_dict_type(flat, StateDictType.SHARDED_STATE_DICT):
        save({"model": flat.state_dict()}, checkpoint_id=folder / "fsdp1")

    two = nn.Sequential(nn.Linear(5, 8), nn.Linear(8, 3))
    with torch.no_grad():
        for parameter in two.parameters():
            parameter.copy_(torch.arange(parameter.numel()).view(parameter.shape))
    parallelize_module(two, mesh, {"0": ColwiseParallel(), "1": RowwiseParallel()})
    save({"model": get_model_state_dict(two)}, checkpoint_id=folder / "tp")

    save({f"stage{rank}": {"w": torch.full((3,), float(rank))}}, checkpoint_id=folder / "pp")
    td.barrier()
    sys.stdout.flush()
    os._exit(0)  # Gloo's threads may abort a process that ends


if __name__ == "__main__":
    main(Path(sys.argv[1]))
