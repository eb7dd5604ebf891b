"""What the operations of a store do to one value: pure functions that every store shares.

A value is bytes; None stands for a key that does not exist. Each function takes the value that is
there and returns the one to put in its place, so the in-process store, the server and the file
store differ in where values lie, never in what an operation means.
"""

from __future__ import annotations

from dure.errors import StoreError

__all__ = ["MAX_VALUE_BYTES", "added", "appended", "encode", "exchanged"]

MAX_VALUE_BYTES = 256 << 20
"""The longest value. A store carries addresses and small objects, and the server takes no frame
longer than this (plus a little), so that nobody can make it reserve memory without end."""


def encode(value: str | bytes) -> bytes:
    """Return `value` as bytes (text as UTF-8); refuse one longer than `MAX_VALUE_BYTES`."""
    data = value.encode() if isinstance(value, str) else bytes(value)
    if len(data) > MAX_VALUE_BYTES:
        raise StoreError(
            "a value is too long for the store",
            seen=f"{len(data)} bytes, and {MAX_VALUE_BYTES} are allowed",
            fix="Send tensors and large objects with a collective instead.",
        )
    return data


def added(key: str, current: bytes | None, amount: int) -> int:
    """Return the number under `key` plus `amount`, of 64 bits; no value counts as 0."""
    try:
        total = int(current or b"0") + amount
    except ValueError:
        raise StoreError(
            f"cannot add to the key {key!r}",
            op="add",
            seen=f"its value {bytes(current or b'')[:40]!r} is not a whole number",
            fix="Use `add` only on keys that `add` made, or that hold decimal text.",
        ) from None
    if not -(1 << 63) <= total < 1 << 63:
        raise StoreError(
            f"cannot add to the key {key!r}", op="add", seen=f"{total} has more than 64 bits"
        )
    return total


def appended(key: str, current: bytes | None, more: bytes) -> bytes:
    """Return the value under `key` with `more` behind it; no value counts as an empty one."""
    size = len(current or b"") + len(more)
    if size > MAX_VALUE_BYTES:
        raise StoreError(
            f"cannot append to the key {key!r}",
            op="append",
            seen=f"it would have {size} bytes, and {MAX_VALUE_BYTES} are allowed",
        )
    return (current or b"") + more


def exchanged(current: bytes | None, expected: bytes, desired: bytes) -> tuple[bytes | None, bytes]:
    """Decide a compare-and-set.

    Returns:
        The value to store (None: leave everything as it is), and the value to return.
    """
    if current is None:
        return (None, expected) if expected else (desired, desired)
    return (desired, desired) if current == expected else (None, current)
