"""The network interface that the user has chosen, by torch's variables.

Gloo reads GLOO_SOCKET_IFNAME, and torch's RPC reads TP_SOCKET_IFNAME. Dure obeys both, on one host
too, as torch does. Where they are not set, the interface that leads to the store is taken
(`address.outward_address`).
"""

from __future__ import annotations

import socket
from ipaddress import ip_address

from dure import env
from dure.errors import UsageError

__all__ = ["chosen_address", "first_address"]

_FAMILIES = (socket.AF_INET, socket.AF_INET6)


def chosen_address(*variables: str) -> str | None:
    """Return the address of the interface that the first variable set among these names.

    Of several interfaces, separated by commas, it is the first; of several addresses the first IPv4
    one, and an address of the link alone (fe80::) last.

    Args:
        variables: Such as GLOO_SOCKET_IFNAME.

    Returns:
        The address; None: no variable is set.

    Raises:
        UsageError: This host has no such interface, or it has no address.
    """
    for variable in variables:
        if given := env.text(variable):
            return _address_of(given.partition(",")[0].strip(), variable)
    return None


def first_address() -> str | None:
    """Return an address of this host that is not a loopback one; None if it has none.

    Of the first interface, in the order of the system, that has one which is not of a link alone.
    """
    for addresses in _addresses().values():
        for address in addresses:
            ip = ip_address(address)
            if not (ip.is_loopback or ip.is_link_local):
                return address
    return None


def _addresses() -> dict[str, list[str]]:
    """Return the addresses of each interface, IPv4 first, and those of a link alone last."""
    import psutil  # lazy: only if an interface is chosen

    found: dict[str, list[str]] = {}
    for name, addresses in psutil.net_if_addrs().items():
        ips = [each.address.partition("%")[0] for each in addresses if each.family in _FAMILIES]
        found[name] = sorted(ips, key=lambda ip: (":" in ip, ip.startswith("fe80:")))
    return found


def _address_of(interface: str, variable: str) -> str:
    found = _addresses()
    addresses = found.get(interface)
    if not addresses:
        has = ", ".join(sorted(found))
        raise UsageError(
            f"{variable} names an interface that this host does not have"
            if interface not in found
            else f"{variable} names an interface without an address",
            seen=f"{interface!r} on {socket.gethostname()}, which has {has}",
            fix=f"Set {variable} to an interface of this host that leads to the other hosts, or "
            "unset it.",
        )
    return addresses[0]
