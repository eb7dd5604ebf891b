"""Where ranks meet that found themselves in a cluster: no MASTER_ADDR, or not even a RANK.

On one host they meet at a Unix socket that is named after the job (`LocalPlace`), so there is no
port to choose. On several, rank 0 listens on its cluster's first host, at the port after one that
all derive from the job's name, or at DURE_STORE_PORT. The key is DURE_JOB_KEY_FILE or derived from
the user's own, which a shared home brings to all hosts, and the job's name.

MPICH gives a job no name. Its processes have one ancestor that no other job has, its proxy or
mpiexec itself, and that one's number and start stand for the name.
"""

from __future__ import annotations

import os

import psutil

from dure import env
from dure.errors import RendezvousError
from dure.placement import Member, Placement, System, detect
from dure.store.identity import process_at
from dure.store.places import LocalPlace, Place, Spot, TcpPlace, port_after

__all__ = ["find_in_cluster"]

_TOLD = (System.DURE, System.TORCHRUN, System.LAUNCHER, System.PLAIN)


def find_in_cluster(rank: int, world_size: int) -> Spot | None:
    """Return where the ranks meet, from the variables of a cluster; None if there is none.

    Args:
        rank: This rank, where the program says it; else -1.
        world_size: The number of ranks, where the program says it; else -1.

    Raises:
        RendezvousError: The cluster and the program contradict each other, or nothing says where
            rank 0 is.
    """
    placement = detect(env.everything())
    member = placement.member
    if member is None or placement.system in _TOLD:
        return None
    spot = Spot(
        place=_place(placement, member),
        rank=_chosen("RANK", rank, member.rank),
        world_size=_chosen("WORLD_SIZE", world_size, member.world_size),
    )
    if (spot.rank, spot.world_size) != (member.rank, member.world_size):
        raise RendezvousError(
            f"{placement.system} and the program do not agree on who this process is",
            seen=f"rank {spot.rank} of {spot.world_size} by RANK, WORLD_SIZE or arguments, but "
            f"{member.rank} of {member.world_size} by {placement.system}",
            fix="Unset RANK and WORLD_SIZE, or set MASTER_ADDR and MASTER_PORT as well, so that "
            "only they count. See `dure env`.",
        )
    return spot


def _chosen(name: str, given: int, found: int) -> int:
    """Take the argument, then the variable, then what was found."""
    if given != -1:
        return given
    told = env.integer(name)
    return found if told is None else told


def _place(placement: Placement, member: Member) -> Place:
    job = placement.job or _launching_process() or str(placement.system)
    if member.on_one_host:
        return LocalPlace(name=job)
    host, port = placement.host, placement.port
    if host is None or port is None:
        raise RendezvousError(
            "nothing says where rank 0 is",
            seen=f"{placement.system} started {member.world_size} ranks on several hosts, and "
            "names none of them",
            fix="Set MASTER_ADDR to the first host (mpirun -x MASTER_ADDR=HOST, mpiexec -genv "
            "MASTER_ADDR HOST) and MASTER_PORT, or install mpi4py, so that ranks meet over MPI.",
        )
    if not placement.port_derived:
        return TcpPlace(host=host, port=port, name="tcp", purpose="MASTER_ADDR")
    others = [other for other in placement.hosts if other != host]
    other = others[0] if others else None
    return TcpPlace(host=host, port=port_after(port), name=job, job=job, other=other)


def _launching_process() -> str | None:
    """Return what tells the MPI launcher above this process from all others of this host."""
    try:
        for parent in psutil.Process(os.getpid()).parents():
            if parent.name().startswith(("hydra", "mpiexec", "mpirun", "pmi_proxy")):
                found = process_at(parent.pid)
                return f"{found.pid} {found.start}" if found else None
    except psutil.Error:
        pass
    return None
