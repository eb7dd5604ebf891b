"""Who wants to hear of the collectives that redistributions call: `CommDebugMode`, `explain`.

The list is the process's: ranks that are threads share it, and who listens looks at the rank of the
step's mesh.
"""

from __future__ import annotations

import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from dure.tensor.redistribute import Step

__all__ = ["Recorder", "announced", "moving", "recorders"]

Recorder = Callable[["Step"], Any]

recorders: list[Recorder] = []
"""Called with the step, on the thread that runs it, before its collective."""


class _Here(threading.local):
    moving = False


_here = _Here()


def moving() -> bool:
    """Tell whether this thread runs the collective of a step that recorders were told of."""
    return _here.moving


@contextmanager
def announced(step: Step) -> Iterator[None]:
    """Tell the recorders of a step, whose collective runs in the block."""
    for record in tuple(recorders):
        record(step)
    _here.moving = True
    try:
        yield
    finally:
        _here.moving = False
