"""How much of the machine this process may use: processor time and memory, control groups heeded.

A limit of any enclosing control group counts, so they are read from the process's own group up to
the root (within a container its own group may be the root), and the lowest holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from pathlib import Path

from dure.errors import UsageError
from dure.launch.spec import JobSpec

__all__ = ["available_memory", "check_memory", "control_groups", "cpu_quota", "kernel_text"]

_CGROUPS = "sys/fs/cgroup"
_FORKED_MB, _FRESH_MB, _BARE_MB = 60, 250, 12
"""What a rank takes of its own: forked from a process with torch, with torch of its own, without
torch. A program that does more than start takes more."""


def kernel_text(path: Path) -> str:
    """Return what a file of the kernel says, or an empty text where there is none."""
    try:
        return path.read_text().strip()
    except OSError:
        return ""


def control_groups(root: Path, controller: str) -> Iterator[Path]:
    """Yield the directories of this process's control groups, the innermost first."""
    for line in kernel_text(root / "proc/self/cgroup").splitlines():
        number, names, path = line.split(":", 2)
        if number == "0" or controller in names.split(","):
            mount = root / _CGROUPS / ("" if number == "0" else controller)
            group = mount / path.lstrip("/")
            yield from (d for d in (group, *group.parents) if d.is_relative_to(mount))


def cpu_quota(root: Path = Path("/")) -> float:
    """Return how many cpus' time the control groups leave this process; infinite without a limit.

    A container with `--cpus 2` on a large machine may run on any cpu, but only for so long.
    """
    lowest = math.inf
    for group in control_groups(root, "cpu"):
        quota, _, period = kernel_text(group / "cpu.max").partition(" ")  # version 2
        quota = quota or kernel_text(group / "cpu.cfs_quota_us")
        period = period or kernel_text(group / "cpu.cfs_period_us")
        if quota.isdecimal() and period.isdecimal() and int(quota) > 0 and int(period) > 0:
            lowest = min(lowest, int(quota) / int(period))
    return lowest


def available_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process and its children may still take; None: not known.

    The kernel's estimate, or what a control group leaves, file pages that it can drop included.
    """
    lines = (line.split() for line in kernel_text(root / "proc/meminfo").splitlines())
    found = [int(words[1]) << 10 for words in lines if words[0] == "MemAvailable:"]
    for group in control_groups(root, "memory"):
        most = kernel_text(group / "memory.max") or kernel_text(group / "memory.limit_in_bytes")
        used = kernel_text(group / "memory.current") or kernel_text(group / "memory.usage_in_bytes")
        if most.isdecimal() and used.isdecimal():
            stat = (line.split() for line in kernel_text(group / "memory.stat").splitlines())
            dropped = sum(int(value) for name, value in stat if name == "inactive_file")
            found.append(max(0, int(most) - int(used) + dropped))
    return min(found, default=None)


def check_memory(spec: JobSpec, *, torch: bool, forked: bool) -> None:
    """Refuse more ranks than this host's memory is likely to hold.

    Raises:
        UsageError: They would take more than is available, and `spec.oversubscribe` is not set.
    """
    each = (_FORKED_MB if forked else _FRESH_MB) if torch else _BARE_MB
    available = available_memory()
    if spec.oversubscribe or available is None or spec.nproc * each << 20 <= available:
        return
    raise UsageError(
        f"{spec.nproc} ranks are more than this host has memory for",
        seen=f"some {each} MB each to start with, {available >> 20} MB available",
        fix="Start fewer, or start them all the same with --oversubscribe.",
    )
