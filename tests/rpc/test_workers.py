"""Threads that receive and run: as many calls as there are slots, and any depth of waiting."""

from __future__ import annotations

import ctypes
import os
import threading
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path

import pytest
import torch

from dure import native
from dure.rpc.message import Completion
from dure.rpc.workers import Workers
from tests.waiting import PATIENCE_S, until

pytestmark = pytest.mark.needs("engine")


def counts(workers: Workers) -> tuple[int, int, int]:
    """Return how many calls run, how many wait, and how many threads there are."""
    with workers._lock:
        return workers._running, len(workers._queue), workers._threads


@contextmanager
def serving(
    functions: dict[bytes, Callable[[Workers], None]], slots: int, *gates: threading.Event
) -> Iterator[tuple[Workers, native.Inbox]]:
    """Run functions by name; `gates` are opened at the end, also of a test that fails."""
    inbox = native.Inbox()
    made = Workers(inbox, lambda message: partial(functions[message], made), slots)
    made.start()
    try:
        yield made, inbox
    finally:
        for gate in gates:
            gate.set()
        made.close()
        made.join()
        assert counts(made)[2] == 0


def test_no_more_run_than_there_are_slots_and_all_run() -> None:
    go, lock, most, done = threading.Event(), threading.Lock(), [0, 0], list[int]()

    def call(_: Workers) -> None:
        with lock:
            most[0] += 1
            most[1] = max(most)
        go.wait()
        with lock:
            most[0] -= 1
            done.append(1)

    with serving({b"call": call}, 3, go) as (workers, inbox):
        for _ in range(10):
            inbox.post(b"call")
        until(lambda: sum(counts(workers)[:2]) == 10, "all calls to come")
        assert counts(workers)[:2] == (3, 7)
        go.set()
        until(lambda: counts(workers)[:2] == (0, 0), "all calls to end")
        assert (len(done), most) == (10, [0, 3])


def test_an_error_that_nobody_caught_ends_no_thread(caplog: pytest.LogCaptureFixture) -> None:
    ran = threading.Event()

    def bad(_: Workers) -> None:
        raise ValueError("nobody caught it")

    with serving({b"bad": bad, b"good": lambda _: ran.set()}, slots=1) as (_, inbox):
        inbox.post(b"bad")
        inbox.post(b"good")
        assert ran.wait(PATIENCE_S)
        until(lambda: "nobody caught it" in caplog.text)  # another thread may log it later


def test_calls_compute_with_as_many_threads_as_the_program_has_set() -> None:
    mapped = Path("/proc/self/maps").read_text().split()
    found = [word for word in mapped if "/torch/" in word and "/libgomp" in word]
    if not found:
        pytest.skip("needs GNU OpenMP in torch: not loaded")
    seen = list[int]()  # torch's own answer would set what is asked for

    def call(_: Workers) -> None:
        seen.append(ctypes.CDLL(found[0]).omp_get_max_threads())

    before, wanted = torch.get_num_threads(), (os.cpu_count() or 1) + 1
    torch.set_num_threads(wanted)
    try:
        with serving({b"call": call}, slots=1) as (_, inbox):
            inbox.post(b"call")
            until(lambda: bool(seen))
    finally:
        torch.set_num_threads(before)
    assert seen == [wanted]


def test_what_completes_a_future_needs_no_slot() -> None:
    """A call may wait for it in a way that gives its slot to nobody."""
    done, went_on = threading.Event(), threading.Event()

    def call(_: Workers) -> None:
        if done.wait(PATIENCE_S):
            went_on.set()

    with serving({b"call": call}, slots=1) as (workers, inbox):
        inbox.post(b"call")
        until(lambda: counts(workers)[0] == 1)
        inbox.post(b"call")
        until(lambda: counts(workers)[1] == 1)
        workers.submit(Completion(done.set))
        assert went_on.wait(PATIENCE_S)
        until(lambda: counts(workers)[:2] == (0, 0))


@pytest.mark.parametrize("asks_again", [True, False], ids=["has messages to read", "gives up"])
def test_a_message_left_without_a_ring_is_read_while_its_sender_has_other_things_to_do(
    asks_again: bool,
) -> None:
    process = native.heap_peer(*native.heap_identity())
    assert process is not None
    callee, caller = native.Inbox(), native.Inbox()
    way = native.Outbox.claim(process, callee.offset)
    back = native.Outbox.claim(process, caller.offset)
    assert way is not None and back is not None
    left, go, read = threading.Event(), threading.Event(), threading.Event()

    def serve() -> None:
        while message := callee.next(None, PATIENCE_S):
            if message == b"long":
                assert way.send(b"second", True)  # soon after a thread left with a message
                left.set()
                assert go.wait(PATIENCE_S)
            elif message == b"second":
                read.set()

    threads = [threading.Thread(target=serve) for _ in range(2)]
    for thread in threads:
        thread.start()
    quiet = 0
    try:
        for _ in range(20):
            time.sleep(0.005)  # both sleep
            assert way.send(b"long") and left.wait(PATIENCE_S)
            if not read.wait(0.01):
                quiet += 1
                if asks_again:
                    assert back.send(b"other")
                    assert caller.next(native.Ticket(), PATIENCE_S, way) == b"other"
                else:
                    way.remind()
            assert read.wait(PATIENCE_S / 4)
            go.set()
            time.sleep(0.001)
            for event in (left, go, read):
                event.clear()
    finally:
        go.set()
        callee.close()
        for thread in threads:
            thread.join()
    assert quiet > 0
