"""A thread that ends operations in streams that can never end: a peer has died, or is too late.

The host does not wait for NCCL's operations, so no call of the program would notice. One thread of
the process looks at all groups over NCCL, several times per second (`EngineGroup.look`), for

* **the death of a member**, as the group's other backends or the kernel know it (`Deaths`). Later
  calls and waits raise `PeerLost` at once. Data of the dead rank may still be on their way, so
  operations get a moment to end. Then the communicators are aborted, which ends the kernels that
  wait for the dead rank;
* **an operation that takes longer than the group's timeout**: the communicators are aborted, and
  later calls and waits raise `CommTimeout`.

A result that was not waited for through Dure may be wrong in the meantime.

**Calls of the device.** Whether an operation has ended is asked only if it is too old: to ask
breaks the capture of a CUDA graph in another thread. Operations that are captured are not watched.

**A rank that serves the store** takes the group's exit records (work.py) with it when it ends. The
others read these while it lives, so that they know whether it had left before.

A group whose own look fails is looked at no more, which is logged; other groups are looked at.

A forked child has neither the thread nor the groups of its parent.
"""

from __future__ import annotations

import os
import threading
import time
from typing import Protocol
from weakref import WeakSet

from dure.errors import PeerLost
from dure.trace import logs

__all__ = ["GRACE_S", "LOOK_S", "RECORD_S", "SLACK_S", "Deaths", "Watched", "look_after"]

_log = logs.logger("comm")

LOOK_S = 0.2
"""How often each group is looked at."""
GRACE_S = 0.5
"""How long operations may take to end after a member has died."""
RECORD_S = 0.4
"""How often the record of a rank that serves the store is read. When it ends in an orderly way, it
waits for a second after it has written the record (store/server.py)."""
SLACK_S = 1.0
"""How much longer than the timeout an operation may take: the engine may find out more."""


class Deaths(Protocol):
    """How a group knows that a member's process has ended."""

    @property
    def keeper(self) -> int | None:
        """The member with which the exit records end; None if nothing depends on them."""
        ...

    def has_died(self, rank: int) -> bool:
        """Return whether the process of `rank` has ended, or cannot be reached any more."""
        ...

    def error(self, rank: int) -> PeerLost:
        """Return the error that names it."""
        ...


class Watched(Protocol):
    """A group that the thread looks at."""

    @property
    def group_name(self) -> str:
        """The group's name."""
        ...

    def look(self) -> bool:
        """End operations that can never end; return False if there is nothing left to look for."""
        ...


_groups: WeakSet[Watched] = WeakSet()
_lock = threading.Lock()
_thread: threading.Thread | None = None


def look_after(group: Watched) -> None:
    """Look at a group from now on, until it is dropped or its `look` returns False."""
    global _thread
    with _lock:
        _groups.add(group)
        if _thread is None:
            thread = threading.Thread(target=_look_at_all, name="dure-watchdog", daemon=True)
            thread.start()
            _thread = thread


def _look_at_all() -> None:
    while _look_once():
        time.sleep(LOOK_S)


def _look_once() -> bool:
    """Look at each group; return False, and forget the thread, if there are none."""
    global _thread
    with _lock:
        groups = [*_groups]
        if not groups:
            _thread = None
            return False
    for group in groups:
        try:
            again = group.look()
        except Exception as error:  # of CUDA, say, or of NCCL in an abort
            again = False
            _log.warning(
                "group %r is not watched any more: %s: %s",
                group.group_name,
                type(error).__name__,
                error,
            )
        if not again:
            with _lock:
                _groups.discard(group)
    return True


def _forget_all() -> None:
    global _groups, _lock, _thread
    _groups, _lock, _thread = WeakSet(), threading.Lock(), None


os.register_at_fork(after_in_child=_forget_all)
