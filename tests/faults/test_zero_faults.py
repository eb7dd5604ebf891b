"""A rank dies in the midst of a step: the others hear of it, and what it means."""

from __future__ import annotations

import os
import signal
from datetime import timedelta

import pytest
import torch

import dure
from dure.errors import PeerLost
from dure.native import available
from faults.crew import Crew, Place
from ranks.zero_models import Net, batch, step

pytestmark = pytest.mark.skipif(not available()[0], reason=available()[1] or "-")

VICTIM, KILLED_AT = 1, 2


class _Dying(torch.optim.SGD):
    """Ends its process in the midst of a step."""

    steps = 0

    def step(self, closure=None):
        self.steps += 1
        if self.steps > KILLED_AT and dure.get_rank() == VICTIM:
            os.kill(os.getpid(), signal.SIGKILL)
        return super().step(closure)


def _train(place: Place, shared: bool) -> tuple[int | None, str, int]:
    dure.init_process_group(
        "shm",
        init_method=place.url,
        rank=place.rank,
        world_size=place.size,
        timeout=timedelta(seconds=20),
    )
    model = Net()
    zero = dure.ZeroRedundancyOptimizer(
        model.parameters(), _Dying, lr=0.1, host_shared_parameters=shared
    )
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


@pytest.mark.parametrize("shared", [False, True])
def test_survivors_of_a_step_know_that_parameters_may_be_half_updated(shared, tmp_path):
    with Crew(3, tmp_path) as crew:
        replies = crew.run(_train, 3, shared, limit_s=30)
    assert replies[VICTIM] is None
    for rank in (0, 2):
        peer, fix, done = replies[rank]
        assert (peer, done) == (VICTIM, KILLED_AT)
        assert "checkpoint" in fix
