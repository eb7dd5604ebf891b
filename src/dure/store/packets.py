"""What the kernel lets through to a socket: small filters that it runs, with no privilege needed.

A filter is a program of the classic Berkeley packet filter; what it returns is how many bytes of a
packet get through.
"""

from __future__ import annotations

import ctypes
import socket
import struct
from collections.abc import Sequence

__all__ = ["let_nobody_in", "let_through_where"]

_SO_ATTACH_FILTER = 26
_LOAD_HALF, _RETURN, _JUMP_IF_EQUAL = 0x28, 0x06, 0x15
_ALL = 0xFFFF
_STEP = struct.Struct("HBBI")
_Step = tuple[int, int, int, int]


def let_through_where(sock: socket.socket, offset: int, value: int) -> None:
    """Let through only packets with the 16 bits `value` at `offset`.

    Raises:
        OSError: The system has no such filters.
    """
    _attach(
        sock,
        [
            (_LOAD_HALF, 0, 0, offset),
            (_JUMP_IF_EQUAL, 0, 1, value),
            (_RETURN, 0, 0, _ALL),
            (_RETURN, 0, 0, 0),
        ],
    )


def let_nobody_in(listener: socket.socket) -> None:
    """Make a listening socket deaf: who knocks gets no answer; connections that stand go on.

    Raises:
        OSError: The system has no such filters.
    """
    _attach(listener, [(_RETURN, 0, 0, 0)])


def _attach(sock: socket.socket, steps: Sequence[_Step]) -> None:
    program = ctypes.create_string_buffer(b"".join(_STEP.pack(*step) for step in steps))
    described = struct.pack("HP", len(steps), ctypes.addressof(program))
    sock.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
