"""Row 1: the ranks of a job meet in one store, and create the default group.

Each rank is a thread with its own handle on a store of this process, which counts the requests and
the bytes that a network store would send. The last rank arrives `LATE_S` after the others, so
requests that waiting ranks repeat are counted, too. A job of one rank comes first, which imports
what a process imports once.

Then as many ranks meet in a store server on loopback, from `PROCESSES` processes: each rank
connects to the server, with its handshake of keys, and meets the others. Imports and starts of
processes are not in that time.
"""

from __future__ import annotations

import statistics
import subprocess
import sys
import threading
import time
from pathlib import Path

from counting import PATIENCE, CountingStore, processor_time

import dure
from dure.comm.world import new_world
from dure.store import HashStore, TCPStore

TITLE = "rendezvous and default group, one store server"
RANKS = (16, 256, 1024)
LATE_S = 2.5
PROCESSES = 4


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
    figures["s until all have met over loopback"] = _met_over_loopback(ranks)
    return figures


def _met_over_loopback(ranks: int) -> float:
    """Return the seconds until the ranks of `PROCESSES` processes have connected and met."""
    server = TCPStore("127.0.0.1", 0, None, True, PATIENCE, wait_for_workers=False)
    program, each = str(Path(__file__).with_name("meeting_ranks.py")), ranks // PROCESSES
    processes: list[subprocess.Popen[str]] = []
    for first in range(0, ranks, each):
        arguments = [str(number) for number in (each, first, ranks, server.port)]
        processes.append(
            subprocess.Popen(
                [sys.executable, program, *arguments],
                stdin=subprocess.PIPE,
                stdout=subprocess.PIPE,
                text=True,
            )
        )
    for process in processes:
        assert process.stdout is not None
        process.stdout.readline()
    begin = time.monotonic()
    for process in processes:
        assert process.stdin is not None
        print(file=process.stdin, flush=True)
    ends = [float(process.communicate()[0]) for process in processes]
    return max(ends) - begin
