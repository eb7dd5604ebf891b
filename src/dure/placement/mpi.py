"""The launchers of MPI: Open MPI's mpirun, the hydra of MPICH and Intel MPI, and others with PMI.

They say which rank a process is, not where rank 0 is. Inside Slurm its list of hosts fills the gap,
because mpirun puts rank 0 on the first of them; elsewhere MASTER_ADDR must say, or the ranks meet
over MPI itself (mpi4py), or they are on one host and need no address.
"""

from __future__ import annotations

from collections.abc import Sequence

from dure.placement.reader import Reader
from dure.placement.value import NodeSlot, Placement, RankSlot, System

__all__ = ["read_mpi", "read_pmi"]


_OPEN_MPI = (
    "OMPI_COMM_WORLD_RANK",
    "OMPI_COMM_WORLD_SIZE",
    "OMPI_COMM_WORLD_LOCAL_RANK",
    "OMPI_COMM_WORLD_LOCAL_SIZE",
)
_OPEN_MPI_JOB = ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID")
_HYDRA = ("PMI_RANK", "PMI_SIZE", "MPI_LOCALRANKID", "MPI_LOCALNRANKS")
_HYDRA_JOB = ("I_MPI_HYDRA_UUID", "PMI_JOBID", "SLURM_JOB_ID")


def read_mpi(reader: Reader) -> Placement | None:
    """Return the placement of a process that mpirun or mpiexec started."""
    if reader.has(*_OPEN_MPI[:2]):
        return _read(reader, System.OPEN_MPI, _OPEN_MPI, _OPEN_MPI_JOB)
    if reader.has(*_HYDRA[:3]):
        return _read(reader, System.HYDRA, _HYDRA, _HYDRA_JOB)
    return None


def read_pmi(reader: Reader) -> Placement | None:
    """Return the placement of a process that another launcher with PMI started."""
    if reader.has(*_HYDRA[:2]):
        return _read(reader, System.PMI, _HYDRA, _HYDRA_JOB)
    if reader.has("PMIX_RANK"):
        reader.note("PMIX_RANK is set, but no variable gives the number of ranks")
    return None


def _read(
    reader: Reader, system: System, names: Sequence[str], job_names: Sequence[str]
) -> Placement | None:
    rank, size, local, here = map(reader.number, names)
    if rank is None or size is None or rank >= size:
        reader.note(f"{names[0]} and {names[1]} do not say which rank this is")
        return None
    job = reader.text(*job_names)
    slot = None  # known only if there is one process per host
    if here is not None:
        each = max(here, 1)
        slot = NodeSlot(nnodes=max(1, size // each), node_rank=rank // each, copies=here)
    return Placement(
        system=system,
        member=RankSlot(rank=rank, world_size=size, local_rank=local, local_world_size=here),
        slot=slot,
        job=None if job is None else f"{system} {job}",
        hosts=reader.hosts("SLURM_JOB_NODELIST"),
    )
