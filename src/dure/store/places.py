"""Where a job's store is: from an `init_method` and the environment to a `Place`, and to a store.

A place is one of four:

* `TcpPlace`: a host and a port. Rank 0 serves, unless the launcher does already.
* `LocalPlace`: an abstract Unix socket of this host, under plain `torchrun` on one host.
* `NearPlace`: one of a few ports above MASTER_PORT, under plain `torchrun` on several hosts.
* `FilePlace`: a file.

**Under torchrun** the agent itself listens on MASTER_PORT, with torch's own store, which speaks
another protocol; so rank 0 cannot bind that port. On one host the ranks need no port at all: they
meet at a Unix socket in the abstract namespace, whose name is derived from the job key, the run's
name, its restart count and MASTER_PORT. Nobody without the key can guess it beforehand (who reads
it in /proc/net/unix still fails in the key exchange), and it leaves no file, however the ranks die.
Between hosts, rank 0 takes the first free one of the 16 ports after MASTER_PORT, and the others try
these in turn. The job key keeps them from entering another user's store, and the run's name, which
each store holds, from entering another job's.
"""

from __future__ import annotations

import itertools
import os
import sys
import tempfile
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Protocol
from urllib.parse import parse_qs, urlsplit

from dure import env
from dure.errors import RendezvousError, StoreError, StoreTimeout
from dure.store.address import resolve
from dure.store.base import Store
from dure.store.file import FileStore, remove_if_ended
from dure.store.identity import alive
from dure.store.key import JobKey
from dure.store.network import NetworkStore, job_key
from dure.store.server import StoreServer, adopt, listen, listen_local

__all__ = ["FilePlace", "LocalPlace", "NearPlace", "Place", "Spot", "TcpPlace", "find_place"]

_NEAR_PORTS = 16
_JOB = "dure/job"


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


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpPlace:
    """A host and a port.

    Attributes:
        hosted: Another process than rank 0, the launcher, serves there.
        purpose: What to call the host's name if it cannot be resolved.
    """

    host: str
    port: int
    name: str
    hosted: bool = False
    purpose: str = "the host of init_method"

    @property
    def held_by_rank_0(self) -> bool:
        """Unless the launcher holds it."""
        return not self.hosted

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Connect; rank 0 serves first, or takes back the server it left a moment ago."""
        address = resolve(self.host, self.port, self.purpose)
        key = job_key(self.host)
        server = None
        if rank == 0 and not self.hosted:
            bind = env.text("DURE_STORE_BIND")
            at = resolve(bind, self.port, "DURE_STORE_BIND") if bind else address
            server = adopt(at.endpoint) or StoreServer(listen(at), key)
        return NetworkStore(address.endpoint, key, timedelta(seconds=timeout_s), server)


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
        key = job_key("localhost")
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
class NearPlace:
    """One of the ports after `port`, which a foreign launcher holds."""

    host: str
    port: int
    name: str

    @property
    def held_by_rank_0(self) -> bool:
        """Always."""
        return True

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Serve on the first free port (rank 0), or look for rank 0's."""
        key = job_key(self.host)
        if rank == 0:
            return self._serve(key, timeout_s)
        deadline = time.monotonic() + timeout_s
        for port in itertools.cycle(self._ports()):
            left_s = deadline - time.monotonic()
            if left_s <= 0:
                break
            store = self._visit(port, key, min(left_s, 0.3))
            if store is not None:
                store.set_timeout(timedelta(seconds=timeout_s))
                return store
        ports = self._ports()
        raise StoreTimeout(
            f"rank 0's store on {self.host} cannot be found",
            elapsed_s=timeout_s,
            seen=f"none of the ports {ports[0]} to {ports[-1]} has the store of this job",
            fix="Check that rank 0 runs and that these ports are open between the hosts.",
        )

    def _ports(self) -> range:
        return range(self.port + 1, min(self.port + 1 + _NEAR_PORTS, 65536))

    def _serve(self, key: JobKey | None, timeout_s: float) -> Store:
        server, last = None, StoreError("there is no port to listen on")
        for port in self._ports():
            at = resolve(env.text("DURE_STORE_BIND") or self.host, port, "MASTER_ADDR")
            try:
                server = adopt(at.endpoint) or StoreServer(listen(at), key)
                break
            except StoreError as error:
                last = error
        if server is None:
            raise last
        endpoint = resolve(self.host, server.port, "MASTER_ADDR").endpoint
        store = NetworkStore(endpoint, key, timedelta(seconds=timeout_s), server)
        store.set(_JOB, self.name)
        return store

    def _visit(self, port: int, key: JobKey | None, timeout_s: float) -> Store | None:
        """Return the store at `port` if it is there and this job's."""
        endpoint = resolve(self.host, port, "MASTER_ADDR").endpoint
        try:
            store = NetworkStore(endpoint, key, timedelta(seconds=timeout_s))
        except StoreError:
            return None
        try:
            if store.get(_JOB) == self.name.encode():
                return store
        except StoreError:
            pass
        store.close()
        return None


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


def find_place(init_method: str | None, rank: int, world_size: int) -> Spot:
    """Read an `init_method`; numbers given as arguments go before those of the URL or environment.

    Raises:
        RendezvousError: It is malformed, or an environment variable is missing.
    """
    url = init_method or "env://"
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    rank = rank if rank >= 0 or "rank" not in query else _number(url, query["rank"])
    if world_size < 0 and "world_size" in query:
        world_size = _number(url, query["world_size"])
    if parts.scheme == "env":
        return _from_environment(rank, world_size)
    if parts.scheme == "tcp":
        place: Place = _tcp_place(url)
    elif parts.scheme == "file":
        place = _file_place(url)
    else:
        raise RendezvousError(
            "init_method cannot be understood",
            seen=repr(url),
            fix="Write env://, tcp://HOST:PORT or file:///PATH.",
        )
    if rank == -1 or world_size == -1:
        missing = [n for n, v in (("rank", rank), ("world_size", world_size)) if v == -1]
        raise RendezvousError(
            f"{' and '.join(missing)} must be given with {parts.scheme}://",
            fix=f"Pass {', '.join(f'{name}=...' for name in missing)} to init_process_group.",
        )
    return Spot(place=place, rank=rank, world_size=world_size)


def _tcp_place(url: str) -> TcpPlace:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise RendezvousError(
            "init_method names no host and port", seen=repr(url), fix="Write tcp://HOST:PORT."
        )
    return TcpPlace(host=host, port=port, name="tcp")


def _file_place(url: str) -> FilePlace:
    parts = urlsplit(url)
    if parts.netloc not in ("", "localhost") or parts.path in ("", "/"):
        raise RendezvousError(
            "init_method names no file",
            seen=repr(url),
            fix="Write file:// and an absolute path, which makes three slashes: file:///PATH.",
        )
    return FilePlace(path=parts.path)


def _number(url: str, value: str) -> int:
    try:
        return int(value)
    except ValueError:
        raise RendezvousError(
            "init_method holds something that is not a whole number", seen=f"{value!r} in {url!r}"
        ) from None


def _from_environment(rank: int, world_size: int) -> Spot:
    launcher = env.text("DURE_STORE_ADDR")
    needed = ["RANK"] if rank == -1 else []
    needed += ["WORLD_SIZE"] if world_size == -1 else []
    needed += [] if launcher else ["MASTER_ADDR", "MASTER_PORT"]
    _require(needed)
    rank = (env.integer("RANK", -1) or 0) if rank == -1 else rank
    world_size = (env.integer("WORLD_SIZE", -1) or 0) if world_size == -1 else world_size
    return Spot(place=_environment_place(launcher, world_size), rank=rank, world_size=world_size)


def _require(names: list[str]) -> None:
    """Say in one error everything that is missing."""
    missing = [name for name in names if env.text(name) is None]
    if len(missing) <= 1:
        for name in missing:
            env.require(name, "init_process_group with env://")
        return
    raise RendezvousError(
        f"the environment variables {', '.join(missing)} are missing",
        seen="; ".join(f"{name}: {env.VARIABLES[name].meaning}" for name in missing),
        fix="Start the program with `dure run --nproc 2 PROGRAM`, or set "
        + " ".join(f"{name}={env.VARIABLES[name].example}" for name in missing)
        + ", or pass init_method=, rank= and world_size=.",
    )


def _environment_place(launcher: str | None, world_size: int) -> Place:
    host, port = env.text("MASTER_ADDR") or "", env.integer("MASTER_PORT", 0) or 0
    run = env.text("TORCHELASTIC_RUN_ID") or ""
    name = f"{run} {env.text('TORCHELASTIC_RESTART_COUNT') or 0} {host}:{port}"
    if launcher:
        where, _, number = launcher.rpartition(":")
        if not where or not number.isdecimal():
            raise RendezvousError(
                "the environment variable DURE_STORE_ADDR is not HOST:PORT", seen=repr(launcher)
            )
        return TcpPlace(
            host=where, port=int(number), name=name, hosted=True, purpose="DURE_STORE_ADDR"
        )
    if not 0 < port < 65536:
        raise RendezvousError(
            "the environment variable MASTER_PORT is no port",
            seen=f"{port}; it means {env.VARIABLES['MASTER_PORT'].meaning}",
            fix="Set it to a free port between 1024 and 65535.",
        )
    if env.flag("TORCHELASTIC_USE_AGENT_STORE"):
        if env.integer("LOCAL_WORLD_SIZE") == world_size:
            return LocalPlace(name=name)
        return NearPlace(host=host, port=port, name=name)
    return TcpPlace(host=host, port=port, name="tcp", purpose="MASTER_ADDR")
