"""What a store decides, without a server; `test_base_contract` has the rest."""

import pytest

from dure.errors import StoreError
from dure.store.board import Board
from dure.store.wire import Reply, StoreRequest

A, B, C = b"a", b"b", b"c"


def test_a_write_that_is_asked_again_gets_its_first_answer() -> None:
    board = Board()
    add = StoreRequest("add", ("n",), amount=1, once=b"1")
    assert board.handle(A, add, 0.0) == [(A, Reply("ok", 1))]
    board.leave(A)
    assert board.handle(B, add, 0.0) == [(B, Reply("ok", 1))]
    assert board.handle(A, add, 0.0) == [(A, Reply("ok", 1))]  # the first one, read late
    for number in range(5000):
        board.handle(b"%d" % number, StoreRequest("set", ("k",), (b"",), once=b"%d!" % number), 0.0)
        board.leave(b"%d" % number)
    assert len(board._done) < 1100  # what is kept of clients that left is bounded
    assert board.data == {"n": b"1", "k": b""}


every_write = pytest.mark.parametrize(
    "write",
    [
        StoreRequest("set", ("k",), (b"1",)),
        StoreRequest("add", ("k",), amount=1),
        StoreRequest("append", ("k",), (b"1",)),
        StoreRequest("compare_set", ("k",), (b"", b"1")),
    ],
)


@every_write
def test_every_kind_of_write_wakes_those_who_are_still_there(write: StoreRequest) -> None:
    board = Board()
    board.handle(A, StoreRequest("get", ("k",), timeout_s=5), 0.0)
    board.handle(C, StoreRequest("get", ("k",), timeout_s=5), 0.0)
    board.leave(C)
    answers = board.handle(B, write, 0.0)
    assert [client for client, _ in answers] == [B, A]
    assert answers[1][1] == Reply("ok", values=(b"1",))


def test_append_makes_no_value_that_set_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dure.store.board.MAX_VALUE_BYTES", 3)
    board = Board()
    board.handle(A, StoreRequest("append", ("k",), (b"123",)), 0.0)
    with pytest.raises(StoreError):
        board.handle(A, StoreRequest("append", ("k",), (b"4",)), 0.0)
    assert board.data == {"k": b"123"}


def test_deadlines_of_requests_that_were_answered_are_not_kept() -> None:
    board = Board()
    waits = StoreRequest("wait", ("never",), timeout_s=1000.0)
    board.handle(A, waits, 0.0)
    for number in range(5000):
        board.handle(B, StoreRequest("get", ("k",), timeout_s=100.0 + number), 0.0)
        assert (B, Reply("ok", values=(b"",))) in board.handle(
            C, StoreRequest("set", ("k",), (b"",)), 0.0
        )
        board.handle(C, StoreRequest("delete", ("k",)), 0.0)
    assert len(board._deadlines) < 100
    assert board.next_deadline() == 1000.0
    assert board.expire(999.0) == []
    assert board.expire(1000.0) == [(A, Reply("timeout", names=("never",)))]
    assert board.next_deadline() is None


def test_the_deadline_of_an_earlier_request_does_not_end_the_next_one() -> None:
    board = Board()
    board.handle(A, StoreRequest("wait", ("k",), timeout_s=1.0), 0.0)
    board.handle(B, StoreRequest("set", ("k",), (b"",)), 0.0)
    board.handle(A, StoreRequest("wait", ("l",), timeout_s=5.0), 0.0)
    assert board.expire(2.0) == []
    assert board.expire(5.0) == [(A, Reply("timeout", names=("l",)))]


def test_a_wait_for_several_keys_ends_when_all_are_there_at_once() -> None:
    board = Board()
    board.handle(A, StoreRequest("wait", ("k", "l"), timeout_s=5.0), 0.0)
    assert board.handle(B, StoreRequest("set", ("k",), (b"",)), 0.0) == [(B, Reply("ok"))]
    assert board.handle(B, StoreRequest("delete", ("k",)), 0.0) == [(B, Reply("ok", 1))]
    assert board.handle(B, StoreRequest("set", ("l",), (b"",)), 0.0) == [(B, Reply("ok"))]
    answers = board.handle(B, StoreRequest("set", ("k",), (b"",)), 0.0)
    assert answers == [(B, Reply("ok")), (A, Reply("ok"))]
