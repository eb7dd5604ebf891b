"""Strategy *gathered*: parameters are gathered into memory of this rank's own, and freed after use.

One all_gather a group.

    shards of this rank  --copy-->  flat [k]  --all_gather-->  flat [n, k]  --copy-->  unsharded

The flat tensor has every parameter's part, padded to that of a full part, and is freed at once. The
unsharded tensors stay the same, as autograd saves them; between uses their storage has no bytes.

With a *post-forward group* (`reshard_after_forward=8`, say), a rank keeps 1/8 of them from
forward to backward, as a flat tensor of the same kind, and gathers the rest from its 7 neighbours.

With replicas (HSDP) the reduced parts are reduced once more, over the axis of replicas.

On a device with streams the first copy and the all_gather run in the gather stream (streams.py).
Shards may be in the host's memory (host_memory.py).
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

import torch

from dure import torch_private
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.reducing import (
    CustomCollective,
    padded_numel,
    padded_shape,
    part_of,
    places_of,
)
from dure.parallel.fsdp.strategy import Strategy

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.training.epochs import ModelEpochs

__all__ = ["Gathered"]

_unversioned = torch_private.unsafe_preserve_version_counter


class Gathered(Strategy):
    """Unshards a group's parameters by all_gather.

    Args:
        parameters, axes: As for `Strategy`.
        post_forward_group: Ranks that together keep the unsharded parameters from forward to
            backward; None: no parts are kept.
        all_gather: The program's own; None for Dure's.
    """

    name = "gathered"

    def __init__(
        self,
        parameters: Sequence[FSDPParameter],
        axes: DataAxes,
        post_forward_group: ProcessGroup | None = None,
        all_gather: CustomCollective | None = None,
    ) -> None:
        super().__init__(parameters, axes)
        self._dtype = parameters[0].dtype
        self._post_forward_group, self._all_gather = post_forward_group, all_gather
        self._part_kept: torch.Tensor | None = None
        self._copied_in: torch.Tensor | None = None  # the input of a gather in a stream
        self._unsharded: list[torch.Tensor] = []
        self._is_unsharded = False
        self._versions: list[int] = []
        self._in_files: dict[FSDPParameter, torch.Tensor] = {}
        self.attach()

    def attach(self) -> None:
        """Take shards out of memory that ranks shared, and into files if they are to be there."""
        for parameter in self._parameters:
            sharded: Any = parameter.sharded
            if "_dure_epochs" in vars(sharded):
                del sharded._dure_epochs
                sharded.part = sharded.part.clone()
            self._keep(parameter)
        self._unsharded = []
        self._part_kept = None
        self._is_unsharded = False

    def _keep(self, parameter: FSDPParameter) -> None:
        """Bring a shard into a file or page-locked memory, if it is to be there and is not."""
        sharded: Any = parameter.sharded
        part = sharded.part
        if parameter.host is not None and parameter.files is None:
            sharded.part = parameter.host.shard_in(part)
            return
        is_plain = type(part) is torch.Tensor and not part.is_meta
        if parameter.files is None or not is_plain or self._in_files.get(parameter) is part:
            return
        sharded.part = parameter.files.zeros(part.shape, part.dtype).copy_(part)
        self._in_files[parameter] = sharded.part

    def publish(self) -> None:
        """Drop what a step that failed has begun to gather; take back what was put elsewhere."""
        super().publish()
        for parameter in self._parameters:
            self._keep(parameter)
        self.gather_after_writes()

    def gather_after_writes(self) -> None:
        """See `Strategy.gather_after_writes`."""
        if self.streams is not None:
            self.streams.gather_after_current()

    def release_shards(self) -> None:
        """See `Strategy.release_shards`."""
        if self.streams is not None:
            self.streams.finish_copies()

    def is_stale(self, accumulates: bool = False) -> bool:
        """Ask all ranks, as each knows of its own shards only, unless `accumulates`."""
        if not self._is_unsharded and self._part_kept is None:
            return False
        return self._differ_anywhere(self._versions, accumulates)

    def begin_read(self, epochs: ModelEpochs) -> Sequence[FSDPParameter]:
        """Have autograd refuse what it has saved of kept parameters whose values have changed."""
        return self._written() if self._is_unsharded or self._part_kept is not None else ()

    def _written(self) -> Sequence[FSDPParameter]:
        """Return which shards were written since the last gather; notify autograd."""
        each = zip(self._parameters, self._versions, strict=False)
        written = [p for p, version in each if p.version != version]
        for parameter in written:
            parameter.has_changed()
        return written

    @property
    def begins_gather(self) -> bool:
        """See `Strategy.begins_gather`."""
        return not self._is_unsharded and self._pending_gather is None

    def unshard(self) -> ProcessGroup | None:
        """Begin the all_gather."""
        if not self.begins_gather:
            return None
        if self.streams is None:
            return self._begin_gather()
        with self.streams.gathering():
            return self._begin_gather()

    def _begin_gather(self) -> ProcessGroup:
        if self._part_kept is not None:
            assert self._post_forward_group is not None
            return self._begin(self._post_forward_group, self._part_kept)
        self._written()
        self._versions = [p.version for p in self._parameters]
        return self._begin(self._axes.shard_group, self._shards())

    def _begin(self, group: ProcessGroup, flat: torch.Tensor) -> ProcessGroup:
        output, gather = self._allocate(group.size() * flat.numel()), self._all_gather
        if gather is None:
            work = group.all_gather_single(output, flat, async_op=True)
        else:
            work = gather(output, flat, group, async_op=True)
        self._pending_gather = output, group.size(), work
        if self.streams is not None:
            self._copied_in = flat
        return group

    def _allocate(self, numel: int) -> torch.Tensor:
        device = self._parameters[0].device
        if self._all_gather is not None:
            return self._all_gather.allocate((numel,), dtype=self._dtype, device=device)
        return torch.empty(numel, dtype=self._dtype, device=device)

    def _shards(self) -> torch.Tensor:
        """Return what this rank has, flat."""
        flat = self._flat([p.part for p in self._parameters], self._axes.size)
        self._note_copies()
        return flat

    def _note_copies(self) -> None:
        """Note that shards on the host are read until the copies to the device are done."""
        if self.streams is not None and self._parameters[0].host is not None:
            self.streams.begin_copies()

    def _flat(self, parts: Sequence[torch.Tensor], size: int) -> torch.Tensor:
        """Copy parts, cast, into a flat tensor that has room for full ones, of `size` parts."""
        sizes = [padded_numel(p, size) for p in self._parameters]
        flat = self._allocate(sum(sizes))
        for parameter, part, piece in zip(self._parameters, parts, flat.split(sizes), strict=True):
            there = piece.view(padded_shape(parameter, size))
            with torch.no_grad():
                own = there.narrow(parameter.dim, 0, part.shape[parameter.dim])
                own.copy_(part, non_blocking=self.streams is not None)
        return flat

    def wait(self) -> Sequence[torch.Tensor]:
        """Finish the all_gather, and return the unsharded parameters."""
        if not self._is_unsharded:
            self.unshard()
            pieces = self._finish_gather()
            assert pieces is not None
            # Wholes that are made in a forward in inference mode are trained later.
            with torch.inference_mode(False), torch.no_grad():
                self._fill(pieces)
            self._is_unsharded = True
            if self.streams is not None:
                self.streams.retire((pieces, self._copied_in))
                self._copied_in = None
        return self._unsharded

    def _fill(self, pieces: torch.Tensor) -> None:
        """Copy all ranks' padded parts [n, k] into the unsharded parameters."""
        if not self._unsharded:
            self._unsharded = [pieces.new_empty(p.unsharded_shape) for p in self._parameters]
        sizes = [padded_numel(p, len(pieces)) for p in self._parameters]
        for parameter, unsharded, theirs in zip(
            self._parameters, self._unsharded, pieces.split(sizes, dim=1), strict=True
        ):
            unsharded.untyped_storage().resize_(unsharded.numel() * unsharded.itemsize)
            with _unversioned(unsharded):
                for piece, part in places_of(theirs, unsharded, parameter):
                    part.copy_(piece)

    def reshard(self, for_backward: bool = False) -> None:
        """Free the unsharded parameters; until backward, keep the post-forward group's part."""
        if not for_backward:
            self._part_kept = None
        if not self._is_unsharded:
            return
        self._is_unsharded = False
        if for_backward and self._post_forward_group is not None and self._part_kept is None:
            self._part_kept = self._part_for_backward(self._post_forward_group)
            self.gather_after_writes()
        if self.streams is not None:
            self.streams.free_retired()
        for tensor in self._memory():
            tensor.untyped_storage().resize_(0)
        for parameter in self._parameters:
            parameter.forbid_reading()

    def _memory(self) -> Sequence[torch.Tensor]:
        """Return the tensors whose memory `reshard` frees."""
        return self._unsharded

    def _part_for_backward(self, post_forward_group: ProcessGroup) -> torch.Tensor:
        size, rank = post_forward_group.size(), post_forward_group.rank()
        parts = [
            part_of(unsharded.detach(), parameter, size, rank)
            for parameter, unsharded in zip(self._parameters, self._unsharded, strict=True)
        ]
        return self._flat(parts, size)
