"""How a hybrid group comes about: who shares memory with whom, and the engines between hosts.

Each rank says where it lives. The ranks of a host make a shared segment; where they cannot map it
(another container, a hardened kernel), each of them counts as a host of its own, and the log says
so. Then the rails and the mesh are made, through the group's store like any engine group, and the
leaders' control channels to each other. A rank whose part cannot be made closes what there is of
it. A group whose ranks all share one host is a `shm` group, and nothing more.

The engines between hosts are Gloo and MPI. NCCL is not among them: it takes no CPU tensors, and
joins the GPUs of a host by itself. A program that has both writes "cpu:hybrid,cuda:nccl".
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.hybrid.backend import LOCAL_SLACK, HybridBackend
from dure.comm.backends.hybrid.control import Watch
from dure.comm.backends.hybrid.state import CompletedCounts, HybridState
from dure.comm.backends.hybrid.subcomms import Hosts, SubComms, find_residents, group_by_host
from dure.comm.backends.shm.backend import ShmBackend
from dure.comm.backends.shm.backend import create as create_shm
from dure.errors import RendezvousError, RendezvousTimeout
from dure.store.prefix import PrefixStore

__all__ = ["create_over_gloo", "create_over_mpi"]

_log = logging.getLogger("dure.comm")
_PATIENCE = timedelta(days=365)
"""The hybrid group keeps the time itself: an engine whose time is up cannot be used again."""
_THREADS = 2
"""A rank's own, and its engine's, which works while the rank waits."""

Factory = Callable[[BackendOptions], Backend]


def find_hosts(options: BackendOptions) -> tuple[Hosts, ShmBackend]:
    """Sort the ranks into hosts whose ranks share memory indeed."""
    residents = find_residents(options, "", "first")
    homes = [(r.process.host_id, r.process.host) for r in residents]
    hosts = group_by_host(homes, options.rank)
    local, why = None, ""
    try:
        local = create_shm(_local_options(options, "local", hosts.mine, hosts.here))
    except RendezvousTimeout:
        raise
    except RendezvousError as e:
        why = e.seen
    reasons = await_all(options, "apart", why)
    if local is None or any(reasons):
        homes = [
            (f"{home} {r}", name) if reasons[r] else (home, name)
            for r, (home, name) in enumerate(homes)
        ]
        _log.warning(
            "ranks %s cannot share memory and count as hosts of their own: %s",
            [r for r, reason in enumerate(reasons) if reason],
            next(reason.decode() for reason in reasons if reason),
        )
        hosts = group_by_host(homes, options.rank)
    if local is None:
        local = create_shm(_local_options(options, "alone", (options.rank,), options.rank))
    return hosts, local


def await_all(options: BackendOptions, what: str, said: str = "") -> list[bytes]:
    """Wait until all ranks have come here; return what each one said.

    Collective:
        All ranks of the group call.
    """
    keys = [f"hybrid/{what}/{rank}" for rank in range(options.size)]
    options.store.set(keys[options.rank], said)
    options.store.wait(keys, options.timeout)
    return options.store.multi_get(keys)


def _options_of(
    options: BackendOptions, what: str, ranks: Sequence[int], number: int
) -> BackendOptions:
    """Return the options of a part of the group."""
    return replace(
        options,
        store=PrefixStore(f"{what}/{number}", options.store),
        rank=list(ranks).index(options.rank),
        size=len(ranks),
        global_ranks=tuple(options.global_ranks[r] for r in ranks),
        name=f"{options.name}/{what}{number}",
        pg_options=None,
    )


def _local_options(
    options: BackendOptions, what: str, ranks: Sequence[int], number: int
) -> BackendOptions:
    part = _options_of(options, what, ranks, number)
    if len(ranks) == options.size:  # then it is the group itself
        return replace(part, name=options.name)
    return replace(part, timeout=part.timeout + LOCAL_SLACK, threads=_THREADS, eager_bytes=None)


def connect(engine: Factory, options: BackendOptions, hosts: Hosts, local: ShmBackend) -> SubComms:
    """Make the engine groups: this rank's rail, and the mesh.

    Args:
        engine: Makes a group between hosts.
        options: What the group is.
        hosts: Who is where.
        local: The ranks of this host.
    """
    timeout_s = options.timeout.total_seconds()
    made: list[Backend] = []

    def between(what: str, ranks: Sequence[int], number: int) -> Backend:
        part = _options_of(options, what, ranks, number)
        made.append(engine(replace(part, patience=_PATIENCE)))
        change = getattr(made[-1], "set_timeout", None)
        if change is not None:
            change(_PATIENCE)
        return made[-1]

    try:
        completed = CompletedCounts(local, hosts.local, len(hosts.mine))
        mesh = between("mesh", range(hosts.size), 0)
        rail = None
        if len(hosts.ranks) == hosts.size:  # one rank a host: the only rail has the mesh's ranks
            rail = mesh
        elif hosts.rail is not None:
            place = hosts.rail
            rail = between("rail", [ranks[place] for ranks in hosts.ranks], place)
    except BaseException:
        for backend in [*made, local]:
            backend.close(True)
        raise
    state = HybridState(local, hosts, completed, options.name, timeout_s)
    state.engines = made
    return SubComms(hosts=hosts, local=local, rail=rail, mesh=mesh, state=state)


def close_all(comms: SubComms) -> None:
    """Close the parts of a group that did not come about."""
    comms.state.left.set()
    for backend in [*comms.state.engines, comms.local]:
        backend.close(True)


def create_with(name: str, engine: Factory, options: BackendOptions) -> Backend:
    """Make this rank's part of a hybrid group; every rank of the group must do so.

    Args:
        name: The backend's name.
        engine: Makes a group between hosts.
        options: What the group is.

    Raises:
        UsageError: The native engine is not built, or this is not Linux.
        RendezvousTimeout: A rank did not come.
        CommError: A host cannot be connected to.
    """
    hosts, local = find_hosts(options)
    if len(hosts.ranks) == 1:
        local.name = name
        return local
    local.leave_unrecorded()
    comms = connect(engine, options, hosts, local)
    watch: Watch | None = None
    try:
        if hosts.is_leader:
            watch = Watch.connect(comms, options)
        await_all(options, "ready")
    except BaseException:
        if watch is not None:
            watch.stop(0)
        close_all(comms)
        raise
    return HybridBackend(name, comms, watch, options)


def create_over_gloo(options: BackendOptions) -> Backend:
    """Make this rank's part of a group that Gloo joins between hosts (see `hybrid.create_with`)."""
    from dure.comm.backends.torch_engine import create_gloo  # lazy: the engine that is wanted only

    return create_with("hybrid", create_gloo, options)


def create_over_mpi(options: BackendOptions) -> Backend:
    """Make this rank's part of a group that MPI joins between hosts (see `hybrid.create_with`)."""
    from dure.comm.backends.mpi.backend import create_mpi  # lazy: the engine that is wanted only

    return create_with("hybrid_mpi", create_mpi, options)
