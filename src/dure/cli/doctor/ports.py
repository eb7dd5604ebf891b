"""Ports: whether there are enough, and who has the one that everybody uses."""

from __future__ import annotations

import contextlib
import socket
from dataclasses import dataclass
from pathlib import Path

import psutil

from dure.cli.doctor.finding import Finding, fine, problem, warning

__all__ = ["Ports", "judge", "read"]

USUAL = 29500
_RANGE = Path("/proc/sys/net/ipv4/ip_local_port_range")
_FEW = 2000


@dataclass(frozen=True, slots=True, kw_only=True)
class Ports:
    """The range of ports that the kernel gives out, how many are in use, and who holds 29500."""

    first: int
    last: int
    num_used: int = 0
    usual_taken: bool = False
    usual_by: str = ""
    loopback_error: str = ""


def read() -> Ports:
    """Read from the system, and open a connection to this process itself."""
    first, last = (int(number) for number in _RANGE.read_text().split())
    used: set[int] = set()
    holder = ""
    with contextlib.suppress(psutil.Error, OSError):
        for connection in psutil.net_connections("tcp"):
            port = connection.laddr.port if connection.laddr else 0
            if first <= port <= last:
                used.add(port)
            if port == USUAL and connection.status == psutil.CONN_LISTEN:
                holder = _name(connection.pid)
    return Ports(
        first=first,
        last=last,
        num_used=len(used),
        usual_taken=bool(holder) or not _free(USUAL),
        usual_by=holder,
        loopback_error=_loopback_error(),
    )


def _name(pid: int | None) -> str:
    if pid is None:
        return "a process of another user"
    with contextlib.suppress(psutil.Error):
        return f"{psutil.Process(pid).name()} (pid {pid})"
    return f"pid {pid}"


def _free(port: int) -> bool:
    with socket.socket() as probe:
        probe.setsockopt(socket.SOL_SOCKET, socket.SO_REUSEADDR, 1)
        try:
            probe.bind(("127.0.0.1", port))
        except OSError:
            return False
    return True


def _loopback_error() -> str:
    try:
        with socket.create_server(("127.0.0.1", 0)) as server:
            server.settimeout(2.0)
            with socket.create_connection(server.getsockname(), timeout=2.0):
                server.accept()[0].close()
    except OSError as error:
        return str(error)
    return ""


def judge(ports: Ports) -> list[Finding]:
    """Say whether a store can listen."""
    if ports.loopback_error:
        return [
            problem(
                "ports",
                f"this host cannot connect to itself: {ports.loopback_error}",
                "ip link set lo up; and see the firewall's rules for the loopback interface.",
            )
        ]
    room = ports.last - ports.first + 1 - ports.num_used
    text = f"{room} of {ports.first}-{ports.last} free"
    found = [fine("ports", text)]
    if room < _FEW:
        found = [
            warning(
                "ports",
                f"{text}: connections may fail with EADDRNOTAVAIL",
                'sysctl -w net.ipv4.ip_local_port_range="15000 65000"',
            )
        ]
    if ports.usual_taken:
        found.append(
            warning(
                "port 29500",
                f"taken by {ports.usual_by or 'somebody'}: torchrun and scripts with the usual "
                "MASTER_PORT fail here",
                "Choose another MASTER_PORT (`dure run` does by itself), or end that process.",
            )
        )
    return found
