"""The types that a store's methods accept, checked in one place before anything is sent.

They are torch's. A key is text; bytes (UTF-8) name the same key. A value is text or bytes. Several
keys are a sequence of keys, and never one string, whose letters would be taken as keys. `add` takes
an integer. A timeout is a `timedelta` or a number of seconds. Everything else raises `TypeError`.
"""

from __future__ import annotations

import operator
from collections.abc import Iterable
from datetime import timedelta
from math import isnan

__all__ = ["bytes_of", "duration_of", "integer_of", "keys_of", "pairs_of", "text_of"]

_CENTURY = timedelta(days=36_525)
"""The longest timeout: clocks and locks can still count it."""


def _wrong(op: str, what: str, expected: str, value: object, fix: str = "") -> TypeError:
    """Return the error that names the method, the argument and what it was."""
    text = f"{op}: {what} must be {expected}, got {value!r} ({type(value).__name__})."
    return TypeError(f"{text} {fix}".rstrip())


def text_of(value: object, op: str, what: str = "key") -> str:
    """Return a key, or another name, as text."""
    if isinstance(value, str):
        if not value.isascii():
            _check_utf8(value, op, what)
        return value
    if isinstance(value, bytes | bytearray):
        try:
            return value.decode()
        except UnicodeDecodeError:
            raise _wrong(op, what, "text in UTF-8", bytes(value)) from None
    raise _wrong(op, what, "str", value)


def keys_of(keys: object, op: str) -> tuple[str, ...]:
    """Return several keys as a tuple of texts."""
    if isinstance(keys, str | bytes | bytearray):
        raise _wrong(op, "keys", "a list of str", keys, f"Pass [{keys!r}].")
    if not isinstance(keys, Iterable):
        raise _wrong(op, "keys", "a list of str", keys)
    return tuple([text_of(key, op) for key in keys])


def pairs_of(keys: object, values: object, op: str) -> list[tuple[str, bytes]]:
    """Return keys with the value of each.

    Raises:
        ValueError: There are more of the ones than of the others.
    """
    if isinstance(values, str | bytes | bytearray) or not isinstance(values, Iterable):
        raise _wrong(op, "values", "a list of str or bytes", values)
    given = [bytes_of(value, op) for value in values]
    return list(zip(keys_of(keys, op), given, strict=True))


def bytes_of(value: object, op: str) -> bytes:
    """Return a value as bytes, text as UTF-8."""
    if isinstance(value, str):
        if not value.isascii():
            _check_utf8(value, op, "value")
        return value.encode()
    if isinstance(value, bytes | bytearray | memoryview):
        return bytes(value)
    raise _wrong(op, "value", "str or bytes", value, f"Convert it, e.g. str({value!r}).")


def integer_of(value: object, op: str, what: str = "amount") -> int:
    """Return a number that is an integer by its type (NumPy's and a tensor's element, too)."""
    try:
        return operator.index(value)  # pyright: ignore[reportArgumentType]
    except TypeError:
        raise _wrong(op, what, "an int", value) from None


def duration_of(timeout: object, op: str) -> timedelta:
    """Return a timeout as a `timedelta`, at most a century, which also replaces infinity."""
    if isinstance(timeout, timedelta):
        return max(-_CENTURY, min(timeout, _CENTURY))
    if isinstance(timeout, int | float) and not (isinstance(timeout, bool) or isnan(timeout)):
        longest_s = _CENTURY.total_seconds()
        return timedelta(seconds=max(-longest_s, min(timeout, longest_s)))
    raise _wrong(op, "timeout", "a timedelta, or a number of seconds", timeout)


def _check_utf8(text: str, op: str, what: str) -> None:
    """Refuse half of a surrogate pair, which UTF-8 cannot express."""
    try:
        text.encode()
    except UnicodeEncodeError:
        raise _wrong(op, what, "text that UTF-8 can express", text) from None
