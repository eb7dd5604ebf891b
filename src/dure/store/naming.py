"""Names that come later, and names that come to mean another address.

In Kubernetes a pod's name is known once the pod has an address, and pods start in any order: the
name of the first one may be unknown for minutes to those that wait for it. A pod that is replaced
keeps its name and gets a new address, which some name servers tell half a minute late. So whoever
waits for a host asks for its name again and again, and one that has been found is asked for again.

Elsewhere a name that is unknown is mostly misspelt, and waiting would not help.
"""

from __future__ import annotations

import contextlib
import socket
import threading
import time
from collections.abc import Callable

from dure import env
from dure.errors import StoreError
from dure.store.address import Address, resolve

__all__ = ["await_name", "is_known", "look_up_briefly", "patience_for_names"]

_SAY_S = 2.0
_PAUSE_S = 0.5


def patience_for_names(limit_s: float, elsewhere_s: float = 0.0) -> float:
    """Return how long to wait for a name that nobody knows: `elsewhere_s` if not in Kubernetes."""
    return limit_s if env.text("KUBERNETES_SERVICE_HOST") else min(limit_s, elsewhere_s)


def is_known(host: str) -> bool:
    """Tell whether `host` has an address; what is no name at all counts as known."""
    try:
        socket.getaddrinfo(host, None, type=socket.SOCK_STREAM)
    except socket.gaierror:
        return host in ("", "*")
    except (OSError, UnicodeError):
        return True
    return True


def await_name(
    host: str,
    limit_s: float,
    say: Callable[[str], None],
    pause: Callable[[float], None] = time.sleep,
) -> None:
    """Wait until `host` is known, or its time is up: then looking it up says what is wrong.

    Args:
        host: A name or an address.
        limit_s: How long, at most; see `patience_for_names`.
        say: Called once, with a line for the user, if it takes long.
        pause: Waits some seconds; what it raises ends the waiting.
    """
    start, said = time.monotonic(), False
    while not is_known(host) and (waited_s := time.monotonic() - start) < limit_s:
        if waited_s >= _SAY_S and not said:
            said = True
            say(f"the name {host!r} is not known here yet; waiting for it for {limit_s:g} s")
        pause(_PAUSE_S)


def look_up_briefly(host: str, port: int, limit_s: float = 1.0) -> Address | None:
    """Return the address of `host`, or None if no answer comes in `limit_s`.

    Asking cannot be broken off, so a thread does it, which ends with the answer.
    """
    found: list[Address] = []

    def ask() -> None:
        with contextlib.suppress(StoreError):
            found.append(resolve(host, port))

    asking = threading.Thread(target=ask, name="dure look-up", daemon=True)
    asking.start()
    asking.join(limit_s)
    return found[0] if found else None
