"""Checks of arguments that raise typed errors."""

from __future__ import annotations

from types import UnionType

from dure.errors import UsageError

__all__ = ["check", "check_seconds"]


def check(value: object, kind: type | UnionType, what: str, *, op: str = "", fix: str = "") -> None:
    """Raise `UsageError` with the text `what` if a value is not of a type; no bool is an int."""
    if not isinstance(value, kind) or isinstance(value, bool):
        raise UsageError(what, op=op, seen=repr(value), fix=fix)


def check_seconds(value: object, op: str) -> None:
    """Raise `UsageError` if a value is not a timeout."""
    if not isinstance(value, int | float) or isinstance(value, bool) or not value >= 0:
        raise UsageError(
            "timeout must be 0 or more seconds",
            op=op,
            seen=repr(value),
            fix="Pass a number; 0 for none.",
        )
