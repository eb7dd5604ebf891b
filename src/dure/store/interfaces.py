"""The network interface that the user has chosen, by torch's variables.

Gloo reads GLOO_SOCKET_IFNAME, and torch's RPC reads TP_SOCKET_IFNAME. Dure obeys both, on one host
too, as torch does. Where they are not set, the interface that leads to the store is taken
(`address.outward_address`).
"""

from __future__ import annotations

import socket

from dure import env
from dure.errors import UsageError

__all__ = ["chosen_address"]


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


def _address_of(interface: str, variable: str) -> str:
    import psutil  # lazy: only where somebody chooses an interface

    found = psutil.net_if_addrs()
    addresses = [
        each
        for each in found.get(interface, [])
        if each.family in (socket.AF_INET, socket.AF_INET6)
    ]
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
    best = min(
        addresses,
        key=lambda each: (each.family != socket.AF_INET, each.address.startswith("fe80:")),
    )
    return str(best.address)
