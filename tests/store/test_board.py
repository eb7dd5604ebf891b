"""What a store decides, on a clock of its own: by hand, and against a model written by hand."""

from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.errors import StoreError
from dure.store.board import Board
from dure.store.shared import EVERYTHING
from dure.store.wire import Reply, Request

A, B, C = b"a", b"b", b"c"


def test_a_write_that_is_asked_again_gets_its_first_answer() -> None:
    board = Board()
    add = Request("add", ("n",), amount=1, once=b"1")
    assert board.handle(A, add, 0.0) == [(A, Reply("ok", 1))]
    board.leave(A)
    assert board.handle(B, add, 0.0) == [(B, Reply("ok", 1))]
    assert board.handle(A, add, 0.0) == [(A, Reply("ok", 1))]  # the first one, read late
    for number in range(5000):
        board.handle(b"%d" % number, Request("set", ("k",), (b"",), once=b"%d!" % number), 0.0)
        board.leave(b"%d" % number)
    assert len(board._done) < 1100  # what is kept of clients that left is bounded
    assert board.data == {"n": b"1", "k": b""}


every_write = pytest.mark.parametrize(
    "write",
    [
        Request("set", ("k",), (b"1",)),
        Request("add", ("k",), amount=1),
        Request("append", ("k",), (b"1",)),
        Request("compare_set", ("k",), (b"", b"1")),
    ],
)


@every_write
def test_every_kind_of_write_wakes_those_who_are_still_there(write: Request) -> None:
    board = Board()
    board.handle(A, Request("get", ("k",), timeout_s=5), 0.0)
    board.handle(C, Request("get", ("k",), timeout_s=5), 0.0)
    board.leave(C)
    answers = board.handle(B, write, 0.0)
    assert [client for client, _ in answers] == [B, A]
    assert answers[1][1] == Reply("ok", values=(b"1",))


@every_write
def test_a_key_that_is_written_has_no_lease_afterwards(write: Request) -> None:
    board = Board()
    board.handle(A, Request("hold", ("k",), (b"",), timeout_s=3.0), 0.0)
    board.handle(A, write, 1.0)
    board.expire(100.0)
    assert board.data == {"k": b"1"}
    assert ask(board, A, Request("renew", ("k",)), 100.0).number == 0


def test_a_lease_ends_its_time_after_the_last_renewal() -> None:
    board, renew = Board(), Request("renew", ("k",))
    board.handle(A, Request("hold", ("k",), (b"",), timeout_s=3.0), 0.0)
    assert ask(board, A, renew, 2.0).number == 1
    assert board.next_deadline() == 5.0
    board.expire(4.9)
    assert board.data == {"k": b""}
    board.expire(5.0)
    assert board.data == {}
    assert ask(board, A, renew, 5.0).number == 0


def test_append_makes_no_value_that_set_would_refuse(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("dure.store.board.MAX_VALUE_BYTES", 3)
    board = Board()
    board.handle(A, Request("append", ("k",), (b"123",)), 0.0)
    with pytest.raises(StoreError):
        board.handle(A, Request("append", ("k",), (b"4",)), 0.0)
    assert board.data == {"k": b"123"}


def test_a_look_at_changes_that_are_forgotten_is_answered_at_once() -> None:
    board = Board()
    for number in range(3000):
        board.handle(A, Request("set", ("k",), (b"%d" % number,)), 0.0)
    look = Request("look", ("other/",), amount=5, timeout_s=9)
    assert board.handle(B, look, 0.0) == [(B, Reply("ok", 3000))]
    recent = Request("look", ("other/",), amount=2999, timeout_s=9)
    assert board.handle(B, recent, 0.0) == []
    assert board.expire(9.0) == [(B, Reply("ok", 3000))]
    assert board.next_deadline() is None


def test_a_look_waits_for_changes_below_its_prefix_only() -> None:
    board = Board()
    assert board.handle(A, Request("look", ("p/",), amount=0, timeout_s=9), 0.0) == []
    assert board.handle(B, Request("set", ("q/x",), (b"0",)), 0.0) == [(B, Reply("ok"))]
    answers = board.handle(B, Request("set", ("p/x",), (b"1",)), 0.0)
    assert answers == [(B, Reply("ok")), (A, Reply("ok", 2, (b"1",), ("p/x",)))]


KEYS = st.sampled_from(["p/a", "p/b", "q"])
VALUES = st.none() | st.sampled_from([b"", b"1"])
MAPS = st.dictionaries(KEYS, VALUES, max_size=2)
STEPS = st.lists(
    st.one_of(
        st.tuples(st.just("transact"), MAPS, MAPS),
        st.tuples(st.just("hold"), KEYS, st.integers(1, 3)),
        st.tuples(st.just("renew"), KEYS),
        st.tuples(st.just("release"), KEYS),
        st.tuples(st.just("sleep"), st.integers(1, 2)),
    ),
    max_size=25,
)


@settings(max_examples=200)
@given(STEPS)
def test_any_sequence_of_steps_equals_the_model(steps: list[tuple[Any, ...]]) -> None:
    """The model: a dictionary of (value, when it ends); a watcher that must miss nothing."""
    board, now = Board(), 0.0
    model: dict[str, tuple[bytes, float]] = {}
    seen: dict[str, bytes] = {}
    since = ask(board, A, Request("look", ("p/",), amount=EVERYTHING), now).number
    assert board.handle(B, Request("look", ("p/",), amount=since, timeout_s=999), now) == []
    for step, *args in steps:
        before = {name: value for name, (value, _) in model.items() if name.startswith("p/")}
        answers: list[tuple[bytes, Reply]] = []
        if step == "sleep":
            now += args[0]
            answers = board.expire(now)
            model = {name: held for name, held in model.items() if held[1] > now}
        elif step == "transact":
            expect, write = args
            met = all(model.get(k, (None,))[0] == v for k, v in expect.items())
            answers = board.handle(A, Request("transact", expect=expect, write=write), now)
            assert answers.pop(0)[1].number == met
            for name, value in write.items() if met else ():
                model.pop(name, None)
                if value is not None:
                    model[name] = value, float("inf")
        elif step == "hold":
            name, ttl = args
            answers = board.handle(A, Request("hold", (name,), (b"h",), timeout_s=ttl), now)
            answers.pop(0)
            model[name] = b"h", now + ttl
            ttls[name] = ttl
        elif step == "renew":
            leased = args[0] in model and model[args[0]][1] < float("inf")
            answers = board.handle(A, Request("renew", (args[0],)), now)
            assert answers.pop(0)[1].number == leased
            if leased:
                model[args[0]] = model[args[0]][0], now + ttls[args[0]]
        else:
            answers = board.handle(A, Request("release", (args[0],)), now)
            answers.pop(0)
            model.pop(args[0], None)
        for who, reply in answers:
            assert who == B
            seen = dict(zip(reply.names, reply.values, strict=True))
            again = Request("look", ("p/",), amount=reply.number, timeout_s=999)
            assert board.handle(B, again, now) == []
        after = {name: value for name, (value, _) in model.items() if name.startswith("p/")}
        assert seen == after
        assert answers or before == after
        assert board.data == {name: value for name, (value, _) in model.items()}


ttls: dict[str, float] = {}


def ask(board: Board, who: bytes, request: Request, now: float) -> Reply:
    return board.handle(who, request, now)[0][1]
