"""How a hybrid group comes about: who shares memory with whom, and the engines between hosts.

Each rank says where it lives. The ranks of a host make a shared segment; where they cannot map it
(another container, a hardened kernel), each of them counts as a host of its own, and the log says
so. Then the lanes and the mesh are made, through the group's store like any engine group.
"""

from __future__ import annotations

import logging
from collections.abc import Callable, Sequence
from dataclasses import replace
from datetime import timedelta

from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.hybrid.fate import Fate
from dure.comm.backends.hybrid.hosts import Hosts, find_residents, group_by_host
from dure.comm.backends.hybrid.links import Links
from dure.comm.backends.hybrid.tally import Tally
from dure.comm.backends.shm.backend import ShmBackend
from dure.comm.backends.shm.backend import create as create_shm
from dure.errors import RendezvousError, RendezvousTimeout
from dure.store.prefix import PrefixStore

__all__ = ["LOCAL_SLACK", "Factory", "await_all", "close_all", "connect", "find_hosts"]

_log = logging.getLogger("dure.comm")
_PATIENCE = timedelta(days=365)
"""The hybrid group keeps the time itself: an engine whose time is up cannot be used again."""
_THREADS = 2
"""A rank's own, and its engine's, which works while the rank waits."""

LOCAL_SLACK = timedelta(seconds=1)
"""How much longer the ranks of a host wait for each other: one of them may wait for another host,
and knows better who is missing."""

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
    return replace(part, timeout=part.timeout + LOCAL_SLACK, threads=_THREADS)


def connect(engine: Factory, options: BackendOptions, hosts: Hosts, local: ShmBackend) -> Links:
    """Make the engine groups: this rank's lane, and the mesh.

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
        tally = Tally(local, hosts.local, len(hosts.mine))
        lane = None
        if hosts.lane is not None:
            place = hosts.lane
            lane = between("lane", [ranks[place] for ranks in hosts.ranks], place)
        mesh = between("mesh", range(hosts.size), 0)
    except BaseException:
        for backend in [*made, local]:
            backend.close(True)
        raise
    fate = Fate(local, hosts, tally, options.name, timeout_s)
    fate.engines = made
    return Links(hosts=hosts, local=local, lane=lane, mesh=mesh, fate=fate)


def close_all(links: Links) -> None:
    """Close the parts of a group that did not come about."""
    links.fate.left.set()
    for backend in [*links.fate.engines, links.local]:
        backend.close(True)
