"""Replacements for the engine's names if the extension is missing.

They spare callers a branch for a missing extension. Some functions are implemented in Python; every
other name raises `UsageError` when it is used. Callers that know the user's request call
`dure.native.require` first, whose error names the request.
"""

from __future__ import annotations

import threading
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, NoReturn  # Any: the arguments of missing functions

from dure.errors import UsageError


def _missing(name: str) -> UsageError:
    return UsageError(
        f"dure.native.{name} needs the native engine, which is not available",
        fix="Call `dure.native.available()`, which returns the reason.",
    )


class _Missing:
    """A class of the engine that has no replacement."""

    def __init__(self, *arguments: Any, **named: Any) -> None:
        del arguments, named
        raise _missing(type(self).__name__)


class Channel(_Missing):
    """Replaces a channel of the engine's group."""


class Group(_Missing):
    """Replaces the engine's group."""


class Outcome:
    """Replaces the engine's outcome."""


class HeapMemory(_Missing):
    """Replaces a block of the symmetric heap."""


class Process(_Missing):
    """Replaces a process whose heap is mapped."""


class Request(_Missing):
    """Replaces the engine's request."""


class Inbox(_Missing):
    """Replaces an inbox."""


class Outbox(_Missing):
    """Replaces the sender's side of an inbox."""


class Ticket(_Missing):
    """Replaces the object that a thread waits for."""


def _missing_function(name: str) -> Callable[..., NoReturn]:
    def raising(*arguments: Any, **named: Any) -> NoReturn:
        del arguments, named
        raise _missing(name)

    return raising


change_word = _missing_function("change_word")
heap_allocate = _missing_function("heap_allocate")
heap_give = _missing_function("heap_give")
heap_identity = _missing_function("heap_identity")
heap_lend = _missing_function("heap_lend")
heap_offset = _missing_function("heap_offset")
heap_peer = _missing_function("heap_peer")
heap_share = _missing_function("heap_share")
heap_take = _missing_function("heap_take")
heap_taken = _missing_function("heap_taken")
heap_trim = _missing_function("heap_trim")
heap_usage = _missing_function("heap_usage")


def not_copied_in_children() -> int:
    """Return 0: there is no heap."""
    return 0


pack_tensor = _missing_function("pack_tensor")
put_into_storage = _missing_function("put_into_storage")
unpack_tensor = _missing_function("unpack_tensor")


def know_torch(
    tensor: type,
    parameter: type,
    reductions: list[object],
    c: object,
    sample: object,
    hooks: list[object],
) -> bool:
    """Return False: tensors cannot be read natively."""
    del tensor, parameter, reductions, c, sample, hooks
    return False


def set_library_folders(folders: list[tuple[str, bool]]) -> None:
    """Ignore the folders of libraries."""
    del folders


def call_site() -> str:
    """Return "": the call site is unknown."""
    return ""


def _table() -> list[int]:
    """Return the CRC-32C remainder of each byte."""
    table = list(range(256))
    for _ in range(8):
        table = [n >> 1 ^ (0x82F63B78 if n & 1 else 0) for n in table]
    return table


_TABLE = _table()


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the CRC-32C of data that follows data with the sum `before`; 10 MB/s."""
    state = before ^ 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        state = state >> 8 ^ _TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def copy_bytes(to: bytearray | memoryview, source: bytes | bytearray | memoryview) -> None:
    """Copy bytes; raises ValueError if the lengths differ."""
    memoryview(to).cast("B")[:] = memoryview(source).cast("B")


def copy_from_file(
    descriptor: int, at: int, to: bytearray | memoryview, summed: bool
) -> tuple[int, int]:
    """Copy nothing: the caller reads the file."""
    del descriptor, at, to, summed
    return 0, 0


@dataclass(frozen=True, slots=True)
class Subject:
    """The object of a collective, such as a module, for error messages."""

    code: int
    text: str


class _ThreadState(threading.local):
    subject = Subject(0, "")


_thread = _ThreadState()


def set_subject(about: Subject) -> None:
    """Set the subject of the calling thread's collectives."""
    _thread.subject = about


def subject() -> Subject:
    """Return the subject of the calling thread's collectives."""
    return _thread.subject


def kernel_isa() -> str:
    """Return "none": there are no kernels."""
    return "none"


def select_kernel_isa(isa: str) -> bool:
    """Return False: there are no kernels."""
    del isa
    return False


def reduce(out: int, sources: list[int], dtype: int, reduction: int, count: int) -> bool:
    """Return False: there are no kernels."""
    del out, sources, dtype, reduction, count
    return False


def limit_isa(most: str) -> bool:
    """Return whether it is a known name; there are no kernels to limit."""
    return most in {"generic", "avx2", "avx512"}
