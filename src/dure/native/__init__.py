"""The typed interface to the native engine: shared-memory collectives in C++ (csrc/).

Only `dure.comm` and `dure.rpc` import this package, and only this package imports the extension.
The package can be imported on systems other than Linux and in a checkout without a built extension:
`available` then returns the reason, and the names of the engine are those of `_absent`.

The engine chooses its instruction set when it is loaded; `DURE_ISA` limits the choice.

Internal: names here may change in any release.
"""

from __future__ import annotations

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
    from dure.native._absent import copy_bytes as _plain_copy
    from dure.native._absent import copy_from_file as _copy_nothing
    from dure.native._absent import crc32c as _slow_crc32c

    try:
        import dure.native._engine as _found
    except ImportError as error:
        from dure.native import _absent as _found

        _reason = _reason or f"the native engine is not built, or does not load: {error}"
    # Extensions from before 0.2 do not say their protocol; it was 9.
    _protocol = getattr(_found, "protocol", 9)
    if not _reason and _protocol != PROTOCOL:
        _reason = (
            f"the native engine was built from other sources: it has protocol {_protocol}, "
            f"and the Python sources have protocol {PROTOCOL}; install Dure again"
        )
    Channel, Group, Outcome = _found.Channel, _found.Group, _found.Outcome
    HeapMemory, Process, Request = _found.HeapMemory, _found.Process, _found.Request
    Inbox, Outbox, Ticket = _found.Inbox, _found.Outbox, _found.Ticket
    heap_allocate, heap_trim = _found.heap_allocate, _found.heap_trim
    heap_give, heap_take = _found.heap_give, _found.heap_take
    heap_identity, heap_offset = _found.heap_identity, _found.heap_offset
    heap_peer, heap_usage = _found.heap_peer, _found.heap_usage
    change_word, put_into_storage = _found.change_word, _found.put_into_storage
    not_copied_in_children = _found.not_copied_in_children
    # Older builds of the extension do not have these.
    heap_taken = getattr(_found, "heap_taken", int)
    heap_lend = getattr(_found, "heap_lend", lambda address, to: 0)
    heap_share = getattr(_found, "heap_share", _found.heap_allocate)
    crc32c = getattr(_found, "crc32c", _slow_crc32c)
    copy_bytes = getattr(_found, "copy_bytes", _plain_copy)
    copy_from_file = getattr(_found, "copy_from_file", _copy_nothing)
    kernel_isa, select_kernel_isa = _found.kernel_isa, _found.select_kernel_isa
    reduce, call_site = _found.reduce, _found.call_site
    pack_tensor, unpack_tensor = _found.pack_tensor, _found.unpack_tensor
    know_torch, set_library_folders = _found.know_torch, _found.set_library_folders
    Subject, set_subject, subject = _found.Subject, _found.set_subject, _found.subject
    _most = env.text("DURE_ISA")
    # An older build of the extension does not have this, and supports no limit.
    if _most and not getattr(_found, "limit_isa", bool)(_most):
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
