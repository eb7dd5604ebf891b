"""How many threads each rank gets, and which cpus with `--numa-binding`.

A *cpu* is what the kernel counts: a hardware thread. A *core* has one or more of them. A *node* is
memory with the cpus that reach it fastest.

On hosts with GPUs the bindings are torch's own (`torch.numa.binding`), which each rank applies to
itself (`child`): it may use the cpus near the GPU with its local rank's number. Without GPUs,
`node` spreads the ranks over the nodes in blocks. The affinity is set before the program starts, so
every thread that it ever has, and the memory they touch first, follow.
"""

from __future__ import annotations

import os
from pathlib import Path

from dure import env
from dure.launch.spec import JobSpec
from dure.store.system import cpu_quota, kernel_text

__all__ = ["binding_of", "may_have_gpus", "num_cores", "parse_cpus", "threads_for"]

_DEVICES = ("nvidia[0-9]*", "kfd", "dri/renderD*", "accel/*", "habanalabs*", "davinci*")


def parse_cpus(text: str) -> frozenset[int]:
    """Read the kernel's `0-2,8`."""
    ends = (part.partition("-") for part in text.strip().split(",") if part)
    ranges = (range(int(first), int(last or first) + 1) for first, _, last in ends)
    return frozenset(cpu for some in ranges for cpu in some)


def num_cores(root: Path = Path("/")) -> int:
    """Return how many cores this process may use.

    Cost:
        Reads a small file for each cpu.
    """
    place = root / "sys/devices/system/cpu"
    cpus = os.sched_getaffinity(0)
    files = {cpu: place / f"cpu{cpu}/topology/thread_siblings_list" for cpu in cpus}
    return len({kernel_text(file) or cpu for cpu, file in files.items()})


def _nodes(root: Path) -> list[frozenset[int]]:
    """Return the cpus of each node that this process may use; of a kernel without NUMA, all."""
    allowed = frozenset(os.sched_getaffinity(0))
    files = sorted((root / "sys/devices/system/node").glob("node[0-9]*/cpulist"))
    nodes = [parse_cpus(kernel_text(file)) & allowed for file in files]
    return [node for node in nodes if node] or [allowed]


def may_have_gpus(root: Path = Path("/")) -> bool:
    """Whether this host has anything that could be a GPU, or another accelerator."""
    return any(True for pattern in _DEVICES for _ in (root / "dev").glob(pattern))


def binding_of(spec: JobSpec, local_rank: int, root: Path = Path("/")) -> str:
    """Return how `child` binds a rank: cpus ("0,1"), "MODE:GPU" for torch's, or "" for not."""
    if spec.numa is None:
        return ""
    if spec.numa != "node" or (root / "proc/driver/nvidia/gpus").exists():
        return f"{spec.numa}:{local_rank}"
    nodes = _nodes(root)
    return ",".join(map(str, sorted(nodes[local_rank * len(nodes) // spec.nproc])))


def threads_for(spec: JobSpec, root: Path = Path("/")) -> int | None:
    """Return OMP_NUM_THREADS for the ranks on this host, or None if the user has chosen it.

    It is one number for all ranks, so that all fit: a collective waits for the slowest.
    """
    if "OMP_NUM_THREADS" in spec.env or env.text("OMP_NUM_THREADS"):
        return None
    if spec.nproc == 1 and spec.numa is None:
        return None
    sharing = spec.nproc if spec.numa is None else max(spec.nproc, len(_nodes(root)))
    return max(1, int(min(num_cores(root), cpu_quota()) / sharing))
