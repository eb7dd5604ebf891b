"""Any exception is answered; what comes back is of its type, or an `RpcError`, and runs nothing."""

from __future__ import annotations

import errno
import sys
from dataclasses import dataclass
from types import ModuleType
from typing import Any

import pytest

from dure.errors import CommTimeout, LaunchError, PeerLost, RpcError
from dure.rpc.allow import Allowed
from dure.rpc.failures import decode, encode
from dure.rpc.names import WorkerInfo
from tests.rpc import served

WORKER = WorkerInfo("worker1", 1)


def travel(error: BaseException, **how: Any) -> Any:
    try:
        raise error
    except BaseException as raised:
        kept = raised
    return decode(encode(kept, WORKER), 1, **how)  # not there, or pytest fails to show `kept`


class Lies(Exception):
    def __getattr__(self, name: str) -> None:
        raise KeyError(name)


class NoText(Exception):
    def __init__(self, text: str = "", why: type[BaseException] = KeyError) -> None:
        super().__init__(text)
        self.why = why

    def __str__(self) -> str:
        raise self.why("no text")


class Exits(Exception):
    def __init__(self, text: str) -> None:
        raise SystemExit(text)


class NoModule(Exception):
    pass


NoModule.__module__ = None  # pyright: ignore


class Hidden(Exception):
    def __getattribute__(self, name: str) -> None:
        raise KeyError(name)


@dataclass(frozen=True)
class Frozen(Exception):
    text: str


class Refuses(Exception):
    remote_traceback = property(lambda self: "its own")


def test_an_exception_comes_back_as_its_type_with_the_trace() -> None:
    error = travel(ValueError("seven"))
    assert type(error) is ValueError
    assert "seven" in str(error)
    assert "worker1" in str(error)
    assert "raise error" in error.remote_traceback
    assert "ValueError: seven" in error.remote_traceback


def test_an_error_of_the_system_keeps_its_number_and_names_the_file() -> None:
    error = travel(travel(FileNotFoundError(errno.ENOENT, "none such", b"a\xff")))
    assert type(error) is FileNotFoundError
    assert error.errno == errno.ENOENT
    assert "none such: b'a\\xff'" in str(error)
    assert "worker1" in str(error)
    assert "raise error" in error.remote_traceback


@pytest.mark.parametrize("kind", [Lies, Frozen, Refuses])
def test_exceptions_that_hinder_come_back_as_they_are(kind: type[Exception]) -> None:
    got = travel(kind("seven"))
    assert type(got) is kind
    assert "seven" in got.args[0]
    assert "raise error" in got.args[0]
    assert got.remote_traceback


@pytest.mark.parametrize("kind", [NoModule, Hidden])
def test_what_cannot_be_found_or_described_is_an_rpc_error(kind: type[Exception]) -> None:
    got = travel(kind("seven"))
    assert type(got) is RpcError
    assert kind.__name__ in str(got)


def test_what_cannot_be_made_of_its_text_is_an_rpc_error() -> None:
    got = travel(UnicodeDecodeError("utf-8", b"x", 0, 1, "seven"))
    assert type(got) is RpcError
    assert "UnicodeDecodeError" in str(got)


@pytest.mark.parametrize("why", [KeyError, SystemExit])
def test_a_text_that_cannot_be_had_is_told(why: type[BaseException]) -> None:
    assert f"its text cannot be had: {why.__name__}" in travel(NoText(why=why)).args[0]


def test_a_type_that_ends_the_process_when_it_is_made_is_an_rpc_error() -> None:
    error = Exits.__new__(Exits)
    got = travel(error)
    assert type(got) is RpcError
    assert "Original exception on remote side was Exits" in str(got)


def test_the_fields_of_our_errors_come_along() -> None:
    lost = travel(travel(PeerLost("gone", peer=2, exit="exit code 5", host="there", fix="Look.")))
    assert (lost.peer, lost.exit, lost.host, lost.pid) == (2, "exit code 5", "there", None)
    late = travel(CommTimeout("late", missing=(1, 3), elapsed_s=0.5))
    assert (late.missing, late.elapsed_s) == ((), 0.5)  # the text names the ranks
    assert travel(LaunchError("failed", report=object())).report is None


@pytest.fixture
def lazy(monkeypatch: pytest.MonkeyPatch) -> list[str]:
    """Put a module among the others that notes what it is asked for."""
    asked: list[str] = []
    module: Any = ModuleType("lazy")
    module.__getattr__ = lambda name: asked.append(name) or ValueError  # pyright: ignore
    monkeypatch.setitem(sys.modules, "lazy", module)
    return asked


def test_looking_for_a_type_imports_nothing(lazy: list[str]) -> None:
    far = type("Error", (Exception,), {"__module__": "lazy"})
    assert type(travel(far("seven"))) is RpcError
    assert [name for name in lazy if not name.startswith("__")] == []


@pytest.mark.parametrize("kind", [ValueError, PeerLost, served.Wrong])
def test_with_a_list_types_on_it_come_back(kind: type[Exception]) -> None:
    assert type(travel(kind("seven"), find=Allowed([served]).find_error)) is kind


@pytest.mark.parametrize("kind", [NoText, served.Wrong])
def test_with_a_list_other_types_do_not(kind: type[Exception]) -> None:
    got = travel(kind("seven"), find=Allowed([served.double]).find_error)
    assert type(got) is RpcError
    assert kind.__name__ in str(got)
