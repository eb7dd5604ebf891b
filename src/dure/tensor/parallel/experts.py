"""`ExpertParallel`: each rank of a mesh axis has some of the experts, and tokens travel to them.

    rows of all experts [N, d] --all_to_all--> rows for this rank's experts, by sender, expert
                               --sorted--> by expert, sender --experts--> and all the way back

The module is one such as `dure.nn.experts.GroupedExperts`, or torchtitan's: called with rows sorted
by expert, and how many each expert has; its parameters have a row (or block) for each expert.

*Gradients.* In backward an expert gets gradients from the tokens of all ranks of the axis. Where
each of these ranks has a loss of its own, whose mean is the loss (data parallel), that sum is
divided by their number. It is done to what flows through: gradients are divided on entering
backward of the experts and multiplied on leaving it, so that whoever else manages the parameters
(`fully_shard`, an optimizer) need not know.

*Nothing is skipped*: a rank without tokens, and an expert without any, run the same operators on
empty tensors. So all ranks save as many tensors for backward, and where a forward is computed again
up to the last of them (activation checkpointing), all stop behind the same collective.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
from torch import nn

from dure.comm.functional import all_to_all_single
from dure.comm.group import ProcessGroup
from dure.errors import PlacementError, ShapeError, UsageError
from dure.mesh import DeviceMesh
from dure.tensor.dtensor import DTensor
from dure.tensor.parallel.styles import ParallelStyle, distribute
from dure.tensor.placement_types import Shard, chunk

__all__ = ["ExpertParallel"]

Sizes = tuple[tuple[int, ...], ...]


class ExpertParallel(ParallelStyle):
    """Experts on the ranks of an axis; tokens are sent to them and back.

    Args:
        gradient_divisor: What gradients of experts are divided by. None: the ranks of the axis,
            each of which has a loss of its own that is averaged with the others'. 1: the ranks
            compute one loss together, as those of a tensor-parallel axis do.

    Raises:
        UsageError: The module has no parameters, or not one expert in each row of them; it is
            parallel already; at the call, it is given something else than rows and their counts.
        PlacementError: There are fewer experts than ranks, or so few that a rank has none.

    Collective:
        At each call, all ranks of the axis, also those without tokens.

    Cost:
        Forward two all_to_alls of rows, to the experts and back, and one of 8 bytes an expert;
        backward two of rows. With N rows of d elements on each of n ranks, routed evenly, each
        sends (n - 1) / n * N * d elements at a time.

    Numerics:
        Each row is computed as on one rank; gradients of weights add up the same terms in another
        order.
    """

    def __init__(self, *, gradient_divisor: int | None = None) -> None:
        self.gradient_divisor = gradient_divisor

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parts = _parts(module, device_mesh.size())
        for name, _ in list(module.named_parameters(recurse=False)):
            distribute(module, name, device_mesh, Shard(0), self.src_data_rank)
        group = device_mesh.get_group()
        divisor = self.gradient_divisor or device_mesh.size()
        running: list[_Way] = []

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            rows, counts = _checked(inputs, sum(parts))
            way = _way_of(counts, parts, group)
            rows = all_to_all_single(rows, way.takes, way.gives, group)
            rows = _TransposeBlocks.apply(rows, way.arrived, float(divisor))
            running.append(way)
            own = [sum(expert) for expert in zip(*way.arrived, strict=True)]
            return rows, torch.tensor(own, device=counts.device)

        def after(_: nn.Module, inputs: object, output: torch.Tensor | None) -> Any:
            way = running.pop() if running else None
            if output is None or way is None:  # the forward, or a hook before it, raised
                return None
            by_expert = tuple(zip(*way.arrived, strict=True))
            made: Any = _TransposeBlocks.apply(output, by_expert, 1 / divisor)
            return all_to_all_single(made, way.gives, way.takes, group)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)
        return module


def _parts(module: nn.Module, ranks: int) -> list[int]:
    """Return how many experts each rank has."""
    found = dict(module.named_parameters(recurse=False))
    if any(isinstance(p, DTensor) for p in found.values()):
        raise UsageError("the experts are parallel already", seen=f"{type(module).__name__}")
    counts = {p.shape[0] if p.ndim else 0 for p in found.values()}
    if len(counts) != 1:
        raise UsageError(
            "ExpertParallel fits a module whose parameters have one row for each expert",
            seen=f"{type(module).__name__} with {[f'{n} {[*p.shape]}' for n, p in found.items()]}",
            fix="Give it the module of the experts alone, such as dure.nn.experts.GroupedExperts.",
        )
    experts = counts.pop()
    parts = [chunk(experts, ranks, rank)[0] for rank in range(ranks)]
    if not all(parts):
        fitting = [n for n in range(1, experts + 1) if -(-experts // n) * (n - 1) < experts]
        raise PlacementError(
            "a rank would have no expert",
            seen=f"{experts} experts on {ranks} ranks, {max(parts)} on each while there are any",
            fix=f"Ranks that fit {experts} experts: {', '.join(map(str, fitting))}.",
        )
    return parts


def _checked(inputs: Sequence[Any], experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and counts."""
    if len(inputs) != 2 or not all(isinstance(each, torch.Tensor) for each in inputs):
        raise UsageError(
            "experts are called with rows sorted by expert, and how many each has",
            seen=f"{[type(each).__name__ for each in inputs]}",
        )
    rows, counts = inputs
    if counts.shape != (experts,) or int(counts.sum()) != len(rows):
        raise ShapeError(
            "each row is one expert's",
            seen=f"{len(rows)} rows, and counts {counts.tolist()} for {experts} experts",
        )
    return rows, counts


class _Way(NamedTuple):
    """How rows travel in one forward.

    Attributes:
        gives, takes: Rows for each rank, and from each.
        arrived: Of the latter how many are for each of this rank's experts, by rank.
    """

    gives: list[int]
    takes: list[int]
    arrived: Sizes


def _way_of(counts: torch.Tensor, parts: list[int], group: ProcessGroup) -> _Way:
    """Tell the other ranks how many rows come for which of their experts."""
    counts = counts.detach().long()
    own = parts[group.rank()]
    arrived = counts.new_empty(len(parts) * own)
    group.all_to_all_single(arrived, counts, [own] * len(parts), parts)
    table = arrived.view(len(parts), own).tolist()
    gives = [int(part.sum()) for part in counts.split(parts)]
    return _Way(gives, [sum(row) for row in table], tuple(map(tuple, table)))


class _TransposeBlocks(torch.autograd.Function):
    """Blocks of rows, those of (i, j) before (i, j + 1), come to lie by j, then i.

    ``sizes[i][j]`` rows each. In backward gradients go back, times `factor`.
    """

    @staticmethod
    def forward(ctx: Any, rows: torch.Tensor, sizes: Sizes, factor: float) -> torch.Tensor:
        ctx.sizes, ctx.factor = tuple(zip(*sizes, strict=True)), factor
        if 1 in (len(sizes), len(ctx.sizes)):
            return rows.view_as(rows)
        blocks = rows.split([size for line in sizes for size in line])
        across = len(sizes[0])
        return torch.cat([block for j in range(across) for block in blocks[j::across]])

    @staticmethod
    def backward(ctx: Any, grad: torch.Tensor) -> tuple[torch.Tensor, None, None]:  # pyright: ignore
        back = _TransposeBlocks.apply(grad, ctx.sizes, 1.0)
        return (back if ctx.factor == 1 else back * ctx.factor), None, None
