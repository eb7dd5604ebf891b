"""Threads that wait for operations and set futures."""

from __future__ import annotations

import _thread
import queue
import threading

import pytest
import torch

from dure.comm.futures import Waiters
from tests.waiting import PATIENCE_S, until


def test_waiters_run_jobs_side_by_side_and_reuse_threads():
    waiters, names = Waiters(), []
    first, second = threading.Event(), threading.Event()
    done = [threading.Event(), threading.Event()]

    def job(number: int) -> None:
        names.append(threading.current_thread())
        (second, first)[number].set()
        (first, second)[number].wait(
            PATIENCE_S
        )  # each needs the other: one thread would be too few
        done[number].set()

    for number in (0, 1):
        waiters.run(lambda number=number: job(number))
    assert all(event.wait(PATIENCE_S) for event in done)

    def reuses_a_thread() -> bool:
        ran: queue.SimpleQueue[threading.Thread] = queue.SimpleQueue()
        waiters.run(lambda: ran.put(threading.current_thread()))
        return ran.get(timeout=PATIENCE_S) in names

    until(reuses_a_thread, "a job on a thread that has ended another")
    until(lambda: (waiters.close(), not any(t.is_alive() for t in names))[1], "the threads' end")


def test_jobs_run_in_threads_of_the_system_where_threading_was_replaced(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As gevent replaces it: what is started never runs while the program waits in C++."""

    def never(*_: object) -> int:
        return 0

    never.__module__ = "gevent.thread"
    monkeypatch.setattr(_thread, "start_new_thread", never)
    monkeypatch.setattr(threading, "_start_new_thread", never)
    waiters, future = Waiters(), torch.futures.Future[int]()
    waiters.run(lambda: future.set_result(5))
    until(future.done, "the job")
    assert future.wait() == 5
    waiters.close()
