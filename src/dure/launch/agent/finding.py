"""How an agent finds where the job's state is: it coordinates, or dials until somebody does.

Who coordinates: the launcher on whose host the endpoint's address is, if nobody does there yet. It
runs two servers, each with a thread of its own. The *control server*, at the endpoint, has the
job's state and the agents' leases; ranks never come there, so renewals never queue behind their
keys. Its key follows from the user's, the endpoint and the job's name. The *ranks' server* is at
another port of that address, and its key is random: the job's own, which the coordinator hands out
in the state. What leaks from a rank opens one job.

Everybody else dials until the join timeout, for hosts come in any order.

With etcd nobody coordinates: everybody finds the same keys there (`EtcdFinder`).
"""

from __future__ import annotations

import select
import socket
import time
import uuid
from collections.abc import Callable
from datetime import timedelta
from typing import TYPE_CHECKING
from urllib.parse import urlsplit

from dure import env
from dure.errors import LaunchError, StoreError, StoreLost, StoreRefused, StoreTimeout, UsageError
from dure.launch.spec import JobSpec
from dure.store.address import (
    Address,
    await_name,
    interface_to,
    is_local,
    look_up_briefly,
    patience_for_names,
    resolve,
)
from dure.store.connection import answers
from dure.store.key import JobKey, mint
from dure.store.listener import listen
from dure.store.network import NetworkStore
from dure.store.server import StoreServer

if TYPE_CHECKING:
    from dure.store.etcd import EtcdStore

__all__ = ["Coordinator", "EtcdFinder", "Finder", "keep_quiet", "open_control"]

_OPERATION = timedelta(seconds=1)
_ETCD = timedelta(seconds=2)
_PAUSE_S = 0.1
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


def open_control(endpoint: str, key: JobKey, patience_s: float = _SLICE_S) -> NetworkStore:
    """Connect to a control server that must be there."""
    return NetworkStore(endpoint, key, timeout=_OPERATION, patience_s=patience_s)


class Coordinator:
    """The servers of the launcher at the endpoint.

    Args:
        there: The endpoint.
        key: The control server's key.
        presence: Told of leased keys whose connection breaks, or is back.

    Raises:
        StoreError: The port is taken.
    """

    def __init__(self, there: Address, key: JobKey, presence: Callable[[str, bool], None]) -> None:
        self.job_key = mint()
        self._control = StoreServer(listen(there), key, presence)
        try:
            self._ranks = StoreServer(listen(resolve(there.ip, 0)), self.job_key)
        except BaseException:
            self._control.stop()
            raise
        self.store = f"{_bracketed(there.ip)}:{self._ranks.port}"

    def close(self) -> None:
        """Stop both servers."""
        self._control.stop()
        self._ranks.stop()


class Finder:
    """Finds the control server.

    Args:
        spec: The job.
        key: The control server's key.
        presence: As for `Coordinator`.
        interrupted: A descriptor that becomes readable when the user has had enough.
        say: Called with a line for the user, if it takes long.

    Attributes:
        coordinator: This launcher's servers, if it coordinates.
        address: The address of this host by which the job's other hosts reach it.
        endpoint: Where the control server is, in ZeroMQ's words.

    Raises:
        StoreError: The endpoint, or DURE_STORE_BIND, is a wildcard, or no address.
    """

    def __init__(
        self,
        spec: JobSpec,
        key: JobKey,
        presence: Callable[[str, bool], None],
        interrupted: int = -1,
        say: Callable[[str], None] = keep_quiet,
    ) -> None:
        assert spec.endpoint is not None
        self._spec, self._key, self._presence = spec, key, presence
        self._interrupted, self._say = interrupted, say
        self._host, self._port = _split(spec.endpoint)
        self._start = time.monotonic()
        self._said = False
        self._taken = ""  # why the endpoint's port cannot be had, though it is ours
        self.coordinator: Coordinator | None = None
        patience_s = patience_for_names(spec.join_timeout_s, _UNKNOWN_S)
        await_name(self._host, patience_s, say, self.pause)
        self._there = resolve(self._host, self._port, "the endpoint's host")
        self.address, self.endpoint = "", self._there.endpoint
        if bind := env.text("DURE_STORE_BIND"):  # for ranks' own stores; a wildcard is refused here
            resolve(bind, 0, "DURE_STORE_BIND")

    def reach(self, *, serve: bool) -> NetworkStore | None:
        """Try once: coordinate, with `serve` and if this host may, or dial; None: nobody is there.

        The endpoint's name is looked up again, for its host may have been replaced.

        Raises:
            LaunchError: Another program has the port, or there is no way to the endpoint.
            StoreRefused: Whoever is there has another key.
        """
        self._there = there = look_up_briefly(self._host, self._port) or self._there
        self.endpoint = there.endpoint
        if serve and self.coordinator is None and self._serves():
            try:
                self.coordinator = Coordinator(there, self._key, self._presence)
            except StoreError as error:  # taken: another agent of this host was first
                self._taken = error.seen or str(error)
                if self._waited_s > _FOREIGN_S and not self._is_ours():
                    raise self._port_taken() from None
        self.address = there.ip if self.coordinator is not None else self._own_address()
        if not self.address:  # the interface is down
            if serve:
                raise LaunchError("there is no way to the endpoint", seen=str(self._spec.endpoint))
            return None
        try:
            return open_control(there.endpoint, self._key)
        except (StoreTimeout, StoreLost):
            return None
        except StoreRefused as error:
            if self._taken and error.foreign:
                return None
            error.advise(
                "Agents of one job have the same --rdzv-endpoint, written alike, and --rdzv-id."
            )
            raise

    def begin(self) -> None:
        """Count the time from now on."""
        self._start, self._said, self._taken = time.monotonic(), False, ""

    def wait(self, limit_s: float) -> bool:
        """Wait a little before the next try; False: there is no time for one.

        Raises:
            LaunchError: The user has had enough, or another program has the port.
        """
        self.pause(_PAUSE_S)
        waited_s = self._waited_s
        if self._taken and waited_s > min(limit_s, _TAKEN_S):
            raise self._port_taken()
        if waited_s > _SAY_S and not self._said and not self._taken:
            self._said = True
            self._say(
                f"nobody answers at {self._spec.endpoint} ({self._there.ip}) yet; "
                f"looking for {limit_s:g} s"
            )
        return waited_s < limit_s

    def nobody(self) -> LaunchError:
        """Return the error of one who has looked in vain."""
        return LaunchError(
            "the job's other hosts cannot be found",
            elapsed_s=self._waited_s,
            seen=f"nobody answers at the endpoint {self._spec.endpoint}",
            fix="Check that `dure run` runs on that host with the same endpoint, and that no "
            "firewall is between.",
        )

    def pause(self, seconds: float) -> None:
        """Wait so long, or until the user has had enough."""
        if self._interrupted < 0:
            time.sleep(seconds)
        elif select.select([self._interrupted], [], [], seconds)[0]:
            raise LaunchError(
                "interrupted while looking for the job's other hosts", elapsed_s=self._waited_s
            )

    def close(self) -> None:
        """Stop the servers, if this launcher has them."""
        if self.coordinator is not None:
            self.coordinator.close()

    @property
    def _waited_s(self) -> float:
        return time.monotonic() - self._start

    def _serves(self) -> bool:
        """Whether this host is the one whose address the endpoint is."""
        if self._spec.serves is not None:
            return self._spec.serves
        return is_local(self._there.ip)

    def _is_ours(self) -> bool:
        """Whether a store with our key answers, be it one of a job that has ended."""
        try:
            return answers(self._there.endpoint, self._key, _SLICE_S)
        except StoreRefused as error:
            if error.foreign:
                return False
            raise

    def _port_taken(self) -> LaunchError:
        return LaunchError(
            f"port {self._port} of this host is taken by another program",
            elapsed_s=self._waited_s,
            seen=f"{self._spec.endpoint}: {self._taken}, and no store of this job answers there",
            fix="Choose another port, on every host (`ss -ltnp` shows who has this one).",
        )

    def _own_address(self) -> str:
        """Return the address of this host from which the endpoint is reached; empty: none is."""
        if self._spec.local_addr is not None:
            return resolve(self._spec.local_addr, 0, "the local address").ip
        with socket.socket(self._there.family, socket.SOCK_DGRAM) as probe:
            try:
                probe.connect((self._there.ip, self._there.port))  # sends nothing
            except OSError:
                return ""
            return str(probe.getsockname()[0])


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


def _bracketed(ip: str) -> str:
    """Return an address as it stands before a port."""
    return f"[{ip}]" if ":" in ip else ip


class EtcdFinder:
    """Finds a job's state in etcd; as `Finder`, but that nobody coordinates.

    Raises:
        UsageError: The addresses or the options make no sense.
    """

    coordinator = None

    def __init__(self, spec: JobSpec, interrupted: int = -1) -> None:
        from dure.store.etcd import EtcdStore  # lazy: few jobs use it, and it brings ssl along
        from dure.store.etcd_gateway import EtcdOptions  # lazy: as before

        assert spec.endpoint is not None
        assert spec.run_id is not None
        self._spec, self._interrupted = spec, interrupted
        self._open = EtcdStore
        self.options = EtcdOptions.read(spec.endpoint, dict(spec.rdzv_conf))
        self.endpoint = self.options.url(spec.run_id)
        self.address = spec.local_addr or ""
        self._why = ""
        self.begin()

    def ranks_store(self) -> str:
        """Return the address of a store for ranks that nobody has used before."""
        return self.options.url(f"{self._spec.run_id}/ranks-{uuid.uuid4().hex[:12]}")

    def begin(self) -> None:
        """Count the time from now on."""
        self._start = time.monotonic()

    def reach(self, *, serve: bool) -> EtcdStore | None:
        """Try once; None: nobody answers.

        Raises:
            StoreRefused: The name, the password or a certificate is wrong.
        """
        if not self.address:
            hosts = [urlsplit(f"//{each}").hostname or "" for each in self.options.endpoints]
            self.address = next(filter(None, map(interface_to, hosts)), "")
        try:
            return self._open(self.options, str(self._spec.run_id), timeout=_ETCD)
        except (StoreTimeout, StoreLost) as error:
            self._why = error.seen or str(error)
            return None

    def wait(self, limit_s: float) -> bool:
        """Wait a little before the next try; False: there is no time for one."""
        if self._interrupted < 0:
            time.sleep(_PAUSE_S)
        elif select.select([self._interrupted], [], [], _PAUSE_S)[0]:
            raise LaunchError("interrupted while looking for etcd")
        return time.monotonic() - self._start < limit_s

    def nobody(self) -> LaunchError:
        """Return the error of one who has looked in vain."""
        return LaunchError(
            "etcd cannot be reached",
            elapsed_s=time.monotonic() - self._start,
            seen=f"{','.join(self.options.endpoints)}: {self._why or 'no answer'}",
            fix="Check --rdzv-endpoint, and that a majority of etcd's members runs.",
        )

    def close(self) -> None:
        """Nothing is held."""
