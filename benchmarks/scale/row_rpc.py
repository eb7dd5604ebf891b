"""Row 6: processes join a world of RPC with dynamic membership.

Each process is a `Peers`, as `init_rpc` makes it, with its own handle on a store of this process,
which counts the requests and the bytes that a network store would send. First all processes of a
world join at once, each in a thread; then one more joins.
"""

from __future__ import annotations

import statistics
import threading

from counting import PATIENCE, CountingStore, processor_time

from dure.rpc.peers import PeerAddress, Peers
from dure.store import HashStore
from dure.store.builds import own_build
from dure.store.identity import myself

TITLE = "a process joins a world of RPC with dynamic membership"
RANKS = (16, 256, 1000)


def measure(ranks: int) -> dict[str, float]:
    """Count what a process sends and receives."""
    threading.stack_size(1 << 20)
    shared = HashStore(PATIENCE)
    gate = threading.Barrier(ranks)
    stores = [CountingStore(shared) for _ in range(ranks)]

    def join(rank: int) -> None:
        gate.wait()
        Peers.join(stores[rank], _address(rank))

    figures: dict[str, float] = {}
    with processor_time(figures, "CPU s of all that join at once"):
        threads = [threading.Thread(target=join, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    at_once = [store.num_requests for store in stores]
    figures["requests of each that joins at once"] = statistics.fmean(at_once)
    figures["most requests of one"] = max(at_once)

    last = CountingStore(shared)
    with processor_time(figures, "CPU s of one that joins later"):
        there = Peers.join(last, _address(ranks))
    figures["requests of one that joins later"] = last.num_requests
    figures["bytes of one that joins later"] = last.num_bytes
    assert len(there.all()) == ranks + 1
    return figures


def _address(rank: int) -> PeerAddress:
    endpoint = f"tcp://10.0.{rank // 256}.{rank % 256}:40000"
    return PeerAddress(f"worker{rank}", -1, myself(), (1, 2, 3), 64, endpoint, own_build())
