"""Where a group over MPI begins: its ranks find each other's places in MPI's world.

MPI numbers the processes that it started together; Dure's ranks may be numbered otherwise, or be
some of them only. So each rank tells the others, through the store, which process of MPI it is and
on which host. From that all make the same communicator, and each sees whether the ranks of its host
are more than the cores.
"""

from __future__ import annotations

import os
import platform
import zlib

from dure.comm.backends.base import BackendOptions
from dure.comm.backends.mpi.backend import MpiBackend
from dure.comm.backends.mpi.library import load
from dure.comm.backends.mpi.verdicts import free_retired
from dure.errors import UsageError

__all__ = ["create_mpi"]


def create_mpi(options: BackendOptions) -> MpiBackend:
    """Make the group's communicator; every rank of the group must do so.

    Raises:
        UsageError: mpi4py or MPI is missing, or the ranks were not started together by MPI.
    """
    library = load()
    world = library.world
    keys = [f"mpi/rank/{r}" for r in range(options.size)]
    mine = f"{world.Get_rank()} {world.Get_size()} {platform.node()}"
    options.store.set(keys[options.rank], mine)
    options.store.wait(keys, options.timeout)
    told = [text.decode().split(" ", 2) for text in options.store.multi_get(keys)]
    numbers = [int(number) for number, _, _ in told]
    if len(set(numbers)) < options.size:
        raise UsageError(
            "the ranks were not started together by MPI",
            group=options.name,
            rank=options.rank,
            world_size=options.size,
            seen=f"MPI sees {world.Get_size()} of {options.size} ranks",
            fix=f"Start the program with: mpirun -n {options.size} python PROGRAM",
        )
    num_here = sum(node == platform.node() for _, _, node in told)
    with library.lock:
        free_retired(library)
        members = world.Get_group().Incl(numbers)
        comm = world.Create_group(members, zlib.crc32(options.name.encode()) & 0x7FFF)
        members.Free()
    return MpiBackend(library, comm, options, crowded=num_here > (os.cpu_count() or 1))
