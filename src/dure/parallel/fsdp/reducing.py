"""Gradients of whole parameters become averaged shards: one reduce_scatter a group.

    gradients  --copy-->  flat [n, k] in the symmetric heap  --reduce_scatter-->  this rank's [k]

The flat tensor has a part for each rank: of each parameter what the rank has of it, padded to a
full part, and one element more, which is 1 where a rank has a gradient: so all know whether any
had, and which gradients stay None. What was frozen since has this element only. Ranks of a host
read it where it lies. The collective runs on the group's channel 1, so that gathers on channel 0
need not wait for it.

With replicas (HSDP) the parts are reduced once more, over the axis of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence

import torch

from dure.comm.memory import heap_empty
from dure.comm.ops import ReduceOp
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.strategy import CustomReduceScatter, Reduction

__all__ = ["Reducer", "padded_numel", "padded_shape", "parts_of"]


class Reducer:
    """Reduces the gradients of a group.

    Args:
        parameters: Of one dtype.
        axes: Over which they are sharded.

    Attributes:
        reducing_group: In which gradients are reduced, unless by a program's own collective.
        custom_reduce_scatter: The program's own; None for Dure's.
    """

    def __init__(self, parameters: Sequence[FSDPParameter], axes: DataAxes) -> None:
        self._parameters, self._axes = list(parameters), axes
        self.reducing_group = axes.shard_group.channel(1)
        self._carry: torch.Tensor | None = None
        self.custom_reduce_scatter: CustomReduceScatter | None = None

    def reduce(
        self, gradients: Sequence[torch.Tensor | None], how: Reduction
    ) -> Callable[[], Sequence[torch.Tensor | None]]:
        """Begin to reduce; see `Strategy.reduce`."""
        size = self._axes.size
        sizes = [padded_numel(p, size) if p.is_trained else 0 for p in self._parameters]
        dtype = how.dtype or self._parameters[0].dtype
        flat = self._empty(size, sum(sizes) + len(sizes), dtype)
        *pieces, used = flat.split([*sizes, len(sizes)], dim=1)
        used.copy_(torch.tensor([g is not None for g in gradients]))
        for piece, parameter, gradient in zip(pieces, self._parameters, gradients, strict=True):
            if gradient is None or parameter.whole_shape[parameter.dim] % size:
                piece.zero_()
            if gradient is not None:
                _copy_in(piece, gradient, parameter)
        average = how.divisor is None and not how.force_sum
        op = ReduceOp.AVG if average else ReduceOp.SUM
        comm = self.custom_reduce_scatter
        if comm is None:
            output = flat.new_empty(flat.shape[1])
            group = self.reducing_group
            work = group.reduce_scatter_single(output, flat.view(-1), op, async_op=True)
        else:
            output = comm.allocate((flat.shape[1],), dtype=dtype, device=flat.device)
            work = comm(output, flat.view(-1), self._axes.shard_group, op, async_op=True)

        def finish() -> Sequence[torch.Tensor | None]:
            if work is not None:
                work.wait()
            return self._reduced(output, sizes, how, op)

        return finish

    def _reduced(
        self, output: torch.Tensor, sizes: list[int], how: Reduction, op: ReduceOp
    ) -> Sequence[torch.Tensor | None]:
        """Reduce over replicas, divide, and cut this rank's parts out."""
        replicas = self._axes.replicate_group
        if replicas is not None and not how.replicate:
            self._carry = output if self._carry is None else self._carry.add_(output)
            return [None] * len(sizes)
        if replicas is not None:
            if self._carry is not None:
                output, self._carry = output.add_(self._carry), None
            replicas.channel(1).all_reduce(output, op)
        if how.hook is not None:
            how.hook(output[: sum(sizes)])
        if op is not ReduceOp.AVG:
            ranks = self._axes.size * (replicas.size() if replicas is not None else 1)
            divisor = ranks if how.divisor is None else how.divisor
            output[: sum(sizes)].div_(divisor)
        *pieces, used = output.split([*sizes, len(sizes)])
        had = used.tolist()
        return [
            self._unpadded(piece, parameter) if some else None
            for piece, parameter, some in zip(pieces, self._parameters, had, strict=True)
        ]

    def _unpadded(self, piece: torch.Tensor, parameter: FSDPParameter) -> torch.Tensor:
        part = parameter.part.shape[parameter.dim]
        return piece.view(padded_shape(parameter, self._axes.size)).narrow(parameter.dim, 0, part)

    def _empty(self, rows: int, columns: int, dtype: torch.dtype) -> torch.Tensor:
        device = self._parameters[0].part.device
        if self.custom_reduce_scatter is not None:
            room = self.custom_reduce_scatter.allocate(
                (rows * columns,), dtype=dtype, device=device
            )
            return room.view(rows, columns)
        if device.type == "cpu":
            return heap_empty(rows, columns, dtype=dtype)
        return torch.empty(rows, columns, dtype=dtype, device=device)


def padded_shape(parameter: FSDPParameter, size: int) -> torch.Size:
    """Return the shape of a full part, of `size` parts; later ones may be shorter."""
    shape = list(parameter.whole_shape)
    shape[parameter.dim] = -(-shape[parameter.dim] // size)
    return torch.Size(shape)


def padded_numel(parameter: FSDPParameter, size: int) -> int:
    """Return the elements of a full part."""
    return padded_shape(parameter, size).numel()


def parts_of(whole: torch.Tensor, parameter: FSDPParameter, size: int) -> list[torch.Tensor]:
    """Return the parts of a whole tensor; the last may be short, or missing."""
    if whole.shape[parameter.dim] == 0:
        return []
    return list(whole.split(padded_shape(parameter, size)[parameter.dim], parameter.dim))


def _copy_in(pieces: torch.Tensor, gradient: torch.Tensor, parameter: FSDPParameter) -> None:
    """Copy a whole gradient into all ranks' padded parts [n, numel]."""
    shape = padded_shape(parameter, len(pieces))
    for piece, part in zip(pieces, parts_of(gradient, parameter, len(pieces)), strict=False):
        size = part.shape[parameter.dim]
        piece.view(shape).narrow(parameter.dim, 0, size).copy_(part)
