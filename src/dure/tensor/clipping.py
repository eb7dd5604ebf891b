"""Clipping by the norm of all gradients, on any meshes and ranks.

The norm of a vector that is divided into parts follows from the norms of its parts:

    norm = (sum over parts of part_norm ** p) ** (1 / p),      for p = inf the largest part_norm.

So each element must be counted in exactly one part, which requires knowing which ranks have the
same gradient. That is known for

* DTensors, from their placements. The ranks of a mesh know the norm of the full tensor after one
  exchange along the axes that shard it.
* Parameters of pipeline stages (`register_stage`): stages have different parameters, except for
  tied ones. A tied parameter is counted by the first rank that has it.
* Other plain tensors: every rank has all of them, as DDP leaves them.

If ranks have different plain gradients, only the caller knows: `process_group` names these ranks.
If several ranks of this group share the mesh of a DTensor, each counts its share of its norm.
"""

from __future__ import annotations

import math
import threading
import weakref
from collections import defaultdict
from collections.abc import Iterable, Sequence
from typing import TYPE_CHECKING, Protocol

import torch
from torch import nn

from dure import torch_private
from dure.errors import UsageError
from dure.tensor.dtensor import DTensor
from dure.tensor.rules.foreach import Norms, combine, norm_of_norms, norms_by_mesh

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["ModelStage", "clip_grad_norm_", "register_stage"]


class ModelStage(Protocol):
    """A part of a model whose other parts are on other ranks, as `PipelineStage`."""

    submod: nn.Module
    group: ProcessGroup

    def tied_ranks(self) -> list[tuple[nn.Parameter, Sequence[int]]]:
        """Return tied parameters, and the global ranks that have each, the first stage first."""
        ...


_stages: weakref.WeakSet[ModelStage] = weakref.WeakSet()
_lock = threading.Lock()


def register_stage(stage: ModelStage) -> None:
    """Register a stage for `clip_grad_norm_`: ranks of its group have different parameters.

    Threads:
        Any; stages of all thread-ranks are in one set, and found by their parameters.
    """
    with _lock:
        _stages.add(stage)


@torch.no_grad()
def clip_grad_norm_(
    parameters: torch.Tensor | Iterable[torch.Tensor],
    max_norm: float,
    norm_type: float = 2.0,
    error_if_nonfinite: bool = False,
    foreach: bool | None = None,
    *,
    process_group: ProcessGroup | None = None,
) -> torch.Tensor:
    """Scale gradients in place so that the norm of all of them together is at most `max_norm`.

    The arguments are those of `torch.nn.utils.clip_grad_norm_`. No `process_group` is needed for
    DDP, `fully_shard`, tensor parallelism, `ZeroRedundancyOptimizer`, any combination of them, and
    the stages of a pipeline. A gradient that is passed twice, as that of a parameter which two
    modules share, is counted and scaled once.

    Args:
        parameters: Parameters of any meshes, and plain ones. Gradients of plain ones must be the
            same on all ranks, except on the ranks of `process_group`.
        max_norm: The largest norm allowed.
        norm_type: The p of the norm, above 0; may be inf.
        error_if_nonfinite: Raise, on all ranks, if the norm is inf or NaN.
        foreach: Accepted as torch's and ignored: lists of gradients are scaled at once.
        process_group: Ranks that have different plain gradients, for instance parameters that each
            rank owns alone, or the stages of a pipeline: ``mesh.get_group("pp")``. Required on a
            rank of a pipeline that has no parameters.

    Returns:
        The norm before clipping [], a plain tensor; float64 if a gradient is, else float32.

    Raises:
        UsageError: `norm_type` is not positive; the norm is not finite and `error_if_nonfinite` is
            set; or this rank cannot know the norm: it is not in the mesh of a parameter that has a
            gradient, or the parameters belong to pipelines of several groups.

    Collective:
        All ranks of the meshes, of `process_group` and of pipelines, also one without a gradient.

    Cost:
        One all_gather of 8 bytes per rank for each mesh and axis that shards gradients, and one
        more for `process_group` or a pipeline.

    Numerics:
        Norms do not overflow or vanish as their powers would. Norms of parts are combined in
        float64 in the order of ranks, and the result is bitwise equal on all of them.

    Example:
        ```python
        from dure.tensor import Shard, clip_grad_norm_, distribute_tensor, init_device_mesh

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("tp",))
        weight = distribute_tensor(torch.nn.Parameter(torch.ones(4)), mesh, [Shard(0)])
        weight.grad = distribute_tensor(torch.full((4,), 3.0), mesh, [Shard(0)])
        norm = clip_grad_norm_([weight], max_norm=1.0)
        assert round(norm.item(), 3) == 6.0
        assert round(weight.grad.full_tensor().norm().item(), 3) == 1.0
        ```
    """
    del foreach
    p = float(norm_type)
    if not p > 0:
        raise UsageError(
            "norm_type must be above 0",
            op="clip_grad_norm_",
            seen=f"norm_type={norm_type}",
            fix="Use 1, 2 or inf.",
        )
    given = [parameters] if isinstance(parameters, torch.Tensor) else list(parameters)
    distinct = list({id(q): q for q in given}.values())
    having = [(q, q.grad) for q in distinct if q.grad is not None]
    stages = _stages_of(distinct)
    group = _group_of(stages) if process_group is None else process_group
    _check_meshes([grad for _, grad in having], group)
    elsewhere = _counted_elsewhere(stages, group)
    found = norms_by_mesh([g for q, g in having if id(q) not in elsewhere], p, in_total=True)
    device = distinct[0].device if distinct else torch.device("cpu")
    shares = [_share(norms, p, group).to(device) for norms in found]
    total = norm_of_norms(torch.cat([torch.zeros(1, device=device), *shares]).double(), p)
    if group is not None and group.size() > 1:
        total = combine(total.reshape(1), p, group)[0]
    grads = [grad for _, grad in having]
    is_wide = any(grad.dtype in (torch.float64, torch.complex128) for grad in grads)
    norm = total if is_wide else total.float()
    if error_if_nonfinite and not bool(total.isfinite()):
        raise UsageError(
            "the norm of the gradients is not finite",
            op="clip_grad_norm_",
            seen=f"{float(norm)}",
            fix="Skip the step, or pass error_if_nonfinite=False.",
        )
    _scale(grads, (max_norm / (total + 1e-6)).clamp(max=1.0))
    return norm


def _scale(grads: Sequence[torch.Tensor], factor: torch.Tensor) -> None:
    """Multiply gradients by a number, float64 []."""
    by_device: dict[torch.device, list[torch.Tensor]] = defaultdict(list)
    for grad in grads:
        by_device[grad.device].append(grad)
    for device, some in by_device.items():
        torch_private.foreach_mul_(some, factor.to(device))


# ---- which ranks have a gradient -----------------------------------------------------------------


def _stages_of(parameters: Sequence[torch.Tensor]) -> list[ModelStage]:
    """Return the pipeline stages to which some of these parameters belong."""
    with _lock:
        stages = [stage for stage in _stages if stage.group.size() > 1]
    if not stages:
        return []
    given = {id(q) for q in parameters}
    return [s for s in stages if any(id(q) in given for q in s.submod.parameters())]


def _group_of(stages: Sequence[ModelStage]) -> ProcessGroup | None:
    """Return the ranks of the pipeline that has these stages; None without one."""
    groups = {stage.group.global_ranks: stage.group for stage in stages}
    if len(groups) > 1:
        raise UsageError(
            "the parameters belong to pipelines of several groups",
            op="clip_grad_norm_",
            seen=f"stages on ranks {' and '.join(str(list(ranks)) for ranks in groups)}",
            fix="Pass process_group=, the ranks whose parameters differ.",
        )
    return next(iter(groups.values()), None)


def _counted_elsewhere(stages: Sequence[ModelStage], group: ProcessGroup | None) -> set[int]:
    """Return the ids of tied parameters that an earlier stage counts, on another rank."""
    if group is None:
        return set()
    found: set[int] = set()
    for stage in stages:
        for parameter, ranks in stage.tied_ranks():
            among = [rank for rank in ranks if rank in group.group_rank_of]
            if among and group.group_rank_of[among[0]] != group.rank():
                found.add(id(parameter))
    return found


def _check_meshes(grads: Sequence[torch.Tensor], group: ProcessGroup | None) -> None:
    """Raise if this rank has some of the gradients only, and no group to ask for the others."""
    outside = [g for g in grads if isinstance(g, DTensor) and g.spec.coordinate is None]
    if group is None and outside and len(outside) < len(grads):
        raise UsageError(
            "this rank cannot know the norm of gradients that only other ranks have",
            op="clip_grad_norm_",
            seen=f"{len(outside)} of {len(grads)} gradients are on a mesh without this rank, such "
            f"as {outside[0].spec}",
            fix="Pass process_group=, with the ranks of all meshes.",
        )


def _share(norms: Norms, p: float, group: ProcessGroup | None) -> torch.Tensor:
    """Return this rank's share of norms, of which each rank of `group` in their mesh has one."""
    if group is None or norms.mesh is None or p == math.inf:
        return norms.values
    ranks = norms.mesh.mesh.flatten().tolist() if norms.is_inside else []
    among = sum(rank in group.group_rank_of for rank in ranks)
    return norms.values * max(among, 1) ** (-1.0 / p)
