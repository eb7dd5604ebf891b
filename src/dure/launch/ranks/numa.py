"""Binding ranks to cores, and how many threads each gets: pure, from a topology to cpus.

A rank belongs to a *slot*. With at least as many GPUs as ranks, slot i is GPU i, on that GPU's node
(as torchrun binds); otherwise slots are the ranks themselves, spread over the nodes in blocks.
Slots of one node share it: wholly (`node`), with the rest of its socket (`socket`), as equal
numbers of cores that nobody else gets (`exclusive`), or by complexes in turn (`core-complex`),
those with most cpus first.

The affinity is set before the rank's program starts, so that every thread it ever has, and the
memory they touch first, follow.
"""

from __future__ import annotations

import contextlib
import functools
import os
from collections.abc import Collection, Iterator

from dure import env
from dure.errors import UsageError
from dure.launch.ranks.cores import Topology, count_cores, cpu_quota, read_topology
from dure.launch.spec import JobSpec, Numa

__all__ = ["bind", "bound_cpus", "bound_to", "share_threads", "threads_for"]

_NOTHING = Topology(())


def bind(topology: Topology, mode: Numa, local_rank: int, nproc: int) -> frozenset[int]:
    """Return the cpus of one rank.

    Args:
        topology: What may be used.
        mode: How to share it.
        local_rank: Which rank of this host.
        nproc: How many ranks this host has.

    Raises:
        UsageError: There is no core for it.
    """
    slots = _slots(topology, nproc)
    node = slots[local_rank]
    if mode == "socket":
        sockets = {cpu.socket for cpu in topology.cpus if cpu.node == node}
        found = {cpu.number for cpu in topology.cpus if cpu.socket in sockets}
    else:
        near = Topology(tuple(cpu for cpu in topology.cpus if cpu.node == node))
        mates = [slot for slot, other in enumerate(slots) if other == node]
        position = mates.index(local_rank)
        if mode == "exclusive":
            found = _share_of_cores(near, position, len(mates))
        elif mode == "core-complex":
            found = _complex(near, position)
        else:
            found = {cpu.number for cpu in near.cpus}
    if not found:
        raise UsageError(
            f"no core is left for local rank {local_rank}",
            seen=f"{topology.num_cores} cores for {nproc} ranks, those of node {node} too few",
            fix="Start fewer ranks, allow more cores (taskset, Slurm's --cpus-per-task), or choose "
            "--numa-binding node.",
        )
    return frozenset(found)


def _slots(topology: Topology, nproc: int) -> tuple[int, ...]:
    """Return the node of each slot."""
    if len(topology.gpus) >= nproc:
        return topology.gpus
    nodes = sorted({cpu.node for cpu in topology.cpus})
    return tuple(nodes[rank * len(nodes) // nproc] for rank in range(nproc))


def _share_of_cores(near: Topology, position: int, of: int) -> set[int]:
    """Return share `position` of `of`; the first shares get what does not divide."""
    cores = sorted({cpu.core for cpu in near.cpus})
    each, more = divmod(len(cores), of)
    start = position * each + min(position, more)
    mine = set(cores[start : start + each + (position < more)])
    return {cpu.number for cpu in near.cpus if cpu.core in mine}


def _complex(near: Topology, position: int) -> set[int]:
    members: dict[int, set[int]] = {}
    for cpu in near.cpus:
        members.setdefault(cpu.cache, set()).add(cpu.number)
    ordered = sorted(members.items(), key=lambda item: (-len(item[1]), item[0]))
    return ordered[position % len(ordered)][1] if ordered else set()


def share_threads(
    cores: float,
    nproc: int,
    topology: Topology = _NOTHING,
    binding: Collection[frozenset[int]] = (),
) -> int:
    """Return how many threads each rank gets for one operator, so that all fit.

    One number for all ranks, the lowest of them: a collective waits for the slowest.

    Args:
        cores: How many cores' time all may take together.
        nproc: How many ranks there are.
        topology: The cpus that may be used, if the ranks are bound.
        binding: The cpus of each rank; empty: the ranks are not bound.
    """
    shares = [
        topology.only(cpus).num_cores // sum(not cpus.isdisjoint(other) for other in binding)
        for cpus in binding
    ]
    return max(1, int(min([cores / nproc, *shares])))


def bound_cpus(spec: JobSpec, local_rank: int) -> frozenset[int] | None:
    """Return the cpus of one rank of a job on this host, or None if it is not bound.

    Raises:
        UsageError: There is no core for it.
    """
    if spec.numa is None:
        return None
    return bind(_topology(spec), spec.numa, local_rank, spec.nproc)


def threads_for(spec: JobSpec) -> int | None:
    """Return OMP_NUM_THREADS for the ranks on this host, or None where the user has chosen it.

    Raises:
        UsageError: There is no core for one of them.
    """
    if "OMP_NUM_THREADS" in spec.env or env.text("OMP_NUM_THREADS"):
        return None
    if spec.nproc == 1 and spec.numa is None:
        return None
    cpus = os.sched_getaffinity(0)
    cores = min(count_cores(cpus), cpu_quota())
    if spec.numa is None:
        return share_threads(cores, spec.nproc)
    topology, ranks = _topology(spec), range(spec.nproc)
    binding = [bind(topology, spec.numa, rank, spec.nproc) for rank in ranks]
    return share_threads(cores, spec.nproc, topology, binding)


def _topology(spec: JobSpec) -> Topology:
    visible = spec.env.get("CUDA_VISIBLE_DEVICES", env.raw("CUDA_VISIBLE_DEVICES"))
    return _machine(frozenset(os.sched_getaffinity(0)), visible)


@functools.lru_cache(maxsize=1)  # every rank asks, and a large machine has a thousand files
def _machine(cpus: frozenset[int], visible_gpus: str | None) -> Topology:
    return read_topology(cpus, visible_gpus)


@contextlib.contextmanager
def bound_to(cpus: frozenset[int] | None) -> Iterator[None]:
    """Let this thread, and the processes that it starts meanwhile, use `cpus` alone."""
    if cpus is None:
        yield
        return
    before = os.sched_getaffinity(0)
    os.sched_setaffinity(0, cpus)
    try:
        yield
    finally:
        os.sched_setaffinity(0, before)
