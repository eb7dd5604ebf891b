"""Memory: how much is free, and what the container or the kernel takes away."""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

import psutil

from dure.cli.doctor.cgroup import memory_limit, memory_used
from dure.cli.doctor.finding import Finding, fine, problem, size, warning

__all__ = ["Memory", "judge", "read"]

_HUGE = Path("/sys/kernel/mm/transparent_hugepage")
_RANK_BYTES = 300 << 20  # a rank that has imported torch


@dataclass(frozen=True, slots=True, kw_only=True)
class Memory:
    """Bytes, except the two settings of transparent huge pages (the chosen word, or empty)."""

    total: int
    available: int
    swap_used: int = 0
    limit: int | None = None
    used_of_limit: int | None = None
    huge_pages: str = ""
    huge_shared: str = ""


def read() -> Memory:
    """Read from the system."""
    memory = psutil.virtual_memory()
    return Memory(
        total=memory.total,
        available=memory.available,
        swap_used=psutil.swap_memory().used,
        limit=memory_limit(),
        used_of_limit=memory_used(),
        huge_pages=_chosen(_HUGE / "enabled"),
        huge_shared=_chosen(_HUGE / "shmem_enabled"),
    )


def _chosen(path: Path) -> str:
    """Return the word in brackets, as in `always [madvise] never`."""
    try:
        return path.read_text().partition("[")[2].partition("]")[0]
    except OSError:
        return ""


def judge(memory: Memory) -> list[Finding]:
    """Say whether ranks fit."""
    free, whose = memory.available, "of the host"
    text = f"{size(memory.available)} of {size(memory.total)} free"
    if memory.limit is not None and memory.limit < memory.total:
        used = memory.used_of_limit or 0
        text += f"; the container may use {size(memory.limit)} and uses {size(used)}"
        if memory.limit - used < free:
            free, whose = memory.limit - used, "of the container"
    fits = f"about {free // _RANK_BYTES} ranks that only import torch"
    if free < _RANK_BYTES:
        found = [
            problem(
                "memory",
                f"{text}: not enough {whose} for one rank that imports torch",
                "Free memory or raise the limit; the kernel kills ranks (SIGKILL) otherwise.",
            )
        ]
    elif free < 4 * _RANK_BYTES:
        found = [warning("memory", f"{text}: room for {fits}", "Start few ranks.")]
    else:
        found = [fine("memory", text)]
    if memory.swap_used > memory.total // 10:
        found.append(
            warning(
                "swap",
                f"{size(memory.swap_used)} swapped out: whoever needs it again waits for the disk",
                "Free memory before measuring or training.",
            )
        )
    found.append(_judge_huge_pages(memory))
    return found


def _judge_huge_pages(memory: Memory) -> Finding:
    pages = f"{memory.huge_pages or 'unknown'}, shared {memory.huge_shared or 'unknown'}"
    if memory.huge_pages == "never":
        return warning(
            "huge pages",
            "switched off: large tensors cost more page faults",
            "echo madvise > /sys/kernel/mm/transparent_hugepage/enabled",
        )
    return fine("huge pages", pages)
