"""Strategy *gathered*: parameters are gathered into memory of this rank's own, and freed after use.

One all_gather a group.

    shards of this rank  --copy-->  flat [k]  --all_gather-->  flat [n, k]  --copy-->  wholes

The flat tensor has every parameter's part, padded to that of a full part, and is freed at once. The
wholes stay the same tensors, as autograd saves them; between uses their storage has no bytes.

With replicas (HSDP) the reduced parts are reduced once more, over the axis of replicas.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

import torch

from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.reducing import Reducer, padded_numel, padded_shape, parts_of

if TYPE_CHECKING:
    from dure.comm.work import Work
    from dure.errors import PeerLost

__all__ = ["Gathered"]

_unversioned = torch.autograd._unsafe_preserve_version_counter  # pyright: ignore


class Gathered(Reducer):
    """Makes a group's parameters whole by all_gather.

    Args:
        parameters: Of one dtype.
        axes: Over which they are sharded.
    """

    name = "gathered"

    def __init__(self, parameters: Sequence[FSDPParameter], axes: DataAxes) -> None:
        super().__init__(parameters, axes)
        self._dtype = parameters[0].dtype
        self._gather = axes.shard_group
        self._wholes: list[torch.Tensor] = []
        self._begun: tuple[torch.Tensor, Work | None] | None = None
        self._is_whole = False

    def attach(self) -> None:
        """Nothing to do: shards are read where they are."""
        self._wholes = []
        self._is_whole = False

    def publish(self) -> None:
        """Nothing to do."""

    def enter(self) -> None:
        """Nothing to do: a rank reads its own copies."""

    def leave(self, together: bool) -> None:
        """Nothing to do."""

    def before_write(self) -> None:
        """Nothing to do."""

    def recomputed(self) -> Sequence[torch.Tensor]:
        """There is none: wholes have no memory between steps."""
        return ()

    def tell(self, error: PeerLost) -> None:
        """Nothing to tell: shards are this rank's own."""

    # ---------------------------------------------------------------- making whole

    def unshard(self) -> None:
        """Begin the all_gather."""
        if self._is_whole or self._begun is not None:
            return
        sizes = [padded_numel(p) for p in self._parameters]
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
            numel = padded_numel(parameter)
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


def _fill_padded(piece: torch.Tensor, part: torch.Tensor, parameter: FSDPParameter) -> None:
    """Copy a part, cast, into a flat piece that has room for a full one."""
    with torch.no_grad():
        there = piece.view(padded_shape(parameter))
        there.narrow(parameter.dim, 0, part.shape[parameter.dim]).copy_(part)


def _copy_out(whole: torch.Tensor, pieces: torch.Tensor, parameter: FSDPParameter) -> None:
    """Copy all ranks' padded parts [n, numel] into a whole tensor."""
    shape = padded_shape(parameter)
    for piece, part in zip(pieces, parts_of(whole, parameter), strict=False):
        size = part.shape[parameter.dim]
        part.copy_(piece.view(shape).narrow(parameter.dim, 0, size))
