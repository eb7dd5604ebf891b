"""What ZeroMQ tells about a connection, read from a socket's monitor.

Two frames: event and value, as the C library lays them out, and the endpoint. PyZMQ has a reader of
its own, but it brings asyncio along, which costs every process of a job 20 ms.

The value is mostly the number of a descriptor, which ZeroMQ may have closed by now, and the process
may use for something else. So it is looked at through a duplicate.
"""

from __future__ import annotations

import os
import socket
import struct
from typing import Any

import zmq

__all__ = ["read_event", "socket_behind"]

_EVENT = struct.Struct("=hi")


def read_event(monitor: zmq.Socket[Any], flags: int = 0) -> tuple[int, int]:
    """Receive one event; return which (see `zmq.Event`) and its value.

    Raises:
        zmq.ZMQError: The monitor is closed, or with `zmq.NOBLOCK` nothing is there.
    """
    event, value = _EVENT.unpack(monitor.recv_multipart(flags)[0])
    return event, value


def socket_behind(fd: int) -> socket.socket:
    """Return a duplicate of the socket that has this number now; the caller closes it.

    Raises:
        OSError: The number is not used, or by something that is no socket.
    """
    copy = os.dup(fd)
    try:
        return socket.socket(fileno=copy)
    except OSError:
        os.close(copy)
        raise
