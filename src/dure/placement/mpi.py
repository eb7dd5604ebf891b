"""The launchers of MPI: Open MPI's mpirun, the hydra of MPICH and Intel MPI, and others with PMI.

They say who a process is, not where rank 0 is. Inside Slurm its list of hosts fills the gap, for
mpirun puts rank 0 on the first of them; Azure names the first host; elsewhere MASTER_ADDR must say,
or the ranks meet over MPI itself (mpi4py), or they are on one host and need no address.
"""

from __future__ import annotations

from dure.placement.reader import Reader
from dure.placement.value import Member, NodeSlot, Placement, System

__all__ = ["read_mpi", "read_pmi"]


_OPEN_MPI = ("OMPI_COMM_WORLD_RANK", "OMPI_COMM_WORLD_SIZE")
_HYDRA = ("PMI_RANK", "PMI_SIZE")
_LOCAL = {  # a launcher's own number and count on the host, and what names its job
    System.OPEN_MPI: ("OMPI_COMM_WORLD_LOCAL_RANK", "OMPI_COMM_WORLD_LOCAL_SIZE"),
    System.HYDRA: ("MPI_LOCALRANKID", "MPI_LOCALNRANKS"),
}
_JOB = {
    System.OPEN_MPI: ("PMIX_NAMESPACE", "OMPI_MCA_ess_base_jobid", "SLURM_JOB_ID"),
    System.HYDRA: ("I_MPI_HYDRA_UUID", "PMI_JOBID", "SLURM_JOB_ID"),
}


def read_mpi(reader: Reader) -> Placement | None:
    """Return the placement of a process of mpirun or mpiexec."""
    if reader.has(*_OPEN_MPI):
        return _read(reader, System.OPEN_MPI, _OPEN_MPI)
    if reader.has(*_HYDRA, "MPI_LOCALRANKID"):
        return _read(reader, System.HYDRA, _HYDRA)
    return None


def read_pmi(reader: Reader) -> Placement | None:
    """Return the placement of a process of another launcher that speaks PMI."""
    if reader.has(*_HYDRA):
        return _read(reader, System.PMI, _HYDRA)
    if reader.has("PMIX_RANK"):
        reader.note("PMIX_RANK is set, but no variable says how many ranks there are")
    return None


def _read(reader: Reader, system: System, names: tuple[str, str]) -> Placement | None:
    rank = reader.take("rank", f"set by {system}", names[0])
    size = reader.take("ranks", "", names[1])
    if rank is None or size is None or rank >= size:
        reader.note(f"{names[0]} and {names[1]} do not say which rank this is")
        return None
    kind = System.OPEN_MPI if system is System.OPEN_MPI else System.HYDRA
    local_rank, local_size = _LOCAL[kind]
    local = reader.take("local rank", "", local_rank)
    here = reader.take("ranks here", "", local_size)
    hosts = reader.hosts("SLURM_JOB_NODELIST", "SLURM_NODELIST")
    if hosts and here != size:
        why = "Slurm's list; mpirun puts rank 0 on the first"
        reader.keep("hosts", reader.text("SLURM_JOB_NODELIST", "SLURM_NODELIST"), "SLURM", why)
    source = next((name for name in _JOB[kind] if reader.has(name)), None)
    if source is not None:
        reader.keep("job", reader.text(source), source)
    slot = None  # known only where there is one process a host
    if here is not None:
        each = max(here, 1)
        slot = NodeSlot(nnodes=max(1, size // each), node_rank=rank // each, copies=here)
    return Placement(
        system=system,
        member=Member(rank=rank, world_size=size, local_rank=local, local_world_size=here),
        slot=slot,
        job=None if source is None else f"{system} {reader.text(source)}",
        host=None if hosts else _azure(reader),
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
