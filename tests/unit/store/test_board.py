"""The server's decisions, without sockets or clocks."""

import pytest

from dure.errors import StoreError
from dure.store.board import Board
from dure.store.wire import Reply, Request

A, B, C = b"a", b"b", b"c"


def test_get_of_a_missing_key_is_answered_by_the_set() -> None:
    board = Board()
    assert board.handle(A, Request("get", ("k",), timeout_s=5), 0.0) == []
    answers = board.handle(B, Request("set", ("k",), (b"v",)), 1.0)
    assert answers == [(B, Reply("ok")), (A, Reply("ok", values=(b"v",)))]
    assert board.next_deadline() is None


def test_parked_requests_end_at_their_own_deadlines() -> None:
    board = Board()
    board.handle(A, Request("wait", ("k", "l"), timeout_s=5), 0.0)
    board.handle(B, Request("wait", ("k",), timeout_s=2), 0.0)
    board.handle(C, Request("set", ("l",), (b"",)), 0.0)
    assert board.next_deadline() == 2.0
    assert board.expire(1.9) == []
    assert board.expire(2.0) == [(B, Reply("timeout", names=("k",)))]
    assert board.next_deadline() == 5.0
    assert board.handle(C, Request("set", ("k",), (b"",)), 3.0)[1:] == [(A, Reply("ok"))]


def test_a_wait_without_time_is_answered_at_once() -> None:
    answers = Board().handle(A, Request("wait", ("k",)), 0.0)
    assert answers == [(A, Reply("timeout", names=("k",)))]


@pytest.mark.parametrize(
    "write",
    [
        Request("add", ("k",), amount=1),
        Request("append", ("k",), (b"1",)),
        Request("compare_set", ("k",), (b"", b"1")),
    ],
)
def test_every_kind_of_write_wakes(write: Request) -> None:
    board = Board()
    board.handle(A, Request("get", ("k",), timeout_s=5), 0.0)
    assert (A, Reply("ok", values=(b"1",))) in board.handle(B, write, 0.0)


def test_expired_requests_leave_nothing_behind() -> None:
    board = Board()
    for i in range(100):
        board.handle(b"%d" % i, Request("get", (f"k{i}", "l"), timeout_s=1), 0.0)
    assert len(board.expire(1.0)) == 100
    assert not board._waiting
    assert not board._parked


def test_a_client_that_leaves_is_no_longer_waited_for() -> None:
    board = Board()
    board.handle(A, Request("get", ("k", "l"), timeout_s=1), 0.0)
    board.leave(A)
    board.leave(B)
    assert not board._waiting
    assert not board._parked
    assert board.handle(B, Request("set", ("k",), (b"",)), 0.5) == [(B, Reply("ok"))]
    assert board.next_deadline() is None


def test_a_client_asks_one_thing_at_a_time() -> None:
    board = Board()
    board.handle(A, Request("get", ("k",), timeout_s=1), 0.0)
    with pytest.raises(StoreError):
        board.handle(A, Request("count"), 0.0)
    board.expire(1.0)
    assert board.handle(A, Request("count"), 1.0) == [(A, Reply("ok", 0))]


def test_append_makes_no_value_that_set_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dure.store.values.MAX_VALUE_BYTES", 3)
    board = Board()
    board.handle(A, Request("append", ("k",), (b"123",)), 0.0)
    with pytest.raises(StoreError):
        board.handle(A, Request("append", ("k",), (b"4",)), 0.0)
    assert board.data == {"k": b"123"}


@pytest.mark.parametrize(
    "request_",
    [
        Request("set", ("k",)),
        Request("add", ("k", "l"), amount=1),
        Request("append", ("k",), ()),
        Request("compare_set", ("k",), (b"",)),
    ],
)
def test_requests_that_make_no_sense_are_refused(request_: Request) -> None:
    board = Board()
    with pytest.raises(StoreError):
        board.handle(A, request_, 0.0)
    assert board.data == {}
