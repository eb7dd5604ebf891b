"""A port that is kept for rank 0 until rank 0 takes it.

`MASTER_PORT` must be known before the ranks start, and free when rank 0 listens on it, perhaps a
minute later. So the launcher keeps a socket *bound* to it, with SO_REUSEADDR, but never listens.
Linux then gives the port to no socket that asks for any free one, and lets a server with
SO_REUSEADDR, which torch, ZeroMQ and most others set, bind and listen.
"""

from __future__ import annotations

import socket

__all__ = ["reserve_port"]


def reserve_port() -> tuple[socket.socket, int]:
    """Reserve a TCP port on this host; return the socket that keeps it, and its number.

    Raises:
        OSError: This host has no free port.
    """
    keeper = socket.socket(socket.AF_INET, socket.SOCK_STREAM)
    try:
        keeper.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        keeper.bind(("", 0))  # every address: so that it stays free on all of them
        return keeper, int(keeper.getsockname()[1])
    except BaseException:
        keeper.close()
        raise
