"""Fuzzing of everything that reads bytes which somebody else wrote.

Each target takes bytes, or a history made of them, and must end in a value or in the one error that
its callers handle. CI tries some hundred inputs each; `make drill` tries a hundred times as many.

Inputs that failed once lie in `tests/findings`, as msgpack, and are tried in every run.
"""

import contextlib
import math
import tempfile
from collections.abc import Callable
from datetime import timedelta
from pathlib import Path
from typing import Any, get_args

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from dure.errors import StoreError
from dure.launch.agent.messages import read_message
from dure.launch.ranks.report import ReportReader
from dure.launch.show.summary import summary
from dure.launch.spec import Exit, JobResult, RankResult
from dure.store import FileStore, JobKey
from dure.store.board import Board
from dure.store.etcd_gateway import parsed
from dure.store.key import read_key_file
from dure.store.wire import Op, StoreRequest, pack, read_reply, read_request
from tests.waiting import PATIENCE_S

QUICK, LONG = 60, 10_000
TIMEOUT = timedelta(seconds=PATIENCE_S)
FINDINGS = Path(__file__).parent.parent / "findings"

some_bytes = st.one_of(
    st.binary(max_size=200),
    # msgpack of anything: gets further than noise
    st.recursive(
        st.none()
        | st.booleans()
        | st.integers(-(2**63), 2**64 - 1)
        | st.floats()
        | st.text()
        | st.binary(),
        lambda inner: st.lists(inner, max_size=4) | st.dictionaries(st.text(), inner, max_size=3),
        max_leaves=8,
    ).map(msgspec.msgpack.encode),
    st.tuples(
        st.sampled_from(["set", "get", "wait", "add", "append", "compare_set", "joined", "lost"]),
        st.lists(st.text(max_size=3), max_size=3),
        st.lists(st.binary(max_size=3), max_size=3),
        st.integers(-(2**63), 2**64 - 1),
        st.floats(),
    ).map(msgspec.msgpack.encode),
)

UNREADABLE = (msgspec.DecodeError, UnicodeDecodeError)

keys = st.lists(st.sampled_from("abc"), max_size=3).map(tuple)
requests = st.builds(
    StoreRequest,
    op=st.sampled_from(get_args(Op)),
    keys=keys,
    values=st.lists(st.sampled_from([b"", b"1", b"x"]), max_size=3).map(tuple),
    amount=st.integers(-(2**63), 2**63 - 1),
    timeout_s=st.floats(0, 1e9),
)
clients = st.sampled_from([b"A", b"B", b"C"])


def a_request(data: bytes) -> None:
    with contextlib.suppress(*UNREADABLE):
        request = read_request(data)
        assert not math.isnan(request.timeout_s)
        assert read_request(pack(request)) == request


def a_reply(data: bytes) -> None:
    with contextlib.suppress(*UNREADABLE):
        pack(read_reply(data))


def an_event(data: bytes) -> None:
    with contextlib.suppress(*UNREADABLE):
        read_message(data)


def an_etcd_answer(data: bytes) -> None:
    with contextlib.suppress(StoreError):
        assert isinstance(parsed(data), dict)


def a_key_file(data: bytes) -> None:
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "key"
        path.touch(0o600)
        path.write_bytes(data)
        with contextlib.suppress(StoreError):
            assert JobKey(read_key_file(path, 33)).raw == data


def a_report(data: bytes) -> None:
    """What a program writes into its report pipe, and the summary that is made of it."""
    texts = [data, b"\n{" + data + b"}\n"]
    texts += [
        b'\n{"crash": {"type": "E", "message": "m", "traceback": ',
        data + b"}}\n",
        b'  File "' + data + b'", line ' + b"9" * 5000 + b" in f\n",
    ]
    reader = ReportReader()
    for text in texts:
        reader.feed(text)
        reader.feed(b"\nStack (most recent call first):\n")
    rank = RankResult(
        rank=0, host="h", pid=1, exit=Exit(code=1), crash=reader.crash, stack=reader.stack
    )
    for first in (rank, None):
        result = JobResult(exit_code=1, ranks=(rank,), elapsed_s=0.0, first_failure=first)
        assert all(isinstance(text, str) for text in summary(result))


def a_store_file(data: bytes) -> None:
    """The file store's log: noise; and, after its head, lines that are well formed but wrong."""
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder) / "store"
        store = FileStore(path, timeout=TIMEOUT)
        store.set("k", "v")
        whole = path.read_bytes()
        json = msgspec.json.encode(data)
        with contextlib.suppress(*UNREADABLE, TypeError):  # JSON has no form for some values
            json = msgspec.json.encode(msgspec.msgpack.decode(data))
        odd = [b'[["set",["\x80"],["eA=="]]]', data, json, b"[%b]" % json, b"[null,%b]" % json]
        for content in (
            *(whole + line + b"\n" for line in odd),
            data,
            whole[: len(data) % len(whole)],
        ):
            path.write_bytes(content)
            with contextlib.suppress(StoreError):
                other = FileStore(path, timeout=TIMEOUT)
                other.set("k", "v")
                other.close()
        store.close()


TARGETS = [
    a_request,
    a_reply,
    an_event,
    an_etcd_answer,
    a_key_file,
    a_report,
    a_store_file,
]


AMOUNTS = [
    QUICK,
    pytest.param(LONG, marks=[pytest.mark.slow, pytest.mark.timeout(900)]),
]


def fuzz(target: Callable[..., None], inputs: st.SearchStrategy, kind: Any, examples: int) -> None:
    """Try what was found before, and then new inputs."""
    folder = FINDINGS / ("bytes" if kind is bytes else "histories")
    for finding in sorted(folder.iterdir()):
        target(msgspec.msgpack.decode(finding.read_bytes(), type=kind))
    settings(max_examples=examples)(given(inputs)(target))()


@pytest.mark.parametrize("examples", AMOUNTS)
@pytest.mark.parametrize("target", TARGETS)
def test_bytes_of_others_end_in_a_value_or_the_right_error(
    target: Callable[[bytes], None], examples: int
) -> None:
    fuzz(target, some_bytes, bytes, examples // (4 if target is a_store_file else 1))


History = tuple[list[tuple[bytes, StoreRequest, float]], list[bytes]]


def a_history(data: History) -> None:
    """Whatever clients ask: each gets at most one answer to each request, and nothing stays."""
    history, leaving = data
    board, now = Board(), 0.0
    asked: dict[bytes, int] = {}
    answered: dict[bytes, int] = {}

    def count(answers: list[tuple[bytes, object]]) -> None:
        for client, _ in answers:
            answered[client] = answered.get(client, 0) + 1

    for client, request, pause in history:
        now += pause
        asked[client] = asked.get(client, 0) + 1
        try:
            count([*board.handle(client, request, now)])
        except StoreError:
            answered[client] = answered.get(client, 0) + 1
        count([*board.expire(now)])
        waiting = len(board._parked)
        assert sum(asked.values()) == sum(answered.values()) + waiting
        assert all(answered.get(c, 0) in (n, n - 1) for c, n in asked.items())
        due = board.next_deadline()
        assert (due is None) == (waiting == 0)
    for client in leaving:
        board.leave(client)
    board.expire(math.inf)
    assert not board._parked
    assert not board._waiting
    assert board.next_deadline() is None


histories = st.lists(st.tuples(clients, requests, st.floats(0, 1e6)), max_size=40)


@pytest.mark.parametrize("examples", AMOUNTS)
def test_the_board_answers_everybody_once(examples: int) -> None:
    fuzz(a_history, st.tuples(histories, st.lists(clients, max_size=3)), History, examples)


@pytest.mark.parametrize("depth", [10_000, 1_000_000])
def test_deep_nesting_ends_in_the_right_error(depth: int) -> None:
    a_request(b"\x91" * depth)
    an_event(b"\x91" * depth)
    a_report(b'{"type":' + b"[" * depth)
