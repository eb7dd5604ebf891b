"""How many functions an empty call goes through: a count, in which no clock has a part."""

from __future__ import annotations

import sys
import threading
from pathlib import Path
from types import FrameType

from dure import rpc
from tests.comm.forked_ranks import Ranks, Slot

MOST = 80
"""Calls of Python and C functions at the caller and the callee together; 74 when written."""

CALLS = 20

counted: list[str] = []


def count(frame: FrameType, event: str, arg: object) -> None:
    if event == "call":
        counted.append(frame.f_code.co_name)
    elif event == "c_call":
        counted.append(getattr(arg, "__name__", ""))


def nothing() -> None:
    pass


def take_counts() -> list[str]:
    """Return the names that were counted in this process, and start again."""
    got = counted.copy()
    counted.clear()
    return got


def count_calls(slot: Slot) -> tuple[list[str], list[str]]:
    """Call `nothing` some times; return what was called at the caller and at the callee."""
    threading.setprofile(count)  # in threads that start from here on
    rpc.init_rpc(
        f"worker{slot.rank}",
        rank=slot.rank,
        world_size=2,
        rpc_backend_options=rpc.TensorPipeRpcBackendOptions(init_method=slot.url),
    )
    here, there = list[str](), list[str]()
    if slot.rank == 0:
        for _ in range(CALLS):  # until threads and rings are there
            rpc.rpc_sync("worker1", nothing)
        rpc.rpc_sync("worker1", take_counts)
        take_counts()
        sys.setprofile(count)
        for _ in range(CALLS):
            rpc.rpc_sync("worker1", nothing)
        sys.setprofile(None)
        here = take_counts()
        there = rpc.rpc_sync("worker1", take_counts)
    rpc.shutdown()
    return here, there


def test_an_empty_call_goes_through_few_functions(tmp_path: Path) -> None:
    with Ranks(2, tmp_path, count_calls) as ranks:
        (here, there), _ = ranks.values()
    # `rpc_sync` of the api, and of the agent; one `nothing` for each
    assert (here.count("rpc_sync"), there.count("nothing")) == (2 * CALLS, CALLS)
    assert (len(here) + len(there)) / CALLS <= MOST
