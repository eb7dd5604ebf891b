"""Kubernetes, which starts one process per host: pods of an indexed Job, a JobSet or a PyTorchJob.

The process is meant to be a launcher, so the host's slot is what the variables describe. If there
are several hosts, the process may also be a rank itself, one per host. If there is one host, a
program that was started without a launcher is not made a job of one rank.
"""

from __future__ import annotations

import re

from dure.placement.reader import Reader
from dure.placement.value import NodeSlot, Placement, RankSlot, System

__all__ = ["read_kubernetes", "read_pytorchjob"]

_POD = re.compile(r"(.+)-(master|worker)-([0-9]+)")
_INDEXED = re.compile(r"(.+)-([0-9]+)")


def read_pytorchjob(reader: Reader) -> Placement | None:
    """Return the placement of a PyTorchJob's pod, in which RANK and WORLD_SIZE count hosts.

    Kubeflow's first operators set WORLD_SIZE to the number of pods and RANK to the pod's; later
    operators multiply WORLD_SIZE by the processes of a pod, but leave RANK. Both look like a rank's
    environment. They can be recognized because LOCAL_RANK is missing, and either PET_NNODES gives
    the number of hosts, or the hosts have the names that the operator gives.
    """
    if reader.has("LOCAL_RANK") or not reader.has("RANK", "WORLD_SIZE"):
        return None
    if not _counts_hosts(reader):
        return None
    nnodes = reader.count("PET_NNODES", "WORLD_SIZE")
    node = reader.number("PET_NODE_RANK", "RANK")
    if not nnodes or node is None or node >= nnodes:
        reader.note("RANK and WORLD_SIZE seem to count hosts, but RANK is not one of them")
        return None
    reader.note(
        "in a PyTorchJob RANK and WORLD_SIZE count hosts: `dure run` uses them as the number of "
        "this host and the number of hosts"
    )
    pod = _POD.fullmatch(reader.text("HOSTNAME") or "")
    job = f"PyTorchJob {pod[1] if pod else reader.text('MASTER_ADDR')}"
    return _placement(reader, System.PYTORCHJOB, node, nnodes, job, ())


def _counts_hosts(reader: Reader) -> bool:
    """Whether RANK and WORLD_SIZE are known to count hosts."""
    if reader.count("PET_NNODES"):
        return True
    master = (reader.text("MASTER_ADDR") or "").split(".")[0]
    pod = _POD.fullmatch(reader.text("HOSTNAME") or "")
    in_kubernetes = reader.has("KUBERNETES_SERVICE_HOST")
    named = master == "localhost" or _POD.fullmatch(master) is not None
    return in_kubernetes and pod is not None and named


def read_kubernetes(reader: Reader) -> Placement | None:
    """Return the placement of a pod of an indexed Job, in a JobSet or not.

    Kubernetes gives a pod its index, but not the number of pods, nor the service that makes the
    pods' names known to each other: the job's YAML sets these, as NNODES and MASTER_ADDR. In a
    JobSet the service has the set's name, so the first pod's name is known.
    """
    index = reader.number("JOB_COMPLETION_INDEX")
    if index is None:
        return None
    found = _INDEXED.fullmatch(reader.text("HOSTNAME") or "")
    stem = found[1] if found else None
    nnodes = reader.count("NNODES", "PET_NNODES")
    if nnodes is None or index >= nnodes:
        reader.note(
            "this is a pod of an indexed job, and Kubernetes does not give the number of pods: set "
            "NNODES (the job's completions) and MASTER_ADDR (POD-0.SERVICE) in the pod's env"
        )
        return Placement(system=System.KUBERNETES, job=stem)
    names: tuple[str, ...] = ()
    service = reader.text("JOBSET_SUBDOMAIN", "JOBSET_NAME")
    if stem and service:
        names = tuple(f"{stem}-{i}.{service}" for i in range(nnodes))
    job = f"kubernetes {stem or reader.text('MASTER_ADDR')}"
    return _placement(reader, System.KUBERNETES, index, nnodes, job, names)


def _placement(
    reader: Reader, system: System, node: int, of: int, job: str, hosts: tuple[str, ...]
) -> Placement:
    slot = NodeSlot(nnodes=of, node_rank=node, nproc=reader.count("PET_NPROC_PER_NODE"))
    alone = RankSlot(rank=node, world_size=of, local_rank=0, local_world_size=1, node=node)
    member = alone if of > 1 else None
    return Placement(system=system, member=member, slot=slot, job=job, hosts=hosts)
