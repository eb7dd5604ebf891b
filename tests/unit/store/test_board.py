"""The server's decisions, without sockets or clocks; see also `test_shared`, and the fuzzing."""

import pytest

from dure.errors import StoreError
from dure.store.board import Board
from dure.store.wire import Reply, Request

A, B, C = b"a", b"b", b"c"


def test_parked_requests_end_at_their_own_deadlines() -> None:
    board = Board()
    board.handle(A, Request("wait", ("k", "l"), timeout_s=5), 0.0)
    board.handle(B, Request("get", ("k",), timeout_s=2), 0.0)
    board.handle(C, Request("set", ("l",), (b"",)), 0.0)
    assert board.next_deadline() == 2.0
    assert board.expire(1.9) == []
    assert board.expire(2.0) == [(B, Reply("timeout", names=("k",)))]
    assert board.next_deadline() == 5.0
    with pytest.raises(StoreError):
        board.handle(A, Request("count"), 2.0)  # one thing at a time
    assert board.handle(C, Request("set", ("k",), (b"",)), 3.0)[1:] == [(A, Reply("ok"))]
    assert board.next_deadline() is None


@pytest.mark.parametrize(
    "write",
    [
        Request("set", ("k",), (b"1",)),
        Request("add", ("k",), amount=1),
        Request("append", ("k",), (b"1",)),
        Request("compare_set", ("k",), (b"", b"1")),
    ],
)
def test_every_kind_of_write_wakes_those_who_are_still_there(write: Request) -> None:
    board = Board()
    board.handle(A, Request("get", ("k",), timeout_s=5), 0.0)
    board.handle(C, Request("get", ("k",), timeout_s=5), 0.0)
    board.leave(C)
    answers = board.handle(B, write, 0.0)
    assert [client for client, _ in answers] == [B, A]
    assert answers[1][1] == Reply("ok", values=(b"1",))


def test_append_makes_no_value_that_set_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dure.store.board.MAX_VALUE_BYTES", 3)
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
        Request("hold", ("k",)),
        Request("look", ("k", "l")),
    ],
)
def test_requests_that_make_no_sense_are_refused(request_: Request) -> None:
    board = Board()
    with pytest.raises(StoreError):
        board.handle(A, request_, 0.0)
    assert board.data == {}
