"""Row 2: `new_group`, `split_group`, `new_subgroups`, and a mesh of three axes.

One process is a rank in the middle of a world of the backend "fake", whose other ranks do not
exist. What a rank of a real job exchanges is counted with threads as ranks, up to `THREADS` of
them: each creates a group of all ranks and one of eight in one call.
"""

from __future__ import annotations

import math
import statistics
import threading
import time
from collections.abc import Callable

from counting import PATIENCE, CountingStore, peak_bytes, processor_time, resident_mb

import dure
from dure.comm.creation import GroupSpec, create_groups
from dure.comm.world import World, new_world
from dure.mesh import init_device_mesh
from dure.store import HashStore

TITLE = "new_group, split_group, mesh of three axes, one rank"
RANKS = (16, 256, 1024, 10_000)
SHAPES = {16: (2, 2, 4), 256: (4, 8, 8), 1024: (8, 8, 16), 10_000: (10, 25, 40)}
THREADS = 1024
PART = 8
"""Ranks of the small groups."""


def measure(ranks: int) -> dict[str, float]:
    """Measure the creation of groups, and count what a rank exchanges for it."""
    shape = SHAPES[ranks]
    assert math.prod(shape) == ranks
    halves = [list(range(ranks // 2)), list(range(ranks // 2, ranks))]
    makers: dict[str, Callable[[], object]] = {
        "mesh": lambda: init_device_mesh("cpu", shape, mesh_dim_names=("a", "b", "c")),
        "new_group": dure.new_group,
        "split_group": lambda: dure.split_group(split_ranks=halves),
        "new_subgroups": lambda: dure.new_subgroups(PART),
    }
    figures: dict[str, float] = {}
    with new_world():  # what a process imports once
        dure.init_process_group("fake", rank=0, world_size=PART)
        dure.new_group()
        dure.split_group(split_ranks=[list(range(PART))])
        init_device_mesh("cpu", (2, 2, 2))
        dure.destroy_process_group()
    with new_world():
        with processor_time(figures, "CPU s of init_process_group"):
            dure.init_process_group("fake", rank=ranks // 2, world_size=ranks)
        for name, make in makers.items():
            with processor_time(figures, f"CPU s of {name}"):
                make()
        for name, make in makers.items():
            kept, peak = peak_bytes(make)
            figures[f"MB kept by {name}"] = kept / 1e6
            figures[f"MB at the peak of {name}"] = peak / 1e6
        dure.destroy_process_group()
    if ranks <= THREADS:
        figures |= exchanged(ranks)
    figures["resident MB of the process"] = resident_mb()
    return figures


def exchanged(ranks: int) -> dict[str, float]:
    """Count what each of several thread-ranks exchanges to create two groups in one call."""
    threading.stack_size(1 << 20)
    shared = HashStore(PATIENCE)
    stores = [CountingStore(shared) for _ in range(ranks)]
    everyone = tuple(range(ranks))

    def create(rank: int) -> None:
        part = tuple(range(rank - rank % PART, rank - rank % PART + PART))
        specs = [
            GroupSpec(name=name, global_ranks=members, backend="fake", timeout=PATIENCE)
            for name, members in (("all", everyone), (f"part {part[0]}", part))
        ]
        create_groups(World(), stores[rank], rank, specs)

    began = time.monotonic()
    threads = [threading.Thread(target=create, args=(rank,)) for rank in range(ranks)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    return {
        "s until all thread-ranks have two groups": time.monotonic() - began,
        "requests per rank for two groups": statistics.median(s.num_requests for s in stores),
        "bytes per rank for two groups": statistics.fmean(s.num_bytes for s in stores),
        "bytes of the busiest rank": max(s.num_bytes for s in stores),
    }
