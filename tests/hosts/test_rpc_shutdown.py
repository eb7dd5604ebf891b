"""RPC over two hosts begins, is used and ends in order, again and again in the same processes.

The last answer of a worker must arrive although the worker that has sent it leaves at once.
"""

from __future__ import annotations

from pathlib import Path

import pytest
import torch

from dure import rpc
from tests.comm.forked_ranks import Slot
from tests.hosts.networks import hosts, set_variables, several_ranks_on

pytestmark = pytest.mark.needs("network namespaces", "engine")


def begin_and_end(slot: Slot, variables: dict[str, str], times: int) -> int:
    """Return how often RPC has begun and ended."""
    set_variables(slot.rank, variables)
    for number in range(times):
        rpc.init_rpc(f"w{slot.rank}", rank=slot.rank, world_size=slot.size)
        other = f"w{(slot.rank + 1) % slot.size}"
        answer = rpc.rpc_sync(other, torch.add, args=(torch.ones(300_000), number))
        assert (answer == number + 1).all()
        assert rpc.remote(other, torch.full, args=((5,), 2.0)).to_here().sum() == 10
        futures = [rpc.rpc_async(other, torch.mul, args=(torch.ones(i + 1), i)) for i in range(20)]
        assert all((future.wait() == i).all() for i, future in enumerate(futures))
        rpc.shutdown()
    return times


@pytest.mark.parametrize("times", [3, pytest.param(40, marks=pytest.mark.slow)])
def test_every_shutdown_ends_without_an_error(times: int, tmp_path: Path):
    with (
        hosts(2, "ends") as made,
        several_ranks_on(made, 2, tmp_path, {}, begin_and_end, times) as ranks,
    ):
        assert ranks.values() == [times] * 4
