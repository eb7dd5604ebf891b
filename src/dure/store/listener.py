"""Places where a store's server can listen.

A TCP port is bound, and heard, before there is a server: so it is known whether it is free, and
which one it is, and early clients wait in the kernel. ZeroMQ takes the socket over.
"""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass

from dure.errors import StoreError
from dure.store.address import Address, check_not_wildcard

__all__ = ["BACKLOG", "Listener", "listen", "stop_listening"]

BACKLOG = 4096
"""How many connections may wait to be accepted."""


@dataclass(frozen=True, slots=True, kw_only=True)
class Listener:
    """A bound place to listen: its ZeroMQ endpoint, and the socket's descriptor (-1: none yet)."""

    endpoint: str
    port: int = 0
    fd: int = -1


def listen(address: Address) -> Listener:
    """Bind a TCP socket; port 0 picks a free one.

    Raises:
        StoreError: The port is taken, the address is not one of this machine's, or it means
            all of them, and `DURE_STORE_BIND_ANY` is not set.
    """
    check_not_wildcard(address.ip, "the store's address")
    sock = socket.socket(address.family, socket.SOCK_STREAM)
    try:
        sock.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        sock.bind((address.ip, address.port))
        sock.listen(BACKLOG)
    except OSError as error:
        sock.close()
        raise StoreError(
            f"the store cannot listen on {address.ip}:{address.port}",
            seen=error.strerror or str(error),
            fix="Another program or another rank 0 holds the port, or the address is another "
            "machine's: choose a free MASTER_PORT (under torchrun and in clusters "
            "DURE_STORE_PORT) and an address of rank 0's host.",
        ) from None
    port = sock.getsockname()[1]
    bound = Address(family=address.family, ip=address.ip, port=port)
    return Listener(endpoint=bound.endpoint, port=port, fd=sock.detach())


def stop_listening(fd: int) -> None:
    """Close a listening socket and free its port, even if a process just forked has it still.

    Closing alone would leave the port taken until the child has run far enough to close its copy.
    ZeroMQ must have closed the socket before: it does not expect one that no longer listens.
    """
    with socket.socket(fileno=fd) as sock, contextlib.suppress(OSError):
        sock.shutdown(socket.SHUT_RDWR)
