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
    "call_site",
    "kernel_isa",
    "know_torch",
    "reduce",
    "select_kernel_isa",
    "set_library_folders",
]


class Group:
    """Stands for the engine's group."""


class Outcome:
    """Stands for the engine's outcome."""


class SharedBlock:
    """Stands for the engine's shared block."""


class Ticket:
    """Stands for the engine's ticket."""


def know_torch(tensor: type, parameter: type, reductions: list[object]) -> bool:
    """Tell that tensors cannot be read natively."""
    del tensor, parameter, reductions
    return False


def set_library_folders(folders: list[str]) -> None:
    """Ignore whose frames are not the user's."""
    del folders


def call_site() -> str:
    """Return that the place of a call is not known."""
    return ""


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
