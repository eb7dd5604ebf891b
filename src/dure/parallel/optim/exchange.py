"""After the update: how every rank gets the values that the others have computed.

Every rank has new values of the parameters that it owns and old ones of the rest. Two ways:

*Straight* (`StraightExchange`): parameters stay where they are. The k-th largest parameters of all
ranks travel in one all_gather, out of the owner's parameter into everybody's, without a copy to
pack or unpack. Parameters below `SMALL_BYTES`, of which a model has many, are packed: one
all_gather carries those of all ranks.

*Buckets* (`BucketExchange`, torch's ``parameters_as_bucket_view``): the parameters of a dtype and
device lie side by side in one flat tensor, those of rank 0 first, and `p.data` is a view of it.
One all_gather a flat tensor, in place, whatever the number of parameters. Parameters that overlap
in memory cannot lie side by side, and are refused.

Cost: (m + 1) all_gathers with m large parameters on the fullest rank, or one a flat tensor; each
rank sends what it owns, S/n bytes of S, and receives the rest.
"""

from __future__ import annotations

from collections.abc import Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING, Protocol

import torch

from dure.comm.agreement import dense_strides
from dure.comm.reduction import as_bytes
from dure.errors import OptimizerError
from dure.parallel.optim.partition import clusters_of

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.work import Work

__all__ = ["SMALL_BYTES", "BucketExchange", "Exchange", "NoExchange", "StraightExchange"]

SMALL_BYTES = 64 * 1024
"""Up to here packing costs less than a collective of its own."""

Owned = Sequence[Sequence[torch.Tensor]]
"""Parameters by owner."""


class Exchange(Protocol):
    """How new values get to all ranks."""

    def run(self) -> None:
        """Bring all ranks' parameters up to date. Collective: all ranks of the group."""
        ...


class NoExchange:
    """There is nobody to exchange with, or all ranks have the same memory."""

    def run(self) -> None:
        """Do nothing."""


class StraightExchange:
    """Sends parameters from where they are to where they are; see the module's text.

    Args:
        group: Its rank r owns `owned[r]`.
        owned: Parameters by owner; the same on all ranks.
    """

    def __init__(self, group: ProcessGroup, owned: Owned) -> None:
        self._group, self._rank = group, group.rank()
        devices = sorted({p.device for params in owned for p in params}, key=str)
        self._devices = [_OnDevice(device, owned) for device in devices]

        self._works: list[Work] = []
        self._packs: list[tuple[_OnDevice, list[torch.Tensor]]] = []
        self._stand_ins: list[tuple[torch.Tensor, torch.Tensor]] = []

    def run(self) -> None:
        """See `Exchange.run`."""
        self.start()
        self.finish()

    def start(self) -> None:
        """Start to send; until `finish` the parameters must not be used."""
        for device in self._devices:
            for turn in device.rounds:
                memories = [device.nothing if p is None else self._memory_of(p) for p in turn]
                self._gather(memories)
            packs = device.packs(self._rank)
            if packs:
                self._gather(packs)
                self._packs.append((device, packs))

    def _memory_of(self, parameter: torch.Tensor) -> torch.Tensor:
        """Return a large parameter's bytes; a copy's, if it has got gaps since the plan."""
        memory = parameter.detach()
        if not _is_dense(memory):
            memory = memory.contiguous()
            self._stand_ins.append((parameter.detach(), memory))
        return _flat_bytes(memory)

    def _gather(self, memories: list[torch.Tensor]) -> None:
        work = self._group.all_gather(memories, memories[self._rank], async_op=True)
        assert work is not None
        self._works.append(work)

    def finish(self) -> None:
        """Wait until all new values are there."""
        while self._works:
            self._works.pop(0).wait()
        while self._stand_ins:
            place, values = self._stand_ins.pop(0)
            place.copy_(values)
        while self._packs:
            device, packs = self._packs.pop(0)
            device.unpack(packs, self._rank)


class _OnDevice:
    """The plan for the parameters of one device.

    Attributes:
        rounds: For each collective, each rank's parameter; None for a rank that has no more.
        small: Each rank's parameters that are packed.
    """

    def __init__(self, device: torch.device, owned: Owned) -> None:
        self.nothing = torch.empty(0, dtype=torch.uint8, device=device)
        here = [[p for p in params if p.device == device and p.numel()] for params in owned]
        large = [sorted((p for p in params if _is_large(p)), key=_minus_bytes) for params in here]
        self.rounds = list(zip_longest(*large))
        self.small = [[p for p in params if not _is_large(p)] for params in here]

    def packs(self, rank: int) -> list[torch.Tensor]:
        """Return one tensor a rank for what is packed, that of `rank` filled; [] if nothing is."""
        lengths = [sum(p.numel() * p.element_size() for p in params) for params in self.small]
        if not any(lengths):
            return []
        packs = [self.nothing.new_empty(n) for n in lengths]
        if self.small[rank]:
            torch.cat(
                [as_bytes(p.detach().contiguous()) for p in self.small[rank]], out=packs[rank]
            )
        return packs

    def unpack(self, packs: Sequence[torch.Tensor], rank: int) -> None:
        """Copy the others' packed values into their parameters."""
        for owner, (params, pack) in enumerate(zip(self.small, packs, strict=True)):
            if owner == rank or not params:
                continue
            parts = pack.split([p.numel() * p.element_size() for p in params])
            for parameter, part in zip(params, parts, strict=True):
                memory = parameter.detach()
                if memory.is_contiguous() and not memory.is_conj():
                    as_bytes(memory).copy_(part)
                else:  # a part of the pack may lie at any address
                    memory.copy_(part.clone().view(memory.dtype).view(memory.shape))


def _minus_bytes(parameter: torch.Tensor) -> int:
    return -parameter.numel() * parameter.element_size()


def _is_large(parameter: torch.Tensor) -> bool:
    """Tell whether a parameter travels by itself: large, and without gaps."""
    nbytes = parameter.numel() * parameter.element_size()
    return nbytes > SMALL_BYTES and _is_dense(parameter)


def _is_dense(tensor: torch.Tensor) -> bool:
    return dense_strides(tensor) == tuple(tensor.stride())


def _flat_bytes(parameter: torch.Tensor) -> torch.Tensor:
    """Return the memory of a parameter without gaps, in the order in which it lies there."""
    memory = parameter.detach()
    return as_bytes(torch.as_strided(memory, (memory.numel(),), (1,)))


class BucketExchange:
    """Keeps parameters in flat tensors; see the module's text.

    Args:
        group: Its rank r owns `owned[r]`.
        owned: Parameters by owner; the same on all ranks.
    """

    def __init__(self, group: ProcessGroup, owned: Owned) -> None:
        self._group, self._owned = group, owned
        self._flats: list[tuple[torch.Tensor, list[torch.Tensor]]] = []
        self._addresses: list[int] = []
        self._gather()

    def _gather(self) -> None:
        """Move all parameters into flat tensors."""
        everything = [p for params in self._owned for p in params]
        if any(len(set(map(everything.__getitem__, c))) > 1 for c in clusters_of(everything)):
            raise OptimizerError(
                "parameters that are views of each other cannot lie side by side in buckets",
                fix="Leave out parameters_as_bucket_view.",
            )
        self._flats = []
        kinds = dict.fromkeys((p.dtype, p.device) for p in everything)
        for dtype, device in kinds:
            mine = [[p for p in ps if (p.dtype, p.device) == (dtype, device)] for ps in self._owned]
            lengths = [sum(p.numel() for p in params) for params in mine]
            flat = torch.empty(sum(lengths), dtype=dtype, device=device)
            offset = 0
            for parameter in (p for params in mine for p in params):
                place = flat[offset : offset + parameter.numel()]
                view = place.as_strided(parameter.shape, dense_strides(parameter))
                view.copy_(parameter.detach())
                parameter.data = view
                offset += parameter.numel()
            self._flats.append((flat, list(flat.split(lengths))))
        self._addresses = [p.data_ptr() for p in everything]

    def run(self) -> None:
        """See `Exchange.run`."""
        everything = [p for params in self._owned for p in params]
        if [p.data_ptr() for p in everything] != self._addresses:
            self._gather()  # the module was moved, or its dtype changed
        works = [
            self._group.all_gather(parts, parts[self._group.rank()], async_op=True)
            for _, parts in self._flats
        ]
        for work in works:
            assert work is not None
            work.wait()
