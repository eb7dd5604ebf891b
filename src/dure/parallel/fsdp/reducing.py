"""Gradients of unsharded parameters become averaged shards: one reduce_scatter per group.

    gradients  --copy-->  flat [n, k] in the symmetric heap  --reduce_scatter-->  this rank's [k]

The flat tensor has a part for each rank: of each parameter what the rank has of it, padded to a
full part, and one element more, which is 1 where a rank has a gradient: so all know whether any
had, and which gradients stay None. A parameter that was frozen since has this element only. Ranks
of a host read it in place. The collective runs on the group's channel 1, so that gathers on
channel 0 need not wait for it.

With replicas (HSDP) the parts are reduced once more, over the axis of replicas.

On a device with streams all but the copy runs in the reduce stream (streams.py).

The sum is divided by a *factor*, the number of ranks or the program's. The collective averages, or
the division comes after it. Only a hook can observe this. As in torch, it receives:

    float32, bfloat16     the sum, divided by the factor
    other dtypes          the sum, divided by a power of two near the factor's root (see
                          `_power_above_root`): before the sum, and by the rest after the hook
    with `force_sum`      as other dtypes; in float32 and bfloat16 the sum, not divided
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass, field
from typing import TYPE_CHECKING, Any, Protocol

import torch

from dure.comm.capture import has_no_values
from dure.comm.memory import heap_empty
from dure.comm.ops import ReduceOp
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.streams import SideStreams
from dure.tensor.placement_types import chunk
from dure.tensor.strides import stored_like

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.work import Work

__all__ = [
    "CustomCollective",
    "Reduction",
    "padded_numel",
    "padded_shape",
    "part_of",
    "places_of",
]


class CustomCollective(Protocol):
    """A program's own all_gather or reduce_scatter, as torch's `AllGather` and `ReduceScatter`."""

    __call__: Callable[..., Work | None]
    """Gathers [k] of each rank into [n * k], or reduces [n * k] of each rank to this rank's [k].

    Called with ``(output, input, group, async_op=True)``, or ``(output, input, group, op, ...)``.
    Returns what waits for it, or None if it is done.
    """

    def allocate(
        self, size: Sequence[int], *, dtype: torch.dtype, device: torch.device
    ) -> torch.Tensor:
        """Return memory [size], for the input or the output; its values may be any."""
        ...


@dataclass(frozen=True, slots=True)
class _Division:
    """How a sum is divided: by `op`, by `before` first, by `rest` before or after the hook."""

    op: ReduceOp
    before: float = 1
    rest: float = 1
    after_hook: bool = False


@dataclass(slots=True)
class Reduction:
    """How gradients of a group are reduced; methods of `FSDPModule` change it.

    Attributes:
        parameters: The group's.
        axes: Over which they are sharded.
        dtype: In which; None for that of the gradients.
        divisor: The sum is divided by it; None for the number of ranks.
        force_sum: Use a plain sum and a division instead of the collective's average.
        replicate: Reduce over the axis of replicas, too, at this backward.
        hook: Called with the reduced parts of a group's gradients, flat, which it may change; the
            text of this module says how they are divided.
        reduce_scatter: The program's own; None for Dure's.
        streams: Beside that of the computation, on a device that has streams.
    """

    parameters: Sequence[FSDPParameter]
    axes: DataAxes
    dtype: torch.dtype | None
    divisor: float | None = None
    force_sum: bool = False
    replicate: bool = True
    hook: Callable[[torch.Tensor], object] | None = None
    reduce_scatter: CustomCollective | None = None
    streams: SideStreams | None = None
    _copied_in: torch.Tensor | None = field(default=None, init=False)
    _scattered: Any = field(default=None, init=False)  # an event: after the reduce_scatter
    _carry: torch.Tensor | None = field(default=None, init=False)
    _pending_reduce: tuple[Work | None, torch.Tensor, list[int], _Division, list[bool]] | None = (
        field(default=None, init=False)
    )

    @property
    def group(self) -> ProcessGroup:
        """In which gradients are reduced, unless by a program's own collective."""
        return self.axes.shard_group.channel(1)

    @property
    def is_begun(self) -> bool:
        """Whether a reduction has begun that is not finished."""
        return self._pending_reduce is not None

    def begin(self, gradients: Sequence[torch.Tensor | None]) -> None:
        """Start to reduce unsharded gradients; None counts as zeros: this rank has no gradient.

        Collective:
            All ranks of the group.
        """
        size = self.axes.size
        sizes = [padded_numel(p, size) if p.is_trained else 0 for p in self.parameters]
        flat = self._empty(size, sum(sizes) + len(sizes))
        *pieces, used = flat.split([*sizes, len(sizes)], dim=1)
        used.fill_(1)
        given = [g is not None for g in gradients]
        for number in (i for i, one in enumerate(given) if not one):
            used[:, number].zero_()
        for piece, parameter, gradient in zip(pieces, self.parameters, gradients, strict=True):
            if gradient is None or parameter.unsharded_shape[parameter.dim] % size:
                piece.zero_()
            if gradient is not None:
                for there, part in places_of(piece, gradient, parameter):
                    there.copy_(part)
        if self.streams is None:
            self._begin(flat, sizes, given)
            return
        self._copied_in = flat
        self.streams.reduce_after_current()
        with self.streams.reducing():
            self._begin(flat, sizes, given)

    def _begin(self, flat: torch.Tensor, sizes: list[int], given: list[bool]) -> None:
        """Start to reduce gradients [n, k] that were copied in."""
        division = self._division(flat.dtype)
        op = division.op
        if division.before != 1:
            flat[:, : sum(sizes)].div_(division.before)
        if self.reduce_scatter is None:
            output = flat.new_empty(flat.shape[1])
            work = self.group.reduce_scatter_single(output, flat.view(-1), op, async_op=True)
        else:
            allocate = self.reduce_scatter.allocate
            output = allocate((flat.shape[1],), dtype=flat.dtype, device=flat.device)
            group = self.axes.shard_group
            work = self.reduce_scatter(output, flat.view(-1), group, op, async_op=True)
        self._pending_reduce = work, output, sizes, division, given

    def _division(self, dtype: torch.dtype) -> _Division:
        replicas = self.axes.replicate_group
        ranks = self.axes.size * (1 if replicas is None else replicas.size())
        factor = ranks if self.divisor is None else self.divisor
        splits = self.hook is not None and dtype not in (torch.float32, torch.bfloat16)
        if self.divisor is None and not self.force_sum and not splits:
            return _Division(ReduceOp.AVG)
        before = _power_above_root(factor) if splits else 1
        return _Division(ReduceOp.SUM, before, factor / before, splits or self.force_sum)

    def finish(self) -> Sequence[torch.Tensor | None]:
        """Wait for what was begun; return this rank's parts, None where no rank had a gradient."""
        assert self._pending_reduce is not None
        (work, output, sizes, division, given), self._pending_reduce = self._pending_reduce, None
        if work is not None:
            work.wait()
        if self.streams is not None:
            self._scattered = self.streams.reduced()
        replicas = self.axes.replicate_group
        if replicas is not None and not self.replicate:
            self._carry = output if self._carry is None else self._carry.add_(output)
            return [None] * len(sizes)
        if replicas is not None:
            if self._carry is not None:
                output, self._carry = output.add_(self._carry), None
            replicas.channel(1).all_reduce(output, division.op)
        reduced = output[: sum(sizes)]
        if division.rest != 1 and not division.after_hook:
            reduced.div_(division.rest)
        if self.hook is not None:
            self.hook(reduced)
        if division.rest != 1 and division.after_hook:
            reduced.div_(division.rest)
        *pieces, flags = output.split([*sizes, len(sizes)])
        # A gradient on this rank is enough; reading the flags would wait for the GPU.
        pairs = zip(given, self.parameters, strict=True)
        if has_no_values((flags,)):
            used = [p.is_trained for p in self.parameters]
        elif all(one or not parameter.is_trained for one, parameter in pairs):
            used = given
        else:
            used = [flag > 0 for flag in flags.tolist()]
        return [
            self._unpadded(piece, parameter) if some else None
            for piece, parameter, some in zip(pieces, self.parameters, used, strict=True)
        ]

    def free_copied_in(self) -> None:
        """Free the memory that gradients were copied to: the stream of the computation waits."""
        if self.streams is not None and self._scattered is not None:
            self.streams.wait_for(self._scattered)
        self._scattered = self._copied_in = None

    def _unpadded(self, piece: torch.Tensor, parameter: FSDPParameter) -> torch.Tensor:
        part = parameter.part
        padded = piece.view(padded_shape(parameter, self.axes.size))
        own = padded.narrow(parameter.dim, 0, part.shape[parameter.dim])
        return stored_like(own, part)  # with gaps, if columns were padded

    def _empty(self, rows: int, columns: int) -> torch.Tensor:
        first = self.parameters[0]
        dtype, device = self.dtype or first.dtype, first.device
        if self.reduce_scatter is not None:
            room = self.reduce_scatter.allocate((rows * columns,), dtype=dtype, device=device)
            return room.view(rows, columns)
        if device.type == "cpu":
            return heap_empty(rows, columns, dtype=dtype, must=False)
        return torch.empty(rows, columns, dtype=dtype, device=device)


def _power_above_root(factor: float) -> int:
    """Return the least power of two that does not divide `factor`, or is at least its root."""
    power = 1
    while factor % power == 0 and factor / power > power:
        power *= 2
    return power


def padded_shape(parameter: FSDPParameter, size: int) -> torch.Size:
    """Return the shape of a full part, of `size` parts; later ones may be shorter."""
    shape = list(parameter.unsharded_shape)
    shape[parameter.dim] = -(-shape[parameter.dim] // size)
    return torch.Size(shape)


def padded_numel(parameter: FSDPParameter, size: int) -> int:
    """Return the elements of a full part."""
    return padded_shape(parameter, size).numel()


def part_of(
    unsharded: torch.Tensor, parameter: FSDPParameter, size: int, rank: int
) -> torch.Tensor:
    """Return part `rank` of `size` of an unsharded tensor; it may be short, or empty."""
    length, offset = chunk(unsharded.shape[parameter.dim], size, rank)
    return unsharded.narrow(parameter.dim, offset, length)


def places_of(
    pieces: torch.Tensor, unsharded: torch.Tensor, parameter: FSDPParameter
) -> Iterator[tuple[torch.Tensor, torch.Tensor]]:
    """Yield where values of an unsharded tensor are in all ranks' padded parts, and in itself.

    Args:
        pieces: The padded parts [n, numel].
        unsharded: The parameter or its gradient [unsharded_shape].
        parameter: Says how it is cut.

    Yields:
        Views of `pieces` and `unsharded` of one shape: the full parts of all ranks that have one,
        and the shorter part of the rank after them. So at most two pairs, for any number of ranks.
    """
    dim, shape = parameter.dim, padded_shape(parameter, len(pieces))
    full, rows = shape[dim], unsharded.shape[dim]
    if rows == 0:
        return
    num_full, rest = divmod(rows, full)
    if num_full:
        parts = unsharded.narrow(dim, 0, rows - rest).unflatten(dim, (num_full, full))
        yield pieces[:num_full].view(num_full, *shape), parts.movedim(dim, 0)
    if rest:
        last = pieces[num_full].view(shape).narrow(dim, 0, rest)
        yield last, unsharded.narrow(dim, rows - rest, rest)
