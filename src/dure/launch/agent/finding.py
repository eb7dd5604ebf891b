"""How an agent finds the job's other agents: it serves the endpoint's store, or dials until it can.

Who serves: the agent on whose host the endpoint's address is, if its node rank is 0 or free, and if
nobody serves there yet. Everybody else dials until the join timeout, for hosts come in any order,
and runs a standby server, bound to the one address of this host from which the endpoint is reached.

The store of a job that has ended is served for some seconds more, for those who still read its end.
It says so (`OVER`), and counts as nobody: the next job at the same endpoint must not end with the
result of the last.
"""

from __future__ import annotations

import contextlib
import select
import socket
import time
from collections.abc import Callable
from datetime import timedelta

from dure import env
from dure.errors import LaunchError, StoreError, StoreLost, StoreRefused, StoreTimeout, UsageError
from dure.launch.spec import JobSpec
from dure.store.address import Address, is_local, resolve
from dure.store.connection import answers
from dure.store.key import JobKey
from dure.store.ladder import Ladder
from dure.store.listener import listen
from dure.store.naming import await_name, look_up_briefly, patience_for_names
from dure.store.server import StoreServer

__all__ = ["OVER", "bracketed", "keep_quiet", "meet"]

OVER = "dure/agents/over"
"""The key that says that a store's job has ended."""

_OPERATION = timedelta(seconds=2)
_SLICE_S = 0.5
_SAY_S = 3.0
_UNKNOWN_S = 10.0
"""How long the endpoint's name may be unknown where names do not come and go with their hosts."""

_TAKEN_S = 30.0
"""How long a store of our key that is no living job's may hold the endpoint's port on this host."""

_FOREIGN_S = 3.0
"""How long somebody may hold it who does not speak as our stores do."""


def keep_quiet(line: str) -> None:
    """Say nothing."""


def meet(
    spec: JobSpec, key: JobKey, interrupted: int, say: Callable[[str], None] = keep_quiet
) -> tuple[StoreServer, Ladder]:
    """Serve the endpoint's store, or find it and run a standby.

    The endpoint's name is looked up again before each try: its host may have been replaced.

    Args:
        spec: The job.
        key: Its key.
        interrupted: A descriptor that becomes readable when the user has had enough.
        say: Called with a line for the user, if it takes long.

    Raises:
        LaunchError: Neither can be done until the join timeout, or `interrupted` became readable.
        StoreRefused: Whoever is there has another key.
        StoreError: The endpoint, or DURE_STORE_BIND, is a wildcard, or no address.
    """
    assert spec.endpoint is not None
    host, port = _split(spec.endpoint)
    start, taken = time.monotonic(), ""
    patience_s = patience_for_names(spec.join_timeout_s, _UNKNOWN_S)
    await_name(host, patience_s, say, lambda s: _pause(s, start, interrupted))
    there = resolve(host, port, "the endpoint's host")
    if bind := env.text("DURE_STORE_BIND"):  # for ranks' own stores; a wildcard is refused here
        resolve(bind, 0, "DURE_STORE_BIND")
    said = False
    with contextlib.ExitStack() as undo:
        standby: StoreServer | None = None
        own = ""
        while True:
            there = look_up_briefly(host, port) or there
            if _serves(spec, there):
                try:
                    return _serve(there, key, host)
                except StoreError as error:  # taken: another agent of this host was first
                    taken = error.seen or str(error)
                    if time.monotonic() - start > _FOREIGN_S and not _is_ours(there, key):
                        raise _taken(spec, time.monotonic() - start, taken) from None
            if standby is None:
                ip = _own_address(spec, there)
                standby = StoreServer(listen(resolve(ip, 0, "the local address")), key)
                undo.callback(standby.stop)
                own = f"{bracketed(ip)}:{standby.port}"
            ladder = _join(spec, _ladder(there, host, key, own), bool(taken))
            if ladder is not None:
                undo.pop_all()
                return standby, ladder
            _pause(0, start, interrupted)
            elapsed_s = time.monotonic() - start
            if elapsed_s > _SAY_S and not said and not taken:
                said = True
                say(
                    f"nobody answers at {spec.endpoint} ({there.ip}) yet; "
                    f"looking for {spec.join_timeout_s:g} s"
                )
            _check_patience(spec, elapsed_s, taken)


def _serves(spec: JobSpec, there: Address) -> bool:
    """Whether this host is the one whose address the endpoint is."""
    if spec.serves is not None:
        return spec.serves
    return spec.node_rank in (None, 0) and is_local(there.ip)


def _ladder(there: Address, host: str, key: JobKey, own: str | None) -> Ladder:
    """Return a ladder whose first rung is at the endpoint; without `own`, that rung is our own."""
    first = f"{bracketed(there.ip)}:{there.port}"

    def door() -> str | None:
        found = look_up_briefly(host, there.port)
        return f"{bracketed(found.ip)}:{found.port}" if found else None

    named = None if host == there.ip else door
    return Ladder([first], key, own=own or first, timeout=_OPERATION, door=named)


def _pause(seconds: float, start: float, interrupted: int) -> None:
    """Wait so long, or until the user has had enough."""
    if interrupted < 0:
        time.sleep(seconds)
    elif select.select([interrupted], [], [], seconds)[0]:
        raise LaunchError(
            "interrupted while looking for the job's other hosts",
            elapsed_s=time.monotonic() - start,
        )


def _check_patience(spec: JobSpec, elapsed_s: float, taken: str) -> None:
    limit_s = min(spec.join_timeout_s, _TAKEN_S) if taken else spec.join_timeout_s
    if elapsed_s < limit_s:
        return
    if taken:
        raise _taken(spec, elapsed_s, taken)
    raise LaunchError(
        "the job's other hosts cannot be found",
        elapsed_s=elapsed_s,
        seen=f"nobody answers at the endpoint {spec.endpoint}",
        fix="Check that `dure run` runs on that host with the same endpoint, and that no "
        "firewall is between.",
    )


def _taken(spec: JobSpec, elapsed_s: float, taken: str) -> LaunchError:
    port = str(spec.endpoint).rpartition(":")[2]
    return LaunchError(
        f"port {port} of this host is taken by another program",
        elapsed_s=elapsed_s,
        seen=f"{spec.endpoint}: {taken}, and no store of this job answers there",
        fix="Choose another port, on every host (`ss -ltnp` shows who has this one).",
    )


def _is_ours(there: Address, key: JobKey) -> bool:
    """Whether a store with our key answers, be it one of a job that has ended."""
    try:
        return answers(there.endpoint, key, _SLICE_S)
    except StoreRefused as error:
        if error.foreign:
            return False
        raise


def _serve(there: Address, key: JobKey, host: str) -> tuple[StoreServer, Ladder]:
    server = StoreServer(listen(there), key)
    ladder = _ladder(there, host, key, None)
    try:
        ladder.lead()
    except BaseException:
        ladder.close()
        server.stop()
        raise
    return server, ladder


def _join(spec: JobSpec, ladder: Ladder, taken: bool) -> Ladder | None:
    """Look for the store a moment, and stand by there; None if there is none of a living job.

    With `taken`, somebody on this host has the port: who does not speak as we do is no store.
    """
    try:
        if not ladder.join(min(_SLICE_S, spec.join_timeout_s)).check([OVER]):
            ladder.stand_by()
            return ladder
        time.sleep(_SLICE_S)
    except (StoreTimeout, StoreLost):
        pass
    except StoreRefused as error:
        ladder.close()
        if not (taken and error.foreign):
            raise
    except BaseException:
        ladder.close()
        raise
    ladder.close()
    return None


def _split(endpoint: str) -> tuple[str, int]:
    host, _, port = endpoint.rpartition(":")
    if not host or not port.isdecimal() or not 0 < int(port) < 65536:
        raise UsageError(
            "the endpoint is not HOST:PORT", seen=repr(endpoint), fix="For example node1:29400."
        )
    host = host.strip("[]")
    if host in ("0.0.0.0", "::", "*"):
        raise UsageError(
            "the endpoint must be one address of one host",
            seen=repr(endpoint),
            fix="Name the interface that the job's hosts share.",
        )
    return host, int(port)


def bracketed(ip: str) -> str:
    """Return an address as it stands before a port."""
    return f"[{ip}]" if ":" in ip else ip


def _own_address(spec: JobSpec, there: Address) -> str:
    """Return the address of this host from which the endpoint is reached."""
    if spec.local_addr is not None:
        return resolve(spec.local_addr, 0, "the local address").ip
    with socket.socket(there.family, socket.SOCK_DGRAM) as probe:
        try:
            probe.connect((there.ip, there.port))  # sends nothing: only asks which interface it is
        except OSError as error:
            raise LaunchError(
                "there is no way to the endpoint", seen=f"{spec.endpoint}: {error.strerror}"
            ) from None
        return str(probe.getsockname()[0])
