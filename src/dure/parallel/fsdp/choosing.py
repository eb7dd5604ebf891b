"""Which strategy a group of parameters gets."""

from __future__ import annotations

from collections.abc import Sequence
from typing import TYPE_CHECKING

from dure.errors import UsageError
from dure.parallel.fsdp.axes import DataAxes
from dure.parallel.fsdp.extensions import Extended, is_extended
from dure.parallel.fsdp.gathered import Gathered
from dure.parallel.fsdp.group import ParameterGroup
from dure.parallel.fsdp.hosts import SharedByHost, why_not_by_host
from dure.parallel.fsdp.parameter import FSDPParameter
from dure.parallel.fsdp.shared import Shared, why_not_shared
from dure.parallel.fsdp.strategy import Strategy

if TYPE_CHECKING:
    from dure.comm.group import ProcessGroup

__all__ = ["as_gathered", "strategy_for"]


def strategy_for(
    parameters: Sequence[FSDPParameter],
    axes: DataAxes,
    near: ProcessGroup | None = None,
    asked: str | None = None,
) -> Strategy:
    """Return *shared* where it can be, else *gathered*; or the one that is asked for.

    Args:
        parameters: Of one group: of one dtype, all tensor subclasses with extensions or none.
        axes: Over which they are sharded.
        near: Of *gathered*; see `Gathered`.
        asked: "shared", "gathered", or None for the choice.

    Raises:
        UsageError: *shared* is asked for where it cannot be; why.
    """
    reason = None if asked == "gathered" else why_not_shared(parameters, axes)
    over_hosts = len(axes.shard_group.hosts) > 1
    if asked != "gathered" and reason is None and over_hosts:
        reason = why_not_by_host(axes)
    if asked != "gathered" and reason is None:
        return SharedByHost(parameters, axes) if over_hosts else Shared(parameters, axes)
    if asked == "shared":
        raise UsageError(
            "these parameters cannot be in memory that ranks share",
            op="fully_shard",
            seen=reason or "",
        )
    kind = Extended if is_extended(parameters[0].part) else Gathered
    return kind(parameters, axes, near)


def as_gathered(group: ParameterGroup) -> Gathered:
    """Return a group's strategy, after it has changed to *gathered* if it was another."""
    if not isinstance(group.strategy, Gathered):
        if isinstance(group.strategy, Shared):
            group.strategy.give_up()
        group.use(Gathered(group.parameters, group.parameters[0].axes, group.near))
    assert isinstance(group.strategy, Gathered)
    return group.strategy
