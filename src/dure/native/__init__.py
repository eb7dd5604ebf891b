"""The typed door to the native engine: shared-memory collectives in C++ (csrc/).

Only `dure.comm` imports this package, and only this package imports the extension. On systems
other than Linux, and in a checkout where the extension was not built, the package imports all the
same; `available` then says why the engine cannot be used, and only making a group fails.
"""

from __future__ import annotations

import sys

from dure.errors import UsageError

_reason = ""
if sys.platform != "linux":
    _reason = f"the native engine needs Linux; this is {sys.platform}"
else:
    try:
        from dure.native._engine import (
            Group,
            Outcome,
            SharedBlock,
            Ticket,
            kernel_isa,
            reduce,
            select_kernel_isa,
        )
    except ImportError as error:
        _reason = f"the native engine is not built, or does not load: {error}"

__all__ = [
    "Group",
    "Outcome",
    "SharedBlock",
    "Ticket",
    "available",
    "kernel_isa",
    "reduce",
    "require",
    "select_kernel_isa",
]


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
