"""Which cores each rank gets, and how many threads: from the kernel's files to a rank's cpus.

Words. A *cpu* is what the kernel counts: a hardware thread. A *core* has one or more of them. A
*node* is memory with the cpus that reach it fastest.

With `--numa-binding node` a rank may use the cpus of one node. With at least as many GPUs as ranks
that is the node of the GPU with its local rank's number, as under torchrun; otherwise ranks are
spread over the nodes in blocks. The affinity is set before the program starts, so every thread that
it ever has, and the memory they touch first, follow. The other modes are torch's own
(`torch.numa.binding`), which each rank applies to itself (`child`): they need GPUs.
"""

from __future__ import annotations

import functools
import os
import shutil
from collections.abc import Collection, Iterable
from dataclasses import dataclass
from pathlib import Path

from dure import env
from dure.errors import UsageError
from dure.launch.spec import JobSpec
from dure.store.system import cpu_quota, kernel_text

__all__ = [
    "Cpu",
    "Topology",
    "bind",
    "binding_of",
    "parse_cpus",
    "read_topology",
    "share_threads",
    "threads_for",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Cpu:
    """The node and core of one cpu; `core` is named after the lowest cpu that shares it."""

    number: int
    node: int
    core: int


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


# --- what the kernel reports ---------------------------------------------------------------------


def parse_cpus(text: str) -> frozenset[int]:
    """Read the kernel's `0-2,8`."""
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    ranges = (range(int(first), int(last or first) + 1) for first, _, last in ends)
    return frozenset(cpu for some in ranges for cpu in some)


@functools.lru_cache(maxsize=4)  # it is asked for every rank, and a large machine has many files
def read_topology(
    allowed: frozenset[int], visible_gpus: str | None = None, root: Path = Path("/")
) -> Topology:
    """Read the cpus and GPUs of this machine that may be used.

    Cost: a small file per cpu, the first time.
    """
    nodes = {  # a kernel without NUMA has no such files, and node 0 alone
        cpu: int(path.parent.name.removeprefix("node"))
        for path in (root / "sys/devices/system/node").glob("node[0-9]*/cpulist")
        for cpu in parse_cpus(kernel_text(path))
    }
    cpus: list[Cpu] = []
    for number in sorted(allowed):
        file = root / f"sys/devices/system/cpu/cpu{number}/topology/thread_siblings_list"
        core = min(parse_cpus(kernel_text(file)), default=number)
        cpus.append(Cpu(number=number, node=nodes.get(number, 0), core=core))
    return Topology(tuple(cpus), _gpus(root, visible_gpus))


def _gpus(root: Path, visible: str | None) -> tuple[int, ...]:
    """Return the node of each GPU that CUDA will number, if NVIDIA's driver lists them.

    CUDA counts GPUs of one kind by their place on the bus, and stops at the first entry of
    CUDA_VISIBLE_DEVICES that it does not know. Those named by UUID are not looked up.
    """
    nodes: list[int] = []
    for path in sorted((root / "proc/driver/nvidia/gpus").glob("*")):
        node = kernel_text(root / "sys/bus/pci/devices" / path.name / "numa_node")
        nodes.append(max(int(node or 0), 0))  # -1: there is only one
    if visible is None:
        return tuple(nodes)
    chosen: list[int] = []
    for entry in (x.strip() for x in visible.split(",")):
        if not entry.isdecimal() or int(entry) >= len(nodes):
            break
        chosen.append(nodes[int(entry)])
    return tuple(chosen)


# --- the share of each rank ----------------------------------------------------------------------


def bind(topology: Topology, local_rank: int, nproc: int) -> frozenset[int]:
    """Return the cpus of one rank: those of its node.

    Raises:
        UsageError: There is no core for it.
    """
    nodes = topology.gpus
    if len(nodes) < nproc:
        known = sorted({cpu.node for cpu in topology.cpus})
        nodes = tuple(known[rank * len(known) // nproc] for rank in range(nproc))
    near = frozenset(cpu.number for cpu in topology.cpus if cpu.node == nodes[local_rank])
    if not near:
        raise UsageError(
            f"no core is left for local rank {local_rank}",
            seen=f"this process may use none of node {nodes[local_rank]}, where its GPU is",
            fix="Allow more cores (taskset, Slurm's --cpus-per-task), or leave out --numa-binding.",
        )
    return near


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


def binding_of(spec: JobSpec, local_rank: int) -> str:
    """Return how `child` binds one rank of a job on this host: cpus, "MODE:GPU", or "" for not.

    Raises:
        UsageError: There is no core for it, or torch has no such binding here.
    """
    if spec.numa is None:
        return ""
    topology = _topology(spec)
    if spec.numa == "node":
        return ",".join(map(str, sorted(bind(topology, local_rank, spec.nproc))))
    if len(topology.gpus) < spec.nproc or shutil.which("numactl") is None:
        raise UsageError(
            f"--numa-binding {spec.numa} needs a GPU for each rank, and numactl",
            seen=f"{spec.nproc} ranks, {len(topology.gpus)} GPUs",
            fix="Choose --numa-binding node.",
        )
    return f"{spec.numa}:{local_rank}"


def threads_for(spec: JobSpec) -> int | None:
    """Return OMP_NUM_THREADS for the ranks on this host, or None if the user has chosen it.

    Raises:
        UsageError: A rank cannot be bound as asked.
    """
    all_bound = [binding_of(spec, rank) for rank in range(spec.nproc)]
    if "OMP_NUM_THREADS" in spec.env or env.text("OMP_NUM_THREADS"):
        return None
    if spec.nproc == 1 and spec.numa is None:
        return None
    topology = _topology(spec)
    binding = [parse_cpus(cpus) for cpus in all_bound if spec.numa == "node"]
    return share_threads(min(topology.num_cores, cpu_quota()), spec.nproc, topology, binding)


def _topology(spec: JobSpec) -> Topology:
    visible = spec.env.get("CUDA_VISIBLE_DEVICES", env.raw("CUDA_VISIBLE_DEVICES"))
    return read_topology(frozenset(os.sched_getaffinity(0)), visible)
