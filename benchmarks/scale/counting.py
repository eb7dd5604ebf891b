"""What is counted in several rows: requests to the store, memory, processor time."""

from __future__ import annotations

import gc
import resource
import time
import tracemalloc
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import timedelta

from dure.store import HashStore
from dure.store.wire import Reply, StoreRequest, pack

PATIENCE = timedelta(minutes=5)


class CountingStore(HashStore):
    """One rank's handle on a store of this process; counts what a network store would send."""

    def __init__(self, shared: HashStore) -> None:
        super().__init__(PATIENCE)
        self._shared = shared
        self.num_requests = self.num_bytes = 0

    def _answered(self, request: StoreRequest, patience_s: float) -> Reply | None:
        reply = self._shared._answered(request, patience_s)  # pyright: ignore[reportPrivateUsage]
        self.num_requests += 1
        self.num_bytes += len(pack(request)) + len(pack(reply))
        return reply


@contextmanager
def processor_time(figures: dict[str, float], name: str = "CPU s") -> Iterator[None]:
    """Add the processor time of this process, all threads, that the block takes."""
    began = time.process_time()
    yield
    figures[name] = time.process_time() - began


def peak_bytes(run: Callable[[], object]) -> tuple[int, int]:
    """Return the bytes of Python objects that `run` leaves behind, and their peak."""
    gc.collect()
    tracemalloc.start()
    try:
        kept = run()
        gc.collect()
        left, peak = tracemalloc.get_traced_memory()
        del kept
        return left, peak
    finally:
        tracemalloc.stop()


def resident_mb() -> float:
    """Return the largest resident memory of this process so far, in MB."""
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024 / 1e6
