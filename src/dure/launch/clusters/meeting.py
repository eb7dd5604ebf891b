"""Where the hosts of a job meet: the first host's address, as the other hosts see it."""

from __future__ import annotations

import socket
import subprocess
from collections.abc import Sequence
from ipaddress import ip_address

from dure.errors import StoreError
from dure.store.address import interface_to, is_local, resolve

__all__ = ["is_this_host", "meeting_host", "outward", "ssh_name"]

_ASK_S = 10.0


def meeting_host(hosts: Sequence[str], ssh_options: Sequence[str] = ()) -> str:
    """Return a name or address of `hosts[0]` that leads to it from all of them.

    A remote host is asked for by the address that ssh would use. This host has many addresses: the
    one that leads to another of the hosts counts, and loopback if there is no other.
    """
    others = [host for host in hosts[1:] if not is_this_host(host)]
    if not is_this_host(hosts[0]):
        return _address(ssh_name(hosts[0], ssh_options))
    found = [interface_to(ssh_name(host, ssh_options)) for host in others]
    return next((address for address in found if address), "127.0.0.1")


def outward(endpoint: str, hosts: Sequence[str]) -> str:
    """Return `endpoint` so that its own host does not take it for loopback.

    Debian's /etc/hosts gives a host's own name to 127.0.1.1, which no other host reaches. So the
    first host serves on the interface that leads to another of `hosts` instead.
    """
    host, _, port = endpoint.rpartition(":")
    others = [other for other in hosts if other != host]
    try:
        if not others or not ip_address(resolve(host.strip("[]"), 0).ip).is_loopback:
            return endpoint
    except StoreError:
        return endpoint  # whoever needs it says that it is unknown
    found = interface_to(others[0])
    if found is None:
        return endpoint
    return f"[{found}]:{port}" if ":" in found else f"{found}:{port}"


def is_this_host(host: str) -> bool:
    """Return whether `host` is this machine; a name that only ssh knows is another."""
    if host == socket.gethostname():
        return True
    try:
        return is_local(host)
    except StoreError:
        return False


def ssh_name(host: str, ssh_options: Sequence[str]) -> str:
    """Return what ssh's configuration makes of `host`."""
    try:
        said = subprocess.run(
            ["ssh", *ssh_options, "-G", "--", host],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            text=True,
            timeout=_ASK_S,
            check=True,
        ).stdout
    except (OSError, subprocess.SubprocessError):
        return host
    lines = (line.partition(" ") for line in said.splitlines())
    return next((value.strip() for key, _, value in lines if key == "hostname"), host)


def _address(host: str) -> str:
    try:
        return resolve(host, 0).ip
    except StoreError:
        return host
