"""Strategy *gathered*: parameters are gathered into memory of this rank's own, and freed after use.

One all_gather a group, on the group's channel 0, and one reduce_scatter, on channel 1: gathering
ahead and reducing do not wait for each other.

    shards of this rank  --copy-->  flat [k]  --all_gather-->  flat [n, k]  --copy-->  wholes

The flat tensor has every parameter's part, padded to that of a full part, and is freed at once. The
wholes stay the same tensors, as autograd saves them; between uses their storage has no bytes.

With replicas (HSDP) the reduced parts are reduced once more, over the axis of replicas.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import TYPE_CHECKING

import torch

from dure.comm.ops import ReduceOp
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.strategy import Reduction

if TYPE_CHECKING:
    from dure.comm.work import Work

__all__ = ["Gathered"]

_unversioned = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore


class Gathered:
    """Makes a group's parameters whole by all_gather.

    Args:
        parameters: Of one dtype.
        axes: Over which they are sharded.
    """

    name = "gathered"

    def __init__(self, parameters: Sequence[FSDPParameter], axes: DataAxes) -> None:
        self._parameters, self._axes = list(parameters), axes
        self._dtype = parameters[0].dtype
        self._gather = axes.shard_group
        self._reduce = axes.shard_group.channel(1)
        self._wholes: list[torch.Tensor] = []
        self._begun: tuple[torch.Tensor, Work | None] | None = None
        self._is_whole = False
        self._carry: torch.Tensor | None = None

    def attach(self) -> None:
        """Nothing to do: shards are read where they are."""
        self._wholes = []
        self._is_whole = False

    def enter(self) -> None:
        """Nothing to do: a rank reads its own copies."""

    def leave(self) -> None:
        """Nothing to do."""

    # ---------------------------------------------------------------- making whole

    def unshard(self) -> None:
        """Begin the all_gather."""
        if self._is_whole or self._begun is not None:
            return
        sizes = [_padded_numel(p) for p in self._parameters]
        flat = torch.empty(sum(sizes), dtype=self._dtype, device=self._parameters[0].part.device)
        for parameter, piece in zip(self._parameters, flat.split(sizes), strict=True):
            _fill_padded(piece, parameter.part, parameter)
        output = flat.new_empty(self._axes.size * flat.numel())
        work = self._gather.all_gather_single(output, flat, async_op=True)
        self._begun = output, work

    def wait(self) -> Sequence[torch.Tensor]:
        """Finish the all_gather, and return the wholes."""
        if self._is_whole:
            return self._wholes
        self.unshard()
        assert self._begun is not None
        output, work = self._begun
        self._begun = None
        if work is not None:
            work.wait()
        if not self._wholes:
            self._wholes = [output.new_empty(p.whole_shape) for p in self._parameters]
        pieces = output.view(self._axes.size, -1)
        begin = 0
        for parameter, whole in zip(self._parameters, self._wholes, strict=True):
            numel = _padded_numel(parameter)
            whole.untyped_storage().resize_(whole.numel() * whole.itemsize)
            with torch.no_grad(), _unversioned(whole):
                _copy_out(whole, pieces[:, begin : begin + numel], parameter)
            begin += numel
        self._is_whole = True
        return self._wholes

    def reshard(self) -> None:
        """Free the wholes."""
        if self._is_whole:
            self._is_whole = False
            for whole in self._wholes:
                whole.untyped_storage().resize_(0)

    # ---------------------------------------------------------------- gradients

    def reduce(
        self, gradients: Sequence[torch.Tensor | None], how: Reduction
    ) -> Callable[[], Sequence[torch.Tensor | None]]:
        """Begin the reduce_scatter.

        Besides the gradients each part has one element for each parameter, which is 1 where a rank
        has a gradient: so all know whether any had, and which gradients stay None.
        """
        size = self._axes.size
        sizes = [_padded_numel(p) for p in self._parameters]
        dtype = how.dtype or next((g.dtype for g in gradients if g is not None), self._dtype)
        device = self._parameters[0].part.device
        flat = torch.zeros(size, sum(sizes) + len(sizes), dtype=dtype, device=device)
        *pieces, used = flat.split([*sizes, len(sizes)], dim=1)
        for number, (parameter, gradient) in enumerate(zip(self._parameters, gradients, strict=True)):
            if gradient is not None:
                _copy_in(pieces[number], gradient, parameter)
                used[:, number] = 1
        output = flat.new_empty(flat.shape[1])
        average = how.divisor is None and not how.force_sum
        op = ReduceOp.AVG if average else ReduceOp.SUM
        work = self._reduce.reduce_scatter_single(output, flat.view(-1), op, async_op=True)

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
        if op is not ReduceOp.AVG:
            ranks = self._axes.size * (replicas.size() if replicas is not None else 1)
            divisor = ranks if how.divisor is None else how.divisor
            output[: sum(sizes)].div_(divisor)
        *pieces, used = output.split([*sizes, len(sizes)])
        had = used.tolist()
        return [
            _unpadded(piece, parameter) if some else None
            for piece, parameter, some in zip(pieces, self._parameters, had, strict=True)
        ]


def _padded_shape(parameter: FSDPParameter) -> torch.Size:
    """Return the shape of a full part."""
    shape = list(parameter.whole_shape)
    shape[parameter.dim] = parameter.rows
    return torch.Size(shape)


def _padded_numel(parameter: FSDPParameter) -> int:
    return _padded_shape(parameter).numel()


def _fill_padded(piece: torch.Tensor, part: torch.Tensor, parameter: FSDPParameter) -> None:
    """Copy a part, cast, into a flat piece that has room for a full one."""
    with torch.no_grad():
        there = piece.view(_padded_shape(parameter))
        there.narrow(parameter.dim, 0, part.shape[parameter.dim]).copy_(part)


def _unpadded(piece: torch.Tensor, parameter: FSDPParameter) -> torch.Tensor:
    part = parameter.part.shape[parameter.dim]
    return piece.view(_padded_shape(parameter)).narrow(parameter.dim, 0, part)


def _parts(whole: torch.Tensor, parameter: FSDPParameter) -> list[torch.Tensor]:
    """Return the ranks' parts of a whole tensor; the last may be short, or missing."""
    if whole.shape[parameter.dim] == 0:
        return []
    return list(whole.split(parameter.rows, parameter.dim))


def _copy_out(whole: torch.Tensor, pieces: torch.Tensor, parameter: FSDPParameter) -> None:
    """Copy all ranks' padded parts [n, numel] into a whole tensor."""
    shape = _padded_shape(parameter)
    for piece, part in zip(pieces, _parts(whole, parameter), strict=False):
        size = part.shape[parameter.dim]
        part.copy_(piece.view(shape).narrow(parameter.dim, 0, size))


def _copy_in(pieces: torch.Tensor, gradient: torch.Tensor, parameter: FSDPParameter) -> None:
    """Copy a whole gradient into all ranks' padded parts [n, numel]."""
    shape = _padded_shape(parameter)
    for piece, part in zip(pieces, _parts(gradient, parameter), strict=False):
        size = part.shape[parameter.dim]
        piece.view(shape).narrow(parameter.dim, 0, size).copy_(part)
