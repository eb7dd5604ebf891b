"""What has to happen when a process ends, wherever that process came from.

`atexit` does not run in the children of multiprocessing, where most ranks live; the finalizers of
multiprocessing run there and in ordinary processes. A forked child begins without the
parent's finalizers, so they are registered again in every child.
"""

from __future__ import annotations

import os
from collections.abc import Callable
from multiprocessing import util

__all__ = ["at_process_end"]


def at_process_end(action: Callable[[], None], order: int) -> None:
    """Call `action` when this process ends in an orderly way, and when a forked child does.

    Args:
        action: Must tolerate being called twice, and return within about a second.
        order: Actions with a lower one come first.
    """

    def register(_: object = None) -> None:
        util.Finalize(None, action, exitpriority=100 - order)

    register()
    os.register_at_fork(after_in_child=register)
    util.register_after_fork(action, register)  # multiprocessing clears the registry once more
