"""What the system grants this process: processor time by its control groups, and memory files.

A limit of any enclosing control group counts, so they are read from the process's own group up to
the root (within a container its own group may be the root), and the lowest holds.
"""

from __future__ import annotations

import errno
import math
import os
from collections.abc import Iterator
from pathlib import Path

__all__ = ["control_groups", "cpu_quota", "kernel_text", "memory_file"]

_CGROUPS = "sys/fs/cgroup"
_MFD_NOEXEC_SEAL = 8  # Linux 6.3


def kernel_text(path: Path) -> str:
    """Return the content of a kernel's file, or an empty text if there is none."""
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


def memory_file(name: str) -> int:
    """Make an anonymous memory file that cannot be executed; return its descriptor.

    A system can demand the flag for that (`vm.memfd_noexec`); before Linux 6.3 it is unknown.

    Raises:
        OSError: The system makes no memory files for this process.
    """
    try:
        return os.memfd_create(name, os.MFD_CLOEXEC | _MFD_NOEXEC_SEAL)
    except OSError as error:
        if error.errno != errno.EINVAL:
            raise
        return os.memfd_create(name, os.MFD_CLOEXEC)
