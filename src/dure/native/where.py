"""The current line of a thread, for the timeout errors of peers that wait for this rank.

The engine calls `line_of` on its own thread when a peer asks (see "Watcher" in
csrc/core/watcher.h). The text has the line of the user's program (`dure.trace.frames`), and also
the innermost frame if it is another one.
"""

from __future__ import annotations

import sys
import threading
from types import FrameType

from dure.trace.frames import user_frame

__all__ = ["line_of"]


def line_of(ident: int) -> str:
    """Return the current line of thread `ident`, or of the main thread if that one has ended."""
    # Python has no other way to see the stack of another thread.
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.get(ident) or frames.get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    stack: list[FrameType] = []
    at: FrameType | None = frame
    while at is not None:
        stack.append(at)
        at = at.f_back
    user = user_frame([each.f_code.co_filename for each in stack])
    if not user:  # None, or the innermost
        return _text(frame)
    return f"{_text(stack[user])} (inside {_text(frame)})"


def _text(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
