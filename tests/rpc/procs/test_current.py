"""A forked child is no worker."""

from __future__ import annotations

from pathlib import Path

import pytest

from dure import rpc
from dure.errors import RpcError
from tests.comm.forked_ranks import Ranks, Slot, in_child
from tests.rpc.procs.rpc_workers import Start, double

pytestmark = pytest.mark.needs("engine")


def fork(slot: Slot) -> list[bool]:
    """Fork; return whether the child could not call, and whether the parent still can."""
    Start(name="program", rank=0, world_size=1, url=slot.url).init()
    rref = rpc.RRef(1)

    def refused() -> bool:
        for call in (lambda: rpc.rpc_sync("program", double, (1,)), rref.to_here):
            with pytest.raises(RpcError):
                call()
        return True

    worked = [in_child(refused)]
    worked += [rpc.rpc_sync("program", double, (21,)) == 42, rref.to_here() == 1]
    rpc.shutdown(graceful=False)
    return worked


def test_a_forked_child_is_no_worker(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, fork) as ranks:
        assert ranks.values() == [[True] * 3]
