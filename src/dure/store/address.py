"""Hosts and their addresses: names to addresses, never back (a reverse look-up can take seconds).

A store listens on one address: a loopback one for a job of one host, and for several hosts that of
the interface through which they reach each other (MASTER_ADDR, or `DURE_STORE_BIND`). A wildcard
address (0.0.0.0, ::, *, and all their spellings) would open the door to every network that this
host is on, and is of no use to other hosts. It is refused, wherever it is written, unless
`DURE_STORE_BIND_ANY=1` allows it, as for a container that must not know its address.

In Kubernetes a pod's name is known once the pod has an address, and pods start in any order: the
name of the first one may be unknown for minutes to those that wait for it. A pod that is replaced
keeps its name and gets a new address, which some name servers report half a minute late. So the
name of a host that is waited for is looked up again and again, also after it was found once.
Elsewhere a name that is unknown is mostly misspelt, and waiting would not help.
"""

from __future__ import annotations

import contextlib
import errno
import ipaddress
import socket
import threading
import time
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any  # Any: a tuple of five

from dure import env
from dure.errors import StoreError
from dure.store.base import Store
from dure.store.interfaces import chosen_address, first_address

__all__ = [
    "LOOPBACK",
    "Address",
    "await_name",
    "check_not_wildcard",
    "interface_to",
    "is_local",
    "is_refused",
    "is_wildcard",
    "look_up_briefly",
    "outward_address",
    "own_address",
    "patience_for_names",
    "resolve",
    "resolve_shared",
    "why_unreachable",
]

LOOPBACK = ("tcp://127.", "tcp://[::1]")
"""How ZeroMQ's endpoints begin that only this host reaches."""


_ELSEWHERE = "192.0.2.1"
"""An address of no host, reserved for documents: the way there is the default route."""

_SAY_S = 2.0
_PAUSE_S = 0.5


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
    """Look `host` up; of several addresses every rank takes the first IPv4 one.

    Raises:
        StoreError: The name is unknown here, or a wildcard, or an address of one link alone
            (fe80::), or the port is no port.
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
    family, _, _, _, where = min(found, key=_preference)
    ip = str(where[0])
    check_not_wildcard(ip, purpose)
    if _is_of_link(ip):
        raise StoreError(
            f"{purpose} must not be an address of one link alone",
            seen=f"{ip} for {host!r}; each host reaches it through an interface of its own",
            fix="Write an IPv4 address or a global or local (fd..) IPv6 one, or a name for that.",
        )
    return Address(family=family, ip=ip, port=port)


def _preference(found: tuple[Any, ...]) -> tuple[bool, bool]:
    """Order what `getaddrinfo` found: IPv4 first, addresses of one link alone last."""
    return found[0] != socket.AF_INET, _is_of_link(str(found[4][0]))


def _is_of_link(ip: str) -> bool:
    return ip.lower().startswith("fe80:")


def resolve_shared(
    host: str, port: int, purpose: str = "the store's host name", towards: str | None = None
) -> Address:
    """Look up a host at which processes of several hosts meet.

    As `resolve`, but a name that means a loopback address here is this host's own (Debian gives it
    127.0.1.1 in /etc/hosts), and other hosts reach it elsewhere: at DURE_STORE_BIND, or else at the
    interface that leads to the host `towards`, or else at that of the default route, or else at the
    first one that has an address. "localhost" and addresses stay what they are, as does the name of
    a host without a network. All processes of a host get the same answer.

    Raises:
        StoreError: As `resolve`.
    """
    address = resolve(host, port, purpose)
    if not is_loopback_name(host, address):
        return address
    outside = _outside(towards)
    return resolve(outside, port, purpose) if outside else address


def own_address() -> str:
    """Return the address at which other hosts most probably reach this one.

    It is what this host's name means (see `resolve_shared`). A name that is unknown here is taken
    for one that means a loopback address.

    Raises:
        StoreError: The name is unknown, and this host has no address on a network.
    """
    try:
        return resolve_shared(socket.gethostname(), 9, "this host's own name").ip
    except StoreError:
        outside = _outside(None)
        if outside is None:
            raise
        return resolve(outside, 9).ip


def _outside(towards: str | None) -> str | None:
    """Return an address of this host, or a name for one, that is not a loopback one."""
    bind = env.text("DURE_STORE_BIND")
    if bind is not None and not is_wildcard(bind):
        return bind
    to_it = interface_to(towards) if towards else None
    return to_it or interface_to(_ELSEWHERE) or first_address()


def is_loopback_name(host: str, address: Address) -> bool:
    """Return whether `host` is a name, other than localhost, for the loopback address `address`."""
    if not ipaddress.ip_address(address.ip.partition("%")[0]).is_loopback:
        return False
    if "localhost" in host.lower() or host.lower() == "ip6-loopback":
        return False
    try:
        ipaddress.ip_address(host)
    except ValueError:
        return True
    return False


def is_wildcard(host: str) -> bool:
    """Return whether `host` means all addresses of a machine, in any spelling."""
    if host in ("", "*"):
        return True
    try:
        ip = ipaddress.ip_address(host.strip("[]").partition("%")[0])
    except ValueError:
        return False
    mapped = getattr(ip, "ipv4_mapped", None)
    return ip.is_unspecified or (mapped is not None and mapped.is_unspecified)


def check_not_wildcard(ip: str, purpose: str) -> None:
    """Refuse an address that means all of a machine's, unless the user has allowed that.

    Raises:
        StoreError: It does. The text names what to write instead.
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
    """Return whether `host` is this machine: a socket can be bound to its addresses only."""
    if is_wildcard(host):
        return True
    address = resolve(host, 0)
    with socket.socket(address.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.bind((address.ip, 0))
        except OSError:
            return False
    return True


def patience_for_names(limit_s: float, elsewhere_s: float = 0.0) -> float:
    """Return how long to wait for an unknown name: `elsewhere_s` if not in Kubernetes."""
    return limit_s if env.text("KUBERNETES_SERVICE_HOST") else min(limit_s, elsewhere_s)


def await_name(
    host: str,
    limit_s: float,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until `host` is known, or its time is up: then looking it up raises the error.

    Args:
        host: A name or an address.
        limit_s: How long, at most; see `patience_for_names`.
        say: Called once, with a line for the user, if it takes long.
        pause: Waits some seconds; an error of it ends the waiting.
    """
    start, said = time.monotonic(), False
    while not _is_known(host) and (waited_s := time.monotonic() - start) < limit_s:
        if waited_s >= _SAY_S and not said:
            said = True
            say(f"the name {host!r} is not known here yet; waiting for it for {limit_s:g} s")
        pause(_PAUSE_S)


def _is_known(host: str) -> bool:
    """Return whether `host` has an address; a text that cannot be a name counts as known."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return host in ("", "*")
    except (OSError, UnicodeError):
        return True
    return True


def look_up_briefly(host: str, port: int, limit_s: float = 1.0) -> Address | None:
    """Return the address of `host`, or None if no answer comes in `limit_s`.

    Asking cannot be broken off, so a thread does it, which ends with the answer.
    """
    found: list[Address] = []

    def ask() -> None:
        with contextlib.suppress(StoreError):
            found.append(resolve_shared(host, port))

    asking = threading.Thread(target=ask, name="dure look-up", daemon=True)
    asking.start()
    asking.join(limit_s)
    return found[0] if found else None


def is_refused(endpoint: str, limit_s: float = 1.0) -> bool:
    """Return whether a host refuses connections at a TCP endpoint of ZeroMQ's.

    If it does, the process that listened there has ended. False if the host does not answer, if the
    network is cut, or if the process is busy or stopped: then its kernel accepts connections.
    """
    host, port = _host_and_port(endpoint)
    try:
        with socket.create_connection((host, port), limit_s):
            return False
    except OSError as error:
        return bool(host) and isinstance(error, ConnectionRefusedError)


_NO_WAY = {errno.ENETUNREACH, errno.ENETDOWN, errno.EHOSTUNREACH, errno.EADDRNOTAVAIL}
"""Errors of the network; others may be this process's, as too many open files."""


def why_unreachable(endpoint: str) -> str:
    """Return the system's reason why nothing can be sent to a TCP endpoint of ZeroMQ's; "" if none.

    Nothing is sent.
    """
    host, port = _host_and_port(endpoint)
    try:
        family = socket.AF_INET6 if ":" in host else socket.AF_INET
        with socket.socket(family, socket.SOCK_DGRAM) as probe:
            probe.connect((host, port))
    except OSError as error:
        return (error.strerror or "").lower() if error.errno in _NO_WAY else ""
    return ""


def outward_address(store: Store, *variables: str) -> str:
    """Return the address of this host that the job's other hosts can reach.

    That of the interface which the user has chosen (GLOO_SOCKET_IFNAME); else of the one through
    which the store is reached; where the store is no network store, through which MASTER_ADDR is;
    failing that, `own_address`.

    Args:
        store: The job's.
        variables: Others than GLOO_SOCKET_IFNAME that may name the interface; they go first.

    Raises:
        UsageError: This host has no such interface.
    """
    if chosen := chosen_address(*variables, "GLOO_SOCKET_IFNAME"):
        return chosen
    endpoint = _endpoint_of(store)
    for host in (endpoint, env.text("DURE_STORE_BIND"), env.text("MASTER_ADDR")):
        found = interface_to(host) if host and not is_wildcard(host) else None
        if found:
            return found
    return own_address()


def interface_to(host: str) -> str | None:
    """Return the address of this machine that leads to `host`; None if nothing does."""
    try:
        to = resolve_shared(host, 9)
    except StoreError:
        return None
    with socket.socket(to.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((to.ip, 9))  # sends nothing: only asks which interface it would be
        except OSError:
            return None
        return str(probe.getsockname()[0])


def _endpoint_of(store: Store) -> str:
    """Return the host of the network store at the bottom of `store`; "" if there is none."""
    while (inner := getattr(store, "underlying_store", None)) is not None:
        store = inner
    return _host_and_port(getattr(store, "endpoint", ""))[0]


def _host_and_port(endpoint: str) -> tuple[str, int]:
    """Return the address and port of a TCP endpoint of ZeroMQ's; of another one "" and 0."""
    if not endpoint.startswith("tcp://"):
        return "", 0
    host, _, port = endpoint.removeprefix("tcp://").rpartition(":")
    return host.strip("[]"), int(port)
