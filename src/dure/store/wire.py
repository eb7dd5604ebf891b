"""Requests to a store, and replies: the form that all stores but a prefix and torch's use.

Client and server of the network store send it: one request, one reply, both msgpack of a fixed
shape that msgspec checks field by field; nothing is ever unpickled. Bytes of another shape
raise `msgspec.DecodeError`, and a text that is no UTF-8 `UnicodeDecodeError`, which is no kind of
it. A connection carries one request at a time, so messages need no numbers.

A message longer than `MAX_FRAME_BYTES` travels as several ZeroMQ frames, which arrive together or
not at all. ZeroMQ refuses longer frames; this holds for the frames of the handshake, too,
before the peer is known: so a client that announces a frame of 2 GB is cut off at its header, and
one that sends what it announces takes 64 KiB of memory here, not 500 MB.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Annotated, Literal

import msgspec
from msgspec import Meta

from dure.errors import StoreError
from dure.store.arguments import bytes_of

__all__ = [
    "FRAME_LIMIT",
    "LONGEST_TIMEOUT_S",
    "MAX_FRAME_BYTES",
    "MAX_MESSAGE_BYTES",
    "MAX_VALUE_BYTES",
    "WRITES",
    "Op",
    "Reply",
    "StoreRequest",
    "encode",
    "frames_of",
    "join",
    "pack",
    "read_reply",
    "read_request",
]

MAX_VALUE_BYTES = 256 << 20
"""The longest value: a store carries addresses and small objects."""

MAX_FRAME_BYTES = 64 << 10
"""The longest frame that we send."""

FRAME_LIMIT = MAX_FRAME_BYTES + 256
"""ZeroMQ's own limit on what it takes in: a frame, and what encryption adds to it."""

MAX_MESSAGE_BYTES = 2 * MAX_VALUE_BYTES + (1 << 20)
"""The longest request: a compare_set of the longest values."""

LONGEST_TIMEOUT_S = 1e9
"""How long a client may ask the server to wait: 30 years, but no infinity and no NaN."""

WRITES = frozenset({"set", "add", "append", "compare_set", "delete"})
"""The operations that must not be done twice."""

Op = Literal[
    "set",
    "get",
    "wait",
    "add",
    "append",
    "compare_set",
    "check",
    "delete",
    "count",
    "list",
    "control",
]


class StoreRequest(msgspec.Struct, array_like=True, frozen=True):
    """One operation.

    Attributes:
        op: Which. The value of `control` is a message to the coordinator of a job on several hosts
            (`dure.launch.agent.messages`); a board has no such operation.
        keys: Its keys.
        values: Its values, mostly one a key.
        amount: What `add` adds.
        timeout_s: How long the server parks a `get` or `wait`.
        once: Random bytes that name a write, so that it is done once though it is asked twice.
    """

    op: Op
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0
    timeout_s: Annotated[float, Meta(ge=0, le=LONGEST_TIMEOUT_S)] = 0.0
    once: Annotated[bytes, Meta(max_length=32)] = b""


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The answer. `names` are keys: the missing ones of a timeout, those of `list`."""

    status: Literal["ok", "timeout", "error"]
    number: int = 0
    values: tuple[bytes, ...] = ()
    names: tuple[str, ...] = ()
    text: str = ""


def encode(value: str | bytes, op: str) -> bytes:
    """Return the value that the method `op` was given as bytes (text as UTF-8).

    Raises:
        TypeError: It is neither text nor bytes.
        StoreError: It is longer than `MAX_VALUE_BYTES`.
    """
    data = bytes_of(value, op)
    if len(data) > MAX_VALUE_BYTES:
        raise StoreError(
            "a value is too long for the store",
            seen=f"{len(data)} bytes, and {MAX_VALUE_BYTES} are allowed",
            fix="Send tensors and large objects with a collective instead.",
        )
    return data


pack = msgspec.msgpack.Encoder().encode
read_request = msgspec.msgpack.Decoder(StoreRequest).decode
read_reply = msgspec.msgpack.Decoder(Reply).decode


def frames_of(message: bytes) -> Sequence[bytes | memoryview]:
    """Cut a message into frames; nearly always it is one."""
    if len(message) <= MAX_FRAME_BYTES:
        return (message,)
    view = memoryview(message)
    return [view[at : at + MAX_FRAME_BYTES] for at in range(0, len(view), MAX_FRAME_BYTES)]


def join(frames: Sequence[bytes]) -> bytes:
    """Put the frames of a request together again.

    Raises:
        StoreError: It is longer than any request may be.
    """
    if len(frames) == 1:
        return frames[0]
    size = sum(map(len, frames))
    if size > MAX_MESSAGE_BYTES:
        raise StoreError(
            "a store request is too long",
            seen=f"{size} bytes, and {MAX_MESSAGE_BYTES} are allowed",
            fix="Send tensors and large objects with a collective instead.",
        )
    return b"".join(frames)
