"""A port that is kept for rank 0 until rank 0 takes it.

`MASTER_PORT` must be known before the ranks start, and free when rank 0 listens on it, perhaps a
minute later. To pick a free port and let it go leaves a gap for a stranger. Here the launcher keeps
a socket *bound* to the port, with SO_REUSEADDR, but never listens on it. Linux then

- hands the port to nobody who asks for any free port, and refuses it to those who bind it
  without SO_REUSEADDR;
- lets a server with SO_REUSEADDR, as torch, ZeroMQ and most others set it, bind and listen.

What remains is a stranger who asks for exactly this number with SO_REUSEADDR before rank 0 does.
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
        keeper.bind(("", 0))  # every address: so that nobody gets it on another one either
        return keeper, int(keeper.getsockname()[1])
    except BaseException:
        keeper.close()
        raise
