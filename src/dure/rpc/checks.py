"""What programs give that is of the wrong kind is told at once, in a typed error."""

from __future__ import annotations

from types import UnionType

from dure.errors import UsageError

__all__ = ["check", "check_seconds"]


def check(value: object, kind: type | UnionType, what: str, *, op: str = "", fix: str = "") -> None:
    """Raise `UsageError` if a value is of another type; `what` says what it should be."""
    if not isinstance(value, kind):
        raise UsageError(what, op=op, seen=repr(value), fix=fix)


def check_seconds(value: object, op: str) -> None:
    """Raise `UsageError` if a value is no timeout."""
    if not isinstance(value, int | float) or not value >= 0:
        raise UsageError(
            "a timeout is 0 or more seconds",
            op=op,
            seen=repr(value),
            fix="Give a number; 0 is none.",
        )
