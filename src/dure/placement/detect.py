"""Which of the systems that set variables here is the one that counts.

Several set theirs at once: mpirun inside a Slurm job, srun with PMI, torchrun inside a pod. The one
that is nearest to the program counts, because it knows best what it started:

1. RANK and WORLD_SIZE, which are set for this program: they count hosts in a PyTorchJob, else
   processes.
2. mpirun and mpiexec. They start their daemons with srun inside Slurm, so SLURM_PROCID is the
   daemon's, not ours.
3. srun. With PMI (`srun --mpi=pmi2`) it sets PMI_RANK, too, but not the MPI_LOCALRANKID by which
   mpiexec is recognized.
4. Another launcher with PMI.
5. Kubernetes: it starts one process per host, mostly a launcher.
6. The shell of a Slurm job.

MASTER_ADDR and MASTER_PORT are set by a person or a launcher, and come before any address that is
derived from a list of hosts.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping
from dataclasses import replace
from hashlib import blake2b

from dure.placement.mpi import read_mpi, read_pmi
from dure.placement.pods import read_kubernetes, read_pytorchjob
from dure.placement.reader import Reader
from dure.placement.slurm import read_batch_shell, read_step
from dure.placement.value import Placement, RankSlot, System

__all__ = ["derived_port", "detect"]

_FIRST_PORT, _LAST_PORT = 15_000, 29_000
_NUMBERED = (System.DURE, System.TORCHRUN, System.LAUNCHER, System.PLAIN)


def detect(environ: Mapping[str, str]) -> Placement:
    """Return where the process with these environment variables stands.

    Args:
        environ: The variables. Nothing else is looked at.

    Returns:
        What they say; `System.NONE` if they say nothing. Never raises: malformed values are
        skipped, with a note.
    """
    notes: list[str] = []
    for read in _READERS:
        reader = Reader(environ)
        found = read(reader)
        notes += [note for note in reader.notes if note not in notes]
        if found is not None:
            found = _with_address(found, reader)
            return replace(found, notes=tuple(notes))
    return Placement(system=System.NONE, notes=tuple(notes))


def _with_address(found: Placement, reader: Reader) -> Placement:
    """Put in what MASTER_ADDR and MASTER_PORT say.

    Without them it is the first host, and a port that follows from the job's name, unless a
    launcher numbered the processes: only that launcher can say where they meet.
    """
    if found.member is not None or found.slot is not None:
        if found.host is None and found.hosts:
            found = replace(found, host=found.hosts[0])
        if found.job and found.system not in _NUMBERED:
            found = replace(found, port=derived_port(found.job), port_derived=True)
    host, port = reader.text("MASTER_ADDR", "PET_MASTER_ADDR"), None
    if found.system is System.PYTORCHJOB and host == "localhost":
        host = reader.text("HOSTNAME")  # the first pod's service has its name; older operators
    if host is not None:
        port = reader.number("MASTER_PORT", "PET_MASTER_PORT")
        port = port if port and port < 65536 else None
        found = replace(found, host=host)
    return found if port is None else replace(found, port=port, port_derived=False)


def _read_environment(reader: Reader) -> Placement | None:
    rank, size = reader.number("RANK"), reader.number("WORLD_SIZE")
    if rank is None or size is None:
        if size is not None and reader.has("LOCAL_RANK") and not reader.has("RANK"):
            reader.note(
                "WORLD_SIZE and LOCAL_RANK are set without RANK, as Lightning does for processes "
                "that it starts itself: start the program with `dure run`, and it starts none"
            )
        return None
    if rank >= size:
        reader.note(f"RANK={rank} is none of the ranks that WORLD_SIZE={size} says there are")
        return None
    system = _starter(reader)
    unclear = system is System.PLAIN and size > 1
    if unclear:
        reader.note(
            "RANK and WORLD_SIZE are set without LOCAL_RANK: a program takes them to count "
            "processes; if they count hosts, as those of PAI-DLC and old PyTorchJobs do, start "
            '`dure run --nnodes "$WORLD_SIZE" --node-rank "$RANK" --nproc N ...`'
        )
    return Placement(
        system=system,
        member=RankSlot(
            rank=rank,
            world_size=size,
            local_rank=reader.number("LOCAL_RANK"),
            local_world_size=reader.number("LOCAL_WORLD_SIZE", "LOCAL_SIZE"),
            node=reader.number("GROUP_RANK", "NODE_RANK", "CROSS_RANK"),
        ),
        job=reader.text("TORCHELASTIC_RUN_ID"),
        unclear=unclear,
    )


def _starter(reader: Reader) -> System:
    if reader.has("DURE_LAUNCHER"):
        return System.DURE
    if not reader.has("LOCAL_RANK"):
        return System.PLAIN
    return System.TORCHRUN if reader.has("TORCHELASTIC_RUN_ID") else System.LAUNCHER


_READERS: tuple[Callable[[Reader], Placement | None], ...] = (
    read_pytorchjob,
    _read_environment,
    read_mpi,
    read_step,
    read_pmi,
    read_kubernetes,
    read_batch_shell,
)


def derived_port(job: str) -> int:
    """Return the port that all hosts of the job called `job` compute.

    It lies under the ports that Linux gives to outgoing connections (32768 and up) and above those
    of well-known services. Two jobs on one host may get the same port, or it may be in use: then
    the store cannot listen, and says so; DURE_STORE_PORT names another.
    """
    digest = blake2b(job.encode(), digest_size=8, person=b"dure port").digest()
    return _FIRST_PORT + int.from_bytes(digest, "big") % (_LAST_PORT - _FIRST_PORT + 1)
