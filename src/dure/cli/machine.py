"""What this machine is, how busy it is, and how ranks are started on it for a measurement."""

from __future__ import annotations

import os
import platform
import subprocess
import time
from importlib.metadata import PackageNotFoundError, version
from pathlib import Path
from typing import Any

import psutil

import dure

_QUIET_CORES = 0.5
QUIET_VARIABLES = {
    "OMP_NUM_THREADS": "1",
    "MKL_NUM_THREADS": "1",
    "PYTHONWARNINGS": "ignore",
    "TORCH_CPP_LOG_LEVEL": "ERROR",
}
"""One thread per rank, and no warnings of libraries in the output of ranks."""


def machine() -> list[tuple[str, str]]:
    cores = psutil.cpu_count(logical=False) or usable_cores()
    threads = psutil.cpu_count() or cores
    kernel = platform.release().partition("-")[0]  # without what its builder added
    return [
        ("Processor", _processor()),
        ("Cores", f"{cores} ({threads} hardware threads), {usable_cores()} usable by this process"),
        ("Memory", f"{psutil.virtual_memory().total / 2**30:.1f} GiB"),
        ("Kernel", f"{platform.system()} {kernel} {platform.machine()}"),
    ]


def conditions(**seen: str) -> dict[str, Any]:
    """Return what every saved measurement has: its date, the machine, and the versions.

    Args:
        seen: More about the machine.
    """
    return {
        "when": time.strftime("%Y-%m-%d %H:%M"),
        "machine": {**dict(machine()), **seen},
        "versions": {
            "dure": dure.__version__,
            "commit": commit(),
            "python": platform.python_version(),
            "torch": _installed("torch"),
        },
    }


def commit() -> str:
    """Return the commit of the checkout that Dure runs from, with "-dirty" after changes.

    A Dure that was installed as a wheel has none: "none".
    """
    root = Path(dure.__file__).parents[2]
    if not (root / ".git").exists():
        return "none"
    command = ["git", "-C", str(root), "describe", "--always", "--dirty", "--exclude=*"]
    try:
        return subprocess.run(command, capture_output=True, text=True, check=True).stdout.strip()
    except (OSError, subprocess.CalledProcessError):
        return "none"


def _installed(package: str) -> str:
    try:
        return version(package)
    except PackageNotFoundError:
        return "none"


def busy_cores(watch_s: float = 0.3) -> float:
    """Watch the machine for `watch_s` seconds; return how many hardware threads are busy."""
    return psutil.cpu_percent(watch_s) / 100 * (psutil.cpu_count() or 1)


def usable_cores() -> int:
    """Return how many hardware threads this process may use."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return psutil.cpu_count() or 1  # not on Linux


def oversubscribed(ranks: int, busy: float) -> str:
    """Return a note if ranks will be slow because other programs keep `busy` cores busy."""
    cores = usable_cores()
    if ranks + busy <= cores + _QUIET_CORES:
        return ""
    return f"{ranks} ranks on {cores} cores, of which others use {busy:.1f}: times will suffer."


def _processor() -> str:
    info = Path("/proc/cpuinfo")
    lines = info.read_text().splitlines() if info.exists() else []
    names = [line.partition(":")[2].strip() for line in lines if line.startswith("model name")]
    return names[0] if names else platform.processor() or platform.machine()
