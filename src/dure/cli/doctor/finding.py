"""What a check says: a level, what was seen, and what to do about it."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from enum import Enum
from functools import partial

__all__ = ["Finding", "Findings", "Level", "fine", "note", "problem", "size", "warning"]


class Level(Enum):
    OK = "ok"
    NOTE = "note"
    """Matters for some jobs only, such as those on several hosts."""
    WARNING = "warning"
    """Works, but worse than it could."""
    PROBLEM = "problem"
    """A job will fail here, or hang."""


@dataclass(frozen=True, slots=True)
class Finding:
    """`advice` is empty where nothing needs doing, `host` where only this one was asked."""

    level: Level
    check: str
    seen: str
    advice: str = ""
    host: str = ""


Findings = Iterator[Finding]
fine = partial(Finding, Level.OK)
note = partial(Finding, Level.NOTE)
warning = partial(Finding, Level.WARNING)
problem = partial(Finding, Level.PROBLEM)


def size(num_bytes: float) -> str:
    """Return a size as a person reads it: 512 MiB, 1.5 GiB."""
    for unit in ("bytes", "KiB", "MiB", "GiB"):
        if num_bytes < 1024:
            return f"{num_bytes:.3g} {unit}"
        num_bytes /= 1024
    return f"{num_bytes:.3g} TiB"
