"""The comparison of all ranks' parts that `DTensor.from_local(run_check=True)` makes."""

from __future__ import annotations

import torch

from dure.comm.call import call_site
from dure.comm.objects import all_gather_object
from dure.errors import Desync
from dure.tensor.placement_types import Replicate
from dure.tensor.spec import DTensorSpec

__all__ = ["check_parts"]


def check_parts(part: torch.Tensor, spec: DTensorSpec) -> torch.Tensor:
    """Raise unless all ranks' parts make one tensor; return the part, replicated parts broadcast.

    Raises:
        Desync: Ranks have different shapes, dtypes or placements, or a part that does not fit.

    Collective:
        All ranks of the mesh.
    """
    if spec.coordinate is None:
        return part
    mine = f"{list(part.shape)} {part.dtype} of {spec} at {call_site()}"
    fits = part.shape == spec.local_shape
    for axis in range(spec.mesh.ndim):
        group = spec.mesh.get_group(axis)
        gathered: list[tuple[str, str, bool] | None] = [None] * group.size()
        all_gather_object(gathered, (mine, str(spec), fits), group)
        found = [one for one in gathered if one is not None]
        if len({(tensor, fit) for _, tensor, fit in found}) > 1 or not fits:
            ranks = dict(zip(group.global_ranks, (text for text, _, _ in found), strict=True))
            raise Desync(
                "the ranks' parts do not make one tensor",
                op="DTensor.from_local",
                group=group.group_name,
                rank=spec.mesh.get_rank(),
                calls=ranks,
                seen="; ".join(f"rank {rank} has {text}" for rank, text in ranks.items()),
                fix="Pass shape= and stride= of the full tensor if parts are uneven.",
            )
    if any(isinstance(p, Replicate) for p in spec.placements):
        part = part.detach().clone().requires_grad_(part.requires_grad)
        with torch.no_grad():
            for axis, placement in enumerate(spec.placements):
                if isinstance(placement, Replicate):
                    spec.mesh.get_group(axis).broadcast(part, 0)
    return part
