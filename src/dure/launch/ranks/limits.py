"""How much memory this process may use, and whether that is enough for a job's ranks."""

from __future__ import annotations

from pathlib import Path

from dure.launch.spec import JobSpec
from dure.store.system import control_groups, kernel_text

__all__ = ["available_memory", "memory_note"]

_FORKED_MB, _FRESH_MB, _BARE_MB = 60, 250, 12
"""What a rank takes of its own: forked from a process with torch, with torch of its own, without
torch. Programs take more once they run."""


def available_memory(root: Path = Path("/")) -> int | None:
    """Return how many bytes this process and its children may still take; None: not known.

    The kernel's estimate, or what a control group leaves, including file pages that can be dropped.
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


def memory_note(spec: JobSpec, *, torch: bool, forked: bool) -> str:
    """Return a warning if this host's memory is not likely to hold the ranks; "" otherwise."""
    each = (_FORKED_MB if forked else _FRESH_MB) if torch else _BARE_MB
    available = available_memory()
    if spec.oversubscribe or available is None or spec.nproc * each << 20 <= available:
        return ""
    return (
        f"{spec.nproc} ranks may be more than this host has memory for: some {each} MB each to "
        f"start with, {available >> 20} MB available (--oversubscribe leaves out this warning)"
    )
