"""When models are averaged, and over which ranks.

An averager counts the steps of the training loop, and at some of them overwrites the parameters
with their mean over a group:

* *periodic*: after a warm-up, every `period` steps, over one group;
* *hierarchical*: several periods, each with a group size. Groups of a smaller period are parts of
  those of the next; at a step that several periods divide, the largest one acts, alone.

During the warm-up nothing is averaged: gradients are, by DDP.

Source: Lin et al., Don't use large mini-batches, use local SGD, https://arxiv.org/abs/1808.07217;
Wang et al., Demystifying why local aggregation helps, https://arxiv.org/abs/2010.12998.
"""

from __future__ import annotations

import itertools
from abc import ABC, abstractmethod
from collections.abc import Mapping
from typing import TYPE_CHECKING

from dure.comm.subgroups import new_subgroups
from dure.comm.world import resolve
from dure.errors import UsageError
from dure.parallel.averaging.packing import Parameters, average_parameters_or_parameter_groups

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["HierarchicalModelAverager", "ModelAverager", "PeriodicModelAverager"]


class ModelAverager(ABC):
    """What all averagers have: a group, and a count of steps.

    Args:
        process_group: The ranks; all by default.

    Attributes:
        step: How often `average_parameters` was called. A resumed job sets it.

    Example:
        ```python
        class Every(dist.ModelAverager):  # an own averager
            def average_parameters(self, params):
                for parameter in params:
                    dist.all_reduce(parameter.data, dist.ReduceOp.AVG)
                self.step += 1

        weight = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
        Every().average_parameters([weight])
        assert weight.item() == 0.5
        ```
    """

    def __init__(self, process_group: ProcessGroup | None = None) -> None:
        self.process_group = resolve(process_group, type(self).__name__)
        self.step = 0

    @abstractmethod
    def average_parameters(self, params: Parameters) -> None:
        """Average `params`, if this step is one at which it is due; call it after each step."""


class PeriodicModelAverager(ModelAverager):
    """Averages every `period` steps, from step `warmup_steps` on.

    Args:
        period: Steps from one averaging to the next. With 1, DDP does the same for less.
        warmup_steps: Steps before the first averaging.
        process_group: The ranks; all by default.

    Raises:
        UsageError: `period` is not positive, or `warmup_steps` negative.

    Example:
        ```python
        averager = dist.PeriodicModelAverager(period=2)
        weight = torch.nn.Parameter(torch.tensor([float(dist.get_rank())]))
        for _ in range(2):  # a training step
            weight.sum().backward()
            averager.average_parameters([weight])  # parameters with a gradient
        assert weight.item() == 0.5
        ```
    """

    def __init__(
        self, period: int, warmup_steps: int = 0, process_group: ProcessGroup | None = None
    ) -> None:
        super().__init__(process_group)
        self.period, self.warmup_steps = _checked(period), _checked_warmup(warmup_steps)

    def average_parameters(self, params: Parameters) -> None:
        """Average the parameters that have a gradient, if this step is one for it.

        Args:
            params: A model's parameters, or an optimizer's parameter groups.

        Collective:
            All ranks of the group, each step.

        Cost:
            As much as an all_reduce of the parameters, every `period` steps.
        """
        after = self.step - self.warmup_steps
        if after >= 0 and after % self.period == 0:
            average_parameters_or_parameter_groups(params, self.process_group)
        self.step += 1


class HierarchicalModelAverager(ModelAverager):
    """Averages over few ranks often and over many rarely.

    Args:
        period_group_size_dict: For each period the size of its groups, both ascending; each size
            divides the next, and the last is that of `process_group`. ``{4: 8, 16: 16}`` averages
            in groups of 8 every 4 steps, and over all 16 ranks every 16.
        warmup_steps: Steps before the first averaging.
        process_group: The ranks; all by default.

    Attributes:
        period_process_group_dict: For each period this rank's group.

    Raises:
        UsageError: The sizes or periods are not as above.

    Collective:
        Construction makes groups; all ranks of `process_group`.

    Example:
        ```python
        averager = dist.HierarchicalModelAverager({4: 2})  # over both ranks every 4 steps
        for _ in range(4):
            averager.average_parameters(torch.nn.Linear(2, 1).parameters())
        ```
    """

    def __init__(
        self,
        period_group_size_dict: Mapping[int, int] | None = None,
        warmup_steps: int = 0,
        process_group: ProcessGroup | None = None,
    ) -> None:
        super().__init__(process_group)
        sizes = dict(period_group_size_dict or {})
        self._check(sizes)
        self.warmup_steps = _checked_warmup(warmup_steps)
        self.period_process_group_dict: dict[int, ProcessGroup] = {
            period: self._group_of(size) for period, size in sizes.items()
        }

    def _check(self, sizes: dict[int, int]) -> None:
        periods, counts = list(sizes), [*sizes.values()]
        size = self.process_group.size()
        ascending = periods == sorted(periods) and all(
            big % small == 0 for small, big in itertools.pairwise(counts)
        )
        if not sizes or periods[0] < 1 or counts[0] < 1 or not ascending or counts[-1] != size:
            raise UsageError(
                "period_group_size_dict does not describe a hierarchy of this group",
                seen=f"{sizes} for {size} ranks",
                fix="Give ascending positive periods, and sizes of which each divides the next; "
                f"the last is {size}.",
            )

    def _group_of(self, size: int) -> ProcessGroup:
        """Return this rank's group of so many ranks, made if need be."""
        if size == self.process_group.size():
            return self.process_group
        group, _ = new_subgroups(size, group=self.process_group)
        assert group is not None
        return group

    def _find_process_group(self) -> ProcessGroup | None:
        """Return the group that averages at this step."""
        due = [period for period in self.period_process_group_dict if self.step % period == 0]
        return self.period_process_group_dict[due[-1]] if due else None

    def average_parameters(self, params: Parameters) -> None:
        """Average the parameters that have a gradient over the group whose step this is, if any.

        Args:
            params: A model's parameters, or an optimizer's parameter groups.

        Collective:
            All ranks of that group, each step.
        """
        group = self._find_process_group() if self.step >= self.warmup_steps else None
        if group is not None:
            average_parameters_or_parameter_groups(params, group)
        self.step += 1


def _checked(period: int) -> int:
    if period < 1:
        raise UsageError("the period must be positive", seen=f"period={period}")
    return period


def _checked_warmup(steps: int) -> int:
    if steps < 0:
        raise UsageError("warmup_steps cannot be negative", seen=f"warmup_steps={steps}")
    return steps
