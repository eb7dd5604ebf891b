"""Exceptions in messages: their type's name, their text and their traceback.

Those of Dure also keep fields that are numbers or texts, and `OSError`s their number.
"""

from __future__ import annotations

import sys
import traceback
from collections.abc import Callable
from contextlib import suppress
from types import ModuleType
from typing import Any

import msgspec

from dure.errors import DureError, RpcError
from dure.rpc.names import WorkerInfo

__all__ = ["decode", "encode", "malformed_message"]

_IN_TEXT = frozenset({"what", "seen", "fix", "remote_traceback"})
"""Fields of Dure's errors that are part of the text, or are set by `decode`."""


class _Failure(msgspec.Struct, array_like=True, frozen=True):
    """An exception, as it is sent."""

    module: str
    name: str
    what: str
    trace: str
    worker: str
    fields: dict[str, bool | int | float | str] = {}
    errno: int | None = None


def malformed_message(sender: int | None, error: BaseException) -> RpcError:
    """Return the error about a message that a worker of this version would not have sent.

    Args:
        sender: The worker that sent it; None if that is not known.
        error: Raised where the message was read.
    """
    source = "an unknown process" if sender is None else f"worker {sender}"
    return RpcError(
        f"a malformed message from {source}",
        peer=sender,
        seen=f"{type(error).__name__}: {error}",
        fix="Run the same version of Dure in all processes, and let only Dure send messages.",
    )


def encode(error: BaseException, worker: WorkerInfo) -> bytes:
    """Return an exception that `worker` has raised as bytes; never fails.

    Of an exception that came from another worker, only the frames are added: its text has the rest.
    If an exception cannot be described, its type is named.
    """
    try:
        return msgspec.msgpack.encode(_describe(error, worker))
    except (Exception, SystemExit) as bad:
        what = f"it cannot be described: {type.__repr__(type(bad))}"
        name = _printable(type.__repr__(type(error)))
        return msgspec.msgpack.encode(_Failure("", name, _printable(what), "", repr(worker)))


def _describe(error: BaseException, worker: WorkerInfo) -> _Failure:
    kind = type(error)
    try:
        what = str(error)
    except (Exception, SystemExit) as bad:
        what = f"its text cannot be had: {type(bad).__name__}"
    fields: dict[str, bool | int | float | str] = {}
    if isinstance(error, DureError):
        own = vars(error).items()
        fields = {
            name: _printable(value) if type(value) is str else value
            for name, value in own
            if name not in _IN_TEXT and type(value) in (bool, int, float, str)
        }
    number = error.errno if isinstance(error, OSError) else None
    return _Failure(
        _printable(str(kind.__module__)),
        _printable(kind.__qualname__),
        _printable(what),
        _printable(_trace(error)),
        _printable(repr(worker)),
        fields,
        number if type(number) is int else None,
    )


def _trace(error: BaseException) -> str:
    if not vars(error).get("remote_traceback"):
        with suppress(Exception):  # it reads attributes of the exception
            return "".join(traceback.format_exception(error))
    return "".join(traceback.format_tb(error.__traceback__))


def _printable(text: str) -> str:
    """Return a text with surrogates escaped, which file names may contain."""
    return text.encode(errors="backslashreplace").decode()


def decode(encoded: bytes, sender: int, find: Callable[[str, str], Any] | None = None) -> Exception:
    """Return the exception for the caller.

    It is of the same type if that is known here and can be made from a text, and an `RpcError`
    otherwise. Both have the `remote_traceback`, and name the worker in their text.

    Args:
        encoded: From `encode`.
        sender: The worker that sent it.
        find: Looks up a type of exceptions (`Allowed.find_error`); types that it refuses, except
            Dure's own, are unknown. If None, all types of imported modules are known.
    """
    try:
        failure = msgspec.msgpack.decode(encoded, type=_Failure)
    except msgspec.DecodeError as error:
        return malformed_message(sender, error)
    text = f"{failure.what}\n\nOn {failure.worker}:\n{failure.trace}"
    error: Any = None
    kind = _find(failure.module, failure.name, find)
    if kind is not None:
        try:
            error = kind(text)
        except (Exception, SystemExit) as refused:
            text = f"{refused}\nOriginal exception on remote side was {failure.name}: {text}"
    if not isinstance(error, Exception):
        error = RpcError(f"{failure.module}.{failure.name}".lstrip("."), seen=text)
    if issubclass(type(error), DureError):
        own, sent = vars(error), failure.fields
        own.update({name: sent[name] for name in own.keys() & sent.keys() - _IN_TEXT})
    if isinstance(error, OSError):
        error.errno = failure.errno
    with suppress(Exception):  # it may have a read-only property of that name
        object.__setattr__(error, "remote_traceback", failure.trace)  # some are frozen
    return error


def _find(
    module_name: str, name: str, find: Callable[[str, str], Any] | None
) -> type[Exception] | None:
    """Look up a type of exceptions; only `find` may import its module."""
    found: Any = None
    if find is None or module_name == DureError.__module__:
        found = sys.modules.get(module_name)
        for part in name.split("."):  # not by getattr: some modules import names on access
            found = vars(found).get(part) if isinstance(found, ModuleType | type) else None
    else:
        with suppress(Exception):
            found = find(module_name, name)
    return found if isinstance(found, type) and issubclass(found, Exception) else None
