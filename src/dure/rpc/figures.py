"""What a process tells of its remote calls while it runs, for `dure rpc top`.

The figures lie in anonymous memory of the process, which others of the same user find by its name
below /proc, and may only read. Nothing has to be cleaned up, and nobody is asked.
"""

from __future__ import annotations

import mmap
import os
import re
import struct
from contextlib import suppress
from dataclasses import astuple, dataclass
from pathlib import Path

from dure.store.identity import start_of
from dure.store.system import memory_file

__all__ = ["Board", "Figures", "Seen", "seen"]

_LABEL = "dure-rpc"
_LINK = re.compile(rf"/memfd:{_LABEL}\b")
_LAYOUT = struct.Struct("128s8Q")


@dataclass(slots=True)
class Figures:
    """The state of a process; what is counted is counted from its start.

    Attributes:
        made: Calls made.
        served: Calls of others that came.
        waiting: Calls made that are not answered.
        running: Calls of others that run, or wait for a thread.
        bytes_sent: In messages, without what they are wrapped in.
        bytes_received: The same.
        owned: Values that it keeps for others.
        held: Values of others that it refers to.
    """

    made: int = 0
    served: int = 0
    waiting: int = 0
    running: int = 0
    bytes_sent: int = 0
    bytes_received: int = 0
    owned: int = 0
    held: int = 0


class Board:
    """Where a process shows its figures.

    Args:
        name: Of the worker.
    """

    def __init__(self, name: str) -> None:
        self._name = name.encode()
        self._descriptor = memory_file(_LABEL)
        os.ftruncate(self._descriptor, _LAYOUT.size)
        self._memory = mmap.mmap(self._descriptor, _LAYOUT.size)
        self.show(Figures())

    def show(self, figures: Figures) -> None:
        """Show these from now on."""
        if not self._memory.closed:
            _LAYOUT.pack_into(self._memory, 0, self._name, *astuple(figures))

    def close(self) -> None:
        """End; nobody finds it any more."""
        self._memory.close()
        os.close(self._descriptor)


@dataclass(frozen=True, slots=True)
class Seen:
    """A worker of this host."""

    pid: int
    name: str
    figures: Figures


def seen() -> list[Seen]:
    """Return the workers of this host whose figures this user may read, by name."""
    found: dict[tuple[int, int], Seen] = {}
    pids = [int(path.name) for path in Path("/proc").glob("[0-9]*")]
    for pid in sorted(pids, key=lambda pid: (int(start_of(pid) or 0), pid)):  # a parent is older
        with suppress(OSError):  # it is gone, or another user's
            for link in Path(f"/proc/{pid}/fd").iterdir():
                with suppress(OSError):
                    if _LINK.match(os.readlink(link)):
                        state = link.stat()
                        name, *numbers = _LAYOUT.unpack(link.read_bytes())
                        text = name.rstrip(b"\0").decode(errors="replace")
                        each = Seen(pid, text, Figures(*numbers))
                        found.setdefault((state.st_dev, state.st_ino), each)
    return sorted(found.values(), key=lambda each: (each.name, each.pid))
