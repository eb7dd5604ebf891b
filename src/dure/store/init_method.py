"""What an `init_method` and the environment say: where the store is, and which rank this is.

`env://` reads torch's variables. Missing ones are taken from the cluster around this process
if there is one; an error names those that are missing there, too. The store is then at one of

* `TcpEndpoint`: a host and a port. Rank 0 serves, unless the launcher does already.
* `LocalEndpoint`: an abstract Unix socket of this host, so that there is no port to choose.
* `EtcdEndpoint`: a job in etcd.
* `FileEndpoint`: a file.

**Under torchrun** the agent itself listens on MASTER_PORT, with torch's own store, which speaks
another protocol; so rank 0 cannot bind that port. On one host the ranks meet at a Unix socket whose
name is derived from the job key, the run's name, its restart count and MASTER_PORT. A process
without the key cannot guess it (one that reads it in /proc/net/unix fails in the key exchange),
and it leaves no file, however the ranks die. Between hosts, rank 0 serves at the port after
MASTER_PORT, or at DURE_STORE_PORT.

**In a cluster** it is the same: a Unix socket on one host, and on several the port after one that
all derive from the job's name, on the cluster's first host. The key is derived from that name, too:
another job's ranks are refused. MPICH gives a job no name; its processes have one ancestor that no
other job has, whose number and start replace the name.
"""

from __future__ import annotations

import contextlib
import os
import time
from dataclasses import dataclass
from datetime import timedelta
from urllib.parse import parse_qs, urlsplit

import psutil

from dure import env
from dure.errors import RendezvousError, StoreError
from dure.placement import Placement, RankSlot, System, detect
from dure.store.address import await_name, patience_for_names, resolve_shared
from dure.store.base import Store
from dure.store.file import FileStore
from dure.store.identity import start_of
from dure.store.key import SHARED_HOME_S, JobKey, name_of
from dure.store.listener import Listener
from dure.store.network import NetworkStore, job_key, serve
from dure.store.server import StoreServer, shared_server
from dure.store.silence import silence_s
from dure.trace import logs

__all__ = [
    "Endpoint",
    "EtcdEndpoint",
    "FileEndpoint",
    "InitMethod",
    "LocalEndpoint",
    "TcpEndpoint",
    "read_init_method",
]

_TAKEN_S = 2.0
"""How long a rank 0 that finds its port taken waits for a store's answer there."""

_WITH_VARIABLES = (System.DURE, System.TORCHRUN, System.LAUNCHER, System.PLAIN)

_log = logs.logger("store")


@dataclass(frozen=True, slots=True, kw_only=True)
class TcpEndpoint:
    """A host and a port.

    Attributes:
        name: The prefix of this job's keys.
        hosted: Another process than rank 0, the launcher, serves there.
        purpose: What to call the host's name if it cannot be resolved.
        key: The job's, where the ranks have it from each other; None: it is found (store/key.py).
        server: Where rank 0 serves already.
        job: Identifies this job among others that would meet here; "": its address does.
        other: Another host of the job: the interface that leads there is meant where a host's own
            name means loopback, as Debian's /etc/hosts has it.
    """

    host: str
    port: int
    name: str = "tcp"
    hosted: bool = False
    purpose: str = "the host of init_method"
    key: JobKey | None = None
    server: StoreServer | None = None
    job: str = ""
    other: str | None = None

    @property
    def held_by_rank_0(self) -> bool:
        """Whether the store is in rank 0's process, and ends with it."""
        return not self.hosted

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Connect; rank 0 serves first, unless its process has a server there already."""
        began = time.monotonic()
        await_name(self.host, patience_for_names(timeout_s), _log.warning)
        address = resolve_shared(self.host, self.port, self.purpose, self.other)
        # In a home that all hosts share, rank 0 may be making the user's key just now.
        wait_s = SHARED_HOME_S if self.job and rank != 0 else 0.0
        job = self.job or name_of(self.host, self.port)
        key = self.key or job_key(self.host, job, min(timeout_s, wait_s))
        timeout_s = max(0.1, timeout_s - (time.monotonic() - began))
        if self.hosted:  # The launcher serves before it starts ranks: if not now, it has gone.
            soon = timedelta(seconds=min(timeout_s, silence_s()))
            store = NetworkStore(address.endpoint, key, soon)
            store.set_timeout(timedelta(seconds=timeout_s))
            return store
        server = self.server
        if rank == 0 and server is None:
            try:
                server = serve(address, lambda port: key)
            except StoreError:
                # If another rank 0 serves there, all ranks learn from the rendezvous that two have
                # this number, in either order.
                with contextlib.suppress(StoreError):
                    limit = timedelta(seconds=timeout_s)
                    return NetworkStore(address.endpoint, key, limit, patience_s=_TAKEN_S)
                raise
        return NetworkStore(address.endpoint, key, timedelta(seconds=timeout_s), server)


@dataclass(frozen=True, slots=True, kw_only=True)
class LocalEndpoint:
    """A Unix socket of this host; `name` says which job's."""

    name: str
    held_by_rank_0: bool = True

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Connect; rank 0 serves first."""
        key = job_key("localhost", self.name)
        secret = key or JobKey(bytes(32))
        word = secret.derive(f"local store of user {os.getuid()}: {self.name}").hex()[:32]
        endpoint = f"ipc://@dure-{word}"
        server = None
        if rank == 0:
            server = shared_server(endpoint, lambda: StoreServer(Listener(endpoint=endpoint), key))
        return NetworkStore(endpoint, key, timedelta(seconds=timeout_s), server)


@dataclass(frozen=True, slots=True, kw_only=True)
class EtcdEndpoint:
    """A job in etcd.

    Attributes:
        url: As `EtcdOptions.from_url` reads it.
        hosted: The launcher clears the keys at the end; else the last rank to leave does.
    """

    url: str
    name: str = "etcd"
    hosted: bool = False
    held_by_rank_0: bool = False

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Connect."""
        from dure.store.etcd import EtcdStore  # lazy: few jobs use it, and it brings ssl along

        return EtcdStore.from_url(self.url, timedelta(seconds=timeout_s), not self.hosted)


@dataclass(frozen=True, slots=True, kw_only=True)
class FileEndpoint:
    """A file, whose own keys need no name."""

    path: str
    name: str = "file"
    held_by_rank_0: bool = False

    def open(self, rank: int, world_size: int, timeout_s: float) -> Store:
        """Open the file; one that a job has left which ended in order is used again."""
        return FileStore(self.path, world_size, timedelta(seconds=timeout_s), fresh=True)


Endpoint = TcpEndpoint | LocalEndpoint | EtcdEndpoint | FileEndpoint
"""An address at which ranks share a store; rank 0 may have to make it when it opens it."""


@dataclass(frozen=True, slots=True, kw_only=True)
class InitMethod:
    """What an `init_method` says: an endpoint, and which rank this is (-1: it does not say)."""

    endpoint: Endpoint
    rank: int
    world_size: int


def read_init_method(init_method: str | None, rank: int, world_size: int) -> InitMethod:
    """Read an `init_method`; numbers given as arguments go before those of the URL or environment.

    Raises:
        RendezvousError: It is malformed, or an environment variable is missing.
    """
    url = init_method or "env://"
    parts = urlsplit(url)
    query = {name: values[-1] for name, values in parse_qs(parts.query).items()}
    try:
        rank = env.parse_integer(query.get("rank", "-1")) if rank < 0 else rank
        size = env.parse_integer(query.get("world_size", "-1")) if world_size < 0 else world_size
    except ValueError:
        raise _malformed(url, "holds something that is not an integer") from None
    if parts.scheme == "env":
        return _from_environment(rank, size)
    if parts.scheme == "tcp":
        host, port = _host_and_port(url)
        endpoint: Endpoint = TcpEndpoint(host=host, port=port)
    elif parts.scheme == "etcd":
        endpoint = EtcdEndpoint(url=url)
    elif parts.scheme != "file":
        raise _malformed(url, "cannot be understood")
    elif parts.netloc not in ("", "localhost") or parts.path in ("", "/"):
        raise _malformed(url, "names no file; the path is absolute, which makes three slashes")
    else:
        endpoint = FileEndpoint(path=parts.path)
    missing = [name for name, number in (("rank", rank), ("world_size", size)) if number == -1]
    if missing:
        raise RendezvousError(
            f"{' and '.join(missing)} must be given with {parts.scheme}://",
            fix=f"Pass {', '.join(f'{name}=...' for name in missing)} to init_process_group.",
        )
    return InitMethod(endpoint=endpoint, rank=rank, world_size=size)


def _malformed(url: str, why: str) -> RendezvousError:
    return RendezvousError(
        f"init_method {why}",
        seen=repr(url),
        fix="Write env://, tcp://HOST:PORT, file:///PATH or etcd://HOST:PORT/JOB.",
    )


def _host_and_port(url: str) -> tuple[str, int]:
    try:
        parts = urlsplit(url)
        host, port = parts.hostname, parts.port
    except ValueError:
        host = port = None
    if not host or not port:
        raise _malformed(url, "names no host and port")
    return host, port


def _from_environment(rank: int, world_size: int) -> InitMethod:
    """Read torch's variables, and the cluster's for those that neither they nor arguments give."""
    launcher = env.text("DURE_STORE_ADDR")
    needed = [name for name, given in (("RANK", rank), ("WORLD_SIZE", world_size)) if given == -1]
    needed += [] if launcher else ["MASTER_ADDR", "MASTER_PORT"]
    missing = [name for name in needed if env.text(name) is None]
    if missing and not launcher:
        placement = detect(env.everything())
        if placement.member is not None and placement.system not in _WITH_VARIABLES:
            return _in_cluster(placement, placement.member, rank, world_size)
    if len(missing) == 1:
        env.require(missing[0], "init_process_group with env://")
    if missing:
        raise RendezvousError(
            f"the environment variables {', '.join(missing)} are missing",
            seen="; ".join(f"{name}: {env.VARIABLES[name].meaning}" for name in missing),
            fix="Start the program with `dure run --nproc 2 PROGRAM`, or set "
            + " ".join(f"{name}={env.VARIABLES[name].example}" for name in missing)
            + ", or pass init_method=, rank= and world_size=.",
        )
    rank = _chosen("RANK", rank, -1)
    world_size = _chosen("WORLD_SIZE", world_size, -1)
    return InitMethod(
        endpoint=_environment_endpoint(launcher, world_size), rank=rank, world_size=world_size
    )


def _chosen(name: str, given: int, found: int) -> int:
    """Take the argument, then the variable, then what was found."""
    if given != -1:
        return given
    variable = env.integer(name)
    return found if variable is None else variable


def _environment_endpoint(launcher: str | None, world_size: int) -> Endpoint:
    host, port = env.text("MASTER_ADDR") or "", env.integer("MASTER_PORT", 0) or 0
    run = env.text("TORCHELASTIC_RUN_ID") or ""
    name = f"{run} {env.text('TORCHELASTIC_RESTART_COUNT') or 0} {host}:{port}"
    if launcher and launcher.startswith("etcd://"):
        return EtcdEndpoint(url=launcher, name=name, hosted=True)
    if launcher:
        host, port = _host_and_port(f"tcp://{launcher}")
        return TcpEndpoint(host=host, port=port, name=name, hosted=True, purpose="DURE_STORE_ADDR")
    if not 0 < port < 65536:
        raise RendezvousError(
            "the environment variable MASTER_PORT must be a port",
            seen=f"{port}; it means {env.VARIABLES['MASTER_PORT'].meaning}",
            fix="Set it to a free port between 1024 and 65535.",
        )
    if not env.flag("TORCHELASTIC_USE_AGENT_STORE"):
        return TcpEndpoint(host=host, port=port, purpose="MASTER_ADDR")
    if env.integer("LOCAL_WORLD_SIZE") == world_size:
        return LocalEndpoint(name=name)
    return TcpEndpoint(
        host=host, port=_port_after(port), name=name, job=name, purpose="MASTER_ADDR"
    )


def _port_after(port: int) -> int:
    """Return where rank 0 serves, where `port` is taken by the launcher, or by anybody."""
    return env.integer("DURE_STORE_PORT") or min(port + 1, 65535)


def _in_cluster(placement: Placement, member: RankSlot, rank: int, world_size: int) -> InitMethod:
    """Return where the ranks meet by the variables of a cluster.

    Raises:
        RendezvousError: The cluster and the program contradict each other, or the host of
            rank 0 is unknown.
    """
    rank = _chosen("RANK", rank, member.rank)
    world_size = _chosen("WORLD_SIZE", world_size, member.world_size)
    if (rank, world_size) != (member.rank, member.world_size):
        raise RendezvousError(
            f"{placement.system} and the program do not agree on the rank of this process",
            seen=f"rank {rank} of {world_size} by RANK, WORLD_SIZE or arguments, but "
            f"{member.rank} of {member.world_size} by {placement.system}",
            fix="Unset RANK and WORLD_SIZE, or set MASTER_ADDR and MASTER_PORT as well, so that "
            "only they count. See `dure env`.",
        )
    return InitMethod(
        endpoint=_cluster_endpoint(placement, member), rank=rank, world_size=world_size
    )


def _cluster_endpoint(placement: Placement, member: RankSlot) -> Endpoint:
    job = placement.job or _launching_process() or str(placement.system)
    if member.on_one_host:
        return LocalEndpoint(name=job)
    host, port = placement.host, placement.port
    if host is None or port is None:
        raise RendezvousError(
            "the host of rank 0 is unknown",
            seen=f"{placement.system} started {member.world_size} ranks on several hosts, and "
            "names none of them",
            fix="Set MASTER_ADDR to the first host (mpirun -x MASTER_ADDR=HOST, mpiexec -genv "
            "MASTER_ADDR HOST) and MASTER_PORT. Only process groups find each other without them, "
            "over MPI, if mpi4py is installed.",
        )
    if not placement.port_derived:
        return TcpEndpoint(host=host, port=port, purpose="MASTER_ADDR")
    others = [other for other in placement.hosts if other != host]
    other = others[0] if others else None
    return TcpEndpoint(host=host, port=_port_after(port), name=job, job=job, other=other)


def _launching_process() -> str | None:
    """Return what identifies the MPI launcher above this process on this host."""
    try:
        for parent in psutil.Process(os.getpid()).parents():
            if parent.name().startswith(("hydra", "mpiexec", "mpirun", "pmi_proxy")):
                return f"{parent.pid} {start_of(parent.pid)}"
    except psutil.Error:
        pass
    return None
