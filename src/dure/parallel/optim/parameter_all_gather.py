"""After the update: the all-gather by which every rank gets the values that the others computed.

Every rank has new values of the parameters that it owns and old ones of the rest. Two ways:

*In place* (`_Direct`): parameters stay where they are. The k-th largest parameters of all ranks
are sent in one all_gather, out of the owner's parameter into those of the others, without a copy to
pack or unpack. Parameters below `SMALL_BYTES`, of which a model has many, are packed: one
all_gather carries those of all ranks.

*Flat* (`_FlatParameters`, torch's ``parameters_as_bucket_view``): the parameters of a dtype and
device are stored in one flat tensor, those of rank 0 first, and `p.data` is a view of it. One
all_gather per flat tensor, in place, for any number of parameters. Parameters that overlap in
memory cannot be side by side, and are refused.

Cost:
    (m + 1) all_gathers with m large parameters on the fullest rank, or one a flat tensor; each rank
    sends what it owns, S/n bytes of S, and receives the rest.

Ranks that share the parameters have nothing to send, for each has written to the shared memory:
    they
only wait for each other. Only parameters that are trained, or have been, are gathered: the rest
never changes. Parameters that are unfrozen later join in at the next step.

*Within backward* (overlap.py) the parameters of one bucket after another are gathered: each
all-gather starts when its bucket is updated, and the end of backward waits for all of them.

Autograd learns of every parameter that another rank has changed, so that an older graph which saved
it refuses to run, as after a step of an unsharded optimizer.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from itertools import zip_longest
from typing import TYPE_CHECKING

import torch

from dure.comm.reduction import as_bytes
from dure.comm.work import combine
from dure.errors import OptimizerError
from dure.training.flat_buffers import SMALL_BYTES, by_kind, dense_strides
from dure.training.shared_parameters import clusters_of

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup
    from dure.comm.work import Work
    from dure.errors import CommError
    from dure.parallel.optim.partition import ParameterPartition

__all__ = ["ParameterAllGather", "explain"]

Owned = Sequence[Sequence[torch.Tensor]]
"""Parameters by owner."""


class ParameterAllGather:
    """Brings the values of one optimizer's parameters to all ranks.

    Args:
        group: The ranks.
        partition: The owners of the parameters.
        shared: The ranks of a host share the parameters.
        flat: Keep parameters side by side in flat tensors.

    Collective:
        `run`, `start` and `wait`, on all ranks of the group in the same order.
    """

    def __init__(
        self, group: ProcessGroup, partition: ParameterPartition, shared: bool, flat: bool
    ) -> None:
        self._group, self._partition = group, partition
        self._shared, self._in_flat = shared, flat
        self._alone = group.size() == 1
        self._gathered: frozenset[int] = frozenset()
        self._way: _Direct | _FlatParameters | None = None
        self._under_way: list[_Direct] = []
        self.plan()

    def plan(self) -> None:
        """Plan for the parameters that are trained by now, and those that have been."""
        self._gathered = self._gathered.union(self._trained())
        if self._shared or self._alone:
            return
        parameters = self._partition.parameters
        owned = self._partition.by_owner({parameters[i] for i in self._gathered})
        self._way = (_FlatParameters if self._in_flat else _Direct)(self._group, owned)

    def _trained(self) -> list[int]:
        """Return the numbers of the parameters that may change."""
        parameters = self._partition.parameters
        return [i for i, p in enumerate(parameters) if p.requires_grad or p.grad is not None]

    def run(self) -> None:
        """Let all ranks have all new values."""
        if self._shared:
            self._group.barrier()
        elif not self._gathered.issuperset(self._trained()):
            self.plan()
        if self._way is not None:
            self._way.run()
        self.tell_autograd(self._partition.parameters)

    def start(self, parameters: Sequence[torch.Tensor]) -> None:
        """Begin to gather `parameters`, the same on all ranks; `wait` waits for them."""
        if not self._shared and not self._alone:
            way = _Direct(self._group, self._partition.by_owner(set(parameters)))
            way.start()
            self._under_way.append(way)

    def wait(self) -> None:
        """Wait for all that was started."""
        while self._under_way:
            self._under_way.pop(0).finish()

    def tell_autograd(self, parameters: Iterable[torch.Tensor]) -> None:
        """Let autograd know which of `parameters` other ranks have changed."""
        torch.autograd.graph.increment_version(self._partition.others_among(parameters))


def explain(error: CommError) -> None:
    """Add to an error in the middle of a step that parameters are inconsistent."""
    error.advise("The parameters may be half updated: continue from a checkpoint, not from these.")


class _Direct:
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
        """Bring all ranks' parameters up to date. Collective: all ranks of the group."""
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
        work.disown()  # not waited for where an earlier one fails
        self._works.append(work)

    def finish(self) -> None:
        """Wait until all new values have arrived."""
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
                else:  # a part of the pack may have any address
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
    """Return the memory of a parameter without gaps, in the order of its addresses."""
    memory = parameter.detach()
    return as_bytes(torch.as_strided(memory, (memory.numel(),), (1,)))


class _FlatParameters:
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
        for dtype, device in by_kind(everything):
            mine = [by_kind(params).get((dtype, device), []) for params in self._owned]
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
        """Bring all ranks' parameters up to date. Collective: all ranks of the group."""
        everything = [p for params in self._owned for p in params]
        if [p.data_ptr() for p in everything] != self._addresses:
            self._gather()  # the module was moved, or its dtype changed
        works = [
            self._group.all_gather(parts, parts[self._group.rank()], async_op=True)
            for _, parts in self._flats
        ]
        combine([work for work in works if work is not None], [], False)
