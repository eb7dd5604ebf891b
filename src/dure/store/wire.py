"""What client and server of the network store say to each other.

One request frame, one reply frame, both msgpack of a fixed shape that msgspec checks field by
field; nothing is ever unpickled. A connection carries one request at a time, so frames need no
numbers.
"""

from __future__ import annotations

from typing import Literal

import msgspec

from dure.store.values import MAX_VALUE_BYTES

__all__ = ["MAX_FRAME_BYTES", "Op", "Reply", "Request", "pack", "read_reply", "read_request"]

MAX_FRAME_BYTES = 2 * MAX_VALUE_BYTES + (1 << 20)
"""The longest frame: a compare_set of the longest values. Set as ZeroMQ's own limit, too."""

Op = Literal[
    "set", "get", "wait", "add", "append", "compare_set", "check", "delete", "count", "list"
]


class Request(msgspec.Struct, array_like=True, frozen=True):
    """One operation. `timeout_s` is how long the server parks a `get` or a `wait`."""

    op: Op
    keys: tuple[str, ...] = ()
    values: tuple[bytes, ...] = ()
    amount: int = 0
    timeout_s: float = 0.0


class Reply(msgspec.Struct, array_like=True, frozen=True):
    """The answer. `names` are keys: the missing ones of a timeout, or those of `list`."""

    status: Literal["ok", "timeout", "error"]
    number: int = 0
    values: tuple[bytes, ...] = ()
    names: tuple[str, ...] = ()
    text: str = ""


pack = msgspec.msgpack.Encoder().encode
read_request = msgspec.msgpack.Decoder(Request).decode
read_reply = msgspec.msgpack.Decoder(Reply).decode
