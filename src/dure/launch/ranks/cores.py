"""Which cores this process may use: where they are in the machine, and how much of them it gets.

Words. A *cpu* is what the kernel counts: a hardware thread. A *core* has one or more of them. A
*node* is memory with the cpus that reach it fastest, a *socket* a chip in its place, with one or
more nodes. A *complex* is the cpus behind one cache of the last level.

All is read from files of the kernel, below a root that tests replace.
"""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

__all__ = [
    "Cpu",
    "Topology",
    "count_cores",
    "cpu_quota",
    "parse_cpus",
    "read_topology",
    "show_cpus",
]

_CPUS = "sys/devices/system/cpu"
_NODES = "sys/devices/system/node"
_GPUS = "proc/driver/nvidia/gpus"
_CGROUPS = "sys/fs/cgroup"


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
        """How many cores they are."""
        return len({cpu.core for cpu in self.cpus})

    def only(self, numbers: Iterable[int]) -> Topology:
        """Return the same with the cpus `numbers` alone."""
        wanted = set(numbers)
        return Topology(tuple(cpu for cpu in self.cpus if cpu.number in wanted), self.gpus)


def parse_cpus(text: str) -> frozenset[int]:
    """Read the kernel's `0-2,8`."""
    found: set[int] = set()
    for part in filter(None, (x.strip() for x in text.split(","))):
        first, _, last = part.partition("-")
        found.update(range(int(first), int(last or first) + 1))
    return frozenset(found)


def show_cpus(cpus: Iterable[int]) -> str:
    """Write cpus as the kernel does: `0-2,8`."""
    parts: list[list[int]] = []
    for cpu in sorted(cpus):
        if parts and cpu == parts[-1][-1] + 1:
            parts[-1][1:] = [cpu]
        else:
            parts.append([cpu])
    return ",".join("-".join(map(str, part)) for part in parts)


def read_topology(
    allowed: Iterable[int] | None = None, visible_gpus: str | None = None, root: Path = Path("/")
) -> Topology:
    """Read what this machine is made of.

    Args:
        allowed: The cpus that may be used; None: those of this thread's affinity.
        visible_gpus: CUDA_VISIBLE_DEVICES, if it is set.
        root: Where the kernel's files are.

    Cost: some five small files a cpu.
    """
    usable = sorted(os.sched_getaffinity(0) if allowed is None else allowed)
    nodes = _nodes(root)
    cpus = tuple(_cpu(root, number, nodes.get(number, 0)) for number in usable)
    return Topology(cpus, _gpus(root, visible_gpus))


def count_cores(cpus: Iterable[int], root: Path = Path("/")) -> int:
    """Return of how many cores `cpus` are; one small file for each."""
    return len({_core(root / _CPUS / f"cpu{number}", number) for number in cpus})


def _core(directory: Path, number: int) -> int:
    siblings = parse_cpus(_text(directory / "topology/thread_siblings_list"))
    return min(siblings, default=number)


def _nodes(root: Path) -> dict[int, int]:
    """Return the node of each cpu; a kernel without NUMA has no such files, and node 0 alone."""
    return {
        cpu: int(path.parent.name.removeprefix("node"))
        for path in (root / _NODES).glob("node[0-9]*/cpulist")
        for cpu in parse_cpus(_text(path))
    }


def _cpu(root: Path, number: int, node: int) -> Cpu:
    directory = root / _CPUS / f"cpu{number}"
    socket = _text(directory / "topology/physical_package_id")
    return Cpu(
        number=number,
        node=node,
        socket=max(int(socket or 0), 0),
        core=_core(directory, number),
        cache=_last_cache(directory, number),
    )


def _last_cache(directory: Path, number: int) -> int:
    best = (0, number)
    for index in (directory / "cache").glob("index[0-9]*"):
        if _text(index / "type") in ("Unified", "Data"):
            sharing = parse_cpus(_text(index / "shared_cpu_list"))
            best = max(best, (int(_text(index / "level") or 0), min(sharing, default=number)))
    return best[1]


def _gpus(root: Path, visible: str | None) -> tuple[int, ...]:
    """Return the node of each GPU that CUDA will number, NVIDIA's driver permitting.

    CUDA counts GPUs of one kind by their place on the bus, and stops at the first entry of
    CUDA_VISIBLE_DEVICES that it does not know.
    """
    found = [(_node_of(root, path.name), _uuid(path)) for path in sorted((root / _GPUS).glob("*"))]
    if visible is None:
        return tuple(node for node, _ in found)
    chosen: list[int] = []
    for entry in (x.strip() for x in visible.split(",")):
        if entry.isdecimal() and int(entry) < len(found):
            chosen.append(found[int(entry)][0])
            continue
        named = [
            node for node, uuid in found if entry.startswith("GPU-") and uuid.startswith(entry)
        ]
        if len(named) != 1:
            break
        chosen.append(named[0])
    return tuple(chosen)


def _node_of(root: Path, address: str) -> int:
    """Return the node of the device at `address`; the kernel says -1 where there is but one."""
    return max(int(_text(root / "sys/bus/pci/devices" / address / "numa_node") or 0), 0)


def _uuid(directory: Path) -> str:
    lines = _text(directory / "information").splitlines()
    return next((x.partition(":")[2].strip() for x in lines if x.startswith("GPU UUID")), "")


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many cpus' time the control groups leave this process; infinite without a limit.

    A container with `--cpus 2` on a large machine may run on any cpu, but only for so long.
    """
    lowest = math.inf
    for line in _text(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0":
            lowest = min(lowest, *_limits(root / _CGROUPS, path), math.inf)
        elif "cpu" in names.split(","):
            lowest = min(lowest, *_limits(root / _CGROUPS / "cpu", path), math.inf)
    return lowest


def _limits(mount: Path, path: str) -> Iterator[float]:
    """Yield the limits of a group and of all it is in (seen from within, it is the mount)."""
    group = mount / path.lstrip("/")
    for directory in (group, *group.parents):
        quota, _, period = _text(directory / "cpu.max").partition(" ")  # version 2
        if not quota:
            quota = _text(directory / "cpu.cfs_quota_us")
            period = _text(directory / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
            yield int(quota) / int(period)
        if directory == mount:
            return


def _text(path: Path) -> str:
    """Return what a file of the kernel says, or an empty text where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""
