"""Making a hybrid group, or the `shm` group that is enough where all ranks share a host.

First the ranks find who lives where; then the parts are connected, and the leaders' lines to each
other (rendezvous.py, watch.py). A rank whose part cannot be made closes what there is of it.
"""

from __future__ import annotations

from dure.comm.backends.base import Backend, BackendOptions
from dure.comm.backends.hybrid.backend import HybridBackend
from dure.comm.backends.hybrid.rendezvous import Factory, await_all, close_all, connect, find_hosts
from dure.comm.backends.hybrid.watch import Watch

__all__ = ["create_with"]


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
    links = connect(engine, options, hosts, local)
    watch: Watch | None = None
    try:
        if hosts.is_leader:
            watch = Watch.connect(links, options)
        await_all(options, "ready")
    except BaseException:
        if watch is not None:
            watch.stop(0)
        close_all(links)
        raise
    return HybridBackend(name, links, watch, options)
