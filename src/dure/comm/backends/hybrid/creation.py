"""Creation of a hybrid group: the ranks of each host, and the engines between hosts.

Each rank publishes its host. The ranks of a host make a shared segment. Then the rails and the mesh
are made, through the group's store like any engine group, and the control channels between leaders.
If one part fails, the rank closes the others. If all ranks share one host the group is a `shm`
group.

The engines between hosts are Gloo and MPI. NCCL takes no CPU tensors, and connects the GPUs of a
host itself; a program that has both kinds of tensors passes "cpu:hybrid,cuda:nccl".
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from contextlib import ExitStack
from dataclasses import replace
from datetime import timedelta

import msgspec

from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.hybrid.backend import HybridBackend
from dure.comm.backends.hybrid.control import HostWatch
from dure.comm.backends.hybrid.header import HeaderExchange
from dure.comm.backends.hybrid.state import HybridState
from dure.comm.backends.hybrid.subcomms import LOCAL_SLACK, Hosts, SubComms, group_by_host
from dure.comm.backends.shm.opening import create as create_shm
from dure.errors import RendezvousTimeout
from dure.store.gathering import Gathering, gather
from dure.store.identity import Identity, myself
from dure.store.prefix import PrefixStore

__all__ = ["create_over_gloo", "create_over_mpi"]

_OP_TIMEOUT = timedelta(days=365)
"""The hybrid group enforces timeouts itself: an engine cannot be used after a timeout."""
_THREADS = 2
"""The rank's thread, and its engine's, which works while the rank waits."""

Factory = Callable[[BackendOptions], Backend]
_HostsOfRanks = tuple[list[tuple[str, str]], list[int]]


def _find_hosts(options: BackendOptions) -> Hosts:
    """Exchange the hosts of all ranks."""
    me = msgspec.msgpack.encode(myself())
    gathering = _gathering(options, "hybrid/home", _summary_of_hosts)
    published = gather(gathering, me, options.timeout)
    homes, number_of_rank = msgspec.msgpack.decode(published, type=_HostsOfRanks)
    return group_by_host([homes[number] for number in number_of_rank], options.rank)


def _gathering(
    options: BackendOptions, name: str, summarize: Callable[[list[bytes]], bytes] | None
) -> Gathering:
    rank, size = options.rank, options.size
    return Gathering(options.store, name, rank, size, summarize, group=options.name)


def _summary_of_hosts(published: list[bytes]) -> bytes:
    """Return each host once, as its id and its name, and the number of each rank's host."""
    numbers: dict[tuple[str, str], int] = {}
    number_of_rank: list[int] = []
    for each in published:
        process = msgspec.msgpack.decode(each, type=Identity)
        home = process.host_id, process.host
        number_of_rank.append(numbers.setdefault(home, len(numbers)))
    return msgspec.msgpack.encode((list(numbers), number_of_rank))


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
        hosts=tuple(options.hosts[r] for r in ranks) if options.hosts else (),
        pg_options=None,
    )


def _create_with(name: str, engine: Factory, options: BackendOptions) -> Backend:
    """Make this rank's part of a hybrid group; every rank of the group must do so.

    Args:
        name: The backend's name.
        engine: Makes a group between hosts.
        options: Of the group.

    Raises:
        UsageError: The native engine is not built, or this is not Linux.
        RendezvousTimeout: A rank did not call, or was late.
        RendezvousError: The ranks of a host cannot share memory.
        CommError: A host cannot be connected to.
    """
    hosts = _find_hosts(options)
    if len(hosts.ranks) == 1:
        local = create_shm(options)
        local.name = name
        return local
    part = _options_of(options, "local", hosts.mine, hosts.here)
    timeout = part.timeout + LOCAL_SLACK
    with ExitStack() as undo:
        local = create_shm(replace(part, timeout=timeout, threads=_THREADS, eager_bytes=None))
        undo.callback(local.close, True)
        local.leave_unrecorded()
        state = HybridState(local, hosts, options.name, options.timeout.total_seconds())

        def between(what: str, ranks: Sequence[int], number: int) -> Backend:
            made = engine(
                replace(_options_of(options, what, ranks, number), op_timeout=_OP_TIMEOUT)
            )
            undo.callback(made.close, True)
            state.engines.append(made)
            return made

        mesh = between("mesh", range(hosts.size), 0)
        rail = None
        if len(hosts.ranks) == hosts.size:  # one rank per host: the only rail has the mesh's ranks
            rail = mesh
        elif hosts.rail is not None:
            rail = between("rail", [ranks[hosts.rail] for ranks in hosts.ranks], hosts.rail)
        comms = SubComms(hosts=hosts, local=local, rail=rail, mesh=mesh, state=state)
        headers, watch = HeaderExchange(comms), None
        if hosts.is_leader:
            watch = HostWatch(comms, headers, options)
            undo.callback(watch.stop, 0)
        agree_on_completion(options)
        undo.pop_all()
    return HybridBackend(name, comms, headers, watch, options)


def agree_on_completion(options: BackendOptions) -> None:
    """Wait until all ranks have their part, or raise on all ranks.

    A rank that is too late finds the others' parts, although these have given up. All follow one
    verdict (store/gathering.py), also the rank that was late.

    Raises:
        RendezvousTimeout: Ranks were late; `missing` names them, the same on all ranks.
        PeerLost: The process of a rank has ended.
        RendezvousError: A rank has failed or was interrupted.
    """
    try:
        gather(_gathering(options, "hybrid/ready", None), b"", options.timeout)
    except RendezvousTimeout as error:
        raise RendezvousTimeout(
            "not all ranks connected in time",
            group=options.name,
            rank=options.rank,
            world_size=options.size,
            elapsed_s=error.elapsed_s,
            came=error.came,
            missing=error.missing,
            seen="this rank was late"
            if options.rank in error.missing
            else f"late: ranks {list(error.missing)}",
            fix="Check what the late ranks do, or raise the group's timeout.",
        ) from None


def create_over_gloo(options: BackendOptions) -> Backend:
    """Make this rank's part of a group that Gloo joins between hosts (see `_create_with`)."""
    from dure.comm.backends.torch_engine import create_gloo  # lazy: the engine that is wanted only

    return _create_with("hybrid", create_gloo, options)


def create_over_mpi(options: BackendOptions) -> Backend:
    """Make this rank's part of a group that MPI joins between hosts (see `_create_with`)."""
    from dure.comm.backends.mpi.backend import create_mpi  # lazy: the engine that is wanted only

    return _create_with("hybrid_mpi", create_mpi, options)
