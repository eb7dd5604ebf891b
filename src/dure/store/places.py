"""Where a job's store is: a `Place`, which can be opened to get the store.

A place is one of four:

* `TcpPlace`: a host and a port. Rank 0 serves, unless the launcher does already.
* `LocalPlace`: an abstract Unix socket of this host, under plain `torchrun` on one host.
* `EtcdPlace`: a job in etcd.
* `FilePlace`: a file.

**Under torchrun** the agent itself listens on MASTER_PORT, with torch's own store, which speaks
another protocol; so rank 0 cannot bind that port. On one host the ranks need no port at all: they
meet at a Unix socket in the abstract namespace, whose name is derived from the job key, the run's
name, its restart count and MASTER_PORT. Nobody without the key can guess it beforehand (who reads
it in /proc/net/unix still fails in the key exchange), and it leaves no file, however the ranks die.
Between hosts, rank 0 serves at the port after MASTER_PORT, or at DURE_STORE_PORT; so it does in a
cluster, where MASTER_PORT is derived from the job's name. The key is derived from that name, too:
another job's ranks are refused.
"""

from __future__ import annotations

import logging
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from ipaddress import ip_address
from pathlib import Path
from typing import Protocol

from dure import env
from dure.errors import RendezvousError, StoreError, StoreTimeout
from dure.store.address import interface_to, resolve
from dure.store.base import Store
from dure.store.file import FileStore, remove_if_ended
from dure.store.identity import alive
from dure.store.key import SHARED_HOME_S, JobKey, name_of
from dure.store.listener import listen, listen_local
from dure.store.naming import await_name, patience_for_names
from dure.store.network import NetworkStore, job_key
from dure.store.server import StoreServer, adopt

__all__ = ["EtcdPlace", "FilePlace", "LocalPlace", "Place", "Spot", "TcpPlace", "port_after"]

_HOSTED_S = 20.0
"""How long ranks look for the store of a launcher, which may be on another host."""

_log = logging.getLogger("dure.store")


@dataclass(frozen=True, slots=True, kw_only=True)
class Spot:
    """What an `init_method` says: a place, and who we are there (-1: it does not say)."""

    place: Place
    rank: int
    world_size: int


class Place(Protocol):
    """Somewhere a store can be."""

    @property
    def name(self) -> str:
        """What to call it in a message, and what sets its keys apart from other jobs'."""
        ...

    @property
    def held_by_rank_0(self) -> bool:
        """Whether the store lives in rank 0's process, and dies with it."""
        ...

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Open the store; rank 0 may have to make it."""
        ...


def _await_pod(host: str, limit_s: float) -> None:
    """In Kubernetes wait until rank 0's pod has a name."""
    await_name(host, patience_for_names(limit_s), _log.warning)


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpPlace:
    """A host and a port.

    Attributes:
        hosted: Another process than rank 0, the launcher, serves there.
        purpose: What to call the host's name if it cannot be resolved.
        key: The job's, where the ranks have it from each other; None: it is found (store/key.py).
        server: Where rank 0 serves already.
        job: What sets this job apart from others that would meet here; "": its address does.
        other: Another host of the job. Rank 0 listens on the interface that leads there where its
            own host's name means loopback, as Debian's /etc/hosts has it.
    """

    host: str
    port: int
    name: str
    hosted: bool = False
    purpose: str = "the host of init_method"
    key: JobKey | None = None
    server: StoreServer | None = None
    job: str = ""
    other: str | None = None

    @property
    def held_by_rank_0(self) -> bool:
        """Unless the launcher holds it."""
        return not self.hosted

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Connect; rank 0 serves first, or takes back the server it left a moment ago."""
        began = time.monotonic()
        _await_pod(self.host, timeout_s)
        host = self._own_name() if rank == 0 else self.host
        address = resolve(host, self.port, self.purpose)
        # In a home that all hosts share, rank 0 may be making the user's key just now.
        wait_s = SHARED_HOME_S if self.job and rank != 0 else 0.0
        job = self.job or name_of(self.host, self.port)
        key = self.key or job_key(self.host, job, min(timeout_s, wait_s))
        timeout_s = max(0.1, timeout_s - (time.monotonic() - began))
        server = self.server
        if rank == 0 and not self.hosted and (server is None or server.retired):
            bind = env.text("DURE_STORE_BIND")
            at = resolve(bind, self.port, "DURE_STORE_BIND") if bind else address
            server = adopt(at.endpoint) or StoreServer(listen(at), key)
        if not self.hosted:
            return NetworkStore(address.endpoint, key, timedelta(seconds=timeout_s), server)
        # The launcher serves before it starts ranks: one that does not answer now has gone.
        store = NetworkStore(address.endpoint, key, timedelta(seconds=min(timeout_s, _HOSTED_S)))
        store.set_timeout(timedelta(seconds=timeout_s))
        return store

    def _own_name(self) -> str:
        """Return by what name or address other hosts reach rank 0's host, where this runs."""
        if self.other is None:
            return self.host
        address = resolve(self.host, 0, "rank 0's host")
        if not ip_address(address.ip).is_loopback:
            return self.host
        return interface_to(self.other) or self.host


def port_after(port: int) -> int:
    """Return where rank 0 serves, where `port` is taken by the launcher, or by anybody."""
    return env.integer("DURE_STORE_PORT") or min(port + 1, 65535)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalPlace:
    """A Unix socket of this host; `name` says which job's."""

    name: str

    @property
    def held_by_rank_0(self) -> bool:
        """Always."""
        return True

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Connect; rank 0 serves first."""
        key = job_key("localhost", self.name)
        endpoint = self._endpoint(key)
        server = None
        if rank == 0:
            server = adopt(endpoint) or StoreServer(listen_local(endpoint), key)
        return NetworkStore(endpoint, key, timedelta(seconds=timeout_s), server)

    def _endpoint(self, key: JobKey | None) -> str:
        secret = key or JobKey(bytes(32))
        word = secret.derive(f"local store of user {os.getuid()}: {self.name}").hex()[:32]
        if sys.platform == "linux":
            return f"ipc://@dure-{word}"
        folder = Path(tempfile.gettempdir()) / f"dure-{os.getuid()}"
        folder.mkdir(mode=0o700, exist_ok=True)
        if folder.stat().st_uid != os.getuid():
            raise StoreError(f"the folder {folder} belongs to another user")
        return f"ipc://{folder / word}"


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdPlace:
    """A job in etcd.

    Attributes:
        url: As `EtcdOptions.from_url` reads it.
        hosted: The launcher clears the keys at the end; else the last rank to leave does.
    """

    url: str
    name: str
    hosted: bool = False

    @property
    def held_by_rank_0(self) -> bool:
        """Never: etcd outlives every rank."""
        return False

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Connect; a guest (rank -1) is not counted among those that use the keys."""
        from dure.store.etcd import EtcdStore  # lazy: few jobs use it, and it brings ssl along

        last_clears = rank >= 0 and not self.hosted
        return EtcdStore.from_url(self.url, timedelta(seconds=timeout_s), last_clears)


@dataclass(frozen=True, slots=True, kw_only=True)
class FilePlace:
    """A file."""

    path: str

    @property
    def name(self) -> str:
        """The file's own keys need no name."""
        return "file"

    @property
    def held_by_rank_0(self) -> bool:
        """Never: the file outlives every rank."""
        return False

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Open the file; refuse one that a dead job has left, delete one of a job that has ended.

        Raises:
            RendezvousError: Says whose file it is.
            StoreTimeout: A guest (rank -1) makes no file, and nobody else has.
        """
        deadline = time.monotonic() + timeout_s
        while rank < 0 and not Path(self.path).exists():
            if time.monotonic() > deadline:
                raise StoreTimeout(f"nobody has made the file {self.path}")
            time.sleep(0.01)
        timeout = timedelta(seconds=timeout_s)
        remove_if_ended(self.path, timeout)
        store = FileStore(self.path, world_size, timeout)
        open_users = [user.process for user in store.users if not user.closed]
        dead = [process for process in open_users if alive(process) is False]
        if dead:
            store.close_and_keep()
            raise RendezvousError(
                f"the file {self.path} is left over from a job that died",
                seen=f"still open by {', '.join(map(str, dead[:8]))}: no longer alive",
                fix=f"Delete it (rm {self.path}), or give each job a new path.",
            )
        return store
