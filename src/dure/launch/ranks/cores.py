"""Which cores each rank gets, and how many threads: from the kernel's files to a rank's cpus.

Words. A *cpu* is what the kernel counts: a hardware thread. A *core* has one or more of them. A
*node* is memory with the cpus that reach it fastest, a *socket* a chip in its place, with one or
more nodes. A *complex* is the cpus behind one cache of the last level.

With at least as many GPUs as ranks, rank i is bound near GPU i (as torchrun binds); otherwise ranks
are spread over the nodes in blocks. Those of one node share it: wholly (`node`), with the rest of
its socket (`socket`), as equal numbers of cores that nobody else gets (`exclusive`), or by
complexes in turn (`core-complex`), those with most cpus first. The affinity is set before the
program starts, so every thread that it ever has, and the memory they touch first, follow.
"""

from __future__ import annotations

import functools
import os
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from dure import env
from dure.errors import UsageError
from dure.launch.spec import JobSpec, Numa
from dure.store.system import cpu_quota, kernel_text

__all__ = [
    "Cpu",
    "Topology",
    "bind",
    "bound_cpus",
    "parse_cpus",
    "read_topology",
    "share_threads",
    "threads_for",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """Where one cpu is; `core` and `cache` are named after the lowest cpu that shares them."""

    number: int
    node: int
    socket: int
    core: int
    cache: int


@dataclass(frozen=True, slots=True)
class Topology:
    """The cpus that this process may use, and the nodes of the GPUs that it sees, in order."""

    cpus: tuple[Cpu, ...]
    gpus: tuple[int, ...] = ()

    @property
    def num_cores(self) -> int:
        return len({cpu.core for cpu in self.cpus})

    def only(self, numbers: Iterable[int]) -> Topology:
        wanted = set(numbers)
        return Topology(tuple(cpu for cpu in self.cpus if cpu.number in wanted), self.gpus)


# --- what the kernel says ------------------------------------------------------------------------


def parse_cpus(text: str) -> frozenset[int]:
    """Read the kernel's `0-2,8`."""
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    ranges = (range(int(first), int(last or first) + 1) for first, _, last in ends)
    return frozenset(cpu for some in ranges for cpu in some)


@functools.lru_cache(maxsize=4)  # every rank asks, and a large machine has a thousand files
def read_topology(
    allowed: frozenset[int], visible_gpus: str | None = None, root: Path = Path("/")
) -> Topology:
    """Read what this machine is made of, as far as it may be used.

    Cost: some five small files a cpu, the first time.
    """
    nodes = {  # a kernel without NUMA has no such files, and node 0 alone
        cpu: int(path.parent.name.removeprefix("node"))
        for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
        for cpu in parse_cpus(kernel_text(path))
    }
    cpus = tuple(_cpu(root, number, nodes.get(number, 0)) for number in sorted(allowed))
    return Topology(cpus, _gpus(root, visible_gpus))


def _cpu(root: Path, number: int, node: int) -> Cpu:
    directory = root / f"sys/devices/system/cpu/cpu{number}"
    socket = kernel_text(directory / "topology/physical_package_id")
    siblings = parse_cpus(kernel_text(directory / "topology/thread_siblings_list"))
    caches = [(0, number)]
    for index in (directory / "cache").glob("index[0-9]*"):
        if kernel_text(index / "type") in ("Unified", "Data"):
            sharing = parse_cpus(kernel_text(index / "shared_cpu_list"))
            caches.append((int(kernel_text(index / "level") or 0), min(sharing, default=number)))
    return Cpu(
        number=number,
        node=node,
        socket=max(int(socket or 0), 0),
        core=min(siblings, default=number),
        cache=max(caches)[1],
    )


def _gpus(root: Path, visible: str | None) -> tuple[int, ...]:
    """Return the node of each GPU that CUDA will number, NVIDIA's driver permitting.

    CUDA counts GPUs of one kind by their place on the bus, and stops at the first entry of
    CUDA_VISIBLE_DEVICES that it does not know. Those named by UUID are not looked up.
    """
    nodes: list[int] = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        node = kernel_text(root / "sys/bus/pci/devices" / path.name / "numa_node")
        nodes.append(max(int(node or 0), 0))  # -1: there is but one
    if visible is None:
        return tuple(nodes)
    chosen: list[int] = []
    for entry in (x.strip() for x in visible.split(",")):
        if not entry.isdecimal() or int(entry) >= len(nodes):
            break
        chosen.append(nodes[int(entry)])
    return tuple(chosen)


# --- who gets what -------------------------------------------------------------------------------


def bind(topology: Topology, mode: Numa, local_rank: int, nproc: int) -> frozenset[int]:
    """Return the cpus of one rank.

    Raises:
        UsageError: There is no core for it.
    """
    slots = topology.gpus
    if len(slots) < nproc:
        nodes = sorted({cpu.node for cpu in topology.cpus})
        slots = tuple(nodes[rank * len(nodes) // nproc] for rank in range(nproc))
    node = slots[local_rank]
    near = [cpu for cpu in topology.cpus if cpu.node == node]
    position, of = slots[:local_rank].count(node), slots.count(node)
    if mode == "socket":
        sockets = {cpu.socket for cpu in near}
        near = [cpu for cpu in topology.cpus if cpu.socket in sockets]
    elif mode == "exclusive":
        cores = sorted({cpu.core for cpu in near})
        each, more = divmod(len(cores), of)  # the first get what does not divide
        start = position * each + min(position, more)
        mine = cores[start : start + each + (position < more)]
        near = [cpu for cpu in near if cpu.core in mine]
    elif mode == "core-complex" and near:
        sizes: dict[int, int] = {}
        for cpu in near:
            sizes[cpu.cache] = sizes.get(cpu.cache, 0) + 1
        ordered = sorted(sizes, key=lambda cache: (-sizes[cache], cache))
        near = [cpu for cpu in near if cpu.cache == ordered[position % len(ordered)]]
    if not near:
        raise UsageError(
            f"no core is left for local rank {local_rank}",
            seen=f"{topology.num_cores} cores for {nproc} ranks, those of node {node} too few",
            fix="Start fewer ranks, allow more cores (taskset, Slurm's --cpus-per-task), or choose "
            "--numa-binding node.",
        )
    return frozenset(cpu.number for cpu in near)


def share_threads(
    cores: float, nproc: int, topology: Topology, binding: Collection[frozenset[int]] = ()
) -> int:
    """Return how many threads each rank gets for one operator, so that all fit.

    One number for all ranks, the lowest of them: a collective waits for the slowest. `cores` is how
    many cores' time all may take together, `binding` the cpus of each rank; empty: not bound.
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
    return bind(_machine(spec), spec.numa, local_rank, spec.nproc)


def threads_for(spec: JobSpec) -> int | None:
    """Return OMP_NUM_THREADS for the ranks on this host, or None where the user has chosen it.

    Raises:
        UsageError: There is no core for one of them.
    """
    if "OMP_NUM_THREADS" in spec.env or env.text("OMP_NUM_THREADS"):
        return None
    if spec.nproc == 1 and spec.numa is None:
        return None
    topology, numa = _machine(spec), spec.numa
    binding = [bind(topology, numa, rank, spec.nproc) for rank in range(spec.nproc)] if numa else []
    return share_threads(min(topology.num_cores, cpu_quota()), spec.nproc, topology, binding)


def _machine(spec: JobSpec) -> Topology:
    visible = spec.env.get("CUDA_VISIBLE_DEVICES", env.raw("CUDA_VISIBLE_DEVICES"))
    return read_topology(frozenset(os.sched_getaffinity(0)), visible)
