"""Where a thread is, seen from another."""

from __future__ import annotations

import threading

from dure.native.where import line_of
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
