"""The typed interface to the native engine: shared-memory collectives in C++ (csrc/).

Only `dure.comm` and `dure.rpc` import this package, and only this package imports the extension.
The package can be imported on systems other than Linux and in a checkout without a built extension:
`available` then returns the reason, and the names of the engine are those of `_absent`.

The engine chooses its instruction set when it is loaded; `DURE_ISA` limits the choice.

Internal: names here may change in any release.
"""

from __future__ import annotations

import importlib
import sys
from typing import TYPE_CHECKING

from dure import env
from dure.errors import UsageError
from dure.version import PROTOCOL

__all__ = [
    "Channel",
    "Group",
    "HeapMemory",
    "Inbox",
    "Outbox",
    "Outcome",
    "Process",
    "Request",
    "Subject",
    "Ticket",
    "available",
    "call_site",
    "change_word",
    "copy_bytes",
    "copy_from_file",
    "crc32c",
    "heap_allocate",
    "heap_give",
    "heap_identity",
    "heap_lend",
    "heap_offset",
    "heap_peer",
    "heap_share",
    "heap_take",
    "heap_taken",
    "heap_trim",
    "heap_usage",
    "kernel_isa",
    "know_torch",
    "not_copied_in_children",
    "pack_tensor",
    "put_into_storage",
    "reduce",
    "require",
    "select_kernel_isa",
    "set_library_folders",
    "set_subject",
    "subject",
    "unpack_tensor",
]

_reason = (
    "" if sys.platform == "linux" else f"the native engine is for Linux; this is {sys.platform}"
)

if TYPE_CHECKING:
    from dure.native._engine import (
        Channel,
        Group,
        HeapMemory,
        Inbox,
        Outbox,
        Outcome,
        Process,
        Request,
        Subject,
        Ticket,
        call_site,
        change_word,
        copy_bytes,
        copy_from_file,
        crc32c,
        heap_allocate,
        heap_give,
        heap_identity,
        heap_lend,
        heap_offset,
        heap_peer,
        heap_share,
        heap_take,
        heap_taken,
        heap_trim,
        heap_usage,
        kernel_isa,
        know_torch,
        not_copied_in_children,
        pack_tensor,
        put_into_storage,
        reduce,
        select_kernel_isa,
        set_library_folders,
        set_subject,
        subject,
        unpack_tensor,
    )
else:
    from dure.native import _absent

    try:
        _engine = importlib.import_module("dure.native._engine")
    except ImportError as error:
        _engine = _absent
        _reason = _reason or f"the native engine is not built, or does not load: {error}"
    _names = set(__all__) - {"available", "require"}
    _protocol = getattr(_engine, "protocol", None)
    _missing = sorted(name for name in {*_names, "limit_isa"} if not hasattr(_engine, name))
    if not _reason and (_protocol != PROTOCOL or _missing):
        _found = f"it has protocol {_protocol}, and the Python sources have protocol {PROTOCOL}"
        if _protocol == PROTOCOL:
            _found = f"it does not have {', '.join(_missing)}"
        _reason = f"the native engine was built from other sources: {_found}; install Dure again"
        _engine = _absent
    globals().update({name: getattr(_engine, name) for name in _names})
    _most = env.text("DURE_ISA")
    if _most and not _engine.limit_isa(_most):
        raise UsageError(
            "DURE_ISA must be generic, avx2 or avx512",
            seen=repr(_most),
            fix="Set it to one of them, or unset it for the best one of this machine.",
        )


def available() -> tuple[bool, str]:
    """Return whether the engine can be used, and the reason if it cannot."""
    return not _reason, _reason


def require(what: str) -> None:
    """Raise `UsageError` if the engine, which `what` needs, cannot be used."""
    if _reason:
        raise UsageError(
            f"{what} cannot be used here",
            seen=_reason,
            fix="Install a wheel of Dure on Linux, or build it there with a C++20 compiler. "
            "The backends gloo and threads do not need the engine.",
        )
