"""The sharded optimizer with real processes: one memory for all, and every backend."""

from __future__ import annotations

import os
import signal
from collections import Counter

import pytest
import torch

import dure
from dure.errors import PeerLost
from dure.testing import ProcessPool
from tests.comm.forked_ranks import Ranks, Slot
from tests.parallel.optim.procs import zero_ranks
from tests.parallel.optim.zero_models import KINDS, Net, batch, step
from tests.waiting import PATIENCE_S

NEEDS_ENGINE = pytest.mark.needs("engine")


@NEEDS_ENGINE
def test_parameters_are_one_memory_for_all_ranks_3_ranks(process_pool):
    pool = process_pool(3, "shm")
    first, *others = pool.run(zero_ranks.one_memory, 3)
    assert first == {1.0, 2.0, 3.0} and others == [first] * 2
    for ddp_first in (True, False):
        seen = pool.run(zero_ranks.training, 3, "shared", ddp_first)
        (files,) = {frozenset(s["files"]) for s in seen}
        assert len(files) == 1 and "" not in files
        assert Counter(number for s in seen for number in s["numbers"]) == Counter(range(9))


@NEEDS_ENGINE
def test_each_host_has_a_copy_and_all_of_the_state():
    with ProcessPool(3, "hybrid", hosts="aab") as pool:
        seen = pool.run(zero_ranks.training, 3, "shared")
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
