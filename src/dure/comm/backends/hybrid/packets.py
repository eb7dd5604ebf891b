"""A listener that has heard enough: a filter lets the kernel answer nobody any more."""

from __future__ import annotations

import ctypes
import socket
import struct

__all__ = ["let_nobody_in"]

_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: return 0 bytes of every packet


def let_nobody_in(listener: socket.socket) -> None:
    """Make a listening socket deaf: who knocks gets no answer; connections that stand go on.

    ZeroMQ could only end the listener together with the connections that came through it.

    Raises:
        OSError: The system has no such filters.
    """
    program = ctypes.create_string_buffer(_DROP)
    described = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
