"""The ordered queue: its order, what becomes of errors, and its end."""

from __future__ import annotations

import threading

import pytest

from dure.comm.backends.queue import OrderedQueue
from dure.comm.backends.request import Request
from dure.errors import Aborted, CommTimeout, DureError, InternalError
from tests.waiting import PATIENCE_S, until


@pytest.fixture
def queue():
    made = OrderedQueue("test-queue", lambda: Aborted("the group was left"))
    yield made
    made.stop()


class _Held:
    """An action that runs until it is let go."""

    def __init__(self) -> None:
        self.begun, self.go = threading.Event(), threading.Event()

    def __call__(self) -> None:
        self.begun.set()
        assert self.go.wait(PATIENCE_S)


def _raising(error: BaseException):
    def action() -> None:
        raise error

    return action


@pytest.mark.parametrize("error", [MemoryError("no scratch"), RuntimeError("ours"), SystemExit(1)])
def test_whatever_an_action_raises_ends_its_request_and_the_thread_goes_on(queue, error):
    failed = queue.run(_raising(error), True)
    after = queue.run(lambda: None, True)
    for _ in range(2):
        with pytest.raises(InternalError) as info:
            failed.wait(PATIENCE_S)
        assert info.value.__cause__ is error
    assert after.wait(PATIENCE_S)


def test_a_synchronous_call_runs_behind_those_before_it(queue):
    held, order = _Held(), []
    queue.run(held, True)
    assert held.begun.wait(PATIENCE_S)
    queue.run(lambda: order.append("first"), True)
    caller = threading.Thread(target=queue.run, args=(lambda: order.append("second"), False))
    caller.start()
    until(lambda: order or len(queue._entries) == 2)
    held.go.set()
    caller.join(PATIENCE_S)
    assert order == ["first", "second"]


def test_stopping_ends_what_has_not_begun_and_refuses_what_comes():
    queue = OrderedQueue("test-queue", lambda: Aborted("the group was left"))
    held = _Held()
    running, waiting = queue.run(held, True), queue.run(lambda: None, True)
    assert running is not None
    assert waiting is not None
    assert held.begun.wait(PATIENCE_S)
    stopping = threading.Thread(target=queue.stop)
    stopping.start()
    with pytest.raises(Aborted):
        waiting.wait(PATIENCE_S)
    held.go.set()
    stopping.join(PATIENCE_S)
    assert running.wait(PATIENCE_S)
    with pytest.raises(DureError):
        queue.run(lambda: None, True)


@pytest.mark.parametrize("error", [None, CommTimeout("late")])
def test_who_waits_for_a_queued_operation_waits_for_what_it_has_started(queue, error):
    inner = Request()
    request = queue.run(lambda: inner, True)
    assert not request.wait(0.01)
    inner.end(error)
    if error is None:
        assert request.wait(PATIENCE_S)
    else:
        with pytest.raises(CommTimeout):
            request.wait(PATIENCE_S)
    assert request.done()


def test_an_error_of_ours_is_raised_as_it_is(queue):
    error = CommTimeout("late")
    request = queue.run(_raising(error), True)
    with pytest.raises(CommTimeout) as info:
        request.wait(PATIENCE_S)
    assert info.value is error
