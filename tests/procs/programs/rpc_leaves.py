"""One thread computes with a leaf again and again, another ends backward passes to it.

torch takes a lock of the leaf's and Python's in either order: a thread that has the one and waits
for the other ends the process's life, or does not.
"""

from __future__ import annotations

import threading
import time
from typing import Any

import torch

from dure.rpc.autograd import graph as module
from dure.rpc.autograd.graph import LocalGraph, edge_of

module._COPIED_BYTES = 0  # gradients are handed over, however small
leaf = torch.ones(2, requires_grad=True)
edge = edge_of(leaf)  # torch's lock is then held longer, for the node is Python's, too
until = time.monotonic() + 2.0
counts = [0, 0]


def compute() -> None:
    while time.monotonic() < until:
        _ = leaf * 2
        counts[0] += 1


def go_back() -> None:
    one = torch.ones(2)
    while time.monotonic() < until:
        graph: LocalGraph[Any] = LocalGraph({"leaf": [edge]}, {})
        graph.arrive("leaf", [one])
        assert graph.leaves[leaf][0] == 1
        counts[1] += 1


torch.set_num_threads(1)
threads = [threading.Thread(target=work, daemon=True) for work in (compute, go_back)]
for thread in threads:
    thread.start()
for thread in threads:
    thread.join()
print("ended")
