"""Why the ranks of a group are not connected, once an engine has failed to connect them.

Engines connect their ranks by themselves, and say of a failure at most that time was up. Then each
rank opens a port of its own, tells the others of it through the store, and tries theirs, all at
once: a firewall between two hosts, or a wrong interface, refuses or drops these connections as it
did the engine's. A rank without a port was too slow to connect. Each rank reports what it has
found, so that all ranks can name the same hosts. It costs nothing while all is well.
"""

from __future__ import annotations

import errno
import os
import selectors
import socket
import time
from contextlib import ExitStack, suppress
from dataclasses import dataclass
from datetime import timedelta

import msgspec

from dure.comm.backends.base import BackendOptions
from dure.errors import StoreTimeout
from dure.store.identity import host_name

__all__ = ["Findings", "Unreachable", "find_unconnected"]

_LIMIT_S = 3.0
"""How long the ranks look for each other's ports, and try them."""

_ANSWER_S = 1.0
"""How long connections may take, and reports."""

_PORT = "reachability/port"
_REPORT = "reachability/report"
_OVER = "reachability/over"
"""Set when the first rank has reported: ranks that begin later do not look."""


class _Port(msgspec.Struct, array_like=True, frozen=True):
    """Where a rank listens while it looks for the others."""

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
        why: What happened.
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
class Findings:
    """Why the ranks are not connected.

    Attributes:
        seeker: A rank that could not reach others: this one if it could not, else the first.
        where: Its host and address.
        unreachable: The ranks that it could not reach; empty: all ranks reach each other.
        absent: Ranks that did not look for the others.
        late: This rank began when the others had given up.
    """

    seeker: int
    where: str
    unreachable: tuple[Unreachable, ...]
    absent: tuple[int, ...]
    late: bool


def find_unconnected(options: BackendOptions, address: str) -> Findings:
    """Find out why the ranks are not connected.

    Args:
        options: What the group is; each of its ranks calls this, at about the same time.
        address: Of this host, at which the engine of this rank listens.
    """
    store, others = options.store, [r for r in range(options.size) if r != options.rank]
    mine = _Report(options.rank, f"{host_name()} ({address})", ())
    absent: list[int] = []
    late = store.check([_OVER])
    if not late:
        until = time.monotonic() + _LIMIT_S
        with ExitStack() as undo:
            family = socket.AF_INET6 if ":" in address else socket.AF_INET
            listener = undo.enter_context(socket.socket(family))
            listener.bind((address, 0))
            listener.listen(options.size)
            port = _Port(host_name(), address, listener.getsockname()[1])
            store.set(f"{_PORT}/{options.rank}", _pack(port))
            found = _said(options, _PORT, others, _LIMIT_S - _ANSWER_S)
            absent = [rank for rank in others if rank not in found]
            ports = {rank: msgspec.msgpack.decode(each, type=_Port) for rank, each in found.items()}
            mine = msgspec.structs.replace(mine, unreachable=tuple(_tried(ports)))
            time.sleep(max(0.0, until - time.monotonic()))  # so that the others find this port open
        store.multi_set([f"{_REPORT}/{options.rank}", _OVER], [_pack(mine), b""])
        others = list(found)
    found = _said(options, _REPORT, others, 0.0 if late else _ANSWER_S)
    reports = [mine, *(msgspec.msgpack.decode(each, type=_Report) for each in found.values())]
    first = next((each for each in reports if each.unreachable), mine)
    return Findings(first.rank, first.seeker, first.unreachable, tuple(absent), late)


_pack = msgspec.msgpack.encode


def _said(options: BackendOptions, what: str, ranks: list[int], limit_s: float) -> dict[int, bytes]:
    """Return what `ranks` have told by the limit."""
    store = options.store
    with suppress(StoreTimeout):
        store.wait([f"{what}/{rank}" for rank in ranks], timedelta(seconds=limit_s))
    there = [rank for rank in ranks if store.check([f"{what}/{rank}"])]
    return dict(zip(there, store.multi_get([f"{what}/{rank}" for rank in there]), strict=True))


def _tried(ports: dict[int, _Port]) -> list[Unreachable]:
    """Connect to all `ports` at once; return those that do not accept it."""
    until, why = time.monotonic() + _ANSWER_S, dict[int, str]()
    with ExitStack() as undo:
        selector = undo.enter_context(selectors.DefaultSelector())
        for rank, port in ports.items():
            try:
                probe = socket.socket(socket.AF_INET6 if ":" in port.address else socket.AF_INET)
            except OSError:  # no descriptors are left
                break
            undo.enter_context(probe)
            probe.setblocking(False)
            code = probe.connect_ex((port.address, port.port))
            if code == errno.EINPROGRESS:
                selector.register(probe, selectors.EVENT_WRITE, rank)
                why[rank] = "no answer"
            elif code:
                why[rank] = os.strerror(code).lower()
        while selector.get_map() and (left_s := until - time.monotonic()) > 0:
            for key, _ in selector.select(left_s):
                probe, rank = key.fileobj, key.data
                assert isinstance(probe, socket.socket)
                selector.unregister(probe)
                code = probe.getsockopt(socket.SOL_SOCKET, socket.SO_ERROR)
                why[rank] = os.strerror(code).lower() if code else ""
    return [
        Unreachable(rank, port.host, port.address, port.port, why[rank])
        for rank, port in ports.items()
        if why.get(rank)
    ]
