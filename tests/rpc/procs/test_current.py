"""A forked child is no worker."""

from __future__ import annotations

import os
import signal
from pathlib import Path

import pytest

from dure import rpc
from dure.errors import RpcError
from tests.comm.forked_ranks import Ranks, Slot
from tests.rpc.procs.rpc_workers import Start, double
from tests.waiting import PATIENCE_S

pytestmark = pytest.mark.needs("engine")


def fork(slot: Slot) -> list[bool]:
    """Fork; return whether the child could not call, and whether the parent still can."""
    Start(name="program", rank=0, world_size=1, url=slot.url).init()
    rref = rpc.RRef(1)
    child = os.fork()
    if child == 0:
        signal.alarm(PATIENCE_S)
        failed = 0
        for call in (lambda: rpc.rpc_sync("program", double, (1,)), rref.to_here):
            try:
                call()
            except RpcError:
                failed += 1
        os._exit(failed)
    worked = [os.waitstatus_to_exitcode(os.waitpid(child, 0)[1]) == 2]
    worked += [rpc.rpc_sync("program", double, (21,)) == 42, rref.to_here() == 1]
    rpc.shutdown(graceful=False)
    return worked


def test_a_forked_child_is_no_worker(tmp_path: Path) -> None:
    with Ranks(1, tmp_path, fork) as ranks:
        assert ranks.values() == [[True] * 3]
