"""A filter for listening sockets, with which the kernel ignores new connections."""

from __future__ import annotations

import ctypes
import socket
import struct

__all__ = ["refuse_new_connections"]

_SO_ATTACH_FILTER = 26
_DROP = struct.pack("HBBI", 0x06, 0, 0, 0)  # classic BPF: return 0 bytes of every packet


def refuse_new_connections(listener: socket.socket) -> None:
    """Let the kernel ignore new connections to a listening socket; open connections stay.

    ZeroMQ could close the listener only together with the connections that it accepted.

    Raises:
        OSError: The system has no such filters.
    """
    program = ctypes.create_string_buffer(_DROP)
    described = struct.pack("HP", 1, ctypes.addressof(program))
    listener.setsockopt(socket.SOL_SOCKET, _SO_ATTACH_FILTER, described)
