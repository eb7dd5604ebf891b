"""Cores: how many this process may use, and whether they are free."""

from __future__ import annotations

import os
from dataclasses import dataclass
from pathlib import Path

from dure.cli.doctor.cgroup import cpu_quota
from dure.cli.doctor.finding import Finding, fine, warning

__all__ = ["Cores", "judge", "read"]

_CLOCK = Path("/sys/devices/system/cpu/cpu0/cpufreq/scaling_governor")


@dataclass(frozen=True, slots=True, kw_only=True)
class Cores:
    """Hardware threads of the host and of this process; `quota` is in cores."""

    total: int
    usable: int
    quota: float | None
    load: float
    governor: str = ""


def read() -> Cores:
    """Read from the system."""
    try:
        governor = _CLOCK.read_text().strip()
    except OSError:
        governor = ""
    return Cores(
        total=os.cpu_count() or 1,
        usable=len(os.sched_getaffinity(0)),
        quota=cpu_quota(),
        load=os.getloadavg()[0],
        governor=governor,
    )


def judge(cores: Cores) -> list[Finding]:
    """Say how many ranks fit, and what would slow them."""
    text = f"{cores.usable} of {cores.total} hardware threads usable"
    found = [fine("cores", text)]
    if cores.usable < cores.total:
        found = [
            warning(
                "cores",
                f"{text}: this process is bound to some",
                f"Start at most {cores.usable} ranks, or free it (taskset, srun --cpus-per-task, "
                "docker --cpuset-cpus).",
            )
        ]
    if cores.quota is not None and cores.quota < cores.usable - 0.01:
        found.append(
            warning(
                "cores",
                f"the container may use {cores.quota:.3g} cores' time, though it sees "
                f"{cores.usable}: ranks beyond that are stopped again and again",
                f"Start at most {max(1, int(cores.quota))} ranks, or raise the limit "
                "(docker --cpus, resources.limits.cpu).",
            )
        )
    limit = min(cores.usable, cores.quota or cores.usable)
    if cores.load > 0.5 * limit:
        found.append(
            warning(
                "load",
                f"{cores.load:.1f} threads want to run already, of {limit:.3g} that can",
                "Look with `top` who they are; collectives wait for the slowest rank.",
            )
        )
    else:
        found.append(fine("load", f"{cores.load:.1f} threads running"))
    if cores.governor == "powersave":
        found.append(
            warning(
                "clock rate",
                "the cores save power",
                "For speed: `cpupower frequency-set -g performance`.",
            )
        )
    return found
