"""Interfaces, and the names of this host: how others would find it.

Two traps. A host's own name often stands for 127.0.1.1 in /etc/hosts: rank 0 then tells the others
an address that leads each of them to itself. And a name server that does not answer for an address
makes programs that log names wait seconds for each client.
"""

from __future__ import annotations

import ipaddress
import socket
import time
from dataclasses import dataclass
from pathlib import Path

import psutil

from dure import env
from dure.cli.doctor.finding import Finding, fine, note, problem, warning

__all__ = ["Interface", "Names", "judge", "read"]

_SLOW_S = 0.5
_CHOICES = ("GLOO_SOCKET_IFNAME", "NCCL_SOCKET_IFNAME")
_VIRTUAL = ("docker", "br-", "virbr", "veth", "cni", "flannel", "cali", "tun", "tap", "wg")


@dataclass(frozen=True, slots=True, kw_only=True)
class Interface:
    """One that is up: its name, IPv4 addresses, and Mbit/s (0: it does not say)."""

    name: str
    addresses: tuple[str, ...]
    mbits: int = 0

    @property
    def is_virtual(self) -> bool:
        """Whether it most likely leads to no other host."""
        return self.name.startswith(_VIRTUAL)


@dataclass(frozen=True, slots=True, kw_only=True)
class Names:
    """`resolved` are the addresses of the host's own name; times in seconds.

    `reverse_s` is the slowest look-up of a name for one of this host's addresses, `chosen` what
    the variables name that choose an interface.
    """

    hostname: str
    interfaces: tuple[Interface, ...]
    default: str = ""
    resolved: tuple[str, ...] = ()
    resolve_s: float = 0.0
    reverse_s: float = 0.0
    chosen: tuple[tuple[str, str], ...] = ()


def read() -> Names:
    """Read from the system, and ask for names as a program would."""
    hostname, interfaces = socket.gethostname(), _interfaces()
    start = time.monotonic()
    resolved = _resolve(hostname)
    resolve_s = time.monotonic() - start
    addresses = [a for i in interfaces for a in i.addresses if not i.is_virtual]
    chosen = [(name, env.text(name) or "") for name in _CHOICES]
    return Names(
        hostname=hostname,
        interfaces=interfaces,
        default=_default_interface(),
        resolved=resolved,
        resolve_s=resolve_s,
        reverse_s=max((_reverse_s(a) for a in addresses[:2]), default=0.0),
        chosen=tuple((name, value) for name, value in chosen if value),
    )


def _interfaces() -> tuple[Interface, ...]:
    states, found = psutil.net_if_stats(), list[Interface]()
    for name, addresses in psutil.net_if_addrs().items():
        state = states.get(name)
        own = tuple(a.address for a in addresses if a.family == socket.AF_INET)
        if state is not None and state.isup and own:
            found.append(Interface(name=name, addresses=own, mbits=state.speed))
    return tuple(found)


def _default_interface() -> str:
    """Return the interface of the default route."""
    try:
        rows = [row.split() for row in Path("/proc/net/route").read_text().splitlines()[1:]]
    except OSError:
        return ""
    return next((row[0] for row in rows if len(row) > 1 and row[1] == "00000000"), "")


def _resolve(hostname: str) -> tuple[str, ...]:
    try:
        found = socket.getaddrinfo(hostname, None, socket.AF_INET, socket.SOCK_STREAM)
    except OSError:
        return ()
    return tuple(dict.fromkeys(str(entry[4][0]) for entry in found))


def _reverse_s(address: str) -> float:
    start = time.monotonic()
    socket.getnameinfo((address, 0), 0)
    return time.monotonic() - start


def judge(names: Names) -> list[Finding]:
    """Say by which address other hosts would find this one."""
    return [
        _judge_interfaces(names),
        *_judge_chosen(names),
        _judge_own_name(names),
        _judge_times(names),
    ]


def _judge_interfaces(names: Names) -> Finding:
    if not any(_loops(a) for i in names.interfaces for a in i.addresses):
        return problem(
            "interfaces", "no loopback interface is up: no job can start", "ip link set lo up"
        )
    outside = [i for i in names.interfaces if not all(map(_loops, i.addresses))]
    real = [i for i in outside if not i.is_virtual]
    if not real:
        return note(
            "interfaces",
            "loopback only: jobs on this host work, with other hosts they cannot",
            "Bring an interface up, if there are other hosts.",
        )
    text = ", ".join(
        f"{i.name} {i.addresses[0]}" + (f" ({i.mbits // 1000} Gbit/s)" if i.mbits >= 1000 else "")
        for i in real
    )
    if len(real) > 1 and not names.chosen:
        return note(
            "interfaces",
            f"{text}: engines may choose different ones on different hosts "
            f"(the default route is {names.default or 'missing'})",
            "On several hosts name the fast one: `dure run --local-addr ADDRESS`, "
            "GLOO_SOCKET_IFNAME, NCCL_SOCKET_IFNAME.",
        )
    return fine("interfaces", text)


def _loops(address: str) -> bool:
    return ipaddress.ip_address(address).is_loopback


def _judge_chosen(names: Names) -> list[Finding]:
    known = {interface.name for interface in names.interfaces}
    found: list[Finding] = []
    for variable, value in names.chosen:
        wanted = [part.lstrip("=") for part in value.lstrip("^").split(",")]
        excludes = value.startswith("^")
        missing = [w for w in wanted if not any(name.startswith(w) for name in known)]
        if missing and not excludes:
            found.append(
                problem(
                    "interfaces",
                    f"{variable}={value}, but {', '.join(missing)} is not up here "
                    f"(there are {', '.join(sorted(known))})",
                    f"Correct or unset {variable}.",
                )
            )
    return found


def _judge_own_name(names: Names) -> Finding:
    own = {a for i in names.interfaces for a in i.addresses}
    if not names.resolved:
        return note(
            "own name",
            f"{names.hostname} stands for no address",
            f"Add a line `ADDRESS {names.hostname}` to /etc/hosts; on one host it does not matter.",
        )
    text = f"{names.hostname} is {', '.join(names.resolved)}"
    outside = any(not _loops(a) for a in own)
    if all(map(_loops, names.resolved)) and outside:
        return note(
            "own name",
            f"{text}: other hosts that are told this address would reach themselves",
            "On several hosts give MASTER_ADDR (or --rdzv-endpoint) as an address, not as this "
            "name; or correct /etc/hosts.",
        )
    strange = [a for a in names.resolved if a not in own and not _loops(a)]
    if strange:
        return warning(
            "own name",
            f"{text}, but this host has only {', '.join(sorted(own))}",
            "The name server or /etc/hosts is out of date; use an address instead of the name.",
        )
    return fine("own name", text)


def _judge_times(names: Names) -> Finding:
    slowest = max(names.resolve_s, names.reverse_s)
    if slowest > _SLOW_S:
        kind = "this host's own name" if names.resolve_s >= _SLOW_S else "names of addresses"
        return warning(
            "name look-up",
            f"asking for {kind} takes {slowest:.1f} s: everything that logs a client's name waits",
            "Correct the name server in /etc/resolv.conf, or add the hosts to /etc/hosts.",
        )
    return fine("name look-up", f"{slowest * 1e3:.0f} ms")
