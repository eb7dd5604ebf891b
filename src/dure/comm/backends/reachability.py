"""Diagnosis of an engine that failed to connect the ranks of a group.

Engines connect their ranks themselves, and report at most a timeout. After such a failure each rank
opens a port, publishes it in the store, and connects to the ports of all others at once. A firewall
between two hosts, or a wrong interface, refuses or drops these connections like the engine's. A
rank without a port was too slow to connect. Each rank publishes its result, so that all ranks name
the same hosts. Nothing runs unless a connection has failed.
"""

from __future__ import annotations

import os
import socket
import time
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from dure.comm.backends.base import BackendOptions
from dure.errors import StoreTimeout
from dure.store.identity import host_name

__all__ = ["ConnectionDiagnosis", "Unreachable", "find_unconnected"]

_LIMIT_S = 3.0
"""How long the ranks wait for each other's ports, and try them."""

_ANSWER_S = 1.0
"""How long connections and reports may take."""

_PORT = "reachability/port"
_REPORT = "reachability/report"
_OVER = "reachability/over"
"""Set when the first rank has reported: ranks that begin later do not connect."""


class _Port(msgspec.Struct, array_like=True, frozen=True):
    """The port at which a rank listens during the diagnosis."""

    host: str
    address: str
    port: int


class Unreachable(msgspec.Struct, array_like=True, frozen=True):
    """A rank whose port could not be reached.

    Attributes:
        rank: Its group rank.
        host: Its host's name.
        address: The address that was tried.
        port: The port that was tried.
        why: The error.
    """

    rank: int
    host: str
    address: str
    port: int
    why: str

    def __str__(self) -> str:
        return f"rank {self.rank} on {self.host} ({self.address}, port {self.port}): {self.why}"


class _Report(msgspec.Struct, array_like=True, frozen=True):
    """Which ranks a rank could not reach."""

    rank: int
    seeker: str
    unreachable: tuple[Unreachable, ...]


@dataclass(frozen=True, slots=True)
class ConnectionDiagnosis:
    """Why the ranks are not connected.

    Attributes:
        seeker: A rank that could not reach others: this one if it could not, else the first.
        where: Its host and address.
        unreachable: The ranks that it could not reach; empty if all ranks reach each other.
        absent: Ranks that did not take part in the diagnosis.
        late: Whether the other ranks had finished the diagnosis before this one began.
    """

    seeker: int
    where: str
    unreachable: tuple[Unreachable, ...]
    absent: tuple[int, ...]
    late: bool


def find_unconnected(options: BackendOptions, address: str) -> ConnectionDiagnosis:
    """Find out why the ranks are not connected.

    Args:
        options: Of the group; all of its ranks call, at about the same time.
        address: Of this host, at which the engine of this rank listens.
    """
    store, others = options.store, [r for r in range(options.size) if r != options.rank]
    mine = _Report(options.rank, f"{host_name()} ({address})", ())
    absent: list[int] = []
    late = store.check([_OVER])
    if not late:
        until = time.monotonic() + _LIMIT_S
        family = socket.AF_INET6 if ":" in address else socket.AF_INET
        with socket.create_server((address, 0), family=family, backlog=options.size) as listener:
            port = _Port(host_name(), address, listener.getsockname()[1])
            store.set(f"{_PORT}/{options.rank}", _pack(port))
            found = _published(options, _PORT, others, _LIMIT_S - _ANSWER_S)
            absent = [rank for rank in others if rank not in found]
            ports = {rank: msgspec.msgpack.decode(each, type=_Port) for rank, each in found.items()}
            mine = msgspec.structs.replace(mine, unreachable=tuple(_tried(ports)))
            time.sleep(max(0.0, until - time.monotonic()))  # the others still connect to this port
        store.multi_set([f"{_REPORT}/{options.rank}", _OVER], [_pack(mine), b""])
        others = list(found)
    found = _published(options, _REPORT, others, 0.0 if late else _ANSWER_S)
    reports = [mine, *(msgspec.msgpack.decode(each, type=_Report) for each in found.values())]
    first = next((each for each in reports if each.unreachable), mine)
    return ConnectionDiagnosis(first.rank, first.seeker, first.unreachable, tuple(absent), late)


_pack = msgspec.msgpack.encode


def _published(
    options: BackendOptions, name: str, ranks: list[int], limit_s: float
) -> dict[int, bytes]:
    """Return the values that `ranks` have published by the limit."""
    store = options.store
    with suppress(StoreTimeout):
        store.wait([f"{name}/{rank}" for rank in ranks], timedelta(seconds=limit_s))
    found = [rank for rank in ranks if store.check([f"{name}/{rank}"])]
    return dict(zip(found, store.multi_get([f"{name}/{rank}" for rank in found]), strict=True))


def _tried(ports: dict[int, _Port]) -> list[Unreachable]:
    """Connect to all `ports` at once; return those that do not accept it."""
    with ThreadPoolExecutor(max(1, len(ports))) as pool:
        whys = list(pool.map(_why_unreachable, ports.values()))
    return [
        Unreachable(rank, port.host, port.address, port.port, why)
        for (rank, port), why in zip(ports.items(), whys, strict=True)
        if why
    ]


def _why_unreachable(port: _Port) -> str:
    """Return why a port does not accept a connection; "" if it does."""
    try:
        socket.create_connection((port.address, port.port), _ANSWER_S).close()
    except TimeoutError:
        return "no answer"
    except OSError as error:
        return os.strerror(error.errno or 0).lower()
    return ""
