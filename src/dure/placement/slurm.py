"""Slurm: what `srun` sets for each task, and what the shell of a batch script has.

A task of `srun` has SLURM_STEP_ID, and is a rank. The shell of a batch script, of `salloc` and of
`srun --pty bash` has SLURM_JOB_ID, too, and even SLURM_PROCID=0, but is not a rank: it is the batch
or the interactive step, whose numbers are the last before 2^32, or it has a terminal.

Of two variables that mean the same the step's comes first: a step may be smaller than its job.
"""

from __future__ import annotations

from dure.placement.reader import Reader
from dure.placement.value import NodeSlot, Placement, RankSlot, System

__all__ = ["read_batch_shell", "read_step"]

_SPECIAL_STEPS = 0xFFFF_FFF0
"""Steps from here on are the batch script, the interactive shell and the like."""


def read_step(reader: Reader) -> Placement | None:
    if not _in_step(reader):
        return None
    rank = reader.number("SLURM_PROCID")
    size = reader.number("SLURM_STEP_NUM_TASKS", "SLURM_NTASKS")
    if rank is None or size is None or rank >= size:
        reader.note("this is a step of Slurm, but SLURM_PROCID and SLURM_NTASKS do not say which")
        return None
    node, local = reader.number("SLURM_NODEID"), reader.number("SLURM_LOCALID")
    hosts = reader.hosts("SLURM_STEP_NODELIST", "SLURM_JOB_NODELIST")
    copies = _tasks_here(reader, node, size)
    nnodes = reader.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES") or len(hosts) or None
    slot = None
    if nnodes is not None and node is not None:
        gpus = reader.count("SLURM_GPUS_ON_NODE")  # one rank for each
        slot = NodeSlot(nnodes=nnodes, node_rank=node, nproc=gpus, copies=copies or 1)
    return Placement(
        system=System.SLURM,
        member=RankSlot(
            rank=rank, world_size=size, local_rank=local, local_world_size=copies, node=node
        ),
        slot=slot,
        job=_job(reader),
        host=None if hosts else reader.text("SLURM_LAUNCH_NODE_IPADDR"),
        hosts=hosts,
    )


def read_batch_shell(reader: Reader) -> Placement | None:
    """Return the placement of a shell in a Slurm job: not a rank, but the hosts are known."""
    if not reader.has("SLURM_JOB_ID") or _in_step(reader):
        return None
    hosts = reader.hosts("SLURM_JOB_NODELIST")
    if len(hosts) > 1:
        reader.note(
            f"this shell is on one of the {len(hosts)} hosts of its Slurm job, and `dure run` uses "
            "this host alone. To use all of them: `srun --ntasks-per-node=1 dure run ...`, or "
            "`dure run --hosts slurm ...` over ssh"
        )
    return Placement(system=System.SLURM, job=reader.text("SLURM_JOB_ID"), hosts=hosts)


def _in_step(reader: Reader) -> bool:
    step = reader.number("SLURM_STEP_ID")
    if not reader.has("SLURM_JOB_ID", "SLURM_PROCID") or step is None:
        return False
    return step < _SPECIAL_STEPS and not reader.has("SLURM_PTY_PORT")


def _tasks_here(reader: Reader, node: int | None, size: int) -> int | None:
    """Return how many tasks of this step are on this host."""
    counts = reader.counts("SLURM_STEP_TASKS_PER_NODE", "SLURM_TASKS_PER_NODE")
    if node is None or node >= len(counts) or sum(counts) != size:
        return size if reader.number("SLURM_STEP_NUM_NODES", "SLURM_NNODES") == 1 else None
    return counts[node]


def _job(reader: Reader) -> str:
    restarts = reader.number("SLURM_RESTART_COUNT")
    step = f"slurm {reader.text('SLURM_JOB_ID')}.{reader.text('SLURM_STEP_ID')}"
    return f"{step} restart {restarts}" if restarts else step
