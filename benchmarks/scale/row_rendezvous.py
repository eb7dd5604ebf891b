"""Row 1: the ranks of a job meet in one store, and create the default group.

Each rank is a thread with its own handle on a store of this process, which counts the requests and
the bytes that a network store would send. The last rank arrives `LATE_S` after the others, so
requests that waiting ranks repeat are counted, too. A job of one rank comes first, which imports
what a process imports once.
"""

from __future__ import annotations

import statistics
import threading
import time

from counting import PATIENCE, CountingStore, processor_time

import dure
from dure.comm.world import new_world
from dure.store import HashStore

TITLE = "rendezvous and default group, one store server"
RANKS = (16, 256, 1024)
LATE_S = 2.5


def measure(ranks: int) -> dict[str, float]:
    """Count what each rank sends and receives."""
    threading.stack_size(1 << 20)
    with new_world():
        dure.init_process_group("threads", store=HashStore(), rank=0, world_size=1)
        dure.destroy_process_group()
    shared = HashStore(PATIENCE)
    stores = [CountingStore(shared) for _ in range(ranks)]
    gate = threading.Barrier(ranks)
    called, met = [0.0] * ranks, [0.0] * ranks

    def be(rank: int) -> None:
        called[rank] = time.monotonic()
        with new_world():
            if rank == ranks - 1:
                shared.wait(["dure/store//0/world"])
                time.sleep(LATE_S)
            dure.init_process_group(
                "threads", store=stores[rank], rank=rank, world_size=ranks, timeout=PATIENCE
            )
            met[rank] = time.monotonic()
            gate.wait()
            dure.destroy_process_group()

    figures: dict[str, float] = {}
    with processor_time(figures, "CPU s of all ranks"):
        threads = [threading.Thread(target=be, args=(rank,)) for rank in range(ranks)]
        for thread in threads:
            thread.start()
        for thread in threads:
            thread.join()
    figures["s until all have met without a wait"] = max(met) - min(called) - LATE_S
    requests = [store.num_requests for store in stores]
    figures["requests per rank"] = statistics.median(requests)
    figures["requests of the busiest rank"] = max(requests)
    figures["bytes per rank"] = statistics.fmean(store.num_bytes for store in stores)
    return figures
