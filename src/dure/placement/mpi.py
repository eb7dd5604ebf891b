"""The launchers of MPI: Open MPI's mpirun, the hydra of MPICH and Intel MPI, and others with PMI.

They say who a process is, not where rank 0 is. Inside Slurm its list of hosts fills the gap, for
mpirun puts rank 0 on the first of them; Azure names the first host; elsewhere MASTER_ADDR must say,
or the ranks meet over MPI itself (mpi4py), or they are on one host and need no address.
"""

from __future__ import annotations

from dataclasses import dataclass

from dure.placement.ports import derived_port
from dure.placement.reader import Reader
from dure.placement.value import Member, Placement, Seat, System

__all__ = ["read_mpi", "read_pmi"]


@dataclass(frozen=True, slots=True, kw_only=True)
class _Names:
    """The variables of one launcher."""

    rank: str
    size: str
    local_rank: str
    local_size: str
    job: tuple[str, ...]


_OPEN_MPI = _Names(
    rank="OMPI_COMM_WORLD_RANK",
    size="OMPI_COMM_WORLD_SIZE",
    local_rank="OMPI_COMM_WORLD_LOCAL_RANK",
    local_size="OMPI_COMM_WORLD_LOCAL_SIZE",
    job=("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid"),
)
_HYDRA = _Names(
    rank="PMI_RANK",
    size="PMI_SIZE",
    local_rank="MPI_LOCALRANKID",
    local_size="MPI_LOCALNRANKS",
    job=("I_MPI_HYDRA_UUID", "PMI_JOBID"),
)


def read_mpi(reader: Reader) -> Placement | None:
    """Return the placement of a process of mpirun or mpiexec."""
    if reader.has(_OPEN_MPI.rank, _OPEN_MPI.size):
        return _read(reader, System.OPEN_MPI, _OPEN_MPI)
    if reader.has(_HYDRA.rank, _HYDRA.size, _HYDRA.local_rank):
        return _read(reader, System.HYDRA, _HYDRA)
    return None


def read_pmi(reader: Reader) -> Placement | None:
    """Return the placement of a process of another launcher that speaks PMI."""
    if reader.has(_HYDRA.rank, _HYDRA.size):
        return _read(reader, System.PMI, _HYDRA)
    if reader.has("PMIX_RANK"):
        reader.note("PMIX_RANK is set, but no variable says how many ranks there are")
    return None


def _read(reader: Reader, system: System, names: _Names) -> Placement | None:
    rank = reader.take("rank", f"set by {system}", names.rank)
    size = reader.take("ranks", "", names.size)
    if rank is None or size is None or rank >= size:
        reader.note(f"{names.rank} and {names.size} do not say which rank this is")
        return None
    local = reader.take("local rank", "", names.local_rank)
    here = reader.take("ranks here", "", names.local_size)
    hosts = reader.hosts("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts and here != size:
        why = "Slurm's list; mpirun puts rank 0 on the first"
        reader.keep("hosts", reader.text("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "SLURM", why)
    name = reader.text(*names.job) or reader.text("SLURM_JOB_ID")
    job = f"{system} {name}" if name else None
    if job:
        source = next(n for n in (*names.job, "SLURM_JOB_ID") if reader.has(n))
        reader.keep("job", name, source)
    return Placement(
        system=system,
        member=Member(rank=rank, world_size=size, local_rank=local, local_world_size=here),
        seat=_seat(rank, size, here),
        job=job,
        host=hosts[0] if hosts else _azure(reader),
        port=derived_port(job) if job else None,
        port_derived=True,
        hosts=hosts,
    )


def _azure(reader: Reader) -> str | None:
    """Return the first host as Azure ML names it, whose jobs are started by mpirun."""
    for name in ("AZ_BATCH_MASTER_NODE", "AZ_BATCHAI_MPI_MASTER_NODE"):
        host = (reader.text(name) or "").partition(":")[0]
        if host and host != "localhost":
            reader.keep("first host", host, name)
            return host
    return None


def _seat(rank: int, size: int, here: int | None) -> Seat | None:
    """Return the host's place: known only where there is one process a host."""
    if here is None:
        return None
    return Seat(nnodes=max(1, size // max(here, 1)), node_rank=rank // max(here, 1), copies=here)
