"""Taking a host's slot: what `dure run` does without flags if a cluster started it.

The cluster gives the number of hosts, which one this is and where the first one is. Flags and
`PET_*` come before it, one by one. Two mistakes are refused, because guessing would start a wrong
job: a `dure run` per rank instead of per host, and RANK and WORLD_SIZE that may count either.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field

from dure.errors import UsageError
from dure.placement import NodeSlot, Placement, System

__all__ = ["ClusterValues", "take_node_slot"]

_ALONE = frozenset({"standalone", "hosts", "hostfile"})
"""Flags that set the hosts without the cluster."""

_PLACES = frozenset({"nnodes", "node_rank", "endpoint", "master_addr"})


@dataclass(frozen=True, slots=True, kw_only=True)
class ClusterValues:
    """What the cluster fills in: values by the flags' names, and a line about it for the user."""

    values: Mapping[str, object] = field(default_factory=dict[str, object])
    line: str = ""


def take_node_slot(placement: Placement, chosen: Mapping[str, object]) -> ClusterValues:
    """Return the values of the flags that are not chosen.

    Args:
        placement: The cluster that was found.
        chosen: The values that the user chose, by the flags' names.

    Raises:
        UsageError: This process was started once per rank; or it is unknown what WORLD_SIZE counts;
            or there are several hosts and the address of the first is unknown.
    """
    if _ALONE & set(chosen):
        return ClusterValues()
    slot, placed = placement.slot, bool(_PLACES & set(chosen))
    if placement.unclear and not placed:
        raise _unclear(placement)
    if slot is None:
        return ClusterValues(line="" if placed else "; ".join(placement.notes))
    if slot.copies > 1:
        raise _once_a_rank(placement, slot)
    values: dict[str, object] = {}
    if slot.nproc is not None:
        values["nproc"] = slot.nproc
    if slot.nnodes > 1:
        values |= _meeting(placement, slot, chosen)
    values = {name: value for name, value in values.items() if name not in chosen}
    return ClusterValues(values=values, line=_line(placement, slot, values))


def _meeting(
    placement: Placement, slot: NodeSlot, chosen: Mapping[str, object]
) -> dict[str, object]:
    """Return how the hosts rendezvous: by their numbers, unless the user gave a range of hosts."""
    values: dict[str, object] = {"nnodes": (slot.nnodes, slot.nnodes), "run_id": placement.job}
    wanted = chosen.get("nnodes", values["nnodes"])
    least, most = wanted if isinstance(wanted, tuple) else (1, 1)
    if least == most == slot.nnodes and "backend" not in chosen:
        values |= {"backend": "static", "node_rank": slot.node_rank}
    elif "node_rank" in chosen or chosen.get("backend") == "static":
        values["node_rank"] = slot.node_rank
    if {"endpoint", "master_addr"} & set(chosen):
        return values
    if most > 1 and placement.endpoint is None:
        raise UsageError(
            "the address of the job's first host is unknown",
            seen=f"{placement.system}: this is host {slot.node_rank} of {slot.nnodes}",
            fix="Set MASTER_ADDR to the first host's name, or give --rdzv-endpoint HOST:PORT.",
        )
    return values | {"endpoint": placement.endpoint}


def _line(placement: Placement, slot: NodeSlot, values: Mapping[str, object]) -> str:
    """Return one line about what was taken from the cluster, or an empty one."""
    if not values:
        return ""
    parts: list[str] = []
    if "nnodes" in values or "node_rank" in values:
        parts.append(f"host {slot.node_rank} of {slot.nnodes}")
    if "nproc" in values:
        parts.append("1 rank here" if slot.nproc == 1 else f"{slot.nproc} ranks here")
    if "endpoint" in values:
        parts.append(f"the hosts rendezvous at {placement.endpoint}")
    return f"{placement.system}: {', '.join(parts)} (see `dure env`; --standalone: this host alone)"


def _once_a_rank(placement: Placement, slot: NodeSlot) -> UsageError:
    how = {
        System.SLURM: "srun --ntasks-per-node=1",
        System.OPEN_MPI: "mpirun --map-by ppr:1:node",
        System.HYDRA: "mpiexec -ppn 1",
    }.get(placement.system, "once per host")
    return UsageError(
        "dure run was started once per rank, and would start all ranks again each time",
        seen=f"{placement.system} started {slot.copies} processes on this host",
        fix=f"Start one per host (`{how} dure run --nproc {slot.copies} ...`), or the program "
        "itself without dure run: it finds its rank. --standalone makes each a job of its own.",
    )


def _unclear(placement: Placement) -> UsageError:
    member = placement.member
    seen = f"RANK={member.rank}, WORLD_SIZE={member.world_size}" if member else ""
    return UsageError(
        "RANK and WORLD_SIZE are set, and may count hosts or processes",
        seen=f"{seen}, without LOCAL_RANK",
        fix='If they count hosts (PAI-DLC, old PyTorchJobs): --nnodes "$WORLD_SIZE" --node-rank '
        '"$RANK". If they count processes, start the program without dure run. If they are left '
        "over: --standalone.",
    )
