"""Which of the systems that left variables here is the one that counts.

Several leave theirs at once: mpirun inside a Slurm job, srun with PMI, torchrun inside a pod. What
was set nearest to the program counts, for it knows best what it started:

1. RANK and WORLD_SIZE, in this order: of pods (they count hosts there), else of processes.
   Whoever sets them does so for this program.
2. mpirun and mpiexec. They start their daemons with srun inside Slurm, so SLURM_PROCID is the
   daemon's, not ours.
3. srun. With PMI (`srun --mpi=pmi2`) it sets PMI_RANK, too, but not the MPI_LOCALRANKID by which
   mpiexec is known.
4. Another launcher that speaks PMI.
5. SkyPilot, SageMaker, then Kubernetes: they start one process a host, mostly a launcher.
6. The shell of a Slurm job.

MASTER_ADDR and MASTER_PORT are told by a person or a launcher, and go before any address that is
derived from a list of hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace

from dure.placement.environment import NUMBERED, read_environment
from dure.placement.mpi import read_mpi, read_pmi
from dure.placement.pods import read_kubernetes, read_pods, read_sagemaker, read_skypilot
from dure.placement.ports import derived_port
from dure.placement.reader import Reader
from dure.placement.slurm import read_batch_shell, read_step
from dure.placement.value import Placement, System

__all__ = ["detect"]

_READERS: tuple[Callable[[Reader], Placement | None], ...] = (
    read_pods,
    read_environment,
    read_mpi,
    read_step,
    read_pmi,
    read_skypilot,
    read_sagemaker,
    read_kubernetes,
    read_batch_shell,
)


def detect(environ: Mapping[str, str]) -> Placement:
    """Return where the process with these environment variables stands.

    Args:
        environ: The variables. Nothing else is looked at.

    Returns:
        What they say; `System.NOBODY` where they say nothing. Never raises: what is malformed is
        passed over, with a note.
    """
    notes: list[str] = []
    for read in _READERS:
        reader = Reader(environ)
        found = read(reader)
        notes += [note for note in reader.notes if note not in notes]
        if found is not None:
            found = _with_address(found, reader)
            doubts = _doubts(found, environ)
            return replace(found, reasons=tuple(reader.reasons), notes=(*notes, *doubts))
    return Placement(system=System.NOBODY, notes=tuple(notes))


def _with_address(found: Placement, reader: Reader) -> Placement:
    """Put in what MASTER_ADDR and MASTER_PORT say, and keep where the endpoint came from.

    Without them it is the first host, and a port that follows from the job's name, unless a
    launcher numbered the processes: it says where they meet, or nobody does.
    """
    if found.member is not None or found.slot is not None:
        if found.host is None and found.hosts:
            found = replace(found, host=found.hosts[0])
        if found.job and found.system not in NUMBERED:
            found = replace(found, port=derived_port(found.job), port_derived=True)
    host, port = reader.text("MASTER_ADDR", "PET_MASTER_ADDR"), None
    if found.system is System.PYTORCHJOB and host == "localhost":
        host = reader.text("HOSTNAME")  # the first pod's service has its name; older operators
    if host is not None:
        port = reader.number("MASTER_PORT", "PET_MASTER_PORT")
        port = port if port and port < 65536 else None
        found = replace(found, host=host)
    if port is not None:
        found = replace(found, port=port, port_derived=False)
    if found.endpoint is not None:
        source = "MASTER_ADDR" if host else "the first host"
        why = f"the port is derived from the job's name, {found.job!r}"
        reader.keep("endpoint", found.endpoint, source, why if found.port_derived else "")
    return found


def _doubts(found: Placement, environ: Mapping[str, str]) -> list[str]:
    """Say where another system numbers this process differently."""
    member, out = found.member, list[str]()
    if member is None:
        return out
    for read in (read_mpi, read_step):
        other = read(Reader(environ))
        if other is None or other.member is None or other.system is found.system:
            continue
        same = (other.member.rank, other.member.world_size) == (member.rank, member.world_size)
        if not same:
            out.append(
                f"{other.system} calls this process rank {other.member.rank} of "
                f"{other.member.world_size}, but {found.system} is nearer to the program and "
                f"calls it {member.rank} of {member.world_size}: that counts"
            )
    return out
