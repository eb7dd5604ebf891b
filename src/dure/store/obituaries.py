"""Who a connection came from that was over before anybody could ask.

ZeroMQ accepts a connection and, when nothing sensible comes through it, closes it again within
some ten microseconds, on a thread of its own. A port scanner, or a client that speaks HTTP, is gone
before the event of its arrival has been read, and the socket with it. Linux tells about that to
whoever listens: its socket diagnosis broadcasts the two addresses of each TCP socket that ceases to
be (what `ss --events` shows, `SKNLGRP_INET_TCP_DESTROY`). A filter in the kernel lets through those
of one port. No privilege is needed; where there is no such thing, names are missing, that is all.
"""

from __future__ import annotations

import socket
import struct
import sys

from dure.store.packets import let_through_where

__all__ = ["Obituaries"]

_SOCK_DIAG = 4
_TCP_DESTROYED, _TCP6_DESTROYED = 1 << 0, 1 << 2
_OUR_PORT, _PEER_PORT = 20, 22  # where struct inet_diag_msg has them, behind the netlink header
_OUR_ADDRESS_BYTES = 16
_PEER_ADDRESS = 24 + _OUR_ADDRESS_BYTES
_LONGEST = 4096


class Obituaries:
    """The peers of a port's TCP connections that have ended. One thread at a time.

    Args:
        port: The port of this machine.

    Raises:
        OSError: The system does not tell.
    """

    def __init__(self, port: int) -> None:
        if not sys.platform.startswith("linux"):
            raise OSError("only Linux tells of the end of connections")
        self._socket = socket.socket(
            socket.AF_NETLINK, socket.SOCK_RAW | socket.SOCK_NONBLOCK, _SOCK_DIAG
        )
        try:
            let_through_where(self._socket, _OUR_PORT, port)
            self._socket.bind((0, _TCP_DESTROYED | _TCP6_DESTROYED))
        except OSError:
            self._socket.close()
            raise

    @property
    def fd(self) -> int:
        """The descriptor to poll."""
        return self._socket.fileno()

    def read(self) -> list[tuple[str, int]]:
        """Return address and port of the peers that have gone since the last call."""
        peers: list[tuple[str, int]] = []
        while True:
            try:
                data = self._socket.recv(_LONGEST)
            except BlockingIOError:
                return peers
            except OSError:  # more than the kernel would keep for us: those have no names
                continue
            peer = _peer_in(data)
            if peer is not None:
                peers.append(peer)

    def close(self) -> None:
        """Hear no more."""
        self._socket.close()


def _peer_in(data: bytes) -> tuple[str, int] | None:
    """Read one message: struct nlmsghdr, then struct inet_diag_msg."""
    if len(data) < _PEER_ADDRESS + _OUR_ADDRESS_BYTES:
        return None
    family = data[16]
    (port,) = struct.unpack_from("!H", data, _PEER_PORT)
    size = 4 if family == socket.AF_INET else 16
    if port == 0 or family not in (socket.AF_INET, socket.AF_INET6):
        return None  # the end of the listening socket itself
    return socket.inet_ntop(family, data[_PEER_ADDRESS : _PEER_ADDRESS + size]), port
