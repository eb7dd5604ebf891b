"""Calls between real processes: many at once, and more of them than memory should hold."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil
import pytest
import torch

from dure import native, rpc
from dure.rpc.agent import Agent
from dure.rpc.calls import MOST_BYTES
from dure.rpc.current import current
from dure.testing import ProcessPool

pytestmark = pytest.mark.skipif(not native.available()[0], reason="needs the native engine")

MIB = 1 << 20
_open = threading.Event()
_sums: list[float] = []


def take(tensor: torch.Tensor) -> None:
    _open.wait(60.0)
    _sums.append(tensor[-1].item())


def open_gate() -> None:
    _open.set()


def waits(agent: Agent) -> bool:
    peer = agent.directory.get(1)
    return peer is not None and bool(peer.blocked)


def open_when(ready: Callable[[], bool]) -> None:
    while not ready():
        time.sleep(0.005)
    rpc.rpc_sync("worker1", open_gate)


def add(a: int, b: int) -> int:
    return a + b


def much(rank: int, url: str) -> tuple[int, int, float]:
    """Have 4 GB under way as fast as may be, and 10,000 calls; return what that took at most."""
    options = rpc.TensorPipeRpcBackendOptions(init_method=url, num_worker_threads=32)
    rpc.init_rpc(f"worker{rank}", rank=rank, world_size=2, rpc_backend_options=options)
    most = used = 0
    if rank == 0:
        agent, sent = current(), torch.zeros(64 * MIB // 4)
        before = psutil.virtual_memory().shared
        small: list[Any] = [rpc.rpc_async("worker1", add, (n, 1)) for n in range(10_000)]
        assert [future.wait() for future in small] == list(range(1, 10_001))
        large: list[Any] = []
        opener = threading.Thread(
            target=open_when, args=(lambda: waits(agent) or len(large) == 64,)
        )
        opener.start()  # nothing is answered until the program waits
        for n in range(64):
            sent[-1] = n
            large.append(rpc.rpc_async("worker1", take, (sent,)))
            most = max(most, int(agent.debug_info()["agent.bytes_in_flight"]))
            used = max(used, psutil.virtual_memory().shared - before)
        for future in large:
            future.wait()
        opener.join()
        assert agent.debug_info()["agent.bytes_in_flight"] == "0"
    rpc.shutdown()
    return most, used, sum(_sums)


@pytest.mark.slow
def test_four_gigabytes_under_way_take_one(tmp_path: Path) -> None:
    with ProcessPool(2) as pool:
        (most, used, _), (_, _, total) = pool.run(much, f"file://{tmp_path}/meeting")
    assert most <= MOST_BYTES
    assert used < MOST_BYTES * 3 // 2
    assert total == sum(range(64))
