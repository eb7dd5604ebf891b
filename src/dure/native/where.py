"""Where a thread of this process is, told from outside: for peers that wait for this rank in vain.

The engine calls `line_of` on a thread of its own when a peer asks (see "Watcher" in
csrc/core/watcher.h). What a user wants to read is a line of their program, so frames of Dure, torch
and Python's own library are passed over; the innermost of all is named, too, if it is another.
"""

from __future__ import annotations

import sys
import sysconfig
import threading
from pathlib import Path
from types import FrameType

__all__ = ["line_of", "user_frame"]

_OURS = str(Path(__file__).parents[1]) + "/"
_STANDARD = sysconfig.get_path("stdlib") + "/"
_TORCH = ("/site-packages/torch/", "/dist-packages/torch/")


def line_of(ident: int) -> str:
    """Say where thread `ident` (`threading.get_ident`) is; the main thread, if it has ended."""
    # Python has no other way to see the stack of another thread.
    frames = sys._current_frames()  # pyright: ignore[reportPrivateUsage]
    frame = frames.get(ident) or frames.get(threading.main_thread().ident or 0)
    if frame is None:
        return ""
    user = user_frame(frame)
    if user is None or user is frame:
        return _text(frame)
    return f"{_text(user)} (inside {_text(frame)})"


def user_frame(frame: FrameType) -> FrameType | None:
    """Return the innermost frame of the user's program; None if there is none."""
    at: FrameType | None = frame
    while at is not None and _is_library(at.f_code.co_filename):
        at = at.f_back
    return at


def _is_library(path: str) -> bool:
    if path.startswith((_OURS, "<frozen")) or any(part in path for part in _TORCH):
        return True
    return path.startswith(_STANDARD) and "-packages/" not in path


def _text(frame: FrameType) -> str:
    code = frame.f_code
    return f"{code.co_filename}:{frame.f_lineno} in {code.co_qualname}"
