"""Whether each rank has a GPU of its own: then the default backend for CUDA tensors is NCCL.

Every rank writes the GPUs that it may use into the rendezvous (`RendezvousMember.gpus`), and all
apply the same rule to all entries, so all choose the same backend.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Sequence

import torch

from dure import env, torch_private
from dure.store.members import RendezvousMember

__all__ = ["each_has_its_own", "visible_gpus"]


def visible_gpus(device: torch.device | None) -> tuple[str, ...]:
    """Return the GPUs that this rank may use, by the names that CUDA_VISIBLE_DEVICES has for them.

    Args:
        device: The rank's `device_id`: then only that one.

    Cost:
        A question to the driver's library; CUDA is not initialized.
    """
    if not torch_private.has_nccl:
        return ()
    count = torch.cuda.device_count()
    named = (env.text("CUDA_VISIBLE_DEVICES") or "").split(",")
    names = named if len(named) >= count and named[0] else map(str, range(count))
    gpus = tuple(name.strip() for name in names)[:count]
    if device is None:
        return gpus
    if device.type != "cuda":
        return ()
    index = device.index or 0
    return gpus[index : index + 1]


def each_has_its_own(members: Sequence[RendezvousMember]) -> bool:
    """Return whether every rank has a GPU that no other rank of its host has.

    Of several that it may use, a rank uses the one of its number on the host, as programs do that
    call ``torch.cuda.set_device(LOCAL_RANK)``.
    """
    used: defaultdict[str, list[str]] = defaultdict(list)
    for member in members:
        on_host = used[member.host_id]
        if not member.gpus:
            return False
        on_host.append(member.gpus[len(on_host) % len(member.gpus)])
    return all(len(set(gpus)) == len(gpus) for gpus in used.values())
