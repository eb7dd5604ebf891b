"""Stock torch's Gloo, named as programs name it; the caller says how the two ranks start.

Arguments: a file for the second world; "here" if this process is a rank already, else the method by
which it starts both; perhaps "stand_in", to call that function first.
"""

from __future__ import annotations

import os
import sys
from datetime import timedelta
from typing import Any

import torch
import torch.distributed
import torch.multiprocessing as mp
from torch.nn.parallel import DistributedDataParallel

dist: Any = torch.distributed
c10d: Any = torch.distributed.distributed_c10d


def library_of(group: object) -> str:
    return type(group).__module__.partition(".")[0]


def total(group: object = None) -> float:
    tensor = torch.tensor([dist.get_rank() + 1.0])
    dist.all_reduce(tensor, group=group)
    return tensor.item()


def use_gloo(**where: Any) -> None:
    dist.init_process_group("gloo", timeout=timedelta(seconds=200), **where)
    rank, world = dist.get_rank(), dist.group.WORLD
    assert dist.get_backend() == "gloo"
    assert world.name() == "gloo"
    assert library_of(world) == "dure"
    assert world.ours.global_ranks == (0, 1)
    assert total() == 3
    dist.monitored_barrier()
    assert isinstance(world, dist.ProcessGroupGloo)
    c10d._set_pg_timeout(timedelta(seconds=100))
    assert world.ours.timeout == timedelta(seconds=100)
    model = DistributedDataParallel(torch.nn.Linear(1, 1, bias=False))  # C++ asks for the name, too
    model(torch.tensor([[rank + 1.0]])).sum().backward()
    assert model.module.weight.grad.item() == 1.5

    alone = dist.new_group([1])
    if rank == 1:
        assert library_of(alone) == "dure"
        assert alone.ours.global_ranks == (1,)
        assert dist.get_backend(alone) == "gloo"
        assert total(alone) == 2
    mesh = dist.init_device_mesh("cpu", (2, 1), mesh_dim_names=("x", "y"))
    assert library_of(mesh.get_group("x")) == "dure"
    assert total(mesh.get_group("x")) == 3

    for name in ("torch_gloo", "cpu:gloo,cuda:torch_gloo"):  # the second: not of Gloo alone
        torchs = dist.new_group(backend=name)
        assert library_of(torchs) == "torch"
        assert total(torchs) == 3
    plain = dist.new_group(backend="dure")
    assert dist.get_backend(plain) == "dure"
    assert total(plain) == 3
    dist.destroy_process_group()


def be_rank(rank: int, file: str) -> None:
    os.environ["RANK"] = str(rank)
    use_gloo()
    use_gloo(init_method=f"file://{file}", rank=rank, world_size=2)
    sys.stdout.write(f"rank {rank} is done\n")


if __name__ == "__main__":
    file, method, *words = sys.argv[1:]
    if words == ["stand_in"]:
        import dure.torch_backend

        dure.torch_backend.stand_in("gloo")
    if method == "here":
        be_rank(int(os.environ["RANK"]), file)
    else:
        mp.start_processes(be_rank, (file,), nprocs=2, start_method=method)
