"""The sharded optimizer with real processes: one memory for all, and every backend."""

from __future__ import annotations

import os
import signal
from collections import Counter
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn

import dure
import dure as dist
from dure.errors import PeerLost
from dure.testing import ProcessPool
from tests.comm.forked_ranks import Ranks, Slot
from tests.parallel.optim.zero_models import KINDS, Net, batch, equal, same, step
from tests.waiting import PATIENCE_S

NEEDS_ENGINE = pytest.mark.needs("engine")


Zero = dist.ZeroRedundancyOptimizer


def place_of(tensor: torch.Tensor) -> str:
    """Return "inode:offset" of a tensor in a symmetric heap; empty for ordinary memory."""
    for line in Path("/proc/self/maps").read_text().splitlines():
        begin, _, end = line.split()[0].partition("-")
        if int(begin, 16) <= tensor.data_ptr() < int(end, 16):
            if "memfd:dure-heap" not in line:
                return ""
            offset = tensor.data_ptr() - int(begin, 16) + int(line.split()[2], 16)
            return f"{line.split()[4]}:{offset}"
    raise ValueError("no mapping holds the tensor")


def file_of(tensor: torch.Tensor) -> str:
    """Return the inode of the heap that a tensor is stored in; empty for ordinary memory."""
    return place_of(tensor).partition(":")[0]


def shared_sgd(model: nn.Module) -> Zero:
    return Zero(model.parameters(), torch.optim.SGD, lr=0.1, host_shared_parameters=True)


def one_memory(rank: int, n: int) -> set[float]:
    """Share a model's parameters, write into those of this rank's shard; return what is seen."""
    model = Net(seed=rank)  # other values on each rank
    expected = Net(seed=0)
    zero = shared_sgd(model)
    assert equal(model, expected)
    assert model.tied.weight is model.mid.weight
    assert model.conv.weight.is_contiguous(memory_format=torch.channels_last)
    dist.barrier()
    for parameter in zero.optim.param_groups[0]["params"]:
        parameter.detach().fill_(rank + 1.0)
    dist.barrier()
    seen = {float(p.detach().flatten()[0]) for p in model.parameters()}
    dist.barrier()
    return seen


def training(rank: int, n: int, kind: str, ddp_first: bool = True) -> dict[str, Any]:
    """Train under DDP with a sharded optimizer and with a plain one; compare losses and state.

    Returns:
        The ranks of this host, where the parameters are, and whose state this rank has.
    """
    reference, model = Net(), Net(seed=rank)
    wrapped = dist.DistributedDataParallel(reference)
    plain = torch.optim.AdamW(wrapped.parameters(), lr=0.01)
    ddp = dist.DistributedDataParallel(model) if ddp_first else model
    zero = Zero(ddp.parameters(), torch.optim.AdamW, lr=0.01, **KINDS[kind])
    ddp = ddp if ddp_first else dist.DistributedDataParallel(model)
    data = torch.Generator().manual_seed(rank)
    for _ in range(3):
        x = batch(data)
        assert step(ddp, zero, x) == step(wrapped, plain, x)
    dist.barrier()
    assert equal(model, reference)
    zero.consolidate_state_dict(to=n - 1)
    if rank == n - 1:
        assert same(zero.state_dict()["state"], plain.state_dict()["state"])
    dist.barrier()
    return {
        "host": next(host for host in dist.group.WORLD.hosts if rank in host),
        "files": {file_of(p) for p in model.parameters()},
        "numbers": list(zero.local_state_dict()["state"]),
    }


@NEEDS_ENGINE
def test_parameters_are_one_memory_for_all_ranks_3_ranks(process_pool):
    pool = process_pool(3, "shm")
    first, *others = pool.run(one_memory, 3)
    assert first == {1.0, 2.0, 3.0} and others == [first] * 2
    for ddp_first in (True, False):
        seen = pool.run(training, 3, "shared", ddp_first)
        (files,) = {frozenset(s["files"]) for s in seen}
        assert len(files) == 1 and "" not in files
        assert Counter(number for s in seen for number in s["numbers"]) == Counter(range(9))


@NEEDS_ENGINE
def test_each_host_has_a_copy_and_all_of_the_state():
    with ProcessPool(3, "hybrid", hosts="aab") as pool:
        seen = pool.run(training, 3, "shared")
    assert [s["host"] for s in seen] == [(0, 1), (0, 1), (2,)]
    assert seen[0]["files"] == seen[1]["files"] != seen[2]["files"]
    for host in ((0, 1), (2,)):
        numbers = Counter(number for rank in host for number in seen[rank]["numbers"])
        assert numbers == Counter(range(9))


VICTIM, KILLED_AT = 1, 2


class Dying(torch.optim.SGD):
    """Ends its process in the middle of a step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps > KILLED_AT and dure.get_rank() == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def train_until_a_rank_dies(place: Slot, kind: str) -> tuple[int | None, str, int]:
    dure.init_process_group("shm", init_method=place.url, rank=place.rank, world_size=place.size)
    model = Net()
    zero = dure.ZeroRedundancyOptimizer(model.parameters(), Dying, lr=0.1, **KINDS[kind])
    data = torch.Generator().manual_seed(0)
    done = 0
    try:
        while True:
            step(model, zero, batch(data))
            done += 1
    except PeerLost as error:
        return error.peer, error.fix, done
    finally:
        dure.destroy_process_group()


@NEEDS_ENGINE
def test_survivors_of_a_step_know_that_parameters_may_be_half_updated(tmp_path):
    with Ranks(3, tmp_path) as ranks:
        for kind in ("straight", "shared"):
            replies = ranks.run(train_until_a_rank_dies, 3, kind, limit_s=PATIENCE_S)
            assert replies[VICTIM] is None
            for rank in (0, 2):
                peer, fix, done = replies[rank]
                assert (peer, done) == (VICTIM, KILLED_AT)
                assert "checkpoint" in fix
