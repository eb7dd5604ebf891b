"""Secrets and core dumps: a dump of a process shows everything but its secrets.

The kernel leaves a page out of a dump if it was told so (`MADV_DONTDUMP`). So the job key lies in a
page of its own (`HiddenPage`), what is made of it for a moment is overwritten (`wipe`), and only
ZeroMQ's own copies are left: it keeps the CURVE secret keys in objects of its heap, which it
neither shows nor clears. `hide` looks for those copies and hides the pages they lie on.

**Where it looks.** A search of all memory would take longer than all else that a connection takes.
But glibc gives each thread a heap of its own, its *arena*, as long as there are not too many. So
sockets with secrets are made in a thread of their own (`apart`): the copies then lie in that
thread's arena, in that of ZeroMQ's I/O thread, and on the two threads' stacks; and only arenas and
stacks are searched, some hundred kilobytes; where threads hold more than 32 MiB, the largest arenas
are hidden unsearched. Arenas are known by where they lie: each begins at a multiple of 64 MiB, and
what it does not use yet is mapped without permissions up to the next one.

**If that cannot be relied on**, all memory is searched, provided that this process can be dumped at
all: where the number of arenas is limited and threads share them (MALLOC_ARENA_MAX, or 8 for each
processor), and where copies are found in fewer places than there must be (another allocator). What
is beyond a gigabyte, the largest mappings, is not searched but hidden: it holds tensors. And where
a process may not look at its own memory, its soft limit of dumps is set to 0.

**Servers** get copies with each connection, all in the I/O thread's arena: arenas with a server's
key are hidden as a whole, with all that they will grow to.

A page that is hidden stays hidden when it is used for something else, so a debugger lacks it: some
pages for a connection. Reading a living process (`gcore` as root, `ptrace`) is another matter: what
`MADV_DONTDUMP` says is a request that gdb honours as well, not a protection.

Cost: 1 to 3 ms a connection in a process with torch, most of it the list of mappings; some 15 ms
where threads hold as much as is searched.
"""

from __future__ import annotations

import ctypes
import logging
import mmap
import os
import re
import resource
import threading
from collections.abc import Callable, Iterator

from dure import env

__all__ = ["HiddenPage", "apart", "can_be_dumped", "hide", "refuse_dumps", "wipe"]

_PAGE = mmap.PAGESIZE
_ARENA = 64 << 20
_ARENAS_PER_CPU = 8
_LARGEST_GUARD = 1 << 20
_LARGEST_STACK = 16 << 20
_CHUNK = 1 << 18
_MOST_SEARCHED = 1 << 30
_MOST_OF_ARENAS = 32 << 20
_SPARSE = 64  # so many bytes that are not there cost as much as one that is
_WINDOW = 1 << 29  # of addresses, whose page table entries are read at once
_PR_GET_DUMPABLE, _PR_SET_DUMPABLE = 3, 4

_libc = ctypes.CDLL(None, use_errno=True)
_libc.memmem.restype = ctypes.c_void_p
_libc.memmem.argtypes = [ctypes.c_void_p, ctypes.c_size_t] * 2
_libc.madvise.argtypes = [ctypes.c_void_p, ctypes.c_size_t, ctypes.c_int]
_libc.mlock.argtypes = [ctypes.c_void_p, ctypes.c_size_t]

_log = logging.getLogger("dure.store")
_Range = tuple[int, int]


class HiddenPage:
    """A page of memory for one secret, in no dump, and not swapped out if the system lets us.

    A forked child has a copy, as hidden as this one. The page is cleared when nobody holds it.
    """

    __slots__ = ("_map", "address", "view")

    def __init__(self, secret: bytes | bytearray | memoryview) -> None:
        self._map = mmap.mmap(-1, _PAGE, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._map.madvise(mmap.MADV_DONTDUMP)
        buffer = (ctypes.c_char * len(secret)).from_buffer(self._map)
        self.address = ctypes.addressof(buffer)
        _libc.mlock(self.address, _PAGE)  # best effort: the limit may be small
        self.view = memoryview(self._map)[: len(secret)]
        """The secret, not copied."""
        self.view[:] = secret

    def __del__(self) -> None:
        if hasattr(self, "view"):
            self.view[:] = bytes(len(self.view))


def wipe(secret: bytes | bytearray) -> None:
    """Overwrite bytes that nobody else uses, in place; they are of no use afterwards."""
    if isinstance(secret, bytearray):
        secret[:] = bytes(len(secret))
    elif len(secret) > 1:  # CPython shares those of length 0 and 1
        ctypes.memset(id(secret) + bytes.__basicsize__ - 1, 0, len(secret))


def refuse_dumps() -> None:
    """Let this process never be dumped, traced or looked into, except by root.

    That closes `/proc/PID/fd`, `environ` and `mem` to other processes of the same user, too. It
    holds for forked children, and not for programs that they start.
    """
    _libc.prctl(_PR_SET_DUMPABLE, 0, 0, 0, 0)


def can_be_dumped() -> bool:
    """Tell whether a crash of this process would leave a dump: to a file, or to a collector."""
    if not _dumpable():
        return False
    if resource.getrlimit(resource.RLIMIT_CORE)[0] != 0:
        return True
    try:
        with open("/proc/sys/kernel/core_pattern", "rb") as file:
            return file.read(1) == b"|"
    except OSError:
        return True


def _dumpable() -> bool:
    return _libc.prctl(_PR_GET_DUMPABLE, 0, 0, 0, 0) != 0


def apart(action: Callable[[], None]) -> None:
    """Do something in a thread of its own, where memory of its own is used for it.

    It is done here if that is of no use, as no dump can be made; and where an interpreter that is
    ending starts no threads.
    """
    errors: list[BaseException] = []

    def work() -> None:
        try:
            action()
        except BaseException as error:
            errors.append(error)

    thread = threading.Thread(target=work, name="dure-secrets", daemon=True)
    try:
        if not _dumpable():
            action()
            return
        thread.start()
    except RuntimeError:
        action()
        return
    thread.join()
    if errors:
        raise errors[0]


def hide(secret: HiddenPage, places: int, whole: bool = False) -> bool:
    """Hide what other copies of a secret there are from dumps.

    Args:
        secret: What to look for.
        places: In how many arenas it must be. If it is found in fewer, all memory is searched.
        whole: Hide all of these arenas, and what will be in them.

    Returns:
        Whether copies that come later to the same threads are hidden, too.
    """
    if not _dumpable():
        return True
    # arithmetic on the curve changes bits of the first and the last byte
    needle = secret.address + 1, len(secret.view) - 2
    try:
        with _Memory() as memory:
            arenas, stacks = memory.arenas_and_stacks()
            hit = memory.mark_arenas(arenas, needle)
            for parts in stacks:
                memory.mark(parts, needle)
            sure = len(hit) >= places and _arenas_are_not_shared(len(arenas))
            if not sure and can_be_dumped():
                memory.mark_or_hide(memory.everything(), needle)
    except OSError as error:
        _give_up(error)
        return True
    for base in hit if whole else []:
        _libc.madvise(base, _ARENA, mmap.MADV_DONTDUMP)
    return whole and sure


def _arenas_are_not_shared(count: int) -> bool:
    """Tell whether each thread that allocates has an arena of its own, as glibc has it at first."""
    limited = env.text("MALLOC_ARENA_MAX") or "arena_max" in (env.text("GLIBC_TUNABLES") or "")
    return not limited and count < _ARENAS_PER_CPU * len(os.sched_getaffinity(0)) - 1


def _give_up(error: OSError) -> None:
    """Switch dumps off, where they are on: the secrets cannot be taken out of them."""
    soft, hard = resource.getrlimit(resource.RLIMIT_CORE)
    if soft != 0:
        resource.setrlimit(resource.RLIMIT_CORE, (0, hard))
        _log.warning(
            "this process writes no core dump: the job's keys cannot be taken out of it, for "
            "%s cannot be read (%s); resource.setrlimit allows dumps again",
            error.filename,
            error.strerror,
        )


class _Memory:
    """This process's memory, to be searched; other threads may unmap it meanwhile."""

    def __enter__(self) -> _Memory:
        self._fds = [os.open("/proc/self/mem", os.O_RDONLY | os.O_CLOEXEC)]
        try:
            self._fds.append(os.open("/proc/self/pagemap", os.O_RDONLY | os.O_CLOEXEC))
            self._mappings = list(_mappings())
        except OSError:
            self.__exit__()
            raise
        self._scratch = mmap.mmap(-1, _CHUNK, flags=mmap.MAP_PRIVATE | mmap.MAP_ANONYMOUS)
        self._scratch.madvise(mmap.MADV_DONTDUMP)
        return self

    def __exit__(self, *_: object) -> None:
        for fd in self._fds:
            os.close(fd)

    def everything(self) -> list[_Range]:
        """Return all memory that is this process's own and may hold what it wrote."""
        return [(start, end) for start, end, kind in self._mappings if kind != "guard"]

    def arenas_and_stacks(self) -> tuple[dict[int, list[_Range]], list[list[_Range]]]:
        """Return the arenas of threads by where they begin, and the threads' stacks."""
        heaps = [x[:2] for x in self._mappings if x[2] == "plain"]
        guards = [x[:2] for x in self._mappings if x[2] == "guard"]
        bases = [e - _ARENA for s, e in guards if e % _ARENA == 0 and s >= e - _ARENA]
        arenas = {
            base: found
            for base in bases
            if (found := [(s, e) for s, e in heaps if base <= s and e <= base + _ARENA])
        }
        feet = {e for s, e in guards if e - s <= _LARGEST_GUARD}
        return arenas, list(_stacks(heaps, feet))

    def mark_arenas(self, arenas: dict[int, list[_Range]], needle: _Range) -> list[int]:
        """Do as `mark_or_hide` with arenas; return those in which `needle` was found."""
        hit: list[int] = []
        left = _MOST_OF_ARENAS
        sizes = {base: sum(end - start for start, end in arenas[base]) for base in arenas}
        for base in sorted(sizes, key=sizes.__getitem__):
            left -= sizes[base]
            if left <= 0:
                _libc.madvise(base, _ARENA, mmap.MADV_DONTDUMP)
            elif self.mark(arenas[base], needle):
                hit.append(base)
        return hit

    def mark_or_hide(self, ranges: list[_Range], needle: _Range) -> None:
        """Do as `mark`, the smallest ranges first, and hide as a whole those that are too much."""
        left = _MOST_SEARCHED
        for start, end in sorted(ranges, key=lambda x: x[1] - x[0]):
            left -= (end - start) // _SPARSE
            if left > 0:
                left -= sum(high - low for low, high in self._resident(start, end))
            if left > 0:
                self.mark([(start, end)], needle)
            else:
                _libc.madvise(start, end - start, mmap.MADV_DONTDUMP)

    def mark(self, ranges: list[_Range], needle: _Range) -> int:
        """Hide the pages on which `needle` (address, length) is found; return how often it is."""
        found = 0
        for start, end in ranges:
            for low, high in self._resident(start, end):
                for address in self._search(low, high, needle):
                    first = address // _PAGE * _PAGE
                    last = -(-(address + needle[1]) // _PAGE) * _PAGE
                    _libc.madvise(first, last - first, mmap.MADV_DONTDUMP)
                    found += 1
        return found

    def _resident(self, start: int, end: int) -> Iterator[_Range]:
        """Yield the runs of pages that exist: the top two bits say present, or swapped out."""
        for low in range(start, end, _WINDOW):
            pages = (min(end, low + _WINDOW) - low) // _PAGE
            entries = os.pread(self._fds[1], pages * 8, low // _PAGE * 8)
            for run in re.finditer(rb"[\x40-\xff]+", entries[7::8]):
                yield low + run.start() * _PAGE, low + run.end() * _PAGE

    def _search(self, low: int, high: int, needle: _Range) -> Iterator[int]:
        step = _CHUNK - needle[1] + 1
        here = ctypes.addressof(ctypes.c_char.from_buffer(self._scratch))
        for at in range(low, high, step):
            with memoryview(self._scratch)[: min(_CHUNK, high - at)] as part:
                try:
                    count = os.preadv(self._fds[0], [part], at)
                except OSError:  # a device's, or unmapped meanwhile
                    return
            found = _libc.memmem(here, count, *needle)
            while found:
                offset = found - here
                yield at + offset
                found = _libc.memmem(found + 1, count - offset - 1, *needle)


def _mappings() -> Iterator[tuple[int, int, str]]:
    """Yield this process's private mappings: plain anonymous ones, guards without rights, others.

    Raises:
        OSError: The list cannot be read.
    """
    with open("/proc/self/maps", "rb") as file:
        lines = file.read().splitlines()
    for line in lines:
        words = line.split(None, 5)
        rights, name = words[1], words[5] if len(words) > 5 else b""
        anonymous = words[4] == b"0" and (not name or name.startswith(b"[anon"))
        kind = {b"rw-p": "plain" if anonymous else "other", b"---p": "guard"}.get(rights)
        if kind is not None and (anonymous or kind == "other"):
            start, _, end = words[0].partition(b"-")
            yield int(start, 16), int(end, 16), kind


def _stacks(heaps: list[_Range], feet: set[int]) -> Iterator[list[_Range]]:
    """Yield each thread's stack: what follows a guard without a gap, in one piece or several."""
    stack: list[_Range] = []
    for start, end in heaps:
        if start in feet:
            if stack:
                yield stack
            stack = [(start, end)]
        elif stack and start == stack[-1][1] and end - stack[0][0] <= _LARGEST_STACK:
            stack.append((start, end))
    if stack:
        yield stack
