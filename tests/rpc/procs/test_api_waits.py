"""Programs in which threads, or processes, could wait for each other for good."""

from __future__ import annotations

import os
import signal
import threading
from pathlib import Path
from typing import Any

import pytest
import torch

import dure as dist
from dure import autograd, rpc
from dure.errors import RpcError
from dure.rpc.autograd import graph as module
from dure.rpc.autograd.graph import LocalGraph, edge_of
from dure.rpc.current import current
from dure.testing import ProcessPool
from tests.comm.forked_ranks import Ranks, Slot
from tests.rpc.procs.rpc_workers import Start, double, gate, wait_here, workers
from tests.waiting import until

pytestmark = pytest.mark.needs("engine")

_NUM_TIMES = 500


def use_a_leaf(_: Slot) -> None:
    """One thread computes with a leaf again and again, another ends backward passes to it.

    torch takes a lock of the leaf's and Python's in either order: a thread that has the one and
    waits for the other would end the process's life.
    """
    module._COPIED_BYTES = 0  # gradients are handed over, however small
    leaf = torch.ones(2, requires_grad=True)
    edge = edge_of(leaf)  # torch's lock is then held longer, for the node is Python's, too
    over = threading.Event()

    def compute() -> None:
        while not over.is_set():
            leaf.mul(2)

    thread = threading.Thread(target=compute)
    thread.start()
    for _turn in range(_NUM_TIMES):
        graph: LocalGraph[Any] = LocalGraph({"leaf": [edge]}, {})
        graph.arrive("leaf", [torch.ones(2)])
        assert graph.leaves[leaf][0] == 1
    over.set()
    thread.join()


def test_threads_compute_with_a_leaf_while_others_go_back_to_it(tmp_path: Path) -> None:
    """torch would keep Python's lock for ever, so that no limit within the process helps."""
    with Ranks(1, tmp_path, use_a_leaf) as ranks:
        assert ranks.values() == [None]


served = torch.nn.Linear(2, 2, bias=False)
served.weight.data.fill_(1.0)


def serve(x: torch.Tensor) -> torch.Tensor:
    return served(x)


def train_both_ways(rank: int, url: str) -> None:
    """Train a net by DDP, and serve another one to the other rank: DDP's gradients need it.

    While DDP waits in one rank for the gradients of the other, that one waits for this one's net.
    """
    Start(name=f"worker{rank}", rank=rank, world_size=2, url=url).init()
    mine = torch.nn.Linear(2, 2, bias=False)
    net = dist.DistributedDataParallel(mine)
    for _ in range(3):
        with autograd.context() as context:
            there = rpc.rpc_sync(f"worker{1 - rank}", serve, (net(torch.full((1, 2), rank + 1.0)),))
            autograd.backward(context, [there.sum()])
            gradients = autograd.get_gradients(context)
        # each output counts twice, by the weights of ones there; inputs are 1 and 2: 3 on average
        assert torch.equal(gradients[mine.weight], torch.full((2, 2), 3.0)), gradients
    rpc.shutdown()


def test_two_train_by_ddp_and_serve_each_other(tmp_path: Path) -> None:
    with ProcessPool(2) as pool:
        pool.run(train_both_ways, f"file://{tmp_path}/meeting")


WAITS = [
    lambda: rpc.rpc_sync("other", wait_here, (1.0,)),
    lambda: rpc.rpc_async("other", wait_here, (1.0,)).wait(),
    lambda: rpc.remote("other", wait_here, (1.0,)).to_here(),
]


def test_ctrl_c_ends_a_wait(tmp_path: Path) -> None:
    url = f"file://{tmp_path}/meeting"
    with workers(Start(name="other", rank=1, world_size=2, url=url)) as (other,):
        Start(name="program", rank=0, world_size=2, url=url).init()
        try:
            assert other.joined() == 1
            for wait in WAITS:
                before = current().activity()[0]

                def interrupt(before: int = before) -> None:
                    until(lambda: current().activity()[0] > before, "a call")
                    os.kill(os.getpid(), signal.SIGINT)

                thread = threading.Thread(target=interrupt)
                thread.start()
                with pytest.raises(KeyboardInterrupt):
                    wait()
                thread.join()
            assert rpc.rpc_sync("other", double, (21,)) == 42
        finally:
            rpc.shutdown(graceful=False)


def test_the_end_at_once_does_not_wait_for_calls_that_run(tmp_path: Path) -> None:
    gate.clear()
    try:
        Start(name="program", rank=0, world_size=1, url=f"file://{tmp_path}/meeting").init()
        future = rpc.rpc_async("program", wait_here, (1.0,))
        until(lambda: current().activity()[1] == 2, "the call to run")
        rpc.shutdown(graceful=False)
        with pytest.raises(RpcError, match="shut down"):
            future.wait()
    finally:
        gate.set()
