"""Parameters that several stages have: an embedding that is the output layer as well.

Each rank that has one sends its gradient to the others that do, when a step ends, and all add them
up in the order of the stages: the same sum, to the bit, everywhere. Stages of one rank that share a
parameter share its gradient already.

A parameter that is a DTensor is sent in parts if it has the same placements on all stages: each
rank sends to the one that has the same part. Where placements differ (only the output layer is
tensor parallel, say), it is sent as a full tensor, and each rank keeps its part of the sum.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING, Any, cast

import torch
from torch import nn

from dure.comm.group import started
from dure.comm.objects import all_gather_object
from dure.errors import UsageError
from dure.parallel.pipeline.messages import FIRST_TAG
from dure.parallel.pipeline.stage import PipelineStage
from dure.tensor.distribute import distribute_tensor
from dure.tensor.dtensor import DTensor
from dure.training.optimizers import present

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["TiedParameters"]

_TAG = FIRST_TAG - 1


class TiedParameters:
    """The tied parameters of this rank's stages.

    Collective:
        Making one: all ranks of the group; one all_gather of objects.

    Raises:
        UsageError: On all ranks: parameters of one name differ in shape or dtype.
    """

    def __init__(self, stages: Sequence[PipelineStage], group: ProcessGroup) -> None:
        self._group, self._rank = group, group.rank()
        self._stages = list(stages)
        self._known: dict[tuple[int, str], nn.Parameter] = {}
        self._mine: dict[str, list[nn.Parameter]] = {}
        self._find()
        self._before: dict[nn.Parameter, torch.Tensor | None] = {}
        described: dict[str, list[tuple[int, str, str]]] = {}
        for stage in stages:
            for name, path in stage.tied.items():
                parameter = stage.submod.get_parameter(path)
                seen = f"{tuple(parameter.shape)} of {parameter.dtype}"
                place = stage.stage_index, seen, _layout_of(parameter)
                described.setdefault(name, []).append(place)
        gathered: list[dict[str, list[tuple[int, str, str]]]] = [{} for _ in range(group.size())]
        all_gather_object(gathered, described, group)
        self._holders: dict[str, list[int]] = {}
        self._sent_in_full: set[str] = set()
        for name in sorted({name for each in gathered for name in each}):
            first = sorted(
                (min(each[name])[0], r) for r, each in enumerate(gathered) if name in each
            )
            places = [place for each in gathered for place in each.get(name, ())]
            seen = {place[1] for place in places}
            if len(seen) > 1:
                raise UsageError(
                    "tied parameters differ", seen=f"{name}: {' and '.join(sorted(seen))}"
                )
            if len({place[2] for place in places}) > 1:
                self._sent_in_full.add(name)
            self._holders[name] = [rank for _, rank in first]
        for stage in stages:
            stage.tied_holders = {name: self._holders[name] for name in stage.tied}
        self._begin_equal()

    def _find(self) -> None:
        """Find the parameters that the stages have now: programs replace, and shard, them."""
        self._mine = {}
        for stage in self._stages:
            for name, path in stage.tied.items():
                place = stage.stage_index, path
                known = self._known.get(place)
                found = stage.submod.get_parameter(path)
                if known is not None and stage.data_parallel.is_sharded:
                    found = cast(nn.Parameter, present(known))  # the module may be unsharded
                self._known[place] = found
                mine = self._mine.setdefault(name, [])
                if not any(found is other for other in mine):
                    mine.append(found)

    def _begin_equal(self) -> None:
        """Give all the values of the earliest stage."""
        for name, holders in self._holders.items():
            if self._rank not in holders:
                continue
            parameters = [p.detach() for p in self._mine[name]]
            values = self._sent(name, parameters[0])
            if self._rank == holders[0]:
                for other in holders[1:]:
                    self._group.send(values.contiguous(), other, _TAG)
            else:
                values = torch.empty_like(values, memory_format=torch.contiguous_format)
                self._group.recv(values, holders[0], _TAG)
            for parameter in parameters:
                self._set(name, parameter, values)

    def begin(self) -> None:
        """Put gradients of earlier steps aside, so that only this step's are summed."""
        self._find()
        self._before = {
            parameter: None if parameter.grad is None else _gradient(parameter)
            for known in self._mine.values()
            for parameter in known
        }
        for parameter in self._before:
            parameter.grad = None

    def end(self, is_whole: bool) -> None:
        """Sum this step's gradients, if it `is_whole`; add those of earlier steps.

        Collective:
            The ranks that have a parameter.
        """
        for name, holders in self._holders.items():
            if is_whole and self._rank in holders:
                self._sum(name, holders)
        for parameter, before in self._before.items():
            if before is not None and parameter.grad is not None:
                _local(_gradient(parameter)).add_(_local(before))
            elif before is not None:
                parameter.grad = before
        self._before = {}

    def _sum(self, name: str, holders: list[int]) -> None:
        parameters = self._mine[name]
        mine = _total([self._sent(name, _gradient(p)) for p in parameters])
        others = [rank for rank in holders if rank != self._rank]
        got = {rank: torch.empty_like(mine) for rank in others}
        with self._group.together([mine]):
            works = [self._group.irecv(got[rank], rank, _TAG) for rank in others]
            works += [started(self._group.send(mine, rank, _TAG, async_op=True)) for rank in others]
        for work in works:
            work.wait()
        total = _total([mine if rank == self._rank else got[rank] for rank in holders])
        for parameter in parameters:
            self._set(name, _gradient(parameter), total)

    def _sent(self, name: str, tensor: torch.Tensor) -> torch.Tensor:
        """Return what ranks send of a tensor: its part here, or the full tensor (a collective)."""
        if isinstance(tensor, DTensor) and name in self._sent_in_full:
            return tensor.full_tensor()
        return _local(tensor)

    def _set(self, name: str, tensor: torch.Tensor, values: torch.Tensor) -> None:
        """Give a tensor values in the form of `_sent`."""
        if isinstance(tensor, DTensor) and name in self._sent_in_full:
            spec = tensor.spec
            values = _local(
                distribute_tensor(values, spec.mesh, spec.placements, src_data_rank=None)
            )
        if _local(tensor) is not values:
            _local(tensor).copy_(values)


def _layout_of(parameter: torch.Tensor) -> str:
    """Return a text that is the same for parameters with the same parts on the same ranks."""
    if not isinstance(parameter, DTensor):
        return ""
    ranks = parameter.spec.mesh.mesh
    return f"{parameter.spec.placements} of {(ranks - ranks.min()).tolist()}"


def _gradient(parameter: nn.Parameter) -> torch.Tensor:
    """Return a gradient, in its parameter's placements (a collective)."""
    gradient: Any = parameter.grad
    if gradient is None:
        gradient = torch.zeros_like(parameter)
    elif isinstance(parameter, DTensor):
        gradient = gradient.detach().redistribute(placements=parameter.placements)
    parameter.grad = gradient
    return gradient


def _local(tensor: torch.Tensor) -> torch.Tensor:
    return tensor.part if isinstance(tensor, DTensor) else tensor


def _total(parts: list[torch.Tensor]) -> torch.Tensor:
    total = parts[0].clone(memory_format=torch.contiguous_format)
    for part in parts[1:]:
        total += part
    return total
