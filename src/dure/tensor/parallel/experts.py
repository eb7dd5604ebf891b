"""`ExpertParallel`: each rank of a mesh axis has some of the experts, and tokens are sent to them.

    rows of all experts [N, d] --all_to_all--> rows for this rank's experts, by sender, expert
                               --sorted--> by expert, sender --experts--> and all the way back

The module is one such as `dure.nn.experts.GroupedExperts`, or torchtitan's: it is called with rows
sorted by expert and the number of rows of each expert; its parameters have a row (or block) for
each expert.

*Gradients.* In backward an expert gets gradients from the tokens of all ranks of the axis. If each
of these ranks computes its own loss and the mean of these is the loss (data parallel), that sum
must be divided by the number of ranks. The gradients of activations are divided on entering the
backward of the experts and multiplied on leaving it, so that other users of the parameters
(`fully_shard`, an optimizer) need not know.

*Nothing is skipped*: a rank without tokens, and an expert without tokens, run the same operators on
empty tensors. So all ranks save the same number of tensors for backward. If activation
checkpointing recomputes the forward up to the last of them, all ranks stop after the same
collective.
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
        gradient_divisor: Divisor of the gradients of experts. None: the number of ranks of the
            axis, for ranks that compute separate losses which are averaged. 1: for ranks that
            compute one loss together, as on a tensor-parallel axis.

    Raises:
        UsageError: The module has no parameters, or its parameters do not have one row for each
            expert; it is already parallel; at the call, the inputs are not rows and their counts.
        ShapeError: At the call, the counts do not add up to the number of rows.
        PlacementError: A rank would have no expert.

    Collective:
        At each call, all ranks of the axis, also those without tokens.

    Cost:
        Forward two all_to_alls of rows, to the experts and back, and one of 8 bytes per expert;
        backward two of rows. With N rows of d elements on each of n ranks, routed evenly, each
        rank sends (n - 1) / n * N * d elements in each of them.

    Numerics:
        Each row is computed as on one rank; gradients of weights add up the same terms in another
        order.

    Example:
        ```python
        from dure.nn import experts
        from dure.tensor import init_device_mesh
        from dure.tensor.parallel import ExpertParallel, parallelize_module

        mesh = init_device_mesh("cpu", (2,), mesh_dim_names=("ep",))
        args = experts.MoEArgs(num_experts=4, num_shared_experts=0)
        layer = experts.MoE(args, dim=8, hidden_dim=16)
        parallelize_module(layer, mesh, {"experts": ExpertParallel()})
        assert layer.experts.w1.to_local().shape == (2, 16, 8)  # 2 of 4 experts
        assert layer(torch.ones(3, 8)).shape == (3, 8)
        ```
    """

    def __init__(self, *, gradient_divisor: int | None = None) -> None:
        self.gradient_divisor = gradient_divisor

    def _apply(self, module: nn.Module, device_mesh: DeviceMesh) -> nn.Module:
        parts = _parts(module, device_mesh.size())
        for name, _ in list(module.named_parameters(recurse=False)):
            distribute(module, name, device_mesh, Shard(0), self.src_data_rank)
        group = device_mesh.get_group()
        divisor = self.gradient_divisor or device_mesh.size()
        running: list[_Routing] = []

        def before(_: nn.Module, inputs: tuple[Any, ...]) -> tuple[torch.Tensor, torch.Tensor]:
            rows, counts = _checked(inputs, sum(parts))
            routing = _routing_of(counts, parts, group)
            rows = all_to_all_single(rows, routing.received, routing.sent, group)
            rows = _TransposeBlocks.apply(rows, routing.by_rank, float(divisor))
            running.append(routing)
            own = [sum(expert) for expert in zip(*routing.by_rank, strict=True)]
            return rows, torch.tensor(own, device=counts.device)

        def after(_: nn.Module, inputs: object, output: torch.Tensor | None) -> Any:
            routing = running.pop() if running else None
            if output is None or routing is None:  # the forward, or a hook before it, raised
                return None
            by_expert = tuple(zip(*routing.by_rank, strict=True))
            made: Any = _TransposeBlocks.apply(output, by_expert, 1 / divisor)
            return all_to_all_single(made, routing.sent, routing.received, group)

        module.register_forward_pre_hook(before)
        module.register_forward_hook(after, always_call=True)
        return module


def _parts(module: nn.Module, ranks: int) -> list[int]:
    """Return the number of experts of each rank."""
    found = dict(module.named_parameters(recurse=False))
    if any(isinstance(p, DTensor) for p in found.values()):
        raise UsageError("the experts are already parallel", seen=f"{type(module).__name__}")
    counts = {p.shape[0] if p.ndim else 0 for p in found.values()}
    if len(counts) != 1:
        raise UsageError(
            "ExpertParallel requires a module whose parameters have one row for each expert",
            seen=f"{type(module).__name__} with {[f'{n} {[*p.shape]}' for n, p in found.items()]}",
            fix="Give it the module of the experts alone, such as dure.nn.experts.GroupedExperts.",
        )
    experts = counts.pop()
    parts = [chunk(experts, ranks, rank)[0] for rank in range(ranks)]
    if not all(parts):
        fitting = [n for n in range(1, experts + 1) if -(-experts // n) * (n - 1) < experts]
        raise PlacementError(
            "a rank would have no expert",
            seen=f"{experts} experts on {ranks} ranks, {max(parts)} per rank until none is left",
            fix=f"Use an axis of {', '.join(map(str, fitting))} ranks.",
        )
    return parts


def _checked(inputs: Sequence[Any], experts: int) -> tuple[torch.Tensor, torch.Tensor]:
    """Return rows and counts."""
    if len(inputs) != 2 or not all(isinstance(each, torch.Tensor) for each in inputs):
        raise UsageError(
            "the inputs of experts must be rows sorted by expert, and the number of rows of each",
            seen=f"{[type(each).__name__ for each in inputs]}",
        )
    rows, counts = inputs
    if counts.shape != (experts,) or int(counts.sum()) != len(rows):
        raise ShapeError(
            "the counts must have one entry per expert and add up to the number of rows",
            seen=f"{len(rows)} rows, and counts {counts.tolist()} for {experts} experts",
        )
    return rows, counts


class _Routing(NamedTuple):
    """The numbers of rows that are sent and received in one forward.

    Attributes:
        sent: For each rank the number of rows sent to it.
        received: For each rank the number of rows received from it.
        by_rank: For each rank the number of received rows for each of this rank's experts.
    """

    sent: list[int]
    received: list[int]
    by_rank: Sizes


def _routing_of(counts: torch.Tensor, parts: list[int], group: ProcessGroup) -> _Routing:
    """Exchange the numbers of rows for each expert between all ranks."""
    counts = counts.detach().long()
    own = parts[group.rank()]
    received = counts.new_empty(len(parts) * own)
    group.all_to_all_single(received, counts, [own] * len(parts), parts)
    table = received.view(len(parts), own).tolist()
    sent = [int(part.sum()) for part in counts.split(parts)]
    return _Routing(sent, [sum(row) for row in table], tuple(map(tuple, table)))


class _TransposeBlocks(torch.autograd.Function):
    """Reorders blocks of rows from order (i, j) to order (j, i).

    Block (i, j) has ``sizes[i][j]`` rows. Backward restores the order and multiplies by `factor`.
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
