"""Where a thread is, seen from another."""

from __future__ import annotations

import threading
import types

from dure import errors
from dure.native.where import line_of, user_frame
from tests.waiting import PATIENCE_S


def _park(inside: threading.Event, go: threading.Event) -> None:
    inside.set()
    go.wait()  # a library's frame is the innermost


def test_line_of_a_thread_is_that_of_its_own_program():
    inside, go = threading.Event(), threading.Event()
    thread = threading.Thread(target=_park, args=(inside, go))
    thread.start()
    try:
        assert inside.wait(PATIENCE_S)
        told = line_of(thread.ident or 0)
    finally:
        go.set()
        thread.join()
    own, _, inner = told.partition(" (inside ")
    assert own == f"{__file__}:{_park.__code__.co_firstlineno + 2} in _park"
    assert "threading.py" in inner


def test_line_of_a_thread_that_is_no_more_is_the_main_threads():
    thread = threading.Thread(target=int)
    thread.start()
    thread.join()
    assert __file__ in line_of(thread.ident or 0)


def test_frames_of_a_library_alone_have_no_user():
    frame = types.SimpleNamespace(
        f_code=types.SimpleNamespace(co_filename=errors.__file__), f_back=None
    )
    assert user_frame(frame) is None  # pyright: ignore[reportArgumentType]
