"""The values of a detection: the system that started this process, and its part of a job.

One environment can be read in two ways. Under `srun --ntasks-per-node=1` a training program has a
*rank slot*: rank r of n. A `dure run` in its place has a *node slot*: host h of n, on which it will
start the ranks itself. A `Placement` has both if both are possible.
"""

from __future__ import annotations

import enum
from dataclasses import dataclass

__all__ = ["NodeSlot", "Placement", "RankSlot", "System"]


class System(enum.StrEnum):
    """What started this process.

    A LAUNCHER sets LOCAL_RANK beside RANK and WORLD_SIZE, as DeepSpeed's, Azure's and Ray Train do;
    PLAIN sets the two alone. HYDRA is the mpiexec of MPICH and Intel MPI. PYTORCHJOB counts hosts
    by WORLD_SIZE. KUBERNETES is an indexed job, in a JobSet or not. NONE: a shell, no cluster, no
    launcher.
    """

    DURE = "dure run"
    TORCHRUN = "torchrun"
    LAUNCHER = "a launcher of torchrun's kind"
    PLAIN = "RANK and WORLD_SIZE"
    OPEN_MPI = "Open MPI"
    HYDRA = "MPICH or Intel MPI"
    PMI = "a launcher that speaks PMI"
    SLURM = "Slurm"
    PYTORCHJOB = "PyTorchJob"
    KUBERNETES = "Kubernetes"
    NONE = "nobody"


@dataclass(frozen=True, slots=True, kw_only=True)
class RankSlot:
    """This process as one rank of a job; None: not known."""

    rank: int
    world_size: int
    local_rank: int | None = None
    local_world_size: int | None = None
    node: int | None = None

    @property
    def on_one_host(self) -> bool:
        """Whether all ranks are known to be on this host."""
        return self.local_world_size == self.world_size


@dataclass(frozen=True, slots=True, kw_only=True)
class NodeSlot:
    """This host's place in a job, for a launcher that starts the ranks itself.

    Attributes:
        nproc: How many ranks the cluster suggests to start here; None: it does not say.
        copies: How many processes the cluster started on this host. A launcher is wanted once.
    """

    nnodes: int
    node_rank: int
    nproc: int | None = None
    copies: int = 1


@dataclass(frozen=True, slots=True, kw_only=True)
class Placement:
    """What an environment says.

    Attributes:
        system: The system that started this process, the innermost of several.
        member: This process as a rank, if it can be one.
        slot: This host's place, if a launcher can take it.
        job: Identifies this job among others of its system, the same on all hosts; None: nothing
            does.
        host: The host of rank 0, as its cluster names it.
        port: A port for the job's store on that host.
        port_derived: `port` was computed from `job`, so it may be in use: look near it, too.
        hosts: All hosts in order, where they are known.
        notes: Values that contradict each other, and how to mend that.
        unclear: RANK and WORLD_SIZE may count hosts or processes, and nothing says which.
    """

    system: System
    member: RankSlot | None = None
    slot: NodeSlot | None = None
    job: str | None = None
    host: str | None = None
    port: int | None = None
    port_derived: bool = False
    hosts: tuple[str, ...] = ()
    notes: tuple[str, ...] = ()
    unclear: bool = False

    @property
    def endpoint(self) -> str | None:
        """host:port of the job's store, where both are known."""
        if self.host is None or self.port is None:
            return None
        host = f"[{self.host}]" if ":" in self.host else self.host
        return f"{host}:{self.port}"
