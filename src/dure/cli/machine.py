"""What this machine is and how busy it is: read from the system, for reports."""

from __future__ import annotations

import os
import platform
from pathlib import Path

import psutil

__all__ = ["busy_cores", "machine", "usable_cores"]


def machine() -> list[tuple[str, str]]:
    """List what this machine is, as (name, value)."""
    cores = psutil.cpu_count(logical=False) or usable_cores()
    threads = psutil.cpu_count() or cores
    return [
        ("Processor", _processor()),
        ("Cores", f"{cores} ({threads} hardware threads), {usable_cores()} usable by this process"),
        ("Memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"),
        ("Kernel", f"{platform.system()} {_kernel()} {platform.machine()}"),
    ]


def busy_cores(watch_s: float = 0.3) -> float:
    """Watch the machine for `watch_s` seconds; return how many hardware threads are busy."""
    return psutil.cpu_percent(watch_s) / 100 * (psutil.cpu_count() or 1)


def usable_cores() -> int:
    """Return how many hardware threads this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _kernel() -> str:
    """Return the kernel's version, without what its builder added."""
    return platform.release().partition("-")[0]


def _processor() -> str:
    """Return the processor's name as the kernel gives it."""
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
