"""Where a store listens: names to addresses, never back (a reverse look-up can take seconds).

A store listens on one address: a loopback one for a job of one host, and for several hosts that of
the interface through which they reach each other (MASTER_ADDR, or `DURE_STORE_BIND`). A wildcard
address (0.0.0.0, ::, *, and all their spellings) would open the door to every network that this
host is on, and tells the other hosts nothing. It is refused, wherever it is written, unless
`DURE_STORE_BIND_ANY=1` says that this is meant, as where a container must not know its address.
"""

from __future__ import annotations

import ipaddress
import socket
from dataclasses import dataclass

from dure import env
from dure.errors import StoreError
from dure.store.base import Store

__all__ = [
    "Address",
    "check_not_wildcard",
    "interface_to",
    "is_local",
    "is_wildcard",
    "outward_address",
    "resolve",
]


@dataclass(frozen=True, slots=True, kw_only=True)
class Address:
    """A resolved TCP address."""

    family: socket.AddressFamily
    ip: str
    port: int

    @property
    def endpoint(self) -> str:
        """The address as ZeroMQ writes it."""
        ip = f"[{self.ip}]" if self.family == socket.AF_INET6 else self.ip
        return f"tcp://{ip}:{self.port}"


def resolve(host: str, port: int, purpose: str = "the store's host name") -> Address:
    """Look `host` up; of several addresses the first IPv4 one is taken, on every rank alike.

    Raises:
        StoreError: The name is unknown here, or a wildcard, or the port is no port.
    """
    if not 0 <= port <= 65535:
        raise StoreError("a port must lie between 0 and 65535", seen=f"port {port} for {host}")
    if host == "*":
        host = "0.0.0.0"
    try:
        found = socket.getaddrinfo(host, port, type=socket.SOCK_STREAM)
    except (OSError, UnicodeError) as error:
        raise StoreError(
            f"{purpose} cannot be resolved",
            seen=f"{host!r}: {error}",
            fix="Check its spelling, use an IP address, or add it to /etc/hosts.",
        ) from None
    family, _, _, _, where = min(found, key=lambda info: info[0] != socket.AF_INET)
    check_not_wildcard(str(where[0]), purpose)
    return Address(family=family, ip=str(where[0]), port=port)


def is_wildcard(host: str) -> bool:
    """Tell whether `host` stands for all addresses of a machine, however that is spelled."""
    if host in ("", "*"):
        return True
    try:
        ip = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_unspecified or (mapped is not None and mapped.is_unspecified)


def check_not_wildcard(ip: str, purpose: str) -> None:
    """Refuse an address that stands for all of a machine's, unless the user has allowed that.

    Raises:
        StoreError: It does. The text says what to write instead.
    """
    if not is_wildcard(ip) or env.flag("DURE_STORE_BIND_ANY"):
        return
    raise StoreError(
        f"{purpose} must not be a wildcard address",
        seen=f"{ip} means every network of this machine",
        fix="Write 127.0.0.1 for one host, or the address of the job's interface for several "
        "(MASTER_ADDR, or DURE_STORE_BIND). If it must be all of them, set DURE_STORE_BIND_ANY=1.",
    )


def is_local(host: str) -> bool:
    """Tell whether `host` is this machine: a socket can be bound to its addresses only."""
    if is_wildcard(host):
        return True
    address = resolve(host, 0)
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address.ip, 0))
        except OSError:
            return False
    return True


def outward_address(store: Store) -> str:
    """Return the address of this host that the job's other hosts can reach.

    That of the interface through which the store is reached; where the store is no network store,
    through which MASTER_ADDR is; failing that, what this host's name means to itself.
    """
    endpoint = _endpoint_of(store)
    for host in (endpoint, env.text("DURE_STORE_BIND"), env.text("MASTER_ADDR")):
        if not host or is_wildcard(host):
            continue
        try:
            address = resolve(host, 9)
        except StoreError:
            continue
        found = _source_address(address)
        if found:
            return found
    return resolve(socket.gethostname(), 9, "this host's own name").ip


def interface_to(host: str) -> str | None:
    """Return the address of this machine that leads to `host`; None if nothing does."""
    try:
        return _source_address(resolve(host, 9))
    except StoreError:
        return None


def _source_address(to: Address) -> str | None:
    with socket.socket(to.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((to.ip, 9))  # sends nothing: only asks which interface it would be
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _endpoint_of(store: Store) -> str | None:
    """Return the host of the network store at the bottom of `store`, if there is one."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    endpoint = getattr(store, "endpoint", "")
    if not endpoint.startswith("tcp://"):
        return None
    return endpoint.removeprefix("tcp://").rpartition(":")[0].strip("[]")
