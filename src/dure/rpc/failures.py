"""How an exception travels: as text, with the name of its type."""

from __future__ import annotations

import importlib
import sys
import traceback
from typing import Any

import msgspec

from dure.errors import RpcError
from dure.rpc.names import WorkerInfo

__all__ = ["decode", "encode"]


def encode(error: BaseException, worker: WorkerInfo) -> bytes:
    """Return what is sent in place of an exception that `worker` has raised.

    Of one that came from another worker only the frames are added: all else is in its text.
    """
    kind = type(error)
    far = hasattr(error, "remote_traceback")
    lines = traceback.format_tb(error.__traceback__) if far else traceback.format_exception(error)
    try:
        what = str(error)
    except Exception as bad:
        what = f"its text cannot be had: {type(bad).__name__}"
    failure = (kind.__module__, kind.__qualname__, what, "".join(lines), repr(worker))
    return msgspec.msgpack.encode([_printable(text) for text in failure])


def _printable(text: str) -> str:
    """Return a text without halves of characters, which names of files may have."""
    return text.encode(errors="backslashreplace").decode()


def decode(encoded: bytes) -> Exception:
    """Return the exception for the caller.

    It is of the same type where that is known here and can be made from a text, and an `RpcError`
    otherwise. Both have the `remote_traceback`, and name the worker in their text.
    """
    failure = msgspec.msgpack.decode(encoded, type=tuple[str, str, str, str, str])
    module_name, name, what, trace, worker = failure
    text = f"{what}\n\nOn {worker}:\n{trace}"
    error: Exception | None = None
    kind = _find(module_name, name)
    if kind is not None:
        try:
            error = kind(text)
        except Exception as refused:
            text = f"{refused}\nOriginal exception on remote side was {name}: {text}"
    if error is None:
        error = RpcError(f"{module_name}.{name}", seen=text)
    error.remote_traceback = trace  # pyright: ignore[reportAttributeAccessIssue]
    return error


def _find(module_name: str, name: str) -> type[Exception] | None:
    """Look a type of exceptions up; nothing is imported for it."""
    found: Any = sys.modules.get(module_name)
    if module_name == "dure.errors":
        found = importlib.import_module(module_name)
    for part in name.split("."):
        found = getattr(found, part, None)
    return found if isinstance(found, type) and issubclass(found, Exception) else None
