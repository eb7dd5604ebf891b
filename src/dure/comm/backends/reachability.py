"""Which ranks of a group cannot open connections to which, once an engine has failed to.

Engines connect their ranks by themselves, and say of a failure at most that time was up. Then each
rank opens a port of its own, tells the others of it through the store, and tries theirs: a firewall
between two hosts, or a wrong interface, refuses or drops these connections as it did the engine's.
It costs nothing while all is well.
"""

from __future__ import annotations

import socket
import time
from collections.abc import Iterator
from contextlib import ExitStack
from dataclasses import dataclass

import msgspec

from dure.comm.backends.base import BackendOptions
from dure.store.identity import host_name

__all__ = ["Unreachable", "find_unreachable"]

_LIMIT_S = 3.0
"""How long the ranks look for each other's ports, and try them."""

_ANSWER_S = 1.0
"""How long a connection may take."""

_PAUSE_S = 0.05
_PORT = "reachability/port"


class _Port(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank listens while it looks for the others."""

    host: str
    address: str
    port: int


@dataclass(frozen=True, slots=True)
class Unreachable:
    """A rank whose port could not be reached from here.

    Attributes:
        rank: Its group rank.
        host: Its host's name.
        address: The address that was tried.
        port: The port that was tried.
        why: What happened.
    """

    rank: int
    host: str
    address: str
    port: int
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.address}, port {self.port}): {self.why}"


def find_unreachable(options: BackendOptions, address: str) -> list[Unreachable]:
    """Return the other ranks that this one cannot connect to; those that never look are left out.

    Args:
        options: What the group is; each of its ranks calls this, at about the same time.
        address: Of this host, at which the engine of this rank listens.
    """
    until = time.monotonic() + _LIMIT_S
    with ExitStack() as undo:
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        listener = undo.enter_context(socket.socket(family))
        listener.bind((address, 0))
        listener.listen(options.size)
        mine = _Port(host_name(), address, listener.getsockname()[1])
        options.store.set(f"{_PORT}/{options.rank}", msgspec.msgpack.encode(mine))
        found = [
            Unreachable(rank, port.host, port.address, port.port, why)
            for rank, port in _ports(options, until - _ANSWER_S)
            if (why := _why_not(port))
        ]
        time.sleep(max(0.0, until - time.monotonic()))  # so that the others find this port open
    return found


def _ports(options: BackendOptions, until: float) -> Iterator[tuple[int, _Port]]:
    """Yield where the others listen, as they tell it."""
    awaited = {rank for rank in range(options.size) if rank != options.rank}
    while awaited and time.monotonic() < until:
        for rank in sorted(awaited):
            key = f"{_PORT}/{rank}"
            if options.store.check([key]):
                awaited.discard(rank)
                yield rank, msgspec.msgpack.decode(options.store.get(key), type=_Port)
        time.sleep(_PAUSE_S)


def _why_not(port: _Port) -> str:
    """Return why a port cannot be connected to; empty if it can."""
    family = socket.AF_INET6 if ":" in port.address else socket.AF_INET
    with socket.socket(family) as probe:
        probe.settimeout(_ANSWER_S)
        try:
            probe.connect((port.address, port.port))
        except TimeoutError:
            return "no answer"
        except OSError as error:
            return (error.strerror or str(error)).lower()
    return ""
