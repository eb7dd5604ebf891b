"""What ZeroMQ tells about a connection, read from a socket's monitor.

Two frames: event and value, as the C library lays them out, and the endpoint. PyZMQ has a reader of
its own, but it brings asyncio along, which costs every process of a job 20 ms.
"""

from __future__ import annotations

import struct
from typing import Any

import zmq

__all__ = ["read_event"]

_EVENT = struct.Struct("=hi")


def read_event(monitor: zmq.Socket[Any], flags: int = 0) -> tuple[int, int]:
    """Receive one event; return which (see `zmq.Event`) and its value.

    Raises:
        zmq.ZMQError: The monitor is closed, or with `zmq.NOBLOCK` nothing is there.
    """
    event, value = _EVENT.unpack(monitor.recv_multipart(flags)[0])
    return event, value
