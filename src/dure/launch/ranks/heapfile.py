"""The memory file that holds the zygote's heap, so that ranks map of it what they touch.

What `import torch` leaves on the heap (some 85 MB) is the same in all ranks, and an idle rank reads
little of it. Forked as it is, each rank would map all of it: its resident size counts every page,
and each fork copies the page tables. So the zygote, once it has imported, moves its heap into a
file (the note "Heap file" in csrc/core/heap.h tells how, and why nothing can be seen of it), which
the launcher has made:

    launcher ──the file's descriptor, and where the engine is──▶ zygote
    launcher: gives the file its memory, while the zygote imports and the launcher waits
    zygote: writes its heap into it, maps it in its place, seals it for ever

The file has no name, and lives as long as one of the ranks or the zygote has it mapped. Where the
engine is not built, or the kernel does not want to, ranks are forked from the heap as it is.
"""

from __future__ import annotations

import contextlib
import importlib.util
import io
import os
from importlib.machinery import EXTENSION_SUFFIXES

__all__ = ["HeapFile"]

_TORCH_BYTES = 80 << 20
"""What the heap takes at least once torch is imported."""


class HeapFile:
    """The file, as long as the launcher holds it; none where the system gives no memory files."""

    def __init__(self) -> None:
        flags = os.MFD_CLOEXEC | os.MFD_ALLOW_SEALING
        self._file: io.FileIO | None = None
        with contextlib.suppress(OSError):  # forbidden (seccomp), or not there
            self._file = io.FileIO(os.memfd_create("dure-heap", flags), "r+")

    @property
    def fds(self) -> tuple[int, ...]:
        """The descriptor, which the zygote inherits."""
        return () if self._file is None else (self._file.fileno(),)

    def setup(self) -> dict[str, object]:
        """Return what the zygote must know."""
        if self._file is None:
            return {"heap": None, "engine": None}
        return {"heap": self._file.fileno(), "engine": _engine()}

    def reserve(self) -> None:
        """Give it memory ahead: 1 us a page, which the zygote need not spend when ranks wait."""
        if self._file is not None and _engine() is not None:
            with contextlib.suppress(OSError):  # there is too little, or it is sealed already
                os.posix_fallocate(self._file.fileno(), 0, _TORCH_BYTES)

    def close(self) -> None:
        """Let go of it; may be called again."""
        if self._file is not None:
            self._file.close()
            self._file = None


def _engine() -> str | None:
    """Return the path of the native engine, which is not loaded here."""
    spec = importlib.util.find_spec("dure.native")
    folders = [] if spec is None else spec.submodule_search_locations or []
    names = (f"{folder}/_engine{suffix}" for folder in folders for suffix in EXTENSION_SUFFIXES)
    return next(filter(os.path.exists, names), None)
