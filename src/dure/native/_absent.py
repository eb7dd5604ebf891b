"""The engine's names where there is no engine: types that have no instances.

It exists so that no caller holds a branch for a missing extension. `dure.native.require` raises
before any of this could be used.
"""

from __future__ import annotations

import threading
from dataclasses import dataclass
from typing import NoReturn

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
    "reduce",
    "select_kernel_isa",
    "set_library_folders",
    "set_subject",
    "subject",
]


class Channel:
    """Stands for a channel of the engine's group."""


class Group:
    """Stands for the engine's group."""


class Outcome:
    """Stands for the engine's outcome."""


class HeapMemory:
    """Stands for a piece of the symmetric heap."""


class Process:
    """Stands for a process whose heap is mapped."""


class Request:
    """Stands for the engine's request."""


class Inbox:
    """Stands for an inbox."""


class Outbox:
    """Stands for the way to an inbox."""


class Ticket:
    """Stands for what a thread waits for."""


def _no_heap(*arguments: object) -> NoReturn:
    """Say that there is no symmetric heap; callers ask `dure.native.available` first."""
    del arguments
    raise RuntimeError("the native engine is not there, and so there is no symmetric heap")


change_word = heap_allocate = heap_give = heap_identity = heap_lend = heap_share = _no_heap
heap_offset = heap_peer = heap_take = heap_taken = heap_trim = heap_usage = _no_heap


def know_torch(tensor: type, parameter: type, reductions: list[object]) -> bool:
    """Tell that tensors cannot be read natively."""
    del tensor, parameter, reductions
    return False


def set_library_folders(library: list[str], programs: list[str]) -> None:
    """Ignore whose frames are not the user's."""
    del library, programs


def call_site() -> str:
    """Return that the place of a call is not known."""
    return ""


def _table() -> list[int]:
    """Return for each byte its CRC-32C's state, of which bytes of sums are made."""
    table = list(range(256))
    for _ in range(8):
        table = [n >> 1 ^ (0x82F63B78 if n & 1 else 0) for n in table]
    return table


_TABLE = _table()


def crc32c(data: bytes | bytearray | memoryview, before: int = 0) -> int:
    """Return the CRC-32C of bytes that follow others whose sum is `before`; 10 MB/s."""
    state = before ^ 0xFFFFFFFF
    for byte in memoryview(data).cast("B"):
        state = state >> 8 ^ _TABLE[(state ^ byte) & 0xFF]
    return state ^ 0xFFFFFFFF


def copy_bytes(to: bytearray | memoryview, source: bytes | bytearray | memoryview) -> None:
    """Copy as many bytes as both have; ValueError where lengths differ."""
    memoryview(to).cast("B")[:] = memoryview(source).cast("B")


def copy_from_file(
    descriptor: int, at: int, to: bytearray | memoryview, summed: bool
) -> tuple[int, int]:
    """Copy nothing: the caller reads."""
    del descriptor, at, to, summed
    return 0, 0


@dataclass(frozen=True, slots=True)
class Subject:
    """What a collective is about."""

    code: int
    text: str


class _Said(threading.local):
    subject = Subject(0, "")


_said = _Said()


def set_subject(about: Subject) -> None:
    """Say what the calling thread's collectives are about."""
    _said.subject = about


def subject() -> Subject:
    """Return what the calling thread's collectives are about."""
    return _said.subject


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
