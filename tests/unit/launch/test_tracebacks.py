"""Tracebacks of several ranks: each in one piece, and what they say alike in full only once."""

from __future__ import annotations

from collections.abc import Callable

import pytest

import dure as dist
from dure.errors import Desync
from dure.launch import JobSpec
from dure.launch.ranks import child
from dure.launch.ranks.environment import Round
from dure.launch.show.output import IDLE_S
from dure.launch.show.terminal import Terminal
from dure.launch.show.tracebacks import say_alike
from dure.testing import run_ranks
from dure.trace.frames import is_library

ROUND = Round(hosts=("h",), nprocs=(2,), master_addr="127.0.0.1", master_port=1, store="h:1")
VALUE = b"""before
Traceback (most recent call last):
  File "a.py", line 1, in <module>
    main()
ValueError: one
"""
KEY = VALUE.replace(b"ValueError: one", b"KeyError: 'two'")
DESYNC = b"""Traceback (most recent call last):
  File "a.py", line %d, in step
    call()
dure.errors.Desync: not the same thing (rank %d of 2, group 'world'): rank 0: x; rank 1: y.
Flight record: /t/rank%d.json
"""
Show = Callable[..., list[str]]


@pytest.fixture
def show(capfd: pytest.CaptureFixture[str]) -> Show:
    def shown(*texts: bytes, cut: int | None = None) -> list[str]:
        """Let rank i write the i-th text, in two pieces if `cut` says where, and return stderr."""
        terminal = Terminal(JobSpec(program="p", nproc=2))
        terminal.begin(ROUND)
        readers = [terminal.reader(rank, "stderr") for rank in range(len(texts))]
        for part in (slice(cut), slice(cut, None)) if cut else (slice(None),):
            for reader, text in zip(readers, texts, strict=True):
                terminal.received(reader, text[part], 0.0)
        terminal.finish()
        return capfd.readouterr().err.splitlines()

    return shown


def test_different_tracebacks_are_not_shown_under_one_header(show: Show) -> None:
    value, key = VALUE.decode().splitlines()[1:], KEY.decode().splitlines()[1:]
    expected = [
        "[0-1] before",
        *(f"[0] {line}" for line in value),
        *(f"[1] {line}" for line in key),
    ]
    assert show(VALUE, KEY) == expected
    assert show(VALUE, KEY, cut=70) == expected


def test_equal_tracebacks_are_shown_once(show: Show) -> None:
    assert show(VALUE, VALUE) == [f"[0-1] {line}" for line in VALUE.decode().splitlines()]


def test_the_same_error_of_dure_is_told_once_and_where_the_other_rank_was(show: Show) -> None:
    lines = show(DESYNC % (5, 0, 0), DESYNC % (9, 1, 1))
    first = [f"[0] {line}" for line in (DESYNC % (5, 0, 0)).decode().splitlines()]
    assert lines == [*first, "[1] the same Desync as on rank 0, here at a.py:9"]


def test_traceback_without_an_end_is_shown_after_a_while() -> None:
    terminal = Terminal(JobSpec(program="p", nproc=2))
    terminal.begin(ROUND)
    reader = terminal.reader(0, "stderr")
    terminal.received(reader, b"Traceback (most recent call last):\n  File\n", 5.0)
    assert terminal.wake_at == 5.0 + IDLE_S
    terminal.tick(5.0 + IDLE_S)
    assert terminal.wake_at != 5.0 + IDLE_S  # it has left for the folder
    terminal.finish()


@pytest.mark.parametrize(
    ("one", "other", "alike"),
    [
        ("lost (rank 0 of 4, group 'g') after 1.25 s", "lost (rank 3 of 4, g) after 0.5 s", True),
        ("rank 0 is gone", "rank 1 is gone", False),
        ("E: 3 of 4", "E: 3 of 5", False),
    ],
)
def test_ranks_say_alike_what_differs_only_in_who_speaks(one: str, other: str, alike: bool) -> None:
    assert say_alike(one, other) == alike


def raised() -> BaseException:
    namespace: dict[str, object] = {}
    code = "def call(fail):\n    fail()\n"
    exec(compile(code, "/home/me/train.py", "exec"), namespace)
    library: dict[str, object] = {"Desync": Desync}
    code = "def fail():\n    raise Desync('not the same')\n"
    exec(compile(code, f"{child._DURE}comm/x.py", "exec"), library)
    try:
        namespace["call"](library["fail"])  # pyright: ignore[reportCallIssue]
    except Desync as error:
        return error
    raise AssertionError


def test_error_of_dure_ends_with_the_users_line(monkeypatch: pytest.MonkeyPatch) -> None:
    error = raised()
    assert error.__traceback__ is not None
    error.__traceback__ = error.__traceback__.tb_next  # this file's own frame
    text = child._formatted(error)
    assert text.splitlines()[1] == '  File "/home/me/train.py", line 2, in call'
    assert "comm/x.py" not in text
    monkeypatch.setenv("DURE_TRACEBACK", "full")
    assert "comm/x.py" in child._formatted(error)


def test_errors_that_come_of_being_a_rank_are_explained(monkeypatch: pytest.MonkeyPatch) -> None:
    torchs = ValueError("Default process group has not been initialized, please make sure to ...")
    assert child._hint(torchs) == ""  # there is no group of Dure's either

    def body(rank: int) -> str:
        dist.barrier()
        return child._hint(torchs)

    assert all("import dure" in hint for hint in run_ranks(2, body))
    monkeypatch.setenv("RANK", "0")
    assert child._hint(EOFError("EOF when reading a line")) == ""
    monkeypatch.setenv("RANK", "1")
    assert "rank 0 alone has the standard input" in child._hint(EOFError())


def test_file_below_a_folder_called_dure_is_the_users() -> None:
    assert is_library(child.__file__)
    assert is_library("/usr/lib/python3.12/threading.py")
    assert is_library("/opt/venv/lib/python3.12/site-packages/zmq/sugar/poll.py")
    assert not is_library("/home/me/dure/examples/train.py")
    assert not is_library("/home/me/torch/train.py")
