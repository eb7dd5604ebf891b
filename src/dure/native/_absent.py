"""The engine's names where there is no engine: types that have no instances.

It exists so that no caller holds a branch for a missing extension. `dure.native.require` raises
before any of this could be used.
"""

from __future__ import annotations

__all__ = [
    "Group",
    "Outcome",
    "SharedBlock",
    "Ticket",
    "kernel_isa",
    "reduce",
    "select_kernel_isa",
]


class Group:
    """Stands for the engine's group."""


class Outcome:
    """Stands for the engine's outcome."""


class SharedBlock:
    """Stands for the engine's shared block."""


class Ticket:
    """Stands for the engine's ticket."""


def kernel_isa() -> str:
    """Return that there are no kernels."""
    return "none"


def select_kernel_isa(isa: str) -> bool:
    """Tell that there are no kernels to choose from."""
    del isa
    return False


def reduce(out: int, sources: list[int], dtype: int, reduction: int, count: int) -> bool:
    """Tell that no reduction has a kernel."""
    del out, sources, dtype, reduction, count
    return False
