"""Systems that start one process a host: Kubernetes, PAI-DLC, SkyPilot, SageMaker.

Their process is meant to be a launcher, so the host's slot is what they describe. Where there are
several hosts the process may be a rank itself, one on each; and where there is one, a program that
was started without a launcher is told so, rather than made a job of one rank.
"""

from __future__ import annotations

import re

from dure.placement.reader import Reader
from dure.placement.value import Member, NodeSlot, Placement, System

__all__ = ["read_kubernetes", "read_pods", "read_sagemaker", "read_skypilot"]

_POD = re.compile(r"(.+)-(master|worker)-([0-9]+)")
_PAI_MASTER = re.compile(r"dlc[0-9a-z]+-master-[0-9]+")
_INDEXED = re.compile(r"(.+)-([0-9]+)")
_NPROC = "ranks to start here"


def read_pods(reader: Reader) -> Placement | None:
    """Return the placement where RANK and WORLD_SIZE count hosts: a PyTorchJob's pod, or PAI's.

    PAI-DLC and Kubeflow's first operators set WORLD_SIZE to the number of pods and RANK to the
    pod's; later operators multiply WORLD_SIZE by the processes of a pod, but leave RANK. Both look
    like a rank's environment. What tells them apart: LOCAL_RANK is missing, and either PET_NNODES
    says how many hosts there are, or the names of the hosts are those that the operator gives.
    """
    if reader.has("LOCAL_RANK") or not reader.has("RANK", "WORLD_SIZE"):
        return None
    system = _counts_hosts(reader)
    if system is None:
        return None
    why = f"{system}: WORLD_SIZE counts hosts, not processes"
    nnodes = reader.take_count("hosts", why, "PET_NNODES", "WORLD_SIZE")
    node = reader.take("node", "", "PET_NODE_RANK", "RANK")
    if not nnodes or node is None or node >= nnodes:
        reader.note("RANK and WORLD_SIZE seem to count hosts, but RANK is none of them")
        return None
    nproc = reader.take_count(_NPROC, "", "PET_NPROC_PER_NODE", "NPROC_PER_NODE")
    reader.note(
        f"the trap of WORLD_SIZE: under {system} it counts hosts, so `dure run` takes RANK and "
        "WORLD_SIZE as the host's number and the number of hosts"
    )
    stem = _POD.fullmatch(reader.text("HOSTNAME") or "")
    job = f"{system} {stem[1] if stem else reader.text('MASTER_ADDR')}"
    return _placement(system, NodeSlot(nnodes=nnodes, node_rank=node, nproc=nproc), job)


def _counts_hosts(reader: Reader) -> System | None:
    """Tell which system's hosts RANK and WORLD_SIZE count; None: nothing says that they do."""
    master = (reader.text("MASTER_ADDR") or "").split(".")[0]
    if _PAI_MASTER.fullmatch(master) or reader.has("NPROC_PER_NODE", "MASTER_ADDR"):
        return System.PAI
    if reader.count("PET_NNODES"):
        return System.PYTORCHJOB
    pod = _POD.fullmatch(reader.text("HOSTNAME") or "")
    in_kubernetes = reader.has("KUBERNETES_SERVICE_HOST")
    if in_kubernetes and pod and (master == "localhost" or _POD.fullmatch(master)):
        return System.PYTORCHJOB
    return None


def read_skypilot(reader: Reader) -> Placement | None:
    node = reader.take("node", "", "SKYPILOT_NODE_RANK")
    if node is None:
        return None
    ips = tuple((reader.text("SKYPILOT_NODE_IPS") or "").split())
    nnodes = reader.number("SKYPILOT_NUM_NODES") or len(ips)
    if node >= nnodes:
        reader.note("SKYPILOT_NODE_RANK is none of the task's nodes")
        return None
    reader.keep("hosts", nnodes, "SKYPILOT_NUM_NODES" if not ips else "SKYPILOT_NODE_IPS")
    gpus = reader.take_count(_NPROC, "one for each GPU", "SKYPILOT_NUM_GPUS_PER_NODE")
    job = f"skypilot {reader.text('SKYPILOT_TASK_ID') or ' '.join(ips)}"
    slot = NodeSlot(nnodes=nnodes, node_rank=node, nproc=gpus)
    return _placement(System.SKYPILOT, slot, job, ips)


def read_sagemaker(reader: Reader) -> Placement | None:
    hosts, current = reader.names("SM_HOSTS"), reader.text("SM_CURRENT_HOST")
    if not hosts or current is None:
        return None
    if current not in hosts:
        reader.note("SM_CURRENT_HOST is none of SM_HOSTS")
        return None
    reader.keep("hosts", ",".join(hosts), "SM_HOSTS", f"{len(hosts)} of them")
    reader.keep("node", hosts.index(current), "SM_CURRENT_HOST")
    gpus = reader.take_count(_NPROC, "one for each GPU", "SM_NUM_GPUS")
    job = f"sagemaker {reader.text('TRAINING_JOB_NAME', 'SM_JOB_NAME') or ' '.join(hosts)}"
    slot = NodeSlot(nnodes=len(hosts), node_rank=hosts.index(current), nproc=gpus)
    return _placement(System.SAGEMAKER, slot, job, hosts)


def read_kubernetes(reader: Reader) -> Placement | None:
    """Return the placement of a pod of an indexed Job, in a JobSet or not.

    Kubernetes tells a pod its index, not how many there are, nor the service that makes the pods'
    names known to each other: the job's YAML says these, as NNODES and MASTER_ADDR. In a JobSet the
    service has the set's name, so the first pod's name follows.
    """
    index = reader.take("node", "the pod's index", "JOB_COMPLETION_INDEX")
    if index is None:
        return None
    nnodes = reader.take_count("hosts", "", "NNODES", "PET_NNODES")
    if nnodes is None or index >= nnodes:
        reader.note(
            "this is a pod of an indexed job; Kubernetes does not say of how many: put NNODES "
            "(its completions) and MASTER_ADDR (POD-0.SERVICE) into the pod's env"
        )
        return Placement(system=System.KUBERNETES, job=_pod_stem(reader))
    stem = _pod_stem(reader)
    job = f"kubernetes {stem or reader.text('MASTER_ADDR')}"
    names: tuple[str, ...] = ()
    service = reader.text("JOBSET_SUBDOMAIN", "JOBSET_NAME")
    if stem and service:
        names = tuple(f"{stem}-{i}.{service}" for i in range(nnodes))
        reader.keep("first host", names[0], "HOSTNAME, JOBSET_NAME", "the JobSet's own service")
    nproc = reader.take_count(_NPROC, "", "PET_NPROC_PER_NODE", "NPROC_PER_NODE")
    slot = NodeSlot(nnodes=nnodes, node_rank=index, nproc=nproc)
    return _placement(System.KUBERNETES, slot, job, names)


def _pod_stem(reader: Reader) -> str | None:
    found = _INDEXED.fullmatch(reader.text("HOSTNAME") or "")
    return found[1] if found else None


def _placement(system: System, slot: NodeSlot, job: str, hosts: tuple[str, ...] = ()) -> Placement:
    node, of = slot.node_rank, slot.nnodes
    alone = Member(rank=node, world_size=of, local_rank=0, local_world_size=1, node=node)
    member = alone if of > 1 else None
    return Placement(system=system, member=member, slot=slot, job=job, hosts=hosts)
