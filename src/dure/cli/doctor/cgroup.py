"""What a control group (a container, a Slurm step, a systemd slice) allows this process.

A limit of any enclosing group counts, so they are read from the process's own group up to the root,
and the smallest holds. Version 2 has one tree; where a host still has version 1, its trees for
memory and processors are looked at under the same names inside a container.
"""

from __future__ import annotations

from pathlib import Path

__all__ = ["cpu_quota", "memory_limit", "memory_used", "pids_limit"]

_ROOT = Path("/sys/fs/cgroup")
_UNLIMITED = 1 << 60  # version 1 writes a number near 2**63 for "none"


def _groups(root: Path, own: str) -> list[Path]:
    """Return the folder of the process's group, and of each group around it."""
    relative = next((x[3:] for x in own.splitlines() if x.startswith("0::")), "/").strip("/")
    here = root / relative
    if not here.is_dir():  # a container sees its own group as the root
        here = root
    return [folder for folder in (here, *here.parents) if folder.is_relative_to(root)]


def _values(name: str, root: Path) -> list[str]:
    try:
        own = Path("/proc/self/cgroup").read_text()
    except OSError:
        own = ""
    found: list[str] = []
    for folder in _groups(root, own):
        try:
            found.append((folder / name).read_text().strip())
        except OSError:
            continue
    return found


def _smallest(name: str, root: Path = _ROOT) -> int | None:
    numbers = [int(v) for v in _values(name, root) if v.lstrip("-").isdigit()]
    return min((n for n in numbers if 0 < n < _UNLIMITED), default=None)


def cpu_quota() -> float | None:
    """Return how many cores' time this process may use; None where there is no limit."""
    quotas: list[float] = []
    for value in _values("cpu.max", _ROOT):
        quota, _, period = value.partition(" ")
        if quota.isdigit() and period.isdigit():
            quotas.append(int(quota) / int(period))
    quota_us = _smallest("cpu.cfs_quota_us", _ROOT / "cpu")
    period_us = _smallest("cpu.cfs_period_us", _ROOT / "cpu")
    if quota_us and period_us:
        quotas.append(quota_us / period_us)
    return min(quotas, default=None)


def memory_limit() -> int | None:
    """Return how many bytes this process's group may use; None where there is no limit."""
    found = [_smallest("memory.max"), _smallest("memory.limit_in_bytes", _ROOT / "memory")]
    return min((n for n in found if n is not None), default=None)


def memory_used() -> int | None:
    """Return how many bytes the group uses that cannot be taken back; None where unknown."""
    used = _smallest("memory.current") or _smallest("memory.usage_in_bytes", _ROOT / "memory")
    if used is None:
        return None
    for text in _values("memory.stat", _ROOT)[:1]:
        cached = next((x.split()[1] for x in text.splitlines() if x.startswith("inactive_file")), 0)
        used -= int(cached)
    return max(0, used)


def pids_limit() -> int | None:
    """Return how many processes and threads the group may have; None where there is no limit."""
    return _smallest("pids.max")
