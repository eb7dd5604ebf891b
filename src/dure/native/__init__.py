"""The typed door to the native engine: shared-memory collectives in C++ (csrc/).

Only `dure.comm` imports this package, and only this package imports the extension. On systems
other than Linux, and in a checkout where the extension was not built, the package imports all the
same: `available` then says why the engine cannot be used, and the names of the engine are those of
`_absent`, whose every use raises that reason.
"""

from __future__ import annotations

import sys
from typing import TYPE_CHECKING

from dure.errors import UsageError

__all__ = [
    "Group",
    "Outcome",
    "SharedBlock",
    "Ticket",
    "available",
    "call_site",
    "kernel_isa",
    "know_torch",
    "reduce",
    "require",
    "select_kernel_isa",
    "set_library_folders",
]

_reason = (
    "" if sys.platform == "linux" else f"the native engine is for Linux; this is {sys.platform}"
)

if TYPE_CHECKING:
    from dure.native._engine import (
        Group,
        Outcome,
        SharedBlock,
        Ticket,
        call_site,
        kernel_isa,
        know_torch,
        reduce,
        select_kernel_isa,
        set_library_folders,
    )
else:
    try:
        from dure.native import _engine as _found
    except ImportError as error:
        from dure.native import _absent as _found

        _reason = _reason or f"the native engine is not built, or does not load: {error}"
    Group, Outcome = _found.Group, _found.Outcome
    SharedBlock, Ticket = _found.SharedBlock, _found.Ticket
    kernel_isa, select_kernel_isa = _found.kernel_isa, _found.select_kernel_isa
    reduce, call_site = _found.reduce, _found.call_site
    know_torch, set_library_folders = _found.know_torch, _found.set_library_folders


def available() -> tuple[bool, str]:
    """Tell whether the engine can be used, and if not, why."""
    return not _reason, _reason


def require() -> None:
    """Raise `UsageError` where the engine cannot be used."""
    if _reason:
        raise UsageError(
            "the backend 'shm' cannot be used here",
            seen=_reason,
            fix="Use backend='gloo', or install Dure on Linux with a C++20 compiler.",
        )
