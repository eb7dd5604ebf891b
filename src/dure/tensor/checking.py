"""What ranks compare: the tensors that they mean, and the parts that they have."""

from __future__ import annotations

import zlib
from functools import lru_cache

import torch

from dure.comm.call import call_site
from dure.comm.objects import all_gather_object
from dure.errors import Desync
from dure.tensor.placement_types import Replicate
from dure.tensor.spec import DTensorSpec

__all__ = ["check_parts", "check_same"]


def check_parts(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Raise unless all ranks' parts make one tensor; return the part, replicated ones copied.

    Raises:
        Desync: A rank has another shape, dtype, placements, or a part that does not fit.

    Collective:
        All ranks of the mesh.
    """
    if spec.coordinate is None:
        return part
    mine = f"{list(part.shape)} {part.dtype} of {spec} at {call_site()}"
    fits = part.shape == spec.local_shape
    for axis in range(spec.mesh.ndim):
        group = spec.mesh.get_group(axis)
        said: list[tuple[str, str, bool] | None] = [None] * group.size()
        all_gather_object(said, (mine, str(spec), fits), group)
        found = [one for one in said if one is not None]
        if len({(whole, fit) for _, whole, fit in found}) > 1 or not fits:
            ranks = dict(zip(group.global_ranks, (text for text, _, _ in found), strict=True))
            raise Desync(
                "the ranks' parts do not make one tensor",
                op="DTensor.from_local",
                group=group.group_name,
                rank=spec.mesh.get_rank(),
                calls=ranks,
                seen="; ".join(f"rank {rank} has {text}" for rank, text in ranks.items()),
                fix="Pass shape= and stride= of the whole where parts are uneven.",
            )
    if any(isinstance(p, Replicate) for p in spec.placements):
        part = part.detach().clone().requires_grad_(part.requires_grad)
        with torch.no_grad():
            for axis, placement in enumerate(spec.placements):
                if isinstance(placement, Replicate):
                    spec.mesh.get_group(axis).broadcast(part, 0)
    return part


@lru_cache(maxsize=1 << 12)
def _digest_of(spec: DTensorSpec) -> tuple[str, torch.Tensor, int]:
    """Return what a spec says, and a digest of it, as a tensor to send and as a number."""
    text = f"{spec} on {spec.mesh!r}"
    value = zlib.crc32(text.encode())
    return text, torch.tensor([value], device=spec.mesh.device_type), value


def check_same(spec: DTensorSpec, op: str) -> None:
    """Raise unless all ranks mean the same shape, dtype and placements.

    Raises:
        Desync: On every rank that shares an axis with one that means another.

    Collective:
        All ranks of the mesh. A comparison of 8 bytes an axis.
    """
    mine, digest, value = _digest_of(spec)
    for axis in range(spec.mesh.ndim):
        group = spec.mesh.get_group(axis)
        digests = digest.new_empty(group.size())
        group.all_gather_single(digests, digest)
        if digests.tolist().count(value) == group.size():
            continue
        said: list[str | None] = [None] * group.size()
        all_gather_object(said, f"{mine} at {call_site()}", group)
        calls = {r: str(text) for r, text in zip(group.global_ranks, said, strict=True)}
        raise Desync(
            "the ranks mean different tensors",
            op=op,
            group=group.group_name,
            rank=spec.mesh.get_rank(),
            calls=calls,
            seen="; ".join(f"rank {rank}: {text}" for rank, text in calls.items()),
            fix="Give the same shape, dtype and placements on all ranks.",
        )
