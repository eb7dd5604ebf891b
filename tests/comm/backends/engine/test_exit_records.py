"""What a rank writes into its group's store when it leaves."""

from __future__ import annotations

import threading
from datetime import timedelta

import pytest

import dure
from dure.comm.backends.engine.work import ExitRecords


def test_a_process_that_ends_and_can_start_no_thread_writes_its_record(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    store = dure.HashStore(timedelta(seconds=40))
    asked: list[float] = []
    append = store.append

    def noted(key: str, value: str) -> None:
        asked.append(store.timeout.total_seconds())
        append(key, value)

    def refuse(thread: threading.Thread) -> None:
        raise RuntimeError("can't create new thread at interpreter shutdown")  # Python 3.12's words

    with monkeypatch.context() as patch:
        patch.setattr(threading.Thread, "start", refuse)
        patch.setattr(store, "append", noted)
        ExitRecords(store, rank=1, size=3).publish("left")
    assert asked == [0.3]  # it must not wait 40 s for a store that has gone
    assert store.timeout == timedelta(seconds=40)
    assert ExitRecords(store, rank=0, size=3).ask(timed_out=False) == ((1,), ())
